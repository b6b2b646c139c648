"""Redistribution between two meshes of one world: disjoint, overlapping, reordered, of another shape."""

import random
from typing import Any

import pytest
import torch

import tritondt as T
from tests.harness.oracle.across_cases import check_across, random_across_case
from tests.redistribution.moves import FULL
from tritondt.comm.transports.threads import run_ranks

CASES_PER_TEST = 10


@pytest.mark.in_ci(6)
@pytest.mark.parametrize("chunk", range(100))
def test_random_pairs_of_meshes_and_layouts(chunk: int) -> None:
    first = chunk * CASES_PER_TEST
    check_across(*(random_across_case(seed, 8) for seed in range(first, first + CASES_PER_TEST)))


@pytest.mark.in_core(1)
@pytest.mark.in_ci(4)
@pytest.mark.parametrize("chunk", range(100))
def test_random_pairs_of_meshes_on_hosts(chunk: int) -> None:
    """The same values, now and later, with gradients, and the fewest bytes between hosts."""
    chosen = random.Random(chunk)
    hosts = [chosen.randrange(3) for _ in range(8)]
    first = chunk * CASES_PER_TEST
    check_across(*(random_across_case(seed, 8) for seed in range(first, first + CASES_PER_TEST)), hosts=hosts)


A, B = (0, 1), (3, 1, 2)  # ranks of two meshes that share rank 1; rank 4 is in neither


def on(ranks: tuple[int, ...], text: str, full: torch.Tensor = FULL) -> T.DTensor:
    return T.distribute_tensor(full, T.Mesh((len(ranks),), ranks=ranks), T.parse_placements(text))


def test_gradients_come_back_to_the_source_in_its_layout() -> None:
    def body(rank: int) -> tuple[str, list[int], Any]:
        x: Any = on(A, "S0").requires_grad_()
        y = x.redistribute(T.Mesh((3,), ranks=B), [T.Shard(1)])
        (y * y).sum().backward()
        assert isinstance(x.grad, T.DTensor)
        assert x.grad.device_mesh is T.Mesh((2,), ranks=A)
        gradient = x.grad.full_tensor() if rank in A else None
        return str(x.grad._spec), list(y.to_local().shape), gradient

    found = run_ranks(5, body)
    assert {text for text, _, _ in found} == {"(S0) of (7, 11) float32"}
    assert [shape for _, shape, _ in found] == [[0], [7, 4], [7, 3], [7, 4], [0]]
    for _, _, gradient in found[:2]:
        torch.testing.assert_close(gradient, 2 * FULL, rtol=0, atol=0)


