"""Operators `tritondt::redistribute` and `tritondt::random_words`, which torch.compile keeps in a graph as they are,
and `tritondt::from_local`, which it meets in place of the code of `DTensor.from_local`.

The specs travel as text, so that a graph that another process has cached means the same there; where a graph leaves
lengths open, the global shape travels apart. Files below call the operators by name (`torch.ops.tritondt`) for tensors
without memory.

Every rank has a graph of its own, of local operators: what one rank has no use for, or finds twice, another may need.
So both operators count as having effects, in order: torch drops no call, keeps the calls of a graph in their order, and
leaves those of forward in forward and those of backward in backward, whatever their arguments depend on. Nor is a call
merged with another: `call` is the number of the call, which no other has.
"""

from collections.abc import Callable, Sequence

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from tritondt.ops.random.generator import words_of
from tritondt.redistribution.run import redistribute_local
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Placement, Replicate, parse_placements, placements_text
from tritondt.sharding.spec_values import spec_from_text

_library = torch.library.Library("tritondt", "DEF")
_library.define(
    "redistribute(Tensor local, str source, str target, ScalarType? wire_dtype=None, SymInt[]? shape=None, int call=0) "
    "-> Tensor"
)
_library.define(
    "random_words(str spec, Device device, int num_words, SymInt[]? shape=None, int call=0) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def _redistribute(
    local: torch.Tensor,
    source: str,
    target: str,
    wire_dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
    call: int = 0,
) -> torch.Tensor:
    return redistribute_local(local, spec_from_text(source, shape), spec_from_text(target, shape), wire_dtype)


def _redistribute_meta(
    local: torch.Tensor,
    source: str,
    target: str,
    wire_dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
    call: int = 0,
) -> torch.Tensor:
    return local.new_empty(spec_from_text(target, shape).local_shape)


def _random_words(
    spec: str, device: torch.device, num_words: int, shape: Sequence[int] | None = None, call: int = 0
) -> torch.Tensor:
    return torch.stack(words_of(spec_from_text(spec, shape), device, None, num_words))


def _random_words_meta(
    spec: str, device: torch.device, num_words: int, shape: Sequence[int] | None = None, call: int = 0
) -> torch.Tensor:
    local_shape = spec_from_text(spec, shape).local_shape
    return torch.empty((num_words, *local_shape), dtype=torch.int64, device=device)


_library.define(
    "from_local(Tensor local, int[] identity, int[] mesh_shape, str[]? names, int[] ranks, str device_type, "
    "str placements, SymInt[]? shape, SymInt[]? stride, str? grad_placements, int[]? order) -> Tensor"
)


def from_local_in_graph(
    local: torch.Tensor,
    mesh: Mesh,
    placements: Sequence[Placement] | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Sequence[Placement] | None,
    order: Sequence[int | str] | None,
) -> torch.Tensor:
    """`from_local` as one operator, of plain values: torch.compile would trace what it calls, down to locks.

    The identity of the mesh's world is one of them, by which torch.compile tells worlds and thread ranks apart.
    """
    given = [Replicate()] * len(mesh.shape) if placements is None else placements
    gradient = None if grad_placements is None else placements_text(grad_placements)
    axes = None if order is None else [mesh.axis(name) for name in order]
    found: torch.Tensor = torch.ops.tritondt.from_local(
        *(local, [mesh.identity.generation, mesh.identity.rank], mesh.shape, mesh.names, mesh.ranks, mesh.device_type),
        *(placements_text(given), shape, stride, gradient, axes),
    )
    return found


def register_from_local(run: Callable[..., torch.Tensor]) -> None:
    """Makes `run`, which takes what from_local takes, the operator; autograd records what it does."""

    def from_local(
        local: torch.Tensor,
        identity: Sequence[int],
        mesh_shape: Sequence[int],
        names: Sequence[str] | None,
        ranks: Sequence[int],
        device_type: str,
        placements: str,
        shape: Sequence[int] | None,
        stride: Sequence[int] | None,
        grad_placements: str | None,
        order: Sequence[int] | None,
    ) -> torch.Tensor:
        mesh = Mesh(mesh_shape, names, ranks=ranks, device_type=device_type)
        gradient = None if grad_placements is None else parse_placements(grad_placements)
        given = {"shape": shape, "stride": stride, "grad_placements": gradient, "order": order}
        return run(local, mesh, parse_placements(placements), **given)

    _library.impl("from_local", from_local, "CompositeImplicitAutograd")


_library.impl("redistribute", _redistribute, "CompositeExplicitAutograd")
_library.impl("random_words", _random_words, "CompositeExplicitAutograd")
# As a fake it would cost the import 23 ms: torch looks for the module that registers.
_library.impl("redistribute", _redistribute_meta, "Meta")
torch.library.register_fake("tritondt::random_words", _random_words_meta)
for _op in (torch.ops.tritondt.redistribute.default, torch.ops.tritondt.random_words.default):
    _register_effectful_op(_op, _EffectType.ORDERED)
    # In graphs that are not made functional, as those of make_fx, effects do not count, and this does.
    torch.fx.node.has_side_effect(_op)
