"""Matmuls in chunks that cannot be: what is refused on all ranks alike, and what one rank tells the others."""

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.parallel import all_gather_matmul, matmul_reduce_scatter


class OutOfMemory(TorchFunctionMode):
    """Lets the third product fail."""

    products = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is torch.mm
        if self.products == 3:
            raise MemoryError("no room for the third product")
        return func(*args, **(kwargs or {}))


def _positions(mesh: T.Mesh, features: int, placement: T.Placement | None = None) -> T.DTensorSpec:
    return T.DTensorSpec(mesh, (placement or T.Shard(1),), T.TensorMeta.contiguous((2, 5, features)))


@pytest.mark.parametrize(
    ("placement", "found"),
    [
        (T.Replicate(), r"\(R\)"),
        (T.Partial(), r"\(P\(sum\)\)"),
        (T.Shard(2), r"\(S2\)"),
        (T.Shard(1, repeats=5), r"\(S1\(repeats=5\)\)"),
    ],
    ids=str,
)
def test_layouts_that_cannot_travel_in_chunks(placement, found):
    def body(rank: int) -> None:
        spec = _positions(T.Mesh((2,)), 6, placement)
        sentence = (
            rf"{found} of \(2, 5, 6\) float32 on Mesh.* cannot travel in chunks of positions; allowed is Shard of"
        )
        with pytest.raises(T.LayoutError, match=sentence):
            all_gather_matmul(torch.ones(spec.local_shape), torch.ones(3, 6), source=spec)
        with pytest.raises(T.LayoutError, match=sentence):
            matmul_reduce_scatter(torch.ones(2, 5, 3), torch.ones(6, 3), target=spec)

    run_ranks(2, body)


def test_a_mesh_of_two_axes_is_refused():
    def body(rank: int) -> None:
        mesh = T.Mesh((1, 2))
        spec = T.DTensorSpec(mesh, (T.Replicate(), T.Shard(0)), T.TensorMeta.contiguous((4, 6)))
        with pytest.raises(T.LayoutError, match=r'on a mesh of one axis, such as mesh\["tp"\]'):
            all_gather_matmul(torch.ones(2, 6), torch.ones(3, 6), source=spec)

    run_ranks(2, body)


@pytest.mark.parametrize("asked", [0, -1, 1.5, True, "2"])
def test_numbers_of_chunks_that_cannot_be(asked):
    def body(rank: int) -> None:
        spec = _positions(T.Mesh((2,)), 6)
        with pytest.raises(
            T.errors.ParallelizeError, match=rf"chunks_per_peer got {asked!r}; allowed is a whole number"
        ):
            all_gather_matmul(torch.ones(spec.local_shape), torch.ones(3, 6), source=spec, chunks_per_peer=asked)

    run_ranks(2, body)


MISFITS = {
    "shape of x": ({"x": torch.ones(2, 4, 6)}, r"was given x of shape \(2, 4, 6\); allowed is \(2, 3, 6\)"),
    "dtype of x": ({"x": torch.ones(2, 3, 6).double()}, r"x of torch.float64; allowed is torch.float32, for x, weight"),
    "dtype of weight": ({"weight": torch.ones(3, 6).bfloat16()}, r"given weight of torch.bfloat16; allowed is torch.f"),
    "weight": ({"weight": torch.ones(3, 5)}, r"a weight of shape \(3, 5\); allowed is \(any, 6\)"),
    "dims of weight": ({"weight": torch.ones(6)}, r"a weight of shape \(6,\); allowed is \(any, 6\)"),
    "bias": ({"bias": torch.ones(2)}, r"a bias of shape \(2,\); allowed is \(3,\)"),
    "dtype of bias": ({"bias": torch.ones(3).double()}, r"was given bias of torch.float64; allowed is torch.float32"),
    "device": ({"weight": torch.ones(3, 6, device="meta")}, r"was given weight on meta; allowed is cpu, the mesh's"),
    "layout": ({"x": torch.ones(2, 3, 6).to_sparse()}, r"x that is of layout torch.sparse_coo; allowed are local"),
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "sentence"), MISFITS.values(), ids=MISFITS)
def test_tensors_of_one_rank_that_do_not_fit_are_refused_and_told(wrong, sentence):
    """The other rank hears of it in its first chunk, and both can go on."""

    def body(rank: int) -> None:
        spec = _positions(T.Mesh((2,)), 6)
        given: dict[str, Any] = {"x": torch.ones(spec.local_shape), "weight": torch.ones(3, 6), "bias": torch.ones(3)}
        if rank == 0:
            with pytest.raises(T.LocalTensorError, match=r"rank 0 at coordinate \(0,\) of \(S1\) .* " + sentence):
                all_gather_matmul(**(given | wrong), source=spec, chunks_per_peer=3)
        else:
            with pytest.raises(T.PeerError, match=r"rank 0 .*" + sentence):
                all_gather_matmul(**given, source=spec, chunks_per_peer=3)
        found = all_gather_matmul(**given, source=spec, chunks_per_peer=3)
        torch.testing.assert_close(found, torch.full((2, 5, 3), 7.0), rtol=0, atol=0)

    run_ranks(2, body)


def test_a_weight_that_does_not_give_the_target_is_refused_and_told():
    def body(rank: int) -> None:
        spec = _positions(T.Mesh((2,)), 6)
        x, weight = torch.ones(2, 5, 3), torch.ones(6 - rank, 3)
        kind, sentence = ((T.PeerError, "rank 1 .*"), (T.LocalTensorError, ""))[rank]
        with pytest.raises(kind, match=sentence + r"a weight of shape \(5, 3\); allowed is \(6, 3\)"):
            matmul_reduce_scatter(x, weight, target=spec, chunks_per_peer=2)
        found = matmul_reduce_scatter(x, torch.ones(6, 3), target=spec, chunks_per_peer=2)
        torch.testing.assert_close(found, torch.full(spec.local_shape, 6.0), rtol=0, atol=0)

    run_ranks(2, body)


def test_distributed_tensors_are_refused():
    def body(rank: int) -> None:
        spec = _positions(T.Mesh((2,)), 6)
        x = T.DTensor.from_local(torch.ones(spec.local_shape), spec.mesh, spec.placements, shape=spec.shape)
        with pytest.raises(T.LocalTensorError, match=r"given x that is a DTensor; allowed are local .* to_local\(\)"):
            all_gather_matmul(x, torch.ones(3, 6), source=spec)

    run_ranks(2, body)


def test_a_rank_that_fails_between_chunks_is_heard_of():
    def body(rank: int) -> None:
        spec = T.DTensorSpec(T.Mesh((2,)), (T.Shard(0),), T.TensorMeta.contiguous((10, 6)))
        arguments = torch.ones(10, 3), torch.ones(6, 3)
        if rank == 1:
            with OutOfMemory(), pytest.raises(MemoryError):
                matmul_reduce_scatter(*arguments, target=spec, chunks_per_peer=5)
        else:
            with pytest.raises(T.PeerError, match=r"rank 1 .* no room for the third product"):
                matmul_reduce_scatter(*arguments, target=spec, chunks_per_peer=5)

    run_ranks(2, body)
