"""`out=` of another shape than the results, and resize_: as on one device, or refused on all ranks alike."""

import warnings

import pytest
import torch

import tritondt as T
from tests.ops.sharded import compare, distribute
from tritondt.comm.transports.threads import run_ranks
from tritondt.ops import pointwise_rule, propagator, register_sharding_prop_rule

FULL = torch.arange(12.0).reshape(4, 3) - 5

LONE = {
    "add": lambda x, **out: torch.add(x, x, **out),
    "sum": lambda x, **out: torch.sum(x, 0, **out),
    "matmul": lambda x, **out: torch.mm(x.t(), x, **out),
    "cat": lambda x, **out: torch.cat([x, x], **out),
    "nonzero": lambda x, **out: torch.nonzero(x, **out),
    "masked": lambda x, **out: torch.masked_select(x, x > 0, **out),
    "norm": lambda x, **out: torch.linalg.vector_norm(x, **out),
    "cumsum": lambda x, **out: torch.cumsum(x, 1, **out),
}


@pytest.mark.parametrize("text", ["R", "S0", "P"])
def test_another_shape_is_resized_as_on_one_device(text):
    def body(rank):
        mesh = T.Mesh((2,))
        x = distribute(FULL, mesh, text)
        for name, function in LONE.items():
            wanted = function(distribute(FULL, mesh, "R").to_local())
            for into, placements in ((torch.empty(0), "R"), (torch.empty(5), "R"), (torch.empty(0, 3), "S0")):
                if placements == "S0" and not wanted.ndim:
                    continue
                out = distribute(into.to(wanted.dtype), mesh, placements)
                assert function(x, out=out) is out, name
                assert out._spec.placements == distribute(into, mesh, placements).placements
                assert out.to_local().shape == out._spec.local_shape, name
                compare(out, wanted, exact=text != "P", what=name)
                compare(out + 0, wanted, exact=text != "P", what=name)
                compare(function(x, out=out), wanted, exact=text != "P", what=name)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run_ranks(2, body)
    # On each rank once for every operator: empty ones, and those that fit, say nothing.
    assert sum("out has (5,) with elements" in str(warning.message) for warning in told) == 2 * len(LONE)


def test_several_results_are_written_to_tensors_of_another_shape():
    def body(rank):
        mesh = T.Mesh((2,))
        x = distribute(FULL, mesh, "R")
        values, places = T.empty(0, device_mesh=mesh), T.empty(0, device_mesh=mesh, dtype=torch.int64)
        torch.max(x, 1, out=(values, places))
        compare((values, places), tuple(FULL.max(1)), exact=True)
        pieces: list[torch.Tensor] = [T.empty(0, device_mesh=mesh), T.empty(0, device_mesh=mesh)]
        torch.split_with_sizes_copy(x, [1, 3], out=pieces)
        compare(pieces, list(FULL.split([1, 3])), exact=True)

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:.*which are lost")
def test_what_a_refused_call_has_resized_is_given_back():
    def body(rank):
        mesh = T.Mesh((2,))
        numbers, real = torch.arange(6).view(3, 2), distribute(FULL[0], mesh, "S0")
        whole, empty = distribute(numbers, mesh, "S1"), T.empty(0, device_mesh=mesh, dtype=torch.int64)
        single = T.ones((), device_mesh=mesh, dtype=torch.int64)
        for x, out in ((real, whole), (real, empty), (distribute(torch.ones(1, 1).char(), mesh, "R"), single)):
            with pytest.raises(RuntimeError, match=r"Long|int64"):
                torch.neg(x, out=out)
        compare((whole, empty, single), (numbers, numbers[0, :0], torch.tensor(1)), exact=True)
        assert torch.neg(real.long(), out=empty).shape == (3,)

    run_ranks(2, body)


