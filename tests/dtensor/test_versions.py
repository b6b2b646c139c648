"""Versions of written arguments: of every operator that writes, as many as torch counts on one device."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

import tritondt as T
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks
from tritondt.ops import propagator

aten = torch.ops.aten


def writing() -> Iterator[OpOverload]:
    """The aten operators with a strategy, or of which torch counts nothing itself, that write to a tensor argument."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        packet = getattr(aten, base, None) if space == "aten" else None
        op = getattr(packet, overload or "default", None)
        if op is None or not any(
            argument.alias_info and argument.alias_info.is_write for argument in op._schema.arguments
        ):
            continue
        # Of this one the schema says that gradients are written, which are not.
        if op is not aten._fused_sgd.out and (
            propagator.knows(op) or not op.has_kernel_for_dispatch_key(DispatchKey.ADInplaceOrView)
        ):
            yield op


def value(kind: str, make) -> Any:
    """An argument of a schema's type."""
    tensors = {
        "Tensor": lambda: make(),
        "Optional[Tensor]": lambda: make(),
        "List[Tensor]": lambda: [make(), make()],
    }
    numbers: dict[str, Any] = {
        "number": 1.5,
        "float": 0.5,
        "int": 0,
        "bool": False,
        "List[number]": [1.5, 0.5],
        "Optional[number]": 0.5,
        "List[int]": [0],
        "Optional[List[int]]": [0],
        "str": "none",
        "Optional[float]": 0.5,
    }
    if kind in tensors:
        return tensors[kind]()
    return numbers.get(kind)


def call(op: OpOverload, make) -> list[int]:
    """How often each tensor that a call writes to was counted to be written; arguments follow from the schema."""
    args, kwargs, written = [], {}, []
    for argument in op._schema.arguments:
        if argument.has_default_value() and argument.alias_info is None:
            continue
        given = value(str(argument.type), make)
        if argument.kwarg_only:
            kwargs[argument.name] = given
        else:
            args.append(given)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += given if isinstance(given, list) else [given]
    before, shapes = [tensor._version for tensor in written], [tensor.shape for tensor in written]
    op(*args, **kwargs)
    if torch.Tag.inplace_view not in op.tags and shapes != [tensor.shape for tensor in written]:
        raise RuntimeError("what is written gets another shape, which is deprecated")
    return [tensor._version - count for tensor, count in zip(written, before, strict=True)]


def is_of_lists(op: OpOverload) -> bool:
    """Whether an operator takes lists of tensors, as optimizers call them."""
    return op._schema.name.startswith("aten::_foreach_")


# Without arguments that have values of their own, such as places, half of all operators can be called.
@pytest.mark.parametrize(
    ("text", "wanted", "at_least"), [pytest.param("R", None, 400, marks=pytest.mark.extended), ("S0", is_of_lists, 60)]
)
def test_what_is_written_is_counted_as_on_one_device(text, wanted, at_least):
    def plain():
        return torch.rand(4) + 0.1

    expected: dict[OpOverload, list[int]] = {}
    for op in filter(wanted, writing()):
        try:
            expected[op] = call(op, plain)
        except (RuntimeError, TypeError, IndexError, ValueError, UserWarning):
            continue  # the arguments that it takes do not follow from its schema

    def body(rank):
        mesh, seen, others = T.Mesh((2,)), [], []
        for op, counts in expected.items():
            try:
                found = call(op, lambda: distribute(plain(), mesh, text))
            except (T.TritondtError, RuntimeError, TypeError, UserWarning):
                continue
            seen.append(op)
            if found != counts:
                others.append((str(op), found, counts))
        assert not others
        return seen

    with torch.no_grad():
        seen, _ = run_ranks(2, body)
    assert len(seen) >= at_least
    assert sum(map(is_of_lists, seen)) >= 60
