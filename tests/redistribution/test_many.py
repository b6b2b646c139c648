"""`redistribute_many`: what single redistributions give, in few exchanges."""

import random
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

import tritondt as T
from tests.harness.oracle import arithmetic
from tests.harness.oracle.across_cases import AcrossCase, Inputs, Side, inputs_of, random_across_case
from tests.harness.oracle.cases import parsed
from tritondt.comm import world
from tritondt.comm.transports.threads import run_ranks
from tritondt.dtensor.many import redistribute_to

R, S0, S1, P = T.Replicate(), T.Shard(0), T.Shard(1), T.Partial()


@pytest.mark.in_ci(4)
@pytest.mark.parametrize("on_hosts", [False, True], ids=["one host", "hosts"])
@pytest.mark.parametrize("seed", range(40))
def test_random_lists_on_several_meshes(seed: int, on_hosts: bool) -> None:
    """Tensors of any layouts and dtypes, on meshes that share ranks or not, in buckets of any size, there and back."""
    chosen = random.Random(seed)
    cases = [random_across_case(1_000_000 + 20 * seed + number, 5) for number in range(12)]
    inputs = [inputs_of(case) for case in cases]
    bucket_bytes, is_async = chosen.choice((1, 300, 1 << 20)), chosen.random() < 0.5
    hosts = [chosen.randrange(2) for _ in range(5)] if on_hosts else None

    def body(rank: int) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        tensors: list[Any] = []
        targets = []
        for case, given in zip(cases, inputs, strict=True):
            local = given.locals.get(rank, torch.empty(0, dtype=case.meta.dtype)).clone()
            tensors.append(T.DTensor(local, case.source.spec(case.meta)).requires_grad_(case.differentiable))
            targets.append(case.target.spec(case.meta))
        found = redistribute_to(tensors, targets, bucket_bytes=bucket_bytes, async_op=is_async)
        results = [cast("T.DTensor", x.detach()).to_local() for x in found]
        leaves = [place for place, case in enumerate(cases) if case.differentiable]
        arriving = [arriving_gradient(cases[place], inputs[place], rank) for place in leaves]
        grads: dict[int, Any] = dict.fromkeys(range(len(cases)))
        if leaves:
            given_leaves = [tensors[place] for place in leaves]
            back: Sequence[Any] = torch.autograd.grad([found[place] for place in leaves], given_leaves, arriving)
            grads |= {place: grad.to_local() for place, grad in zip(leaves, back, strict=True)}
        return list(zip(results, grads.values(), strict=True))

    outcomes = run_ranks(5, body, hosts=hosts)
    for place, (case, given) in enumerate(zip(cases, inputs, strict=True)):
        results = {rank: outcomes[rank][place][0] for rank in case.target.ranks}
        assert_holds(results, given.full, case.target, parsed(case.target.placements))
        if case.differentiable:
            # A DTensor's gradient is of the whole tensor: means have their own share in it already.
            grads = {rank: outcomes[rank][place][1] for rank in case.source.ranks}
            assert_holds(grads, given.grad / case.target.mean_size(), case.source, case.source.without_terms())


def arriving_gradient(case: AcrossCase, given: Inputs, rank: int) -> T.DTensor:
    local = given.local_grads.get(rank, torch.empty(0, dtype=case.meta.dtype))
    return T.DTensor(local, case.target.spec(case.meta).with_placements(case.target.without_terms()))


def assert_holds(found: Any, full: torch.Tensor, side: Side, placements: tuple[T.Placement, ...]) -> None:
    coordinates = arithmetic.coordinates(side.mesh_shape)
    by_coordinate = {at: found[rank] for at, rank in zip(coordinates, side.ranks, strict=True)}
    arithmetic.assert_holds(by_coordinate, full, side.mesh_shape, placements, side.order)