def test_what_cannot_be_resized_is_refused():
    def body(rank):
        mesh = T.Mesh((2,))
        x = distribute(FULL, mesh, "S0")
        with pytest.raises(
            T.PropagationError, match=r"gives shape \(4, 3\), and out has \(2,\); a view cannot be resized"
        ):
            torch.add(x, x, out=T.zeros(4, 2, device_mesh=mesh)[0])
        row = distribute(FULL[0], mesh, "R")
        with pytest.raises(T.PropagationError, match=r"out has \(3,\); what is read as well cannot be resized"):
            torch.add(x, row, out=row)
        with (
            pytest.warns(UserWarning, match=r"out has \(2, 2\) with elements, which are lost"),
            pytest.raises(T.PropagationError, match=r"to \(0,\), of which \(S1\) is no layout"),
        ):
            torch.sum(x, 0, out=(ones := distribute(torch.ones(2, 2), mesh, "S1")))
        compare(ones, torch.ones(2, 2), exact=True)
        # As it was, where the new shape has no such layout.
        blocks = distribute(torch.arange(6.0), mesh, "S0(repeats=3)")
        with (
            pytest.warns(UserWarning, match="with elements, which are lost"),
            pytest.raises(T.PropagationError, match=r"out has \(6,\), for which \(S0\(repeats=3\)\) is no layout"),
        ):
            torch.neg(distribute(torch.ones(4), mesh, "S0"), out=blocks)
        compare(blocks, torch.arange(6.0), exact=True)
        values = T.empty(0, device_mesh=mesh)
        places, counts = (T.empty(0, device_mesh=mesh, dtype=torch.int64) for _ in "ab")
        with pytest.raises(T.PropagationError, match=r"shapes only values tell; call it without out"):
            torch.ops.aten._unique2.out(row, out0=values, out1=places, out2=counts)

    run_ranks(2, body)


def test_resize_goes_to_and_from_nothing():
    def body(rank):
        mesh = T.Mesh((2,))
        x = distribute(FULL, mesh, "S0")
        with pytest.raises(T.PropagationError, match=r"to \(2, 6\) would keep elements by their place in memory"):
            x.resize_(2, 6)
        assert x.resize_(4, 3) is x
        compare(x, FULL, exact=True)
        assert x.resize_(0).shape == (0,)
        x.resize_(5, 2).fill_(3)
        assert x.to_local().shape == (3 - rank, 2)
        compare(x * 2, torch.full((5, 2), 6.0), exact=True)

    run_ranks(2, body)


LIBRARY = torch.library.Library("outs", "DEF")
LIBRARY.define("doubled(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
LIBRARY.impl("doubled", lambda x, *, out: out.copy_(x * 2), "CompositeExplicitAutograd")
LIBRARY.define("into(Tensor x, *, Tensor(a!) out) -> ()")
LIBRARY.impl("into", lambda x, *, out: (out.copy_(x * 2), None)[1], "CPU")
LIBRARY.impl("into", lambda x, *, out: None, "Meta")
LIBRARY.define("both(Tensor x, *, Tensor(a!) first, Tensor(b!) second) -> (Tensor(a!), Tensor(b!))")
LIBRARY.impl("both", lambda x, *, first, second: (first.copy_(x), second.copy_(-x)), "CompositeExplicitAutograd")
LIBRARY.define("resizing(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
LIBRARY.impl("resizing", lambda x, *, out: out.resize_(x.shape).copy_(x * 2), "CompositeExplicitAutograd")
LIBRARY.define("placed(Tensor x, Tensor(a!) out) -> ()")
LIBRARY.impl("placed", lambda x, out: (out.copy_(x * 2), None)[1], "CompositeExplicitAutograd")


@pytest.fixture
def _laid_out():
    operators = [getattr(torch.ops.outs, name).default for name in ("doubled", "into", "both", "resizing", "placed")]
    for op in operators:
        register_sharding_prop_rule(op, pointwise_rule)
    yield
    for op in operators:
        propagator.forget(op)


@pytest.mark.usefixtures("_laid_out")
@pytest.mark.in_core(6)
@pytest.mark.parametrize("of_out", ["R", "S0", "S1"])
@pytest.mark.parametrize("text", ["S0", "R", "P"])
def test_operators_of_users_write_to_what_they_are_given(text, of_out):
    def body(rank):
        mesh = T.Mesh((2,))
        x = distribute(FULL, mesh, text)

        def outs():
            return distribute(torch.zeros(FULL.shape), mesh, of_out)

        out = outs()
        assert torch.ops.outs.doubled(x, out=out) is out
        compare(out, FULL * 2, exact=text != "P")
        for write in (torch.ops.outs.into, torch.ops.outs.placed):
            out = outs()
            assert write(x, out=out) is None
            compare(out, FULL * 2, exact=text != "P")
        first, second = outs(), outs()
        torch.ops.outs.both(x, first=first, second=second)
        compare((first, second), (FULL, -FULL), exact=text != "P")
        if of_out == "R":
            out = T.empty(0, device_mesh=mesh)
            compare(torch.ops.outs.resizing(x, out=out), FULL * 2, exact=text != "P")
        with pytest.raises(RuntimeError, match="must match the"):
            torch.ops.outs.doubled(x, out=distribute(torch.zeros(2, 7), mesh, of_out))
        compare(x + 0, FULL, exact=text != "P")

    run_ranks(2, body)
