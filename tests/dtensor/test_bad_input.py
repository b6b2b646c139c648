"""Bad input that every rank sees alike, or that one rank brings: the sentence that says what is wrong."""

import pytest
import torch

import tritondt as T
from tritondt.comm.transports.threads import run_ranks


def layout(placements: str, shape: tuple[int, ...] = (4, 6), mesh_shape: tuple[int, ...] = (2, 2)) -> T.Layout:
    return T.Layout(mesh_shape, T.parse_placements(placements), shape)


@pytest.mark.parametrize(
    ("placements", "shape", "sentence"),
    [
        ("S2, R", (4, 6), r"axis 0 shards dim 2, but a tensor of shape \(4, 6\) has dims 0\.\.1"),
        ("R, S-3", (4, 6), r"axis 1 shards dim -3, but a tensor of shape \(4, 6\) has dims 0\.\.1"),
        ("S0, R", (), r"axis 0 shards dim 0, but a tensor of shape \(\) has no dims"),
        ("S1", (4, 6), r"mesh of shape \(2, 2\) takes 2 placements, one per axis; got 1: \(S1\)"),
        (
            "S1(sizes=3/4), R",
            (4, 6),
            r"axis 0 of size 2 cuts dim 1 of length 6 by S1\(sizes=3/4\); the sizes sum to 7, they must sum to 6",
        ),
        (
            "S1(sizes=1/2/3), R",
            (4, 6),
            r"cuts dim 1 of length 6 by S1\(sizes=1/2/3\); 3 sizes were given, allowed are 2, one per coordinate",
        ),
        ("S1(sizes=1/2, repeats=2), R", (4, 8), r"the sizes sum to 3, they must sum to 4"),
        ("S1(unit=2, sizes=3/3), R", (4, 6), r"every size must be a multiple of the unit"),
        ("S1(unit=4), R", (4, 6), r"cuts dim 1 of length 6 by S1\(unit=4\); the unit must divide the length"),
        ("S1(unit=2, repeats=2), R", (4, 6), r"the unit must divide a block's length 3"),
        ("S1(repeats=4), R", (4, 6), r"repeats must divide the length"),
        (
            "S1(unit=2), S1(unit=3)",
            (4, 6),
            r"axis 1 cuts dim 1 in units of 3 after axis 0 has cut it in units of 2; a later unit must divide every "
            r"earlier one: give axis 0 unit=6",
        ),
        (
            "S1, S1(sizes=2/4)",
            (4, 6),
            r"axis 1 cuts dim 1 by sizes=\(2, 4\) after axis 0 has cut it; sizes are allowed only for the first cut",
        ),
        (
            "P(max), P(sum)",
            (4, 6),
            r"\(P\(max\), P\(sum\)\) reduces by max and sum on different axes.*allowed is one op on all axes, or sum "
            r"with avg",
        ),
        ("P(avg), P(product)", (4, 6), r"reduces by avg and product on different axes"),
        ("S0, R", (-1, 6), r"lengths of 0 or more, got \(2, 2\) and \(-1, 6\)"),
    ],
)
def test_layouts_that_cannot_be(placements: str, shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(T.LayoutError, match=sentence):
        layout(placements, shape)


@pytest.mark.parametrize("order", [(0,), (0, 0), (0, 2), (0, 1, 1)])
def test_orders_that_do_not_list_each_axis_once(order: tuple[int, ...]) -> None:
    with pytest.raises(T.LayoutError, match=r"order=.* must list each of the axes \(0, 1\) once"):
        T.Layout((2, 2), (T.Shard(0), T.Shard(0)), (4,), order)


def test_a_placement_that_is_none() -> None:
    with pytest.raises(T.LayoutError, match="axis 0 got 'S0'; allowed are Shard, Replicate and Partial"):
        T.Layout((2,), ("S0",), (4,))  # type: ignore[arg-type]


def spec(placements: str, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (4, 6)) -> T.DTensorSpec:
    meta = T.TensorMeta.contiguous(shape, dtype)
    return T.DTensorSpec(T.Mesh((2,)), T.parse_placements(placements), meta)


@pytest.mark.parametrize(
    ("placements", "dtype", "sentence"),
    [
        ("P(avg)", torch.int32, r"\(P\(avg\)\) asks for avg of torch.int32; int elements have sum, max, min, product"),
        ("P(sum)", torch.bool, r"asks for sum of torch.bool; bool elements have max, min"),
        ("P(max)", torch.complex64, r"asks for max of torch.complex64; complex elements have sum, avg, product"),
        ("P(sum)", torch.uint16, r"uint16"),
        ("P(max)", torch.float8_e4m3fn, r"float8_e4m3fn"),
    ],
)
def test_reductions_that_a_dtype_does_not_have(placements: str, dtype: torch.dtype, sentence: str) -> None:
    def body(rank: int) -> None:
        with pytest.raises(T.ReductionError, match=sentence):
            spec(placements, dtype)

    run_ranks(2, body)


def test_an_axis_name_that_the_mesh_lacks() -> None:
    def body(rank: int) -> None:
        mesh = T.Mesh((2,), ("tp",))
        with pytest.raises(
            T.MeshError, match=r"Mesh\(tp=2 over ranks 0\.\.1, cpu\) has no axis 'dp'; allowed are \('tp',\)"
        ):
            T.DTensorSpec(mesh, (T.Shard(0),), T.TensorMeta.contiguous((4,)), order=("dp",))

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        (((4,),), {}, r"a mesh of shape \(4,\) needs rank 3, but the world has 2 ranks \(0\.\.1\); start 4 or make"),
        (((2,),), {"ranks": (0, 5)}, r"needs rank 5, but the world has 2 ranks"),
        (((2,),), {"ranks": (0, 0)}, r"takes 2 different ranks, got 0, 0"),
        (((2,),), {"ranks": (0,)}, r"takes 2 different ranks, got 0"),
        (((2, 0),), {}, r"axes of size 1 or more, got shape \(2, 0\)"),
        (((),), {}, r"one or more axes"),
        (((2,), ("a", "b")), {}, r"takes 1 different names, got \('a', 'b'\)"),
        (((1, 2), ("a", "a")), {}, r"takes 2 different names, got \('a', 'a'\)"),
    ],
)
def test_meshes_that_do_not_fit_the_world(
    arguments: tuple[object, ...], options: dict[str, object], sentence: str
) -> None:
    def body(rank: int) -> None:
        with pytest.raises(T.MeshError, match=sentence):
            T.Mesh(*arguments, **options)  # type: ignore[arg-type]

    run_ranks(2, body)