def test_a_bucket_is_one_exchange_and_moves_the_fewest_bytes() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)

    def body(rank: int) -> tuple[int, int, int]:
        mesh = T.Mesh((3,))
        moves = []
        for number, dtype in enumerate(dtypes * 3):
            full = torch.arange(35).view(5, 7).to(dtype)
            source = (S0, S1, R)[number % 3]
            moves.append((T.distribute_tensor(full, mesh, [source]), [(S1, R, S0)[number % 3]]))
        communicator: Any = world.current().communicator((0, 1, 2))
        numbers, before = communicator.sequence, communicator.traffic.received_bytes
        T.redistribute_many(moves)
        once = communicator.sequence - numbers
        received = communicator.traffic.received_bytes - before
        T.redistribute_many(moves, bucket_bytes=1)
        explained = sum(
            T.explain(x._spec, x._spec.with_placements(placements)).received_bytes for x, placements in moves
        )
        assert received == explained
        return once, communicator.sequence - numbers - once, communicator.traffic.num_sent

    # R -> S0 moves nothing; the eight others are one exchange, or one each.
    assert [found[:2] for found in run_ranks(3, body)] == [(1, 8)] * 3


def test_terms_are_reduced_in_two_exchanges_for_all() -> None:
    def body(rank: int) -> None:
        mesh = T.Mesh((4,))
        communicator: Any = world.current().communicator((0, 1, 2, 3))
        fulls = [torch.arange(float(length)) for length in (3, 10, 64)]
        moves: list[Any] = [(T.distribute_tensor(full, mesh, [P]), [R]) for full in fulls]
        moves.append((T.distribute_tensor(torch.eye(4), mesh, [T.Partial("avg")]), [T.Partial()]))
        numbers = communicator.sequence
        found = T.redistribute_many(moves)
        assert communicator.sequence - numbers == 2
        for x, full in zip(found, [*fulls, torch.eye(4)], strict=True):
            torch.testing.assert_close(x.full_tensor(), full, rtol=0, atol=0)

    run_ranks(4, body)


def test_pending_and_prefetched_tensors_of_a_list() -> None:
    def body(rank: int) -> None:
        mesh, other = T.Mesh((3,)), T.Mesh((2,), ranks=(2, 0))
        full = torch.arange(35.0).view(5, 7)
        x = T.distribute_tensor(full, mesh, [S0])
        T.prefetch(x, [R])
        pending = x.redistribute(placements=[S1], async_op=True)
        elsewhere = x.redistribute(other, [S1], async_op=True)
        found = T.redistribute_many(
            [(pending, [S0]), (elsewhere, mesh, [R]), (x, [R]), (x, [S0]), (pending, other, [R])], async_op=True
        )
        assert found[3] is not x
        assert found[3].to_local().data_ptr() == x.to_local().data_ptr()
        assert found[0].work is not None
        assert found[0].wait() is found[0]
        for y in found:
            if y._spec.coordinate is not None:
                torch.testing.assert_close(y.full_tensor(), full, rtol=0, atol=0)

    run_ranks(3, body)


def test_gradients_of_some_of_a_list() -> None:
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        full = torch.arange(12.0).view(4, 3)
        x: Any
        y: Any
        z: Any
        x, y, z = (T.distribute_tensor(full, mesh, [S0]).requires_grad_(wants) for wants in (True, False, True))
        a, b, c = T.redistribute_many([(x, [S1]), (y, [R]), (z, [R])])
        assert [t.requires_grad for t in (a, b, c)] == [True, False, True]
        (a * b).sum().backward()  # c has no gradient
        assert z.grad is None
        assert isinstance(x.grad, T.DTensor)
        assert x.grad.placements == (S0,)
        torch.testing.assert_close(x.grad.full_tensor(), full, rtol=0, atol=0)

    run_ranks(2, body)


