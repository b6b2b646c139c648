"""Redistribution, and random bits, as operators of torch's, for graphs: torch.compile runs them as they are.

The specs travel as text, so that a graph that another process has cached means the same there.
"""

import json
from functools import lru_cache

import torch

from tritondt import identity
from tritondt.dtensor.serialization import spec_from, spec_values
from tritondt.identity import Identity
from tritondt.ops.random.generator import words_of
from tritondt.redistribution.run import redistribute_local
from tritondt.sharding.spec import DTensorSpec

_library = torch.library.Library("tritondt", "DEF")
_library.define("redistribute(Tensor local, str source, str target, ScalarType? wire_dtype=None) -> Tensor")
_library.define(
    "random_words(str spec, Device device, int num_words) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)


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


def _draw(spec: str, device: torch.device, num_words: int) -> torch.Tensor:
    return torch.stack(words_of(_spec(spec), device, None, num_words))


def _drawn_shape(spec: str, device: torch.device, num_words: int) -> torch.Tensor:
    return torch.empty((num_words, *_spec(spec).local_shape), dtype=torch.int64, device=device)


_library.impl("redistribute", _run, "CompositeExplicitAutograd")
_library.impl("random_words", _draw, "CompositeExplicitAutograd")
# As a fake it would cost the import 23 ms: torch looks for the module that registers.
_library.impl("redistribute", _shape, "Meta")
torch.library.register_fake("tritondt::random_words", _drawn_shape)


def redistribution_in_graph(
    local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, wire_dtype: torch.dtype | None
) -> torch.Tensor:
    """What stands in a graph for a redistribution."""
    found: torch.Tensor = torch.ops.tritondt.redistribute(local, _text(source), _text(target), wire_dtype)
    return found


def random_words_in_graph(spec: DTensorSpec, device: torch.device, num_words: int) -> torch.Tensor:
    """What stands in a graph for random bits: `num_words` for each element of this rank's part."""
    found: torch.Tensor = torch.ops.tritondt.random_words(_text(spec), device, num_words)
    return found
