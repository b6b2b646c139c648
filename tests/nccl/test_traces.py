"""Reading traces of the profiler; and what they show of communication and computation on a GPU."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.nccl.conftest import SETTINGS, SettingOf
from tests.nccl.devices import device_of
from tests.nccl.here import join
from tests.nccl.traces import Kernel, kernels_of, side_by_side


def event(name: str, stream: int, start: float, duration: float, grid: tuple[int, int, int] = (2, 1, 1)) -> Any:
    return {"cat": "kernel", "name": name, "ts": start, "dur": duration, "args": {"stream": stream, "grid": grid}}


SEND, MATMUL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "nvjet_hsh_128x256"


def test_kernels_are_read_from_a_trace() -> None:
    copies = {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 0.0, "dur": 9.0, "args": {"stream": 7}}
    trace = {"traceEvents": [copies, event(MATMUL, 7, 5.0, 4.0, (16, 8, 2)), event(SEND, 20, 1.5, 2.0)]}
    assert kernels_of(trace) == [Kernel(SEND, 20, 1.5, 3.5, 2), Kernel(MATMUL, 7, 5.0, 9.0, 256)]


@pytest.mark.parametrize(
    ("stream", "start", "beside"), [(7, 2.0, True), (7, 3.5, False), (20, 2.0, False), (7, 0.0, True), (7, -8.0, False)]
)
def test_kernels_beside_each_other_are_on_two_streams_at_one_time(stream: int, start: float, beside: bool) -> None:
    one, other = (
        kernels_of({"traceEvents": [event(SEND, 20, 1.5, 2.0)]})[0],
        Kernel(MATMUL, stream, start, start + 8, 1),
    )
    assert side_by_side([one, other]) == ([(one, other)] if beside else [])


# Elements of a message, by place and number of ranks. On an H100 one to oneself of 1 << 26 took 191 us, and with a
# profiler the host launched the first product 235 us after it.
MESSAGE = {("host", 1): 1 << 12, ("host", 2): 1 << 12, ("gpu", 1): 1 << 28, ("gpu", 2): 1 << 26}
WIDTH = {"host": 32, "gpu": 8192}


def move_and_multiply(rank: int, where: str) -> list[Kernel]:
    """An asynchronous redistribution, or where there is nobody else a letter to oneself, and then products."""
    device, width = device_of(where), WIDTH[where]
    dtype = torch.bfloat16 if where == "gpu" else torch.float32
    left, right = (torch.ones(width, width, dtype=dtype, device=device.kind) for _ in range(2))
    here = join(rank, where)
    mesh = T.Mesh((here.size,), device_type=device.kind)
    whole = torch.arange(float(MESSAGE[where, here.size]), device=device.kind).reshape(-1, 16)
    x: Any = T.distribute_tensor(whole, mesh, [T.Shard(0)])
    target = torch.zeros_like(whole)

    def run() -> Any:
        if here.size > 1:
            moved = x.redistribute(placements=[T.Replicate()], async_op=True)
        else:
            here.stream.wait_event(device.streams.current().record_event())
            sends, receives = ([(0, tensor.data_ptr(), tensor.nbytes)] for tensor in (whole, target))
            here.native.exchange(sends, receives, here.stream.cuda_stream)
        for _ in range(3):
            left @ right
        if here.size > 1:
            return moved.to_local()
        here.stream.synchronize()
        return target

    found = run()  # connects, and loads kernels
    differs = (found != whole).nonzero()
    again = "equal" if torch.equal(run(), whole) else "not equal"
    assert not len(differs), f"{len(differs)} differ, from {differs[0]} to {differs[-1]}; a second one is {again}"
    dist.barrier()
    return device.kernels(run)


@pytest.mark.parametrize(("where", "size"), SETTINGS)
def test_products_run_while_communication_does(setting_of: SettingOf, where: str, size: int) -> None:
    for kernels in setting_of(where, size).ranks.run(move_and_multiply, where):
        assert bool(side_by_side(kernels)) == (where == "gpu"), "\n".join(map(str, kernels))


def reduce_in_few_ctas(rank: int, where: str) -> list[Kernel]:
    device = device_of(where)
    tensor = torch.ones(1 << 20, device=device.kind)
    dist.all_reduce(tensor)
    found = device.kernels(lambda: dist.all_reduce(tensor))
    torch.testing.assert_close(tensor, torch.full_like(tensor, 4.0), rtol=0, atol=0)
    return found


@pytest.mark.parametrize(("where", "size"), [SETTINGS[1], SETTINGS[3]])
def test_max_ctas_bounds_the_blocks_of_a_collective(setting_of: SettingOf, where: str, size: int) -> None:
    """One rank alone has no kernel. What the environment says would go before the option."""
    setting = setting_of(where, size)
    if where == "host":  # where options are tested elsewhere, and starting ranks costs 10 s
        assert setting.ranks.run(reduce_in_few_ctas, where) == [[], []]
        return
    with setting.alike(NCCL_MAX_CTAS="", TRITONDT_NCCL_OPTIONS='{"max_ctas": 2}') as ranks:
        for kernels in ranks.run(reduce_in_few_ctas, where):
            reducing = [kernel for kernel in kernels if kernel.communicates]
            assert reducing, kernels
            assert all(kernel.ctas <= 2 for kernel in reducing), reducing