def test_a_tensor_at_fault_is_told_of_and_the_ranks_go_on() -> None:
    def body(rank: int) -> None:
        mesh, other = T.Mesh((3,)), T.Mesh((2,), ranks=(2, 0))
        meta = T.TensorMeta.contiguous((4, 3))
        for is_async in (False, True):
            whole = [T.DTensor(torch.ones(4, 3), T.DTensorSpec(mesh, [P], meta)) for _ in range(3)]
            if rank == 1:
                whole[1] = T.DTensor(torch.ones(2), whole[1]._spec)
            moves = [(whole[0], [R]), (whole[1], other, [R]), (whole[2], [S0])]
            with pytest.raises((T.LocalTensorError, T.PeerError), match="a local tensor of shape") as caught:
                wait_for_all(moves, async_op=is_async, bucket_bytes=1)
            assert isinstance(caught.value, T.LocalTensorError) == (rank == 1)
            fine = T.DTensor(torch.ones(4, 3), whole[0]._spec)
            for x in T.redistribute_many([(fine, [R]), (fine, other, [R]), (fine, [S0])]):
                if x._spec.coordinate is not None:
                    torch.testing.assert_close(x.full_tensor(), torch.full((4, 3), 3.0), rtol=0, atol=0)

    run_ranks(3, body)


def wait_for_all(moves: Any, **options: Any) -> None:
    for x in T.redistribute_many(moves, **options):
        x.wait()


def test_bad_lists() -> None:
    def body(rank: int) -> None:
        x = T.distribute_tensor(torch.ones(4, 3), T.Mesh((2,)), [S0])
        assert T.redistribute_many([]) == []
        with pytest.raises(T.MixedTensorsError, match="was given a Tensor as tensor 1; allowed are distributed"):
            T.redistribute_many([(x, [R]), (torch.ones(2), [R])])  # type: ignore[list-item]
        told = r"was given 4 values as move 0; allowed are \(x, placements\) and \(x, device_mesh, placements\)"
        with pytest.raises(T.LayoutError, match=told):
            T.redistribute_many([(x, x.device_mesh, [R], [R])])  # type: ignore[list-item]
        with pytest.raises(T.TransportError, match="bucket_bytes=0 was asked for; allowed is a number of bytes"):
            T.redistribute_many([(x, [R])], bucket_bytes=0)

    run_ranks(2, body)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_gradients_on_two_meshes(norm_type: float) -> None:
    fulls = [torch.arange(12.0).view(4, 3) - 4, torch.arange(5.0) * 3, torch.tensor(2.5)]

    def body(rank: int) -> list[torch.Tensor]:
        meshes = (T.Mesh((2,), ranks=(0, 1)), T.Mesh((3,), ranks=(3, 1, 2)), T.Mesh((2,), ranks=(0, 1)))
        parameters = []
        for full, mesh, placement in zip(fulls, meshes, (S0, S0, R), strict=True):
            x: Any = torch.nn.Parameter(T.distribute_tensor(torch.zeros_like(full), mesh, [placement]))
            x.grad = T.distribute_tensor(full, mesh, [placement])
            parameters.append(x)
        if rank == 4:
            return []
        total = T.clip_grad_norm_(parameters, 1.5, norm_type)
        return [total, *(x.grad.full_tensor() for x in parameters if x._spec.coordinate is not None)]

    plain = [torch.nn.Parameter(torch.zeros_like(full)) for full in fulls]
    for x, full in zip(plain, fulls, strict=True):
        x.grad = full.clone()
    total = torch.nn.utils.clip_grad_norm_(plain, 1.5, norm_type)
    found = run_ranks(5, body)
    held = [(0, 2), (0, 1, 2), (1,), (1,)]
    for (norm, *gradients), places in zip(found[:4], held, strict=True):
        torch.testing.assert_close(norm, total)
        torch.testing.assert_close(gradients, [plain[place].grad for place in places])


def test_what_cannot_be_clipped() -> None:
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        x = torch.nn.Parameter(T.ones(2, device_mesh=mesh))
        assert T.clip_grad_norm_([x], 1.0).item() == 0
        x.grad = x.detach() / 0
        with pytest.raises(RuntimeError, match=r"the norm of order 2.0 of gradients is inf, and cannot be clipped"):
            T.clip_grad_norm_(x, 1.0, error_if_nonfinite=True)
        plain = torch.nn.Parameter(torch.ones(2))
        plain.grad = torch.ones(2)
        with pytest.raises(T.MixedTensorsError, match=r"was given a plain gradient of shape \(2,\)"):
            T.clip_grad_norm_([x, plain], 1.0)

    run_ranks(2, body)
