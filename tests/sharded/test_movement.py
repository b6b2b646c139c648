"""Whole tensors cut, gathered and resharded between specs of any boxes, exactly; and the gradient on its way back."""

import random

import pytest
import torch
from torch.testing import assert_close

import tritondt as T
import tritondt.sharded as sharded
from tests.sharded.cuts import chunks, drawn_spec, expect_shards, listed, whole
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import LayoutError, LocalTensorError, PeerError

SHAPES = [(7,), (5, 6), (3, 1, 4), (2, 3, 2, 3), (8, 5), (0, 3), (17,)]
DTYPES = [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64]


@pytest.mark.parametrize("seed", range(30))
def test_random_specs_there_and_back(seed: int) -> None:
    numbers = random.Random(seed)
    size, shape = numbers.randint(1, 5), numbers.choice(SHAPES)
    expected = whole(shape, numbers.choice(DTYPES))
    specs = [drawn_spec(numbers, shape, size) for _ in range(3)]
    source, dst = numbers.randrange(size), numbers.randrange(size)

    def body(rank: int) -> None:
        given = expected.clone() if rank == source else torch.zeros_like(expected)
        tensor = specs[0].shard(given, source)
        expect_shards(tensor, expected)
        for spec in (specs[1], specs[2], specs[0]):
            assert tensor.reshard(spec) is tensor
            assert tensor.sharding_spec() is spec
            expect_shards(tensor, expected)
            out = torch.zeros(*shape[:-1], shape[-1] * 2, dtype=expected.dtype)[..., ::2] if rank == dst else None
            assert tensor.gather(dst, out) is None
            if out is not None:
                assert_close(out, expected, rtol=0, atol=0)
        assert tensor.metadata() == specs[0].build_metadata(expected.shape, tensor.metadata().tensor_properties)

    run_ranks(size, body)


def test_a_scalar_has_one_shard() -> None:
    def body(rank: int) -> float | None:
        tensor = listed(([], [], 1)).shard(torch.tensor(3.5))
        out = torch.empty(()) if rank == 0 else None
        tensor.gather(0, out)
        assert len(tensor.local_shards()) == rank
        return None if out is None else out.item()

    assert run_ranks(2, body) == [3.5, None]


def test_gather_converts() -> None:
    def body(rank: int) -> list[torch.Tensor]:
        tensor = chunks(0, 0, 1).shard(whole((5, 2)) + 0.75)
        outs = [torch.empty(5, 2, dtype=dtype) for dtype in (torch.float64, torch.int32)]
        tensor.gather(1, outs[0] if rank == 1 else None)
        tensor.gather(1, outs[1] if rank == 1 else None, dtype=torch.int32)
        with pytest.warns(FutureWarning, match="enforce_dtype is deprecated"):
            tensor.gather(0, None if rank else torch.empty(5, 2), enforce_dtype=True)
        return outs

    _, (doubles, ints) = run_ranks(2, body)
    assert_close(doubles, whole((5, 2), torch.float64) + 0.75, rtol=0, atol=0)
    assert_close(ints, whole((5, 2), torch.int32), rtol=0, atol=0)


GATHERS = {
    "none": (None, None, r"takes out=, of size \(5, 2\), on that rank; rank 0 gave none"),
    "two": ((5, 2), (5, 2), r"takes out= on that rank only; rank 1 gave one, too"),
    "size": ((2, 5), None, r"takes a strided out= of size \(5, 2\), .* rank 0 gave one of \(2, 5\)"),
}


@pytest.mark.parametrize("case", GATHERS)
def test_gather_is_refused_on_all_ranks(case: str) -> None:
    first, second, text = GATHERS[case]

    def body(rank: int) -> None:
        tensor = chunks(0, 0, 1).shard(whole((5, 2)))
        size = second if rank else first
        with pytest.raises((LocalTensorError, sharded.ShardingMismatchError), match=text):
            tensor.gather(0, None if size is None else torch.empty(size))
        # The refused call counts as run: what follows is in step.
        out = torch.empty(5, 2) if rank == 1 else None
        tensor.gather(1, out)

    run_ranks(2, body)

    def differing(rank: int) -> None:
        with pytest.raises(
            sharded.ShardingMismatchError, match=r"gather was called with dst=0, .* on rank 0, but with dst"
        ):
            sharded.ones(chunks(0, 0, 1), 4).gather(rank, torch.empty(4))

    run_ranks(2, differing)
    with pytest.raises(LayoutError, match=r"gather was asked for dst=2; allowed are 0\.\.1, ranks of its group"):
        run_ranks(2, lambda rank: sharded.ones(chunks(0, 0, 1), 4).gather(2))


def test_gather_writes_every_element_of_any_tensor() -> None:
    def body(rank: int) -> None:
        values = torch.complex(whole((3, 2)), whole((3, 2)) + 1)
        shards = [
            sharded.Shard.from_tensor_and_offsets(values[:2].conj() if rank == 0 else values[2:], [2 * rank, 0], rank)
        ]
        expected = torch.cat([values[:2].conj(), values[2:]]).resolve_conj()
        tensor = sharded.init_from_local_shards(shards, 3, 2)
        out = torch.empty(3, 2, dtype=values.dtype)
        tensor.gather(0, out.conj() if rank == 0 else None)
        if rank == 0:
            assert_close(out.conj().resolve_conj(), expected, rtol=0, atol=0)
        with pytest.raises((LocalTensorError, sharded.ShardingMismatchError), match=r"rank 0 gave one of .* \(0, 1\)"):
            tensor.gather(0, torch.empty(1, 2, dtype=values.dtype).expand(3, 2) if rank == 0 else None)
        tensor.reshard(chunks(1, 0, 1))
        expect_shards(tensor, expected)

    run_ranks(2, body)


