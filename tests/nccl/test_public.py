"""tritondt.nccl, the public module of raw communicators: its names, its example, what it refuses, on the double."""

import ctypes
import inspect
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.conftest import REPOSITORY
from tests.doubles.fake_nccl.library import FakeNccl, build, load
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.ports import free_port
from tests.nccl.devices import ON_ONE_MACHINE, SHARED, why_not
from tests.nccl.libraries import sharing_library, variables_for
from tritondt import PeerError, WorldError, nccl
from tritondt._C import NcclLibrary
from tritondt.comm.objects import gather_objects

PUBLIC = {
    *("Buffer", "Call", "Communicator", "Window", "WindowSum"),
    *("NcclCallConfig", "NcclCommunicator", "NcclError", "NcclLibrary", "NcclUnsupportedError"),
    *("bootstrap", "empty", "init", "join", "library", "memory_pool"),
}
# What each rank prints of the example, and the version that brought it.
SHRINK, PUTS = 22703, 22902
PRINTED = {
    "rank 0: all_reduce [[3.0, 3.0, 3.0]]": 0,
    "rank 1: all_reduce [[3.0, 3.0, 3.0]]": 0,
    "rank 0: all_gather_v [[0.0], [1.0, 1.0]]": 0,
    "rank 1: all_gather_v [[0.0], [1.0, 1.0]]": 0,
    "rank 0: all_reduce by pre_mul_sum [[3.0, 3.0, 3.0]]": 0,
    "rank 1: all_reduce by pre_mul_sum [[3.0, 3.0, 3.0]]": 0,
    "rank 0: split, rank 0 of 1 [[3.0, 3.0, 3.0]]": 0,
    "rank 1: split, rank 0 of 1 [[3.0, 3.0, 3.0]]": 0,
    "rank 0: put [[0.0, 11.0]]": PUTS,
    "rank 1: put [[10.0, 0.0]]": PUTS,
    "rank 0: shrink to 1 [[3.0, 3.0, 3.0]]": SHRINK,
}


@pytest.fixture(scope="module")
def double() -> FakeNccl:
    return load(build())


@pytest.fixture
def alone(double: FakeNccl) -> Iterator[nccl.Communicator]:
    """A communicator of one rank, of this process."""
    library = nccl.library(str(double.path))
    with nccl.init([library.unique_id()], 1, 0, library=library) as communicator:
        yield communicator


def wait_for_stream(double: FakeNccl) -> None:
    double("fakeStreamSynchronize", None)


def test_public_names_are_these_and_each_is_described() -> None:
    assert set(nccl.__all__) == PUBLIC
    for name in PUBLIC:
        described = getattr(nccl, name)
        assert (described.__doc__ or "").strip(), name
        members = inspect.getmembers(described) if inspect.isclass(described) else []
        for member, value in members:
            if not member.startswith("_") and described.__module__.startswith("tritondt.nccl"):
                assert inspect.getdoc(value), f"{name}.{member}"


def test_importing_tritondt_does_not_import_it() -> None:
    program = "import sys, tritondt; sys.exit('tritondt.nccl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=False).returncode == 0


