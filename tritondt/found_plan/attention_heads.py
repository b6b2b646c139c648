"""Heads of attention that a plan cuts: what the code of a module knows of their number is set to this rank's."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from tritondt.interop.transformers.heads import Attention, MergedAttention
from tritondt.sharding.mesh import Mesh


class HeadCut(NamedTuple):
    """Attention by the pattern of its module's name: names in it of the projections to heads, and numbers of these."""

    pattern: str
    projections: tuple[str, ...]
    num_heads: int
    num_key_heads: int
    head_dim: int


def adapt_heads(model: nn.Module, heads: Sequence[HeadCut], mesh: Mesh) -> None:
    """Sets attributes such as `num_key_value_groups`, where modules have them, to numbers of this rank's heads."""
    for cut in heads:
        for name in [name for name, _ in model.named_modules() if matches(name, cut.pattern)]:
            module: Any = model.get_submodule(name)
            if len(cut.projections) == 3:
                queries, keys, values = (module.get_submodule(each) for each in cut.projections)
                Attention(name, module, queries, keys, values, cut.num_heads, cut.num_key_heads).adapt(mesh)
            elif {"num_heads", "split_size"} <= vars(module).keys():
                MergedAttention(name, module, {}, cut.num_heads, cut.head_dim).adapt(mesh)


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted name fits a pattern, in which a star stands for one part.

    >>> matches("blocks.1.mlp", "blocks.*.mlp"), matches("blocks.1.mlp.up", "blocks.*.mlp")
    (True, False)
    """
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(it in (part, "*") for it, part in zip(wanted, parts, strict=True))
