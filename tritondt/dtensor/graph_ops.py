"""Operators `tritondt::redistribute` and `tritondt::random_words`, which torch.compile keeps in a graph as they are.

The specs travel as text, so that a graph that another process has cached means the same there. Files below call the
operators by name (`torch.ops.tritondt`) for tensors without memory.

Every rank has a graph of its own, of local operators: what one rank has no use for, or finds twice, another may need.
So both operators count as having effects, in order: torch drops no call, keeps the calls of a graph in their order, and
leaves those of forward in forward and those of backward in backward, whatever their arguments depend on. Nor is a call
merged with another: `call` is the number of the call, which no other has.
"""

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from tritondt.ops.random.generator import words_of
from tritondt.redistribution.run import redistribute_local
from tritondt.sharding.spec_values import spec_from_text

_library = torch.library.Library("tritondt", "DEF")
_library.define("redistribute(Tensor local, str source, str target, ScalarType? wire_dtype=None, int call=0) -> Tensor")
_library.define(
    "random_words(str spec, Device device, int num_words, int call=0) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def _redistribute(
    local: torch.Tensor, source: str, target: str, wire_dtype: torch.dtype | None = None, call: int = 0
) -> torch.Tensor:
    return redistribute_local(local, spec_from_text(source), spec_from_text(target), wire_dtype)


def _redistribute_meta(
    local: torch.Tensor, source: str, target: str, wire_dtype: torch.dtype | None = None, call: int = 0
) -> torch.Tensor:
    return local.new_empty(spec_from_text(target).local_shape)


def _random_words(spec: str, device: torch.device, num_words: int, call: int = 0) -> torch.Tensor:
    return torch.stack(words_of(spec_from_text(spec), device, None, num_words))


def _random_words_meta(spec: str, device: torch.device, num_words: int, call: int = 0) -> torch.Tensor:
    return torch.empty((num_words, *spec_from_text(spec).local_shape), dtype=torch.int64, device=device)


_library.impl("redistribute", _redistribute, "CompositeExplicitAutograd")
_library.impl("random_words", _random_words, "CompositeExplicitAutograd")
# As a fake it would cost the import 23 ms: torch looks for the module that registers.
_library.impl("redistribute", _redistribute_meta, "Meta")
torch.library.register_fake("tritondt::random_words", _random_words_meta)
for _op in (torch.ops.tritondt.redistribute.default, torch.ops.tritondt.random_words.default):
    _register_effectful_op(_op, _EffectType.ORDERED)
    # In graphs that are not made functional, as those of make_fx, effects do not count, and this does.
    torch.fx.node.has_side_effect(_op)
