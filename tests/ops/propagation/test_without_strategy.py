"""Operators of torch that have neither a strategy nor a decomposition are those that docs/operators.md lists."""

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

from tritondt.ops import propagator
from tritondt.ops.propagation.fallback import decomposition_of

DOCS = Path(__file__).parents[3] / "docs" / "operators.md"


def _operators() -> Iterator[OpOverload]:
    """Operators of aten that take a tensor and give results of their own; `dir` knows those that were asked for."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    for name in sorted({found.removeprefix("aten::").partition(".")[0] for found in names if found[:6] == "aten::"}):
        packet: Any = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            op = getattr(packet, overload)
            arguments = op._schema.arguments
            if any("Tensor" in str(a.type) for a in arguments) and not any(a.is_out for a in arguments):
                yield op


def _is_composite(op: OpOverload) -> bool:
    try:
        return bool(op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))
    except RuntimeError:  # only TorchScript has it
        return True


def test_the_list_is_that_of_the_documentation() -> None:
    text = DOCS.read_text(encoding="utf-8").partition("### Operators of torch that have none")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    listed = {*re.findall(r"`([\w*]+)`", " ".join(cells))}
    found = {
        op._schema.name.removeprefix("aten::")
        for op in _operators()
        if not propagator.knows(op) and decomposition_of(op) is None and not _is_composite(op)
    }
    assert {name for name in found if not any(fnmatch(name, each) for each in listed)} == set(), "not in the document"
    if torch.__version__.startswith("2.13."):
        gone = {each for each in listed if not any(fnmatch(name, each) for name in found)}
        assert gone == set(), "has a strategy by now"
