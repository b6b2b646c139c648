"""A compiled call in the extension: torch's own bindings of operators, who hears of functions, and wrong tables."""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tritondt as T
from tests.harness.work import num_calls
from tests.ops.sharded import distribute, whole
from tritondt import _C
from tritondt.comm import read_guard
from tritondt.comm.transports.threads import run_ranks
from tritondt.dtensor import operator_call
from tritondt.dtensor.dispatch import enter
from tritondt.dtensor.operator_call import CompiledCall, Kind, direct_binding
from tritondt.dtensor.own_sources import run_apart
from tritondt.dtensor.tensor import wrap
from tritondt.dtensor.wiring import dispatcher
from tritondt.dtensor.writes import FORMER, MEMORY, RECORDED, memory_of, watched

aten = torch.ops.aten
PAIR = torch.arange(6.0).reshape(2, 3) + 1, torch.arange(6.0).reshape(2, 3) - 2.5
SQUARE = torch.arange(9.0).reshape(3, 3), torch.arange(9.0).reshape(3, 3) - 4

# Arguments of each overload that a binding of torch's runs in its place.
SAMPLES: Mapping[str, list[tuple[Any, ...]]] = {
    **{f"{name}.Tensor": [PAIR, (PAIR[0], 2.5), (PAIR[0], 3)] for name in ("add", "sub", "mul", "div")},
    **{f"{name}_.Tensor": [PAIR, (PAIR[0], 2.5), (PAIR[0], 3)] for name in ("add", "sub", "mul", "div")},
    **{f"{name}.default": [PAIR[:1]] for name in ("neg", "exp", "rsqrt", "relu", "sigmoid", "tanh", "sum")},
    **{f"{name}.default": [PAIR[:1]] for name in ("mean", "t")},
    **{f"{name}.default": [(PAIR[0], 1, False)] for name in ("_softmax", "_log_softmax")},
    "zero_.default": [PAIR[:1]],
    "mm.default": [SQUARE],
    "bmm.default": [tuple(each[None] for each in SQUARE)],
    "addmm.default": [(SQUARE[0][0], *SQUARE)],
    "transpose.int": [(PAIR[0], 0, 1), (PAIR[0], -1, 0)],
    "unsqueeze.default": [(PAIR[0], 1)],
    "sum.dim_IntList": [(PAIR[0], [1]), (PAIR[0], [0], True), (PAIR[0], None), (PAIR[0], [0, 1], False)],
    "mean.dim": [(PAIR[0], [1]), (PAIR[0], [0, 1], True), (PAIR[0], None)],
}


class Heard(TorchDispatchMode):
    """The operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(op)
        return op(*args, **(kwargs or {}))


def run_alone(body: Callable[[T.Mesh], None]) -> None:
    """Runs a body that sends nothing on the first of two ranks' views."""
    run_ranks(2, lambda rank: body(T.Mesh((2,))))


def test_each_binding_has_samples() -> None:
    assert set(SAMPLES) == operator_call._FUNCTIONS | operator_call._METHODS


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_binding_runs_the_operator_in_whose_place_it_is(name: str) -> None:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet), overload)
    binding = direct_binding(op, op._op)
    assert binding is not None
    assert direct_binding(op, lambda *args: None) is None
    for sample in SAMPLES[name]:
        mine, others = ([each.clone() if isinstance(each, torch.Tensor) else each for each in sample] for _ in "12")
        with Heard() as heard:
            found = binding(*mine)
        assert heard.ops == [op]
        torch.testing.assert_close(found, op(*others), rtol=0, atol=0)
        torch.testing.assert_close(mine, others, rtol=0, atol=0)


