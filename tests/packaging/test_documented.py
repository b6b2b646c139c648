"""Public functions carry an example, which the doctests run."""

import inspect
from types import ModuleType

import pytest

import tritondt
from tritondt import debug, experimental, found_plan, fsdp, nccl, ops, parallel, random, sharded

ROOMS = (tritondt, debug, experimental, found_plan, fsdp, nccl, ops, parallel, random, sharded)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_every_public_function_has_an_example(room: ModuleType):
    functions = {name: getattr(room, name) for name in room.__all__ if inspect.isroutine(getattr(room, name))}
    own = {name: found for name, found in functions.items() if found.__module__.startswith("tritondt")}
    assert own or room is nccl, sorted(room.__all__)
    assert sorted(name for name, found in own.items() if ">>> " not in (inspect.getdoc(found) or "")) == []