def test_a_gradient_of_the_gradient() -> None:
    def body(rank: int) -> torch.Tensor | None:
        x: Any = on(A, "S0").requires_grad_()
        y = x.redistribute(T.Mesh((3,), ranks=B), [T.Shard(1)])
        (first,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert isinstance(second, T.DTensor)
        return second.full_tensor() if rank in A else None

    for found in run_ranks(5, body)[:2]:
        torch.testing.assert_close(found, 6 * FULL, rtol=0, atol=0)


def test_a_chain_of_pending_tensors_across_three_meshes() -> None:
    def body(rank: int) -> torch.Tensor:
        x = on(A, "S0")
        for ranks, text in ((B, "S1"), (B, "R"), (A, "P"), ((0, 1, 2, 3, 4), "R")):
            mesh = T.Mesh((len(ranks),), ranks=ranks)
            x = x.redistribute(mesh, T.parse_placements(text), async_op=True)
        return x.to_local()

    for found in run_ranks(5, body):
        torch.testing.assert_close(found, FULL, rtol=0, atol=0)


def test_explain_counts_bytes_between_the_hosts_of_two_meshes() -> None:
    """A tensor that all 3 ranks of the other host want crosses once, and a rank in neither mesh explains the same."""

    def body(rank: int) -> tuple[int, int, tuple[tuple[int, int, int], ...], list[str]]:
        x = on((1, 0, 4), "S0")
        target = T.DTensorSpec(T.Mesh((3,), ranks=(3, 5, 2)), [T.Replicate()], x._spec.tensor_meta)
        found = T.explain(x._spec, target)
        return found.received_bytes, found.far_bytes, found.between_hosts, [step.kind for step in found.steps]

    found = run_ranks(7, body, hosts=(0, 0, 1, 1, 0, 1, 2))
    assert {(between, *kinds) for _, _, between, kinds in found} == {(((0, 1, 308),), "exchange", "exchange")}
    assert [received for received, _, _, _ in found] == [0, 0, 308, 308, 0, 308, 0]
    assert sum(far for _, far, _, _ in found) == FULL.numel() * 4


def test_a_wire_dtype_rounds_alike_on_both_meshes() -> None:
    full = torch.arange(12.0).view(3, 4) + 2.0**-12

    def body(rank: int) -> tuple[torch.Tensor, int]:
        x = on((0, 1), "P", full)
        mesh = T.Mesh((2,), ranks=(1, 2))
        y = x.redistribute(mesh, [T.Replicate()], wire_dtype=torch.bfloat16)
        return y.to_local(), T.explain(x._spec, y._spec, wire_dtype=torch.bfloat16).received_bytes

    found = run_ranks(3, body)
    for local, _ in found[1:]:
        torch.testing.assert_close(local, full.bfloat16().float(), rtol=0, atol=0)
    # Rank 1 lacks rank 0's term, and rank 2 the sum: 12 elements of 2 bytes each.
    assert [num_bytes for _, num_bytes in found] == [0, 24, 24]


def test_the_same_ranks_under_other_names_move_nothing() -> None:
    def body(rank: int) -> None:
        plain, named = T.Mesh((2, 2)), T.Mesh((2, 2), ("dp", "tp"))
        x = T.distribute_tensor(FULL, plain, T.parse_placements("S0, P"))
        y = x.redistribute(named, x.placements)
        assert y.device_mesh is named
        assert y.to_local().data_ptr() == x.to_local().data_ptr()
        assert T.explain(x._spec, y._spec).messages == 0
        torch.testing.assert_close(y.full_tensor(), FULL, rtol=0, atol=0)
        flat = x.redistribute(placements=T.parse_placements("S0, S0")).redistribute(T.Mesh((4,)), [T.Shard(0)])
        assert T.explain(flat._spec, x._spec).steps

    run_ranks(4, body)


def test_a_grid_of_another_shape_with_equal_boxes_moves_nothing() -> None:
    def body(rank: int) -> None:
        x = T.distribute_tensor(torch.arange(8.0), T.Mesh((4,)), [T.Shard(0)])
        y = x.redistribute(T.Mesh((2, 2)), T.parse_placements("S0, S0"))
        assert [step.kind for step in T.explain(x._spec, y._spec).steps] == ["local"]
        torch.testing.assert_close(y.to_local(), x.to_local(), rtol=0, atol=0)

    run_ranks(4, body)


def test_explain_of_a_rank() -> None:
    def body(rank: int) -> str:
        x = on(A, "S0")
        return str(T.explain(x._spec, T.DTensorSpec(T.Mesh((3,), ranks=B), [T.Replicate()], x._spec.tensor_meta)))

    found = run_ranks(5, body)
    title, _, exchange, footer = found[1].splitlines()
    assert title == "(S0) on ranks 0..1 -> (R) on ranks 3, 1, 2 of (7, 11) at rank 1"
    assert exchange.split()[:8] == ["exchange", "(S0)", "(R)", "2", "264", "1", "176", "0"]
    assert footer == "peak temporary 0 bytes; 3 peers, first connections 3.0 ms"
    assert " 0      0          0         0         0 " in found[4]


@pytest.mark.parametrize("hosts", [None, (0, 0, 1, 1, 1, 0)], ids=["one host", "two hosts"])
def test_a_rank_that_cannot_send_is_told_of_and_the_ranks_go_on(hosts: tuple[int, ...] | None) -> None:
    """Also in plans of several exchanges, of which some ranks have a message in the last only."""

    def body(rank: int) -> None:
        mesh, other = T.Mesh((2, 2)), T.Mesh((3,), ranks=(4, 5, 0))
        meta = T.TensorMeta.contiguous((4, 6))
        for source_text, (target_mesh, target_text) in (
            ("S0, P", (mesh, "R, R")),
            ("S0, P", (other, "R")),
            ("S0, P", (other, "S1")),
            ("P, P", (other, "P")),
        ):
            source = T.DTensorSpec(mesh, T.parse_placements(source_text), meta)
            target = T.DTensorSpec(target_mesh, T.parse_placements(target_text), meta)
            local = torch.ones(source.local_shape)
            for is_async in (False, True):
                given = torch.ones(1, 1) if rank == 3 else local
                error: Exception | None = None
                try:
                    T.DTensor(given, source).redistribute(target_mesh, target.placements, async_op=is_async).wait()
                except (T.PeerError, T.LocalTensorError) as raised:
                    error = raised
                assert rank != 3 or isinstance(error, T.LocalTensorError)
                assert error is None or "at coordinate (1, 1) a local tensor of shape" in str(error)
                found = T.DTensor(local, source).redistribute(target_mesh, target.placements)
                if target.coordinate is not None:
                    ones = source.layout.num_ranks if source_text == "P, P" else 2
                    torch.testing.assert_close(found.full_tensor(), torch.full((4, 6), float(ones)), rtol=0, atol=0)

    run_ranks(6, body, hosts=hosts)


def test_ranks_that_mean_different_targets_are_told() -> None:
    def body(rank: int) -> str:
        x = on(A, "S0")
        text = "S1" if rank == 1 else "R"
        try:
            x.redistribute(T.Mesh((3,), ranks=B), T.parse_placements(text))
        except (T.MismatchError, T.PeerError) as error:
            return type(error).__name__
        return "done"  # a rank that only sends

    found = run_ranks(5, body)
    assert found[4] == "done"
    assert set(found[1:4]) <= {"MismatchError", "PeerError"}


def test_what_cannot_go_between_meshes() -> None:
    def body(rank: int) -> None:
        x = on(A, "S0")
        there = T.DTensorSpec(T.Mesh((3,), ranks=B), [T.Replicate()], T.TensorMeta.contiguous((7, 11), torch.float64))
        with pytest.raises(T.LayoutError, match="the dtypes differ; convert the local tensor first"):
            T.redistribute(x.to_local(), x._spec, there)
        small = T.DTensorSpec(T.Mesh((3,), ranks=B), [T.Replicate()], T.TensorMeta.contiguous((7, 10)))
        with pytest.raises(T.LayoutError, match=r"the source has shape \(7, 11\), the target \(7, 10\)"):
            T.redistribute(x.to_local(), x._spec, small)
        on_gpu = T.Mesh((3,), ranks=B, device_type="cuda")
        with pytest.raises(T.MeshError, match="the one is of cpu, the other of cuda; both must be of one type"):
            x.redistribute(on_gpu, [T.Replicate()])
        with pytest.raises(T.LayoutError, match="takes 1 placements, one per axis; got 2"):
            x.redistribute(T.Mesh((3,), ranks=B), [T.Replicate(), T.Replicate()])

    run_ranks(4, body)


def test_a_graph_refuses_to_leave_its_mesh() -> None:
    def body(rank: int) -> None:
        mesh, other = T.Mesh((2,)), T.Mesh((2,), ranks=(1, 0))

        def there(local: torch.Tensor) -> torch.Tensor:
            x = T.DTensor.from_local(local, mesh, [T.Shard(0)])
            return x.redistribute(other, [T.Replicate()]).to_local()

        with pytest.raises(T.MeshError, match="a graph redistributes on one mesh only: go from mesh to mesh outside"):
            torch.fx.experimental.proxy_tensor.make_fx(there, tracing_mode="fake")(torch.ones(2, 3))

    run_ranks(2, body)


def test_a_prefetch_to_another_mesh() -> None:
    def body(rank: int) -> torch.Tensor:
        x, mesh = on(A, "S0"), T.Mesh((3,), ranks=B)
        T.prefetch(x, [T.Replicate()], device_mesh=mesh)
        y = x.redistribute(mesh, [T.Replicate()], async_op=True)
        assert y.work is not None or rank == 4
        return y.to_local()

    for found in run_ranks(5, body)[1:4]:
        torch.testing.assert_close(found, FULL, rtol=0, atol=0)