def test_a_mode_hears_the_operators_of_parts_and_no_functions() -> None:
    class Functions(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[Any] = []

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.heard.append(function)
            return function(*args, **(kwargs or {}))

    def body(mesh: T.Mesh) -> None:
        x = distribute(torch.arange(8.0).reshape(4, 2), mesh, "S0")
        expected = x.add(x)
        with Functions() as functions:
            found = torch.add(x, x)
        assert functions.heard.count(torch.add) == 1, "the caller's own"
        assert {*functions.heard} <= {torch.add, aten.add.Tensor}
        torch.testing.assert_close(whole(found), whole(expected), rtol=0, atol=0)

    run_alone(body)


def test_a_class_of_local_tensors_hears_operators_and_no_functions() -> None:
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    heard: list[Any] = []

    def body(mesh: T.Mesh) -> None:
        x = T.DTensor.from_local(torch.ones(2, 3).as_subclass(Own), mesh, [T.Shard(0)])
        heard.clear()
        for _ in range(2):
            found: Any = x.add(x)
            assert torch.equal(found.to_local().as_subclass(torch.Tensor), torch.full((2, 3), 2.0))
        assert torch.add not in heard

    run_ranks(1, lambda rank: body(T.Mesh((1,))))


def test_a_class_that_hears_functions_is_asked_and_its_attributes_are_found_by_text() -> None:
    heard: list[Any] = []

    class Hears(T.DTensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            heard.append(function)
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))

    def body(mesh: T.Mesh) -> None:
        x = distribute(torch.arange(8.0).reshape(4, 2), mesh, "S0")
        own = Hears(x.to_local(), x._spec)
        by_text = ctypes.pythonapi.PyObject_GetAttrString
        by_text.restype, by_text.argtypes = ctypes.py_object, [ctypes.py_object, ctypes.c_char_p]
        tensor: Any
        for tensor in (x, own):
            assert by_text(tensor, b"_spec") is x._spec
            assert by_text(tensor, b"__torch_function__") == tensor.__torch_function__
            with pytest.raises(AttributeError, match="no_such_name"):
                by_text(tensor, b"no_such_name")
        for one, count in ((x, 0), (own, 1)):
            heard.clear()
            torch.neg(one)
            assert heard.count(torch.neg) == count

    run_alone(body)
    with pytest.MonkeyPatch.context() as patch:  # given to the class later, it is found as well
        patch.setattr(T.DTensor, "__torch_function__", Hears.__torch_function__)
        heard.clear()
        run_alone(lambda mesh: heard.append(torch.neg(distribute(torch.ones(2, 2), mesh, "S0"))))
        assert torch.neg in heard


def test_a_gradient_is_read_as_torch_keeps_it() -> None:
    def body(mesh: T.Mesh) -> None:
        x: Any = distribute(torch.arange(8.0).reshape(4, 2), mesh, "S0").requires_grad_()
        assert x.grad is None
        (x * 3).redistribute(placements=[T.Replicate()], async_op=True).backward(
            distribute(torch.ones(4, 2), mesh, "R")
        )
        assert isinstance(x.grad, T.DTensor)
        assert num_calls(lambda: x.grad) == num_calls(lambda: x.device), "no function of Python"
        torch.testing.assert_close(whole(x.grad), torch.full((4, 2), 3.0), rtol=0, atol=0)
        x.grad = x.detach()
        torch.testing.assert_close(whole(x.grad), whole(x.detach()), rtol=0, atol=0)
        del x.grad
        assert x.grad is None
        torch.Tensor.grad.__set__(x, torch.zeros(4, 2))
        assert isinstance(x.grad, T.DTensor), "zeros that autograd made of a shape"
        with pytest.raises(TypeError):
            T.DTensor.grad.fget(3)
        assert "gradient" in str(T.DTensor.grad.__doc__)

    run_ranks(2, lambda rank: body(T.Mesh((2,))))


def test_dispatch_takes_its_arguments_by_name() -> None:
    def body(mesh: T.Mesh) -> None:
        x = distribute(torch.arange(8.0).reshape(4, 2), mesh, "S0")
        dispatch: Any = T.DTensor.__torch_dispatch__
        found = dispatch(op=aten.add.Tensor, types=(), args=(x, x))
        torch.testing.assert_close(whole(found), whole(x) * 2, rtol=0, atol=0)
        assert dispatcher.running() is None

    run_alone(body)