def test_a_shard_that_was_replaced_by_another_is_refused_on_all_ranks() -> None:
    def body(rank: int) -> None:
        for wrong in (torch.ones(1, 2), torch.ones(2, 2, dtype=torch.float64)):
            tensor = chunks(0, 0, 1).shard(whole((4, 2)))
            if rank == 1:
                tensor.local_shards()[0].tensor = wrong
            with pytest.raises(
                (LocalTensorError, PeerError), match=r"rank 1 holds shards of sizes \[\(2, 2\)\], float32"
            ):
                tensor.reshard(chunks(1, 0, 1))
        sharded.ones(chunks(0, 0, 1), 4, 2).reshard(chunks(1, 0, 1))

    run_ranks(2, body)


def test_reshard_refuses_what_does_not_fit_and_leaves_the_tensor() -> None:
    def body(rank: int) -> None:
        tensor = chunks(0, 0, 1).shard(whole((5, 2)))
        with pytest.raises(
            TypeError, match=r"a sharding spec is a tritondt\.sharded\.ShardingSpec, .* got builtins\.str"
        ):
            tensor.reshard("rows")
        with pytest.raises(LayoutError, match=r"placed on rank 2, which is not among the group's \(0, 1\)"):
            tensor.reshard(chunks(0, 0, 2))
        with pytest.raises(LayoutError, match="moves among devices of one type, cpu here, and was asked for cuda"):
            tensor.reshard(sharded.ChunkShardingSpec(0, ["rank:0/cuda:0", "rank:1/cuda:1"]))
        with pytest.raises(LayoutError, match="cuts dim 2"):
            tensor.reshard(chunks(2, 0, 1))
        expect_shards(tensor, whole((5, 2)))
        assert tensor.sharding_spec() == chunks(0, 0, 1)

    run_ranks(2, body)


def test_ranks_that_ask_for_different_specs_are_told() -> None:
    def body(rank: int) -> str:
        tensor = chunks(0, 0, 1).shard(whole((6, 2)))
        with pytest.raises(PeerError) as raised:
            tensor.reshard(chunks(1, *((0, 1) if rank else (1, 0))))
        return str(raised.value)

    assert all("moving 2 shards" in text for text in run_ranks(2, body))


def test_where_shards_stay_nothing_moves() -> None:
    def body(rank: int) -> None:
        tensor = chunks(0, 0, 1).shard(whole((4, 2)))
        before = tensor.local_tensor()
        tensor.reshard(listed(([0, 0], [2, 2], 0), ([2, 0], [2, 2], 1)))
        assert tensor.local_tensor() is before
        assert isinstance(tensor.sharding_spec(), sharded.EnumerableShardingSpec)

    run_ranks(2, body)


def test_a_reshard_moves_the_fewest_bytes() -> None:
    def body(rank: int) -> int:
        tensor = chunks(0, 0, 1, 2).shard(whole((6, 9)))
        communicator = T.comm.world.current().communicator((0, 1, 2))
        before = communicator.traffic.received_bytes
        tensor.reshard(chunks(1, 2, 0, 1))
        return int(communicator.traffic.received_bytes - before)

    # A rank wants 6 rows of 3 columns and holds 2 of these rows: 12 elements of 4 bytes come in.
    assert run_ranks(3, body) == [48, 48, 48]


@pytest.mark.parametrize("several", [False, True])
def test_the_gradient_moves_back(several: bool) -> None:
    target = listed(([0, 0], [5, 1], 1), ([0, 1], [2, 3], 0), ([2, 1], [3, 3], 1)) if several else chunks(1, 1, 0)

    def body(rank: int) -> None:
        values = whole((5, 4)).requires_grad_()
        tensor = chunks(0, 0, 1).shard(values)
        leaf = tensor.local_tensor()
        assert leaf.requires_grad
        assert leaf.is_leaf
        factors = whole((5, 4)) * 3
        tensor.reshard(target)
        terms = [
            (shard.tensor * factors[tuple(slice(*interval) for interval in shard.metadata.box)]).sum()
            for shard in tensor.local_shards()
        ]
        torch.stack(terms).sum().backward()
        rows = slice(0, 3) if rank == 0 else slice(3, 5)
        assert_close(leaf.grad, factors[rows], rtol=0, atol=0)

    run_ranks(2, body)


def test_a_gradient_does_not_pass_a_rank_without_shards() -> None:
    def body(rank: int) -> None:
        tensor = chunks(0, 0, 1).shard(whole((4,)).requires_grad_())
        with pytest.raises(LayoutError, match=r"ranks \[1\] hold no shard; give them an empty one, or call this under"):
            tensor.reshard(chunks(0, 0))
        with torch.no_grad():
            tensor.reshard(chunks(0, 0))
        assert all(shard.tensor.requires_grad for shard in tensor.local_shards())

    run_ranks(2, body)


def test_groups_are_meshes_and_ranks_outside_hold_nothing() -> None:
    def body(rank: int) -> int:
        mesh = T.Mesh((2,), ranks=(3, 1))
        # src_rank is a rank of the group: the first of the mesh, the world's rank 3.
        tensor = chunks(0, 1, 3).shard(whole((5,)) + (100 if rank != 3 else 0), 0, mesh)
        expect_shards(tensor, whole((5,)))
        tensor.reshard(chunks(0, 3, 1))
        out = torch.empty(5) if rank == 1 else None
        tensor.gather(1, out)
        if out is not None:
            assert_close(out, whole((5,)), rtol=0, atol=0)
        return len(tensor.local_shards())

    assert run_ranks(4, body) == [0, 1, 0, 1]
