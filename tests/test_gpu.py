"""What holds for tensors on a GPU; the ranks are threads that share it."""

from functools import partial

import pytest
import torch

import tritondt as T
from tests.harness.gpu_device import DEVICE
from tests.harness.oracle.cases import check_cases, random_case
from tritondt.comm.transports.threads import ThreadCommunicator, run_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("chunk", range(20))
@pytest.mark.timeout(600)
def test_random_redistributions(chunk):
    world_size = (8, 4, 6, 4, 5)[chunk % 5]
    seeds = range(800_000 + 20 * chunk, 800_020 + 20 * chunk)
    check_cases([random_case(seed, world_size) for seed in seeds], world_size, device_type=DEVICE.type)


def test_distributing_a_tensor():
    whole = torch.arange(77.0, device=DEVICE).view(7, 11)

    def body(rank):
        mesh = T.Mesh((4,), device_type=DEVICE.type)
        return T.distribute_tensor(whole, mesh, [T.Shard(1)]).to_local()

    assert torch.equal(torch.cat(run_ranks(4, body), 1), whole)


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("source", "target"), [("S0", "S1"), ("S1", "R"), ("P(sum)", "S1"), ("P(avg)", "R")])
def test_messages_of_another_dtype_give_what_the_cpu_gives(source, target, wire_dtype):
    whole = torch.randn(37, 53, generator=torch.Generator().manual_seed(9))

    def body(rank, device_type):
        mesh, meta = T.Mesh((4,), device_type=device_type), T.TensorMeta.contiguous((37, 53))
        before, after = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in (source, target))
        replicated = T.DTensor.from_local(whole.to(device_type), mesh, [T.Replicate()])
        local = replicated.redistribute(placements=before.placements).to_local()
        return T.redistribute(local, before, after, wire_dtype=wire_dtype).cpu()

    found, expected = (run_ranks(4, partial(body, device_type=name)) for name in (DEVICE.type, "cpu"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_transport_for_the_cpu_refuses_cuda_tensors(monkeypatch):
    monkeypatch.setattr(ThreadCommunicator, "device_types", ("cpu",))

    def body(rank):
        mesh = T.Mesh((2,), device_type="cuda")
        meta = T.TensorMeta.contiguous((5, 3))
        rows, whole = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in ("S0", "R"))
        with pytest.raises(T.TransportError, match=r"tensor on cuda:0; it carries tensors on cpu only"):
            T.redistribute(torch.zeros(rows.local_shape, device="cuda"), rows, whole)

    run_ranks(2, body)
