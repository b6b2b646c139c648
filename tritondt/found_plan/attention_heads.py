"""Heads of attention that a plan cuts: what the code of a module knows of their number is set to this rank's."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tritondt.interop.transformers.heads import HEAD_ATTRIBUTES, Attention, MergedAttention
from tritondt.sharding.mesh import Mesh, canonical_mesh


class HeadCut(NamedTuple):
    """Attention by the pattern of its module's name: names in it of the projections to heads, and numbers of these."""

    pattern: str
    projections: tuple[str, ...]
    num_heads: int
    num_key_heads: int
    head_dim: int


def knows_heads(module: nn.Module, cut: HeadCut) -> bool:
    """Whether a module has attributes with the number of its heads."""
    names = vars(module).keys()
    return bool(names & HEAD_ATTRIBUTES) if len(cut.projections) == 3 else {"num_heads", "split_size"} <= names


def adapt_heads(model: nn.Module, heads: Sequence[HeadCut], mesh: DeviceMesh | Mesh) -> None:
    """Sets attributes such as `num_key_value_groups`, where modules have them, to numbers of this rank's heads.

    `mesh` is the one over which `parallelize_module` has laid the model out; nothing is sent. Raises ParallelizeError
    for a mesh on which a rank has no head.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def groups_of(rank):
    ...     attention = nn.ModuleDict({"q": nn.Linear(24, 24), "k": nn.Linear(24, 8), "v": nn.Linear(24, 8)})
    ...     attention.num_key_value_groups = 3
    ...     cut = HeadCut("attention", ("q", "k", "v"), num_heads=6, num_key_heads=2, head_dim=4)
    ...     adapt_heads(nn.ModuleDict({"attention": attention}), [cut], Mesh((4,)))
    ...     return attention.num_key_value_groups
    >>> run_ranks(4, groups_of)
    [2, 1, 2, 1]
    """
    over = canonical_mesh(mesh)
    for cut in heads:
        for name in [name for name, _ in model.named_modules() if matches(name, cut.pattern)]:
            module: Any = model.get_submodule(name)
            if not knows_heads(module, cut):
                continue
            if len(cut.projections) == 3:
                queries, keys, values = (module.get_submodule(each) for each in cut.projections)
                Attention(name, module, queries, keys, values, cut.num_heads, cut.num_key_heads).adapt(over)
            else:
                MergedAttention(name, module, {}, cut.num_heads, cut.head_dim).adapt(over)


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted name fits a pattern, in which a star stands for one part.

    >>> matches("blocks.1.mlp", "blocks.*.mlp"), matches("blocks.1.mlp.up", "blocks.*.mlp")
    (True, False)
    """
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(it in (part, "*") for it, part in zip(wanted, parts, strict=True))
