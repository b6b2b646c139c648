"""Sharded tensors made of a whole tensor or of shards that are there: what ranks must agree on, what is refused."""

import pytest
import torch

import tritondt.sharded as sharded
from tests.sharded.cuts import chunks, expect_shards, whole
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import LocalTensorError


def test_a_whole_tensor_is_cut_where_all_ranks_agree() -> None:
    def refused(rank: int, src_rank: int, spec: sharded.ShardingSpec, tensor: torch.Tensor) -> str:
        with pytest.raises(ValueError) as raised:  # noqa: PT011  the text is returned, and compared
            sharded.shard_tensor(tensor, spec, src_rank)
        return str(raised.value)

    def body(rank: int) -> list[str]:
        values, rows = whole((4, 2)), chunks(0, 0, 1)
        return [
            refused(rank, rank, rows, values),
            refused(rank, 0, chunks(rank, 0, 1), values),
            refused(rank, 0, rows, values.double() if rank else values),
            refused(rank, 0, rows, values.t() if rank else values),
            refused(rank, 2, rows, values),
        ]

    first, second = run_ranks(2, body)
    for found, what in zip(first, ("src_rank=1", "dim=1", "float64", "what it refused", "src_rank=2"), strict=True):
        assert what in found
    assert "src_rank=0" in first[0]
    assert "on rank 1" in first[0]
    assert first[0] == second[0]
    assert second[3].startswith("shards are cut from a contiguous tensor, got one of size (2, 4) and strides (1, 2)")


class Halves(sharded.ShardingSpec):
    """A spec of a user's, which has no equality and another repr on every rank."""

    def build_metadata(self, tensor_sizes, tensor_properties):
        half = tensor_sizes[0] // 2
        shards = [
            sharded.ShardMetadata([0], [half], "rank:1/cpu"),
            sharded.ShardMetadata([half], [tensor_sizes[0] - half], "rank:0/cpu"),
        ]
        return sharded.ShardedTensorMetadata(shards, tensor_sizes, tensor_properties)


def test_specs_of_users() -> None:
    def body(rank: int) -> list[float]:
        tensor = Halves().shard(whole((5,)), 1)
        expect_shards(tensor, whole((5,)))
        tensor.reshard(chunks(0, 0, 1)).reshard(Halves())
        found: list[float] = tensor.local_tensor().tolist()
        return found

    assert run_ranks(2, body) == [[2, 3, 4], [0, 1]]


def test_init_from_local_shards() -> None:
    def body(rank: int) -> None:
        expected = whole((5, 3))
        shards = [
            sharded.Shard.from_tensor_and_offsets(expected[start:stop].clone(), [start, 0], rank)
            for start, stop in ([(0, 2), (4, 5)], [(2, 4)], [])[rank]
        ]
        tensor = sharded.init_from_local_shards(shards, 5, 3)
        assert [shard.tensor for shard in tensor.local_shards()] == [shard.tensor for shard in shards]
        assert tensor.sharding_spec() == chunks(0, 0, 1, 0)
        tensor.reshard(chunks(1, 0, 1, 2))
        expect_shards(tensor, expected)

    run_ranks(3, body)


def test_init_from_local_shards_works_out_the_size() -> None:
    def body(rank: int) -> None:
        shard = sharded.Shard.from_tensor_and_offsets(whole((rank + 1, 3)), [0, 0], rank)
        tensor = sharded.init_from_local_shards([shard], None, 3)
        assert tensor.size() == torch.Size([6, 3])
        assert [place.shard_offsets for place in tensor.metadata().shards_metadata] == [[0, 0], [1, 0], [3, 0]]

    run_ranks(3, body)


def _shard(rank: int, dtype: torch.dtype = torch.float32, at: int | None = None) -> sharded.Shard:
    return sharded.Shard.from_tensor_and_offsets(torch.ones(2, dtype=dtype), [2 * rank if at is None else at], rank)


LOCAL_SHARDS = {
    "size": (lambda rank: ([_shard(rank)], 4 + rank), "size [4] on rank 0, but with [5] on rank 1"),
    "dtype": (
        lambda rank: ([_shard(rank, torch.int32 if rank else torch.float32)], 4),
        "properties ['float32', False, False] on rank 0, but with ['int32', False, False] on rank 1",
    ),
    "overlap": (lambda rank: ([_shard(rank, at=rank)], 4), "overlap; an element lies in one shard only"),
    "gap": (lambda rank: ([_shard(rank)], 5), "the shards have 4 elements in all, the tensor of size (5,) 5"),
    "nobody": (lambda rank: ([], 4), "was given no shard on any rank"),
    "rank": (lambda rank: ([_shard(0)], 4), "a rank gives its own shards; rank 1 gave one of rank 0"),
    "strides": (
        lambda rank: (
            [sharded.Shard.from_tensor_and_offsets(torch.ones(4)[:: 1 + rank][:2], [2 * rank], rank)],
            4,
        ),
        "shards are strided and contiguous; rank 1 gave one of size (2,)",
    ),
    "mixed": (
        lambda rank: ([_shard(rank), _shard(rank, torch.int32, 4)] if rank else [_shard(0)], 6),
        "shards of one tensor have one dtype and alike flags; rank 1 gave",
    ),
    "unknown": (lambda rank: ([_shard(rank)] * (1 + rank), None), "takes one shard of every rank; rank 1 gave 2"),
    "no size": (
        lambda rank: ([_shard(rank)], "4" if rank else 4),
        "a size is ints, or one sequence of ints, got ['4']",
    ),
}


@pytest.mark.parametrize("case", LOCAL_SHARDS)
def test_local_shards_are_refused_on_all_ranks(case: str) -> None:
    make, text = LOCAL_SHARDS[case]

    def body(rank: int) -> str:
        shards, size = make(rank)
        with pytest.raises((ValueError, TypeError)) as raised:
            sharded.init_from_local_shards(shards, size)
        return str(raised.value)

    found = run_ranks(2, body)
    assert all(text in each for each in found), found


def test_init_without_communication() -> None:
    def body(rank: int) -> None:
        spec, expected = chunks(0, 0, 1), whole((5, 2))
        local = (expected[:3] if rank == 0 else expected[3:]).clone()
        tensor = sharded.init_from_local_tensor(local, spec, 5, 2)
        assert tensor.local_tensor() is local
        metadata = tensor.metadata()
        again = sharded.init_from_local_shards_and_global_metadata(tensor.local_shards(), metadata)
        assert again.sharding_spec() == spec
        expect_shards(again, expected)
        with pytest.raises(LocalTensorError, match="it gave one tensor of size"):
            sharded.init_from_local_tensor(local, spec, 8, 2)
        with pytest.raises(LocalTensorError, match=f"the metadata give rank {rank} the shards .*; it gave \\[\\]"):
            sharded.init_from_local_shards_and_global_metadata([], metadata)
        wrong = metadata.copy()
        wrong.tensor_properties.dtype = torch.int64
        with pytest.raises(LocalTensorError, match=r"the metadata say \{'dtype': 'int64'"):
            sharded.init_from_local_shards_and_global_metadata(tensor.local_shards(), wrong)

    run_ranks(2, body)