def test_what_is_no_mesh() -> None:
    def body(rank: int) -> None:
        with pytest.raises(T.MeshError, match="a mesh is a DeviceMesh or a tritondt Mesh, got tuple"):
            T.DTensorSpec((2,), (T.Shard(0),), T.TensorMeta.contiguous((4,)))  # type: ignore[arg-type]

    run_ranks(2, body)


def test_a_target_of_another_tensor() -> None:
    def body(rank: int) -> None:
        with pytest.raises(T.LayoutError, match=r"source has shape \(4, 6\), the target \(4, 5\); they must be equal"):
            T.redistribute(torch.zeros(2, 6), spec("S0"), spec("S0", shape=(4, 5)))

    run_ranks(2, body)


def test_a_target_of_another_dtype() -> None:
    def body(rank: int) -> None:
        with pytest.raises(T.TritondtError, match=r"torch.float32.*torch.int32|float32.*int32"):
            T.redistribute(torch.zeros(2, 6), spec("S0"), spec("R", torch.int32))

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("local", "error", "sentence"),
    [
        (
            torch.zeros(3, 6),
            T.LocalTensorError,
            r"\(S0\) of \(4, 6\) float32 gives rank 1 at coordinate \(1,\) a local tensor of shape \(2, 6\) and "
            r"torch.float32; found shape \(3, 6\) and torch.float32",
        ),
        (
            torch.zeros(2, 6, dtype=torch.int8),
            T.LocalTensorError,
            r"torch.float32; found shape \(2, 6\) and torch.int8",
        ),
        (
            torch.zeros(2, 6).to_sparse(),
            T.TransportError,
            r"takes a strided tensor, got torch.sparse_coo; call to_d",
        ),
        (torch.zeros(2, 6, device="meta"), T.TransportError, r"takes local tensors on cpu, got one on meta"),
    ],
)
def test_one_rank_brings_the_wrong_tensor(local: torch.Tensor, error: type[Exception], sentence: str) -> None:
    """It is told what it should have brought, and the ranks that wait are told that it will not come."""
    seen: list[str] = []

    def body(rank: int) -> None:
        if rank == 1:
            with pytest.raises(error, match=sentence):
                T.redistribute(local, spec("S0"), spec("R"))
        else:
            with pytest.raises(
                T.PeerError, match=r"rank 1 failed while rank 0 waited for rank 1 in step 1 of 1"
            ) as told:
                T.redistribute(torch.zeros(2, 6), spec("S0"), spec("R"))
            seen.append(str(told.value))
        # The next exchange finds both ranks in step again.
        assert T.redistribute(torch.full((2, 6), rank), spec("S0", torch.int64), spec("R", torch.int64)).sum() == 12

    run_ranks(2, body)
    assert error.__name__ in seen[0]


def test_ranks_that_ask_for_different_things_are_told_both() -> None:
    def body(rank: int) -> None:
        shape, dtype = ((4, 6), torch.float32) if rank == 0 else ((4, 8), torch.int32)
        source, target = spec("S0", dtype, shape), spec("R", dtype, shape)
        with pytest.raises(T.PeerError) as told:
            T.redistribute(torch.zeros(source.local_shape, dtype=dtype), source, target)
        if isinstance(told.value, T.MismatchError):
            assert "rank 0" in str(told.value)
            assert "rank 1" in str(told.value)
            assert "(4, 6) float32" in str(told.value)
            assert "(4, 8) int32" in str(told.value)
            found.append(rank)

    found: list[int] = []
    run_ranks(2, body)
    assert found, "no rank was told what the other one asked for"


def test_a_rank_that_raises_ends_the_run_with_its_own_error() -> None:
    def body(rank: int) -> None:
        if rank == 2:
            raise KeyError("its own error")
        T.redistribute(torch.zeros(spec("S0").local_shape), spec("S0"), spec("R"))

    with pytest.raises(KeyError, match="its own error"):
        run_ranks(3, body)


def test_a_rank_that_leaves_early_is_named() -> None:
    def body(rank: int) -> None:
        if rank == 0:
            T.redistribute(torch.zeros(2, 6), spec("S0"), spec("R"))

    with pytest.raises(T.PeerError, match=r"rank 1 has ended while rank 0 waited for rank 1 in step 1 of 1 "):
        run_ranks(2, body)
