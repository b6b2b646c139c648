"""What sharding rules written for torch ask of a spec."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed.tensor._dtensor_spec as reference
from torch.distributed.tensor import Partial, Replicate, Shard

import tritondt as T
from tritondt.comm.transports.threads import run_ranks

META = T.TensorMeta.contiguous((5, 3))


class TorchMesh:
    """As much of a DeviceMesh as torch's spec asks."""

    ndim = 2

    def size(self, axis: int) -> int:
        return (2, 3)[axis]


def test_maps_are_those_of_torch_and_read_back() -> None:
    kinds = [(T.Shard(0), Shard(0)), (T.Shard(1), Shard(1)), (T.Replicate(), Replicate()), (T.Partial(), Partial())]
    torch_meta = reference.TensorMeta(torch.Size(META.shape), META.stride, META.dtype)

    def body(rank: int) -> None:
        mesh = T.Mesh((2, 3))
        torch_mesh: Any = TorchMesh()
        for pair in itertools.product(kinds, repeat=2):
            spec = T.DTensorSpec(mesh, [ours for ours, _ in pair], META)
            expected: Any = reference.DTensorSpec(torch_mesh, tuple(other for _, other in pair), torch_meta)
            for name in ("num_shards_map", "sums", "num_shards", "stride", "ndim", "shape"):
                assert getattr(spec, name) == getattr(expected, name), (pair, name)
            assert spec.is_replicated() is expected.is_replicated()
            assert spec.is_sharded() is expected.is_sharded()
            try:
                dim_map = expected.dim_map
            except ValueError:
                with pytest.raises(T.LayoutError, match="has no dim_map: axes 0 and 1 both cut dim"):
                    _ = spec.dim_map
                continue
            assert spec.dim_map == dim_map
            assert T.DTensorSpec.from_dim_map(mesh, dim_map, spec.sums, META) is spec
        wider = T.TensorMeta.contiguous((7, 3), torch.int64)
        ordered = T.DTensorSpec(mesh, [T.Shard(0), T.Shard(0)], META, order=(1, 0))
        found = ordered.shallow_copy_with_tensor_meta(wider)
        assert (found.placements, found.order, found.tensor_meta) == (ordered.placements, (1, 0), wider)

    run_ranks(6, body)


def test_maps_that_no_mesh_has_are_refused() -> None:
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        with pytest.raises(T.LayoutError, match=r"got axis 1 of .*; allowed are 0\.\.0, and -1 for none"):
            T.DTensorSpec.from_dim_map(mesh, [1, -1], [], META)
        with pytest.raises(T.LayoutError, match="got axis 0 for S0 and for S1; allowed is one placement an axis"):
            T.DTensorSpec.from_dim_map(mesh, [0, 0], [], META)
        with pytest.raises(
            T.LayoutError, match=r"got axis 0 for P\(sum\) and for S1; allowed is one placement an axis"
        ):
            T.DTensorSpec.from_dim_map(mesh, [-1, 0], [0], META)

    run_ranks(2, body)