def test_the_running_operator_is_the_innermost_and_is_forgotten_after_an_error() -> None:
    def body(mesh: T.Mesh) -> None:
        x = distribute(torch.arange(8.0).reshape(4, 2), mesh, "S0")
        seen: list[Any] = []

        def local(*args: Any) -> torch.Tensor:
            seen.append(dispatcher.running())
            x.neg()
            seen.append(dispatcher.running())
            raise KeyError("within")

        dispatch = dispatch_of(aten.exp.default, {(x._spec,): CompiledCall(Kind.ONE, local, x._spec)})
        with pytest.raises(KeyError, match="within"):
            dispatch(aten.exp.default, (), (x,))
        assert seen == [aten.exp.default] * 2
        assert dispatcher.running() is None

    run_alone(body)


def dispatch_of(op: Any, signatures: Any) -> Any:
    """Dispatch by a table of one operator."""

    def run_any(*args: Any) -> None:
        raise AssertionError("the general way")

    operators = {id(op): (signatures, 0, op)} if isinstance(signatures, dict) else {id(op): signatures}
    by = operators, wrap, run_any, enter, run_apart, read_guard.readers, watched
    return _C.make_dispatch(lambda *args: None, T.DTensor, *by, RECORDED, MEMORY, FORMER)


def test_a_table_of_something_else_is_refused() -> None:
    def body(mesh: T.Mesh) -> None:
        x = distribute(torch.arange(8.0).reshape(4, 2), mesh, "S0")
        for wrong in ("text", (), {(x._spec,): "text"}, {(x._spec,): (Kind.ONE, None)}):
            with pytest.raises(TypeError, match="the table of operators has something else than CompiledCalls"):
                dispatch_of(aten.exp.default, wrong)(aten.exp.default, (), (x,))
        call = CompiledCall(Kind.LIST, lambda local: [local, local], (x._spec,))
        with pytest.raises(ValueError, match="an operator gave 2 tensors for 1 specs"):
            dispatch_of(aten.exp.default, {(x._spec,): call})(aten.exp.default, (), (x,))

    run_alone(body)


def test_an_alias_has_the_memory_of_what_a_view_views() -> None:
    def body(mesh: T.Mesh) -> None:
        x = distribute(torch.arange(8.0).reshape(4, 2), mesh, "S0")
        aliases = [x.t().detach(), x.t().t().detach(), x.detach().t().detach(), x.detach().detach()]
        for alias in aliases:
            assert memory_of(alias)[0] is memory_of(x)[0]
        view = x.t()
        x.data = distribute(torch.zeros(4, 2), mesh, "S0")  # the view keeps the former memory, too
        assert {*map(id, memory_of(view.detach()))} == {*map(id, memory_of(view))}
        aliases[0].add_(1)
        torch.testing.assert_close(whole(aliases[3]), torch.arange(8.0).reshape(4, 2) + 1, rtol=0, atol=0)
        assert aliases[0]._version == 1

    run_alone(body)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_local_tensor_that_is_resized_or_given_other_memory_is_not_that_of_the_operator(is_compiled: bool) -> None:
    """What `from_local` is given and `to_local` gives are tensors of their own on the same memory."""

    def body(mesh: T.Mesh) -> None:
        def resize(local: torch.Tensor) -> None:
            local.resize_(2, 2)

        def replace(local: torch.Tensor) -> None:
            local.data = torch.zeros(3, 3, dtype=torch.float64)

        for change in (resize, replace):
            given = torch.arange(8.0).view(4, 2)
            x = T.DTensor.from_local(given, mesh, [T.Shard(0)])
            for _ in range(2 if is_compiled else 0):
                x.add(x)
            change(given)
            change(x.to_local())
            found: Any = x.add(x)
            torch.testing.assert_close(found.to_local(), torch.arange(8.0).view(4, 2) * 2, rtol=0, atol=0)

    run_alone(body)
