"""Redistribution as one operator of torch's, for graphs: torch.compile sees it as a whole and runs it as it is.

The specs travel as text, so that a graph that another process has cached means the same there.
"""

import json
from functools import lru_cache

import torch

from tritondt import identity
from tritondt.execute import redistribute_local
from tritondt.identity import Identity
from tritondt.saving import spec_from, spec_values
from tritondt.spec import DTensorSpec

_library = torch.library.Library("tritondt", "DEF")
_library.define("redistribute(Tensor local, str source, str target, ScalarType? wire_dtype=None) -> Tensor")


def _text(spec: DTensorSpec) -> str:
    return json.dumps([*spec_values(spec), str(spec.dtype).removeprefix("torch.")])


def _spec(text: str) -> DTensorSpec:
    return _spec_in(identity.current(), text)


@lru_cache(maxsize=4096)
def _spec_in(who: Identity, text: str) -> DTensorSpec:
    (shape, names, ranks, device_type), (placements, *rest), dtype = json.loads(text)
    of_mesh = tuple(shape), None if names is None else tuple(names), tuple(ranks), device_type
    of_shape, stride, order = (tuple(item) for item in rest)
    return spec_from((of_mesh, (placements, of_shape, stride, order)), getattr(torch, dtype))


def _run(local: torch.Tensor, source: str, target: str, wire_dtype: torch.dtype | None = None) -> torch.Tensor:
    return redistribute_local(local, _spec(source), _spec(target), wire_dtype)


def _shape(local: torch.Tensor, source: str, target: str, wire_dtype: torch.dtype | None = None) -> torch.Tensor:
    return local.new_empty(_spec(target).local_shape)


_library.impl("redistribute", _run, "CompositeExplicitAutograd")
torch.library.register_fake("tritondt::redistribute", _shape)


def redistribution_in_graph(
    local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, wire_dtype: torch.dtype | None
) -> torch.Tensor:
    """What stands in a graph for a redistribution."""
    found: torch.Tensor = torch.ops.tritondt.redistribute(local, _text(source), _text(target), wire_dtype)
    return found
