"""input_reshard: gradients of one process, with a part of each input kept; and loss_parallel."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritondt as T
from tritondt.comm import world
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import ParallelizeError
from tritondt.parallel import ColwiseParallel, RowwiseParallel, input_reshard, loss_parallel, parallelize_module


def feed_forward() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))


def step(model: nn.Module, x: torch.Tensor) -> list[Any]:
    found = model(x)
    (found * found).sum().backward()
    return [found, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("shape", [(7, 6), (2, 5, 6)])
def test_gradients_are_those_of_one_process_and_inputs_are_kept_in_parts(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = step(feed_forward(), x)

    def body(rank: int) -> None:
        mesh = T.Mesh((3,))
        model = feed_forward()
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        assert input_reshard(model, mesh) is model  # None changes nothing
        assert input_reshard(model, mesh, 0) is model
        communicator = world.current().communicator((0, 1, 2))
        found = model(x)
        before = communicator.traffic.received_bytes
        (found * found).sum().backward()
        received = communicator.traffic.received_bytes - before
        rows = x.shape[0]
        own = min(-(-rows // 3), max(0, rows - rank * -(-rows // 3)))
        kept = x.numel() // rows * (rows - own) * 4  # what the others had kept
        flat = x.view(-1, 6)
        own_flat = min(-(-len(flat) // 3), max(0, len(flat) - rank * -(-len(flat) // 3)))
        assert received in (kept, (len(flat) - own_flat) * 6 * 4)
        grads = [parameter.grad for parameter in model.parameters()]
        for grad, wanted in zip(grads, expected[1:], strict=True):
            assert isinstance(grad, T.DTensor)
            torch.testing.assert_close(grad.full_tensor(), wanted)
        with pytest.raises(ParallelizeError, match="input_reshard was called twice for one Sequential; call it once"):
            input_reshard(model, mesh, 0)
        with pytest.raises(ParallelizeError, match="input_reshard takes a mesh of one axis"):
            input_reshard(nn.Linear(1, 1), T.Mesh((3, 1)), 0)

    run_ranks(3, body)


def test_loss_of_plain_targets_within_loss_parallel() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(4, 7, generator=generator), torch.tensor([0, 6, 3, 3])
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf, target)
    expected.backward()

    def body(rank: int) -> None:
        cut: Any = T.distribute_tensor(logits, T.Mesh((3,)), [T.Shard(1)]).requires_grad_()
        with loss_parallel():
            loss: Any = F.cross_entropy(cut, target)
            loss.backward()
        torch.testing.assert_close(loss.full_tensor(), expected.detach())
        assert cut.grad.placements == (T.Shard(1),)
        torch.testing.assert_close(cut.grad.full_tensor(), leaf.grad)
        with pytest.raises(T.MixedTensorsError):
            F.cross_entropy(cut, target)

    run_ranks(3, body)