def printed_by_example(*arguments: str, **told: str) -> list[str]:
    """The lines of both ranks of the example, sorted; `told` are environment variables."""
    variables = {**told, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "examples/nccl_raw.py", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, **variables, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outcomes = [rank.communicate(timeout=250) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outcomes
    lines = "".join(output for output, _ in outcomes).splitlines()
    return sorted(line for line in lines if not line.startswith("[Gloo]"))  # torch 2.10 prints whom it has reached


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which the example runs")
def test_the_example_says_that_there_is_no_gpu() -> None:
    ended = subprocess.run(
        [sys.executable, "examples/nccl_raw.py"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr == "torch sees no GPU here: --double PATH names a libnccl.so.2 that works on the host\n"


@pytest.mark.parametrize(
    "version", [pytest.param(21801, marks=pytest.mark.extended), pytest.param(22807, marks=pytest.mark.extended), 23203]
)
def test_the_example_runs_on_two_ranks(version: int) -> None:
    found = printed_by_example("--double", str(build(version)))
    assert found == sorted(line for line, since in PRINTED.items() if since <= version)


@pytest.mark.gpu
def test_the_example_runs_on_gpus() -> None:
    version, told = nccl.library().version_code, dict(ON_ONE_MACHINE)
    if torch.cuda.device_count() < 2:
        reason = why_not("gpu", 2)
        if reason is not None:
            pytest.skip(reason)
        told |= {**SHARED, **variables_for(sharing_library())}
        version = NcclLibrary(sharing_library()).version_code
    found = [line for line in printed_by_example(**told) if "share no symmetric memory" not in line]
    expected = {line for line, since in PRINTED.items() if since <= version}
    assert set(found) <= expected
    assert {line for line in expected if " put " not in line} <= set(found)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (nccl.Call("barrier", torch.zeros(1)), "the operation 'barrier' was asked for; NCCL has all_gather, "),
        (nccl.Call("all_reduce"), "all_reduce was given neither a source nor a target; one of them says how much"),
        (nccl.Call("send", target=torch.zeros(1)), "send was given no source"),
        (
            nccl.Call("all_gather", torch.zeros(3), torch.zeros(5)),
            "all_gather among 1 ranks was given a source of 3 and a target of 5 elements; 3 make 3",
        ),
        (
            nccl.Call("all_reduce", torch.zeros(4, 4).t(), torch.zeros(4, 4)),
            "all_reduce was given a tensor of shape (4, 4) that is not contiguous; NCCL reads and writes elements end",
        ),
        (
            nccl.Call("all_reduce", torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
            "all_reduce was given tensors of float32 and int32; it takes one dtype",
        ),
        (
            nccl.Call("all_reduce", torch.zeros(4, dtype=torch.complex64), torch.zeros(4, dtype=torch.complex64)),
            "the dtype 'complex64' was asked for; NCCL has int8, ",
        ),
        (nccl.Call("send", torch.zeros(4), peer=1), "rank 1 was named; this communicator has ranks 0 to 0"),
    ],
)
def test_calls_that_cannot_be_are_refused(alone: nccl.Communicator, call: nccl.Call, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        alone.group([call])


def test_parts_that_cannot_be_are_refused(alone: nccl.Communicator) -> None:
    with pytest.raises(ValueError, match=r"^all_gather_v was given 2 targets; there must be 1, one for a rank$"):
        alone.all_gather_v(torch.zeros(1), [torch.zeros(1), torch.zeros(1)])
    with pytest.raises(ValueError, match=r"^all_gather_v was given a source of 1 elements and a target of 2 for it$"):
        alone.all_gather_v(torch.zeros(1), [torch.zeros(2)])
    with pytest.raises(ValueError, match=r"^reduce_scatter_v was given a target of 2 elements and a source of 1 for i"):
        alone.reduce_scatter_v([torch.zeros(1)], torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_collectives_of_one_rank_copy(alone: nccl.Communicator, double: FakeNccl, dtype: torch.dtype) -> None:
    source = torch.arange(6).to(dtype)
    for run in (
        alone.all_reduce,
        alone.all_gather,
        alone.reduce_scatter,
        alone.all_to_all,
        lambda source, target: alone.reduce(source, target, 0),
        lambda source, target: alone.broadcast(source, target, 0),
        lambda source, target: alone.gather(source, target, 0),
        lambda source, target: alone.scatter(source, target, 0),
        lambda source, target: alone.all_gather_v(source, [target]),
        lambda source, target: alone.reduce_scatter_v([source], target, "max"),
        lambda source, target: alone.all_to_all_v([source], [target]),
        lambda source, target: alone.gather_v(source, [target], 0),
        lambda source, target: alone.scatter_v([source], target, 0),
        lambda source, target: alone.group([nccl.Call("send", source), nccl.Call("recv", target=target)]),
    ):
        target = torch.zeros_like(source)
        run(source, target)
        wait_for_stream(double)
        assert torch.equal(source, target)


def test_memory_is_registered_within_a_block(alone: nccl.Communicator, double: FakeNccl) -> None:
    memory = nccl.empty((10,), torch.float32, "cpu", alone.library).fill_(1)
    with alone.register_buffer(memory) as buffer:
        assert buffer.handle
        alone.all_reduce(memory)
        wait_for_stream(double)
    source = memory[8:].fill_(7)
    with alone.register_window(memory) as window:
        window.put([(0, source, 8)])
        window.wait_signals({0: 1})
        wait_for_stream(double)
        with pytest.raises(nccl.NcclError, match="the source is not in a symmetric window"):
            window.put([(0, torch.full((2,), 9.0), 8)])
    assert memory[:8].tolist() == [1, 1, 7, 7, 1, 1, 1, 1]
    with pytest.raises(nccl.NcclError):
        window.put([(0, source, 0)])
    num_allocations = double.counts()[3]
    del buffer, window, source, memory
    assert double.counts()[3] == num_allocations - 1


def write_into_peers(rank: int, path: Path) -> list[int]:
    """Each rank writes its number, by plain stores, where each of the others has its window."""
    library = nccl.library(str(path))
    memory = nccl.empty((5,), torch.int64, "cpu", library).zero_()
    with nccl.bootstrap(library=library) as communicator, communicator.register_window(memory) as window:
        pointers = window.peer_pointers(8)
        assert (pointers.dtype, pointers.shape) == (torch.int64, (3,))
        assert pointers[rank] == memory.data_ptr() + 8
        dist.barrier()
        for address in pointers.tolist():
            ctypes.c_int64.from_address(address + 8 * rank).value = rank + 1
        dist.barrier()
        for offset in (-1, 40):
            sentence = f"^byte {offset} of a window was asked for; it has 40 bytes, counted from 0$"
            for ask in (window.peer_pointers, window.multimem_pointer):
                with pytest.raises(ValueError, match=sentence):
                    ask(offset)
        with pytest.raises(nccl.NcclUnsupportedError, match="gave no address: the GPUs of this communicator have no"):
            window.multimem_pointer()
        return memory.tolist()


def test_peers_windows_are_written_to_at_their_addresses(double: FakeNccl) -> None:
    with GlooRanks(3) as ranks:
        assert ranks.run(write_into_peers, double.path) == [[0, 1, 2, 3, 0]] * 3


def test_a_failed_block_aborts(double: FakeNccl) -> None:
    library = nccl.library(str(double.path))
    with pytest.raises(KeyError), nccl.init([library.unique_id()], 1, 0, library=library) as communicator:
        raise KeyError
    with pytest.raises(nccl.NcclError, match=r"^this communicator was aborted; nothing more can be done with it$"):
        communicator.all_reduce(torch.zeros(1))


def test_a_communicator_that_does_not_block_is_waited_for(double: FakeNccl) -> None:
    library = nccl.library(str(double.path))
    options = {"blocking": 0}
    with nccl.init([library.unique_id()], 1, 0, library=library, options=options) as communicator:
        assert communicator.wait(60)
        assert communicator.poll()
        assert not communicator.is_blocking


def test_what_bootstrap_needs_is_said(double: FakeNccl) -> None:
    library, store = nccl.library(str(double.path)), dist.HashStore()
    with pytest.raises(WorldError, match=r"over torch.distributed; call init_process_group first$"):
        nccl.bootstrap(library=library)
    with pytest.raises(ValueError, match=r"^a store was given with rank None of None; it needs rank and num_ranks$"):
        nccl.bootstrap(store, library=library)
    with pytest.raises(ValueError, match=r"^rank 0 of None was given with a process group, which knows both$"):
        nccl.bootstrap(rank=0, library=library)
    with pytest.raises(PeerError, match=r"^rank 1 waited 0.1 s for rank 0 to set 'nccl'$"):
        nccl.bootstrap(store, rank=1, num_ranks=2, timeout=timedelta(seconds=0.1), library=library)
    with nccl.bootstrap(store, rank=0, num_ranks=1, library=library) as communicator:
        assert (communicator.rank, communicator.num_ranks) == (0, 1)
    with pytest.raises(ValueError, match=r"^the store has 'nccl' already; each communicator needs a name of its own$"):
        nccl.bootstrap(store, rank=0, num_ranks=1, library=library)
    double.set(FAKE_NCCL_JOIN_MS=500)
    with pytest.raises(PeerError, match=r"^rank 0 waited 0.1 s for all of 2 ranks to join in NCCL$"):
        nccl.bootstrap(store, rank=0, num_ranks=2, name="alone", timeout=timedelta(seconds=0.1), library=library)

    for thread in threading.enumerate():
        if thread.name == "tritondt-nccl":  # which goes on waiting
            thread.join(60)
    double.set(FAKE_NCCL_JOIN_MS=60_000)


def test_options_and_estimates_of_calls(alone: nccl.Communicator, double: FakeNccl) -> None:
    tensor = torch.ones(4)
    config = alone.library.call_config({"max_ctas": 1})
    alone.all_reduce(tensor, config=config)
    wait_for_stream(double)
    assert tensor.tolist() == [1, 1, 1, 1]
    estimate = alone.simulate([nccl.Call("all_reduce", tensor, tensor)])
    assert estimate is None or estimate >= 0
    factor = alone.pre_mul_sum(torch.ones(2), torch.float32)
    with pytest.raises(ValueError, match=r"^a factor of 2 torch.float32 was given; it must be one torch.float32$"):
        factor.__enter__()


def test_a_revoked_communicator_is_closed_without_the_others(alone: nccl.Communicator) -> None:
    alone.revoke()
    alone.close()
    with pytest.raises(nccl.NcclError, match=r"^this communicator was destroyed; nothing more can be done with it$"):
        alone.poll()


def grow_and_shrink(rank: int, path: Path) -> list[list[float]]:
    """Two ranks become three, and one of them is left out again."""
    library = nccl.library(str(path))
    pair = dist.new_group([0, 1])
    told: bytes | None = None
    found = []
    tensor = torch.full((2,), float(rank + 1))
    if rank < 2:
        communicator = nccl.bootstrap(pair, library=library)
        if rank == 0:
            told = communicator.grow_id()
    unique_id = gather_objects(told)[0]
    assert isinstance(unique_id, bytes)
    if rank < 2:
        grown = communicator.grow(3, unique_id if rank == 0 else None)
    else:
        grown = nccl.join(unique_id, 3, 2, library=library)
    with grown:
        grown.all_reduce(tensor)
        wait_for_stream(load(path))
        found.append(tensor.tolist())
        if rank != 1:
            with grown.shrink([1]) as smaller:
                smaller.all_reduce(tensor)
                wait_for_stream(load(path))
                found.append(tensor.tolist())
    if rank < 2:
        communicator.close()
        communicator.close()
    return found


def test_ranks_come_and_go(double: FakeNccl) -> None:
    with GlooRanks(3) as ranks:
        found = ranks.run(grow_and_shrink, double.path)
    assert found == [[[6, 6], [12, 12]], [[6, 6]], [[6, 6], [12, 12]]]
