"""`redistribute` on thread ranks against torch.chunk arithmetic: 5,000 random cases, and what random ones may miss."""

import pytest
import torch

import tritondt as T
from tests.harness.oracle.cases import check_cases, random_case
from tritondt.comm.transports.threads import run_ranks
from tritondt.planning.cost import CostTable
from tritondt.redistribution.compile import received_bytes

NUM_CASES = 5000
CASES_PER_TEST = 100


@pytest.mark.in_ci(12)
@pytest.mark.parametrize("chunk", range(NUM_CASES // CASES_PER_TEST))
def test_random_cases(chunk: int) -> None:
    world_size = (8, 4, 6, 4, 5)[chunk % 5]
    first = chunk * CASES_PER_TEST
    check_cases([random_case(seed, world_size) for seed in range(first, first + CASES_PER_TEST)], world_size)


def test_random_cases_in_several_hops() -> None:
    """Where a rank may talk to one other only, plans go axis by axis."""
    cases = [random_case(seed, 8) for seed in range(400_000, 400_200)]
    check_cases(cases, 8, CostTable(max_peers=1))


def specs(
    mesh: T.Mesh, shape: tuple[int, ...], dtype: torch.dtype, source: str, target: str
) -> tuple[T.DTensorSpec, T.DTensorSpec]:
    meta = T.TensorMeta.contiguous(shape, dtype)
    return T.DTensorSpec(mesh, T.parse_placements(source), meta), T.DTensorSpec(mesh, T.parse_placements(target), meta)


def redistributed(
    mesh_shape: tuple[int, ...], source: str, target: str, locals_by_rank: list[torch.Tensor], shape: tuple[int, ...]
) -> list[torch.Tensor]:
    """The results by rank of redistributing the given local tensors."""

    def body(rank: int) -> torch.Tensor:
        local = locals_by_rank[rank]
        return T.redistribute(local, *specs(T.Mesh(mesh_shape), shape, local.dtype, source, target))

    return run_ranks(len(locals_by_rank), body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_moved_bits_are_kept(dtype: torch.dtype) -> None:
    """NaN with any payload, infinities, signed zeros and subnormal numbers move as bits."""
    whole = torch.randint(0, 256, (6 * 5 * dtype.itemsize,), dtype=torch.uint8)
    rows = list(whole.view(dtype).view(6, 5).chunk(3))
    columns = redistributed((3,), "S0", "S1", rows, (6, 5))
    found = torch.cat([column.contiguous().view(torch.uint8).view(6, -1, dtype.itemsize) for column in columns], 1)
    torch.testing.assert_close(found.flatten(), whole, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.uint64])
def test_any_dtype_moves(dtype: torch.dtype) -> None:
    whole = torch.arange(10 * dtype.itemsize, dtype=torch.uint8)
    found = redistributed((2,), "S0", "R", list(whole.view(dtype).chunk(2)), (10,))
    for local in found:
        assert local.dtype is dtype
        torch.testing.assert_close(local.view(torch.uint8), whole, rtol=0, atol=0)


def test_terms_that_stay_partial_are_moved_as_they_are() -> None:
    terms = [torch.arange(6.0) * 10**rank for rank in range(4)]
    found = redistributed((2, 2), "P, R", "P, S0", [terms[0], terms[0], terms[1], terms[1]], (6,))
    expected = [terms[0][:3], terms[0][3:], terms[1][:3], terms[1][3:]]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("op", "dtype", "identity"),
    [
        ("sum", torch.float32, 0.0),
        ("sum", torch.int8, 0),
        ("product", torch.complex64, 1.0),
        ("product", torch.int64, 1),
    ],
)
def test_replicate_to_terms_keeps_the_value_once(op: str, dtype: torch.dtype, identity: float) -> None:
    whole = torch.tensor([3, 0, 5]).to(dtype)
    first, *others = redistributed((3,), "R", f"P({op})", [whole.clone() for _ in range(3)], (3,))
    torch.testing.assert_close(first, whole, rtol=0, atol=0)
    for other in others:
        torch.testing.assert_close(other, torch.full_like(whole, identity), rtol=0, atol=0)


@pytest.mark.parametrize("op", ["max", "min", "avg"])
def test_replicate_to_terms_of_an_idempotent_reduction_keeps_all(op: str) -> None:
    whole = torch.tensor([3.0, -0.5, 5.0])
    for local in redistributed((3,), "R", f"P({op})", [whole.clone() for _ in range(3)], (3,)):
        torch.testing.assert_close(local, whole, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("op", "dtype", "identity"),
    [
        ("sum", torch.float32, 0.0),
        ("product", torch.float32, 1.0),
        ("max", torch.float32, float("-inf")),
        ("min", torch.bfloat16, float("inf")),
        ("max", torch.int16, -(2**15)),
        ("min", torch.uint8, 255),
        ("max", torch.bool, False),
        ("min", torch.bool, True),
    ],
)
def test_a_shard_becomes_a_term_among_identities(op: str, dtype: torch.dtype, identity: float) -> None:
    whole = torch.tensor([1, 0, 1]).to(dtype)
    found = redistributed((2,), "S0", f"P({op})", [whole[:2].clone(), whole[2:].clone()], (3,))
    filler = torch.full((3,), identity).to(dtype)
    expected = [torch.cat([whole[:2], filler[2:]]), torch.cat([filler[:2], whole[2:]])]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_sum_and_mean_exchange_terms_without_talking() -> None:
    terms = [torch.tensor([1.0, -2.0]) * (rank + 1) for rank in range(4)]
    scaled = redistributed((4,), "P(sum)", "P(avg)", terms, (2,))
    torch.testing.assert_close(scaled, [4 * term for term in terms], rtol=0, atol=0)
    back = redistributed((4,), "P(avg)", "P(sum)", scaled, (2,))
    torch.testing.assert_close(back, terms, rtol=0, atol=0)


@pytest.mark.parametrize("pair", [("S0", "P"), ("S0", "S1"), ("S0", "R"), ("S1(sizes=0/0/6/1)", "P"), ("R", "P")])
def test_the_most_that_a_rank_receives_is_that_of_the_plan(pair: tuple[str, str]) -> None:
    """A shard becomes a term of a sum without a message, though its rank lacks the rest of the tensor."""

    def most_and_explained(_rank: int) -> tuple[int, int]:
        before, after = specs(T.Mesh((4,)), (3, 7), torch.float32, *pair)
        return received_bytes(before, after), T.explain(before, after).received_bytes

    found = run_ranks(4, most_and_explained)
    assert {most for most, _ in found} == {max(explained for _, explained in found)}
    assert (found[0][0] == 0) == (pair[1] == "P")


def test_an_order_by_names_is_that_of_axes() -> None:
    def body(rank: int) -> torch.Tensor:
        mesh, meta = T.Mesh((2, 3), ("dp", "tp")), T.TensorMeta.contiguous((11,))
        by_name = T.DTensorSpec(mesh, (T.Shard(0), T.Shard(0)), meta, order=("tp", "dp"))
        assert by_name is T.DTensorSpec(mesh, (T.Shard(0), T.Shard(0)), meta, order=(1, 0))
        whole = T.DTensorSpec(mesh, (T.Replicate(), T.Replicate()), meta)
        return T.redistribute(torch.arange(11.0), whole, by_name)

    # tp cuts 11 into 4, 4, 3; dp halves each.
    expected = [[0.0, 1.0], [4.0, 5.0], [8.0, 9.0], [2.0, 3.0], [6.0, 7.0], [10.0]]
    assert [local.tolist() for local in run_ranks(6, body)] == expected


def test_a_spec_to_itself_gives_another_tensor_of_that_memory() -> None:
    def body(rank: int) -> None:
        source, _ = specs(T.Mesh((2,)), (4,), torch.float32, "S0", "S0")
        local = torch.ones(2)
        found = T.redistribute(local, source, source).requires_grad_()
        assert (found.data_ptr(), local.requires_grad) == (local.data_ptr(), False)

    run_ranks(2, body)


def test_ranks_outside_the_mesh_hold_nothing() -> None:
    def body(rank: int) -> tuple[tuple[int, ...] | None, torch.Tensor]:
        source, target = specs(T.Mesh((2,), ranks=(3, 1)), (5,), torch.int32, "S0", "R")
        given = [torch.empty(0), torch.tensor([3, 4]), torch.empty(0), torch.tensor([0, 1, 2])][rank].int()
        return source.coordinate, T.redistribute(given, source, target)

    found = run_ranks(4, body)
    assert [coordinate for coordinate, _ in found] == [None, (1,), None, (0,)]
    assert [local.tolist() for _, local in found] == [[], [0, 1, 2, 3, 4], [], [0, 1, 2, 3, 4]]


def test_other_names_of_axes_move_nothing() -> None:
    """A plan of no steps: the layout is the same, and the spec another."""

    def renamed(rank: int) -> tuple[tuple[str, ...] | None, list[list[float]]]:
        x = T.distribute_tensor(torch.arange(8.0).view(4, 2), T.Mesh((2, 1)), [T.Shard(0), T.Replicate()])
        found = x.redistribute(T.Mesh((2, 1), ("data", "model")), x.placements)
        return found._spec.mesh.names, found.to_local().tolist()

    first, second = run_ranks(2, renamed)
    assert first == (("data", "model"), [[0.0, 1.0], [2.0, 3.0]])
    assert second == (("data", "model"), [[4.0, 5.0], [6.0, 7.0]])
