"""`reshard_after_forward` as a number: so many neighbours keep the parameters for backward, which asks no others.

The sums of gradients are those that all ranks as keepers give, bit by bit.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy

import tritondt as T
from tests.fsdp.models import DataAxes, Net, loss_of, plan
from tests.harness.gloo_ranks import GlooRanks
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode
from tritondt.errors import FullyShardError
from tritondt.fsdp import fully_shard
from tritondt.parallel import parallelize_module

# Shapes of meshes, the axes of data in them, and whether the last axis is for tensors.
LAYOUTS: dict[str, tuple[tuple[int, ...], DataAxes, bool]] = {
    "fsdp": ((4,), DataAxes("a"), False),
    "two axes": ((2, 2), DataAxes(("a", "b")), False),
    "hsdp": ((2, 4), DataAxes("b", "a"), False),
    "hsdp of two axes": ((2, 2, 2), DataAxes(("b", "c"), "a"), False),
    "fsdp+tp": ((4, 2), DataAxes("a"), True),
    "two axes+tp": ((2, 2, 2), DataAxes(("a", "b")), True),
}
NARROW = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


def laid_out(kind: str, rank: int, *, recomputes: bool = False, **options: Any) -> tuple[Any, int, int]:
    """The model, and the number and position of this rank's part of the batch."""
    shape, axes, has_tensor_axis = LAYOUTS[kind]
    model, width = Net(), shape[-1] if has_tensor_axis else 1
    if has_tensor_axis:
        first = rank // width * width
        tensor_mesh = T.Mesh((width,), ("tp",), ranks=range(first, first + width))
        parallelize_module(model, tensor_mesh, plan(), src_data_rank=None)
    arguments = {"mesh": T.Mesh(shape, "abc"[: len(shape)]), "dp_mesh_dims": axes, **options}
    for name, block in list(model.blocks.named_children()):
        model.blocks._modules[name] = checkpoint_wrapper(block) if recomputes else block
        fully_shard(model.blocks.get_submodule(name), **arguments)
    return fully_shard(model, **arguments), torch.Size(shape).numel() // width, rank // width


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: gradient.full_tensor() for name, gradient in found.items()}


def trained(kind: str, rank: int, reshard: bool | int, **options: Any) -> list[dict[str, torch.Tensor]]:
    """Gradients of three passes: one that is kept, one that is reduced, and one after a step and an evaluation."""
    model, num_parts, part = laid_out(kind, rank, reshard_after_forward=reshard, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        model.set_requires_gradient_sync(step > 0)
        loss_of(model, step, num_parts, part).backward()
        if step:
            found.append(gradients_of(model))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                loss_of(model, step, num_parts, part)
    return found


@pytest.mark.parametrize("kind", ["hsdp of two axes", "fsdp+tp"])
def test_gradients_are_those_of_all_ranks_as_keepers(kind: str) -> None:
    _assert_alike(kind, recomputes=True)


@pytest.mark.extended
@pytest.mark.parametrize("kind", LAYOUTS)
def test_gradients_in_every_layout(kind: str) -> None:
    _assert_alike(kind)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_gradients_of_narrow_parameters(kind: str) -> None:
    _assert_alike(kind, recomputes=kind == "fsdp", **NARROW)


def _assert_alike(kind: str, **options: Any) -> None:
    num_ranks = torch.Size(LAYOUTS[kind][0]).numel()
    expected = run_ranks(num_ranks, lambda rank: trained(kind, rank, reshard=True, **options))
    found = run_ranks(num_ranks, lambda rank: trained(kind, rank, reshard=2, **options))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def train_on_process(rank: int) -> None:
    expected, found = (trained("fsdp", rank, reshard=reshard, recomputes=True) for reshard in (True, 2))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.extended
def test_processes(four_ranks: GlooRanks) -> None:
    four_ranks.run(train_on_process, timeout_s=200)


def test_backward_receives_what_the_neighbours_keep_and_no_more() -> None:
    """A weight of 7 x 6 and a bias of 7 elements: 4 rows of both on the first of two keepers, 3 on the second."""

    def body(rank: int, reshard: bool | int) -> tuple[int, int, int]:
        layer: Any = fully_shard(nn.Linear(6, 7), mesh=T.Mesh((4,)), reshard_after_forward=reshard)
        with CommDebugMode() as forward:
            output = layer(torch.ones(2, 6))
        with CommDebugMode() as again:
            layer.unshard()
        layer.reshard()
        assert output.requires_grad
        with CommDebugMode() as anew:
            layer.unshard()
        return forward.get_received_bytes(), again.get_received_bytes(), anew.get_received_bytes()

    def but_for(rows: int) -> int:
        return (7 - rows) * 7 * 4

    shards = [but_for(rows) for rows in (2, 2, 2, 1)]
    kept = [but_for(rows) for rows in (4, 3, 4, 3)]
    for reshard, again in ((2, kept), (True, shards), (4, shards), (False, [0] * 4), (1, [0] * 4)):
        found = run_ranks(4, partial(body, reshard=reshard))
        # What `reshard` frees is nowhere else: all ranks give their shards.
        assert found == list(zip(shards, again, shards, strict=True)), reshard


def test_what_was_written_since_comes_from_the_shards() -> None:
    def body(rank: int) -> tuple[torch.Tensor, int]:
        layer: Any = fully_shard(nn.Linear(3, 4, bias=False), mesh=T.Mesh((4,)), reshard_after_forward=2)
        with torch.no_grad():
            layer(torch.ones(1, 3))
            layer.weight.fill_(2.0)
            with CommDebugMode() as traffic:
                found = layer(torch.ones(1, 3))
        return found, traffic.get_received_bytes()

    for found, num_bytes in run_ranks(4, body):
        torch.testing.assert_close(found, torch.full((1, 4), 6.0), rtol=0, atol=0)
        assert num_bytes == 3 * 3 * 4


def test_a_rank_that_refuses_the_gather_among_neighbours_is_heard_of() -> None:
    def body(rank: int) -> str:
        layer: Any = fully_shard(nn.Linear(3, 4, bias=False), mesh=T.Mesh((4,)), reshard_after_forward=2)
        loss = layer(torch.ones(1, 3)).square().mean()
        if rank == 1:
            layer.weight = None
        try:
            loss.backward()
        except (FullyShardError, T.PeerError) as error:
            return str(error)
        return ""

    found = run_ranks(4, body)
    assert "weight was sharded as" in found[1]
    assert "rank 1" in found[0]


def test_other_numbers_are_refused() -> None:
    def body(rank: int, given: int) -> str:
        with pytest.raises(FullyShardError) as found:
            fully_shard(nn.Linear(3, 3), mesh=T.Mesh((4,)), reshard_after_forward=given)
        return str(found.value)

    for given in (0, -2, 3, 8):
        text = (
            f"fully_shard got reshard_after_forward={given}; allowed are True, False, None, and a divisor of 4, the "
            "number of ranks that shard: after forward each so many keep the parameters"
        )
        assert run_ranks(4, partial(body, given=given)) == [text] * 4
