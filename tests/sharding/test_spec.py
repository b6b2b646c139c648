"""Specs: one object per value, world and rank; and what they refuse."""

import copy
import gc
import pickle
import random
import threading
import weakref

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import tritondt as T
from tests.harness.oracle.arithmetic import coordinates, indices_of
from tests.harness.oracle.random_layouts import random_pair
from tritondt import identity
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import OpenLengthError
from tritondt.identity import Identity
from tritondt.sharding import spec
from tritondt.sharding.spec import compute_local_shape_and_global_offset

META = T.TensorMeta.contiguous((5, 3))


def make(placements: str = "S0, R", meta: T.TensorMeta = META, **options: object) -> T.DTensorSpec:
    return T.DTensorSpec(T.Mesh((2, 2)), T.parse_placements(placements), meta, **options)  # type: ignore[arg-type]


def test_equal_specs_are_one_object_on_each_rank() -> None:
    def body(rank: int) -> T.DTensorSpec:
        found = make()
        assert found is make("(S-2, R)")
        assert found is make(meta=T.TensorMeta((5, 3), (3, 1), torch.float32))
        assert found is T.DTensorSpec(found.mesh, found.placements, found.tensor_meta, found.order)
        assert found is found.with_placements(found.placements)
        assert found == make()
        assert hash(found) == hash(make())
        return found

    specs = run_ranks(4, body)
    assert len(set(map(id, specs))) == 4
    assert [found.coordinate for found in specs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [found.local_shape for found in specs] == [(3, 3), (3, 3), (2, 3), (2, 3)]
    assert len(set(specs)) == 4


def test_whatever_differs_makes_another_spec() -> None:
    def body(rank: int) -> None:
        variants = [
            make(),
            make("R, S0"),
            make(meta=T.TensorMeta((5, 3), (1, 5), torch.float32)),
            make(meta=T.TensorMeta.contiguous((5, 3), torch.float64)),
            make(meta=T.TensorMeta.contiguous((5, 4))),
            make("S0, S0"),
            make("S0, S0", order=(1, 0)),
            T.DTensorSpec(T.Mesh((2, 2), ("a", "b")), make().placements, META),
            T.DTensorSpec(T.Mesh((2, 2), ranks=(3, 2, 1, 0)), make().placements, META),
        ]
        assert len(set(map(id, variants))) == len(variants)
        assert all(left != right for i, left in enumerate(variants) for right in variants[:i])

    run_ranks(4, body)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_and_copying_find_the_same_object(protocol: int) -> None:
    def body(rank: int) -> None:
        for found in (make(), make("S0, S0", order=(1, 0)), make("P(avg), S1(unit=3)")):
            assert pickle.loads(pickle.dumps(found, protocol)) is found
            assert copy.copy(found) is found
            assert copy.deepcopy({"spec": found})["spec"] is found
            assert pickle.loads(pickle.dumps(found.mesh, protocol)) is found.mesh

    run_ranks(4, body)


def test_a_spec_of_another_rank_is_read_as_this_ranks() -> None:
    """What rank 0 pickles is rank 3's own spec there: it says what the tensor is, not who looks at it."""

    def body(rank: int) -> tuple[bytes, T.DTensorSpec]:
        return pickle.dumps(make()), make()

    pickled = run_ranks(4, body)[0][0]

    def read(rank: int) -> tuple[int, ...] | None:
        found = pickle.loads(pickled)
        assert found is make()
        coordinate: tuple[int, ...] | None = found.coordinate
        return coordinate

    assert run_ranks(4, read) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_worlds_do_not_share_specs() -> None:
    first = run_ranks(4, lambda rank: make())
    second = run_ranks(4, lambda rank: make())
    assert not {*map(id, first)} & {*map(id, second)}
    with pytest.raises(T.MeshError, match="was made in another world; make it again in this one"):
        run_ranks(4, lambda rank: T.DTensorSpec(first[rank].mesh, first[rank].placements, META))


def test_specs_made_by_many_threads_at_once_are_one_object() -> None:
    """Threads of one rank, as autograd and a worker would be."""
    who, start, found = Identity(identity.new_generation(), 0, 4), threading.Barrier(8), list[T.DTensorSpec]()

    def body() -> None:
        with identity.assumed(who):
            start.wait()
            found.extend(make(meta=T.TensorMeta.contiguous((number, 3))) for number in range(100))

    threads = [threading.Thread(target=body) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 100


def test_the_table_of_specs_lets_go() -> None:
    gc.collect()
    before = len(spec._interned)

    def body(rank: int) -> int:
        kept = [make(meta=T.TensorMeta.contiguous((20_000 + number, 3))) for number in range(50)]
        return len(kept)

    assert run_ranks(4, body) == [50] * 4
    gc.collect()
    assert len(spec._interned) <= before


def test_a_spec_of_placed_sizes_lets_its_world_go() -> None:
    def body(rank: int) -> "weakref.ref[T.Mesh]":
        found = make(meta=T.TensorMeta.contiguous((4, 3)))
        assert found.placed.of_size((4, 3), (3, 1)) is found
        return weakref.ref(found.mesh)

    meshes = run_ranks(4, body)
    identity.forget_ended()
    gc.collect()
    assert [mesh() for mesh in meshes] == [None] * 4


def test_placements_without_a_tensor_say_that_they_have_no_shape() -> None:
    def body(rank: int) -> str:
        found = T.DTensorSpec(T.Mesh((2,)), [T.Shard(0)])
        assert not found.is_open
        for name in ("layout", "shape", "ndim", "stride", "dtype", "placed", "dim_map", "num_shards"):
            with pytest.raises(T.LayoutError, match=r"\(S0\) of a tensor yet to be known has no .*give DTensorSpec"):
                getattr(found, name)
        return str(found.shallow_copy_with_tensor_meta(T.TensorMeta.contiguous((4,))))

    assert run_ranks(2, body) == ["(S0) of (4,) float32"] * 2


def test_symbolic_sizes_compare_by_value_and_are_not_interned() -> None:
    size = ShapeEnv().create_unbacked_symint()

    def body(rank: int) -> None:
        first, second = (make(meta=T.TensorMeta((size, 3), (3, 1), torch.float32)) for _ in range(2))  # type: ignore[arg-type]
        assert first is not second
        assert first == second
        assert hash(first) == hash(second)
        assert first != make("R, S0", meta=first.tensor_meta)
        assert first != make()
        with pytest.raises(OpenLengthError, match="has symbolic sizes and no layout; give it sizes as ints"):
            _ = first.layout

    run_ranks(4, body)


def test_no_world_is_an_error_that_says_what_to_call() -> None:
    with pytest.raises(T.WorldError, match=r"torch.distributed is not initialised.*init_process_group"):
        T.Mesh((1,))


@pytest.mark.parametrize("seed", range(60))
def test_shape_and_offset_are_where_the_one_box_lies(seed: int) -> None:
    layout, _ = random_pair(random.Random(seed), torch.float32)

    def body(rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        mesh = T.Mesh(layout.mesh_shape)
        assert mesh.coordinate is not None
        if len(layout.boxes(mesh.coordinate)) > 1:
            with pytest.raises(
                T.LayoutError, match=r"boxes, which have no one offset; layout.boxes\(coordinate\) lists"
            ):
                compute_local_shape_and_global_offset(layout.shape, mesh, layout.placements, layout.order)
            return None
        return compute_local_shape_and_global_offset(layout.shape, mesh, layout.placements, layout.order)

    found = run_ranks(layout.num_ranks, body)
    for coordinate, shape_and_offset in zip(coordinates(layout.mesh_shape), found, strict=True):
        if shape_and_offset is not None:
            kept = indices_of(layout, coordinate)
            shape = tuple(map(len, kept))
            offset = tuple(
                int(indices[0]) if len(indices) else length for indices, length in zip(kept, layout.shape, strict=True)
            )
            assert shape_and_offset == (shape, offset)


def test_a_rank_outside_the_mesh_has_no_shape_and_offset() -> None:
    def body(rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return compute_local_shape_and_global_offset((5,), T.Mesh((2,)), (T.Shard(0),))

    assert run_ranks(3, body) == [((3,), (0,)), ((2,), (3,)), ((0,), ())]
