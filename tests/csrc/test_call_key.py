"""Arguments taken apart: what tells calls apart, what runs locally, and what is left to the general way."""

import gc
import sys

import pytest

from tritondt._C import make_call_splitter


class Distributed:
    __slots__ = ("_local_tensor", "_spec")

    def __init__(self, spec, local):
        self._spec, self._local_tensor = spec, local


split = make_call_splitter(Distributed)
X, Y = Distributed("spec x", "local x"), Distributed("spec y", "local y")


@pytest.mark.parametrize(
    ("args", "static_argnum", "key", "local_args"),
    [
        ((), 0, (), ()),
        ((X, Y), 0, ("spec x", "spec y"), ("local x", "local y")),
        ((X, 2), 0, ("spec x", int, 2), ("local x", 2)),
        ((X, 2), 2, ("spec x", int), ("local x", 2)),
        ((X, 2, 3.5), 2, ("spec x", int, float, 3.5), ("local x", 2, 3.5)),
        ((X, None, True), 9, ("spec x", None, True), ("local x", None, True)),
        ((X, [3, 4]), 0, ("spec x", (3, 4)), ("local x", [3, 4])),
        ((X, [3, 4]), 9, ("spec x", (2, "int")), ("local x", [3, 4])),
        (([X, Y], [0.5, 1.5]), 9, (("spec x", "spec y"), (2, "float")), (["local x", "local y"], [0.5, 1.5])),
    ],
)
def test_what_is_understood(args, static_argnum, key, local_args):
    assert split(args, static_argnum) == (key, local_args)


@pytest.mark.parametrize(
    "args",
    [("text",), (X, 1j), ([],), ([X, 1],), ([1, 2.0],), ((X, Y),), ([0.5],), ([True],), (object(),), (X,) * 33],
)
def test_what_is_left_to_the_general_way(args):
    assert split(args, 0) is None


def test_subclasses_and_tensors_without_slots_filled_are_left():
    class Derived(Distributed):
        pass

    assert split((Derived("spec", "local"),), 0) is None
    assert split((Distributed.__new__(Distributed),), 0) is None
    assert split(([X, Distributed.__new__(Distributed)],), 0) is None


def test_a_class_without_slots_is_refused():
    with pytest.raises(AttributeError):
        make_call_splitter(int)
    with pytest.raises(TypeError, match=r"Plain\._local_tensor is no slot|Plain\._spec is no slot"):
        make_call_splitter(type("Plain", (), {"_spec": 1, "_local_tensor": 2}))


def test_wrong_calls_are_refused():
    for wrong in ((), ((),), ([X], 0), ((X,), "0")):
        with pytest.raises(TypeError, match="split takes a tuple of arguments and static_argnum, an int"):
            split(*wrong)


def test_references_are_kept_and_given_back():
    spec, local = object(), object()
    x = Distributed(spec, local)
    gc.collect()
    before = sys.getrefcount(spec), sys.getrefcount(local), sys.getrefcount(x)
    for _ in range(100):
        split((x, [x, x], 2.5, [1, 2], None), 0)
        split((x, [x, x], "text"), 0)  # given up on the way
    assert (sys.getrefcount(spec), sys.getrefcount(local), sys.getrefcount(x)) == before
    kept = split((x, [x]), 0)
    assert sys.getrefcount(spec) == before[0] + 2
    del kept
