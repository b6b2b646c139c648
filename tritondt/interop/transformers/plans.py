"""plan_of: the styles that the names of a tp_plan ask for, module by module."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from tritondt.errors import ParallelizeError
from tritondt.errors.arguments import checked
from tritondt.interop.transformers.adapters import adapter_styles, base_of
from tritondt.interop.transformers.entries import Entry, check_names, entries_of, is_transposed, names_of
from tritondt.interop.transformers.experts import experts_of
from tritondt.interop.transformers.heads import AnyAttention, attention_of, attentions_of
from tritondt.interop.transformers.held import HeldAlike
from tritondt.parallel import ColwiseParallel, ParallelStyle, ReplicateParallel, RowwiseParallel
from tritondt.parallel.ties import User, ties_of
from tritondt.parallel.weights import WeightStyle
from tritondt.sharding.placement import Replicate, Shard

_STYLES: dict[str, tuple[type[WeightStyle], dict[str, Any]]] = {
    "colwise": (ColwiseParallel, {"balanced": True}),
    "rowwise": (RowwiseParallel, {"balanced": True}),
    "colwise_gather_output": (ColwiseParallel, {"balanced": True, "output_layouts": Replicate()}),
    "rowwise_split_input": (RowwiseParallel, {"balanced": True, "input_layouts": Replicate()}),
    "packed_colwise": (ColwiseParallel, {"balanced": True, "repeats": 2}),
    # The terms of gradients are of whatever part a rank has; the dim is one that every input has.
    "replicated_with_grad_allreduce": (ReplicateParallel, {"input_layouts": Shard(0)}),
    "replicate": (ReplicateParallel, {}),
    "embedding_rowwise": (RowwiseParallel, {"balanced": True}),
    "embedding_colwise": (ColwiseParallel, {"balanced": True, "output_layouts": Replicate()}),
}
_STYLES |= {
    "colwise_rep": _STYLES["colwise_gather_output"],
    "rowwise_rep": _STYLES["rowwise_split_input"],
    "replicated": _STYLES["replicate"],
}


def _made(name: str, module: nn.Module) -> WeightStyle:
    kind, options = _STYLES[name]
    if is_transposed(module) and kind is not ReplicateParallel:
        options = {**options, "transposed": True}
    return kind(**options)


@checked
def plan_of(model: nn.Module, tp_plan: Mapping[str, str] | None = None) -> dict[str, ParallelStyle]:
    """Styles of all modules of a model of transformers, by dotted name, as `parallelize_module` takes them.

    They follow the names of `tp_plan`, or of the model's own (`model._tp_plan`, `config.base_model_tp_plan`). Heads of
    attention are cut whole, other features evenly; a module that is tied to one of the plan is cut alike; everything
    else that has parameters is replicated. Of LoRA's factors in a model of peft that which is as wide as what the plan
    cuts is cut alike; names are those in the model of transformers. Not collective, and nothing is changed. Raises
    ParallelizeError for a model without a plan, for a name of a style that is not known, for a pattern of `tp_plan`
    that matches nothing, and for attention whose projections are not apart.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up, self.down, self.norm = nn.Linear(4, 6), nn.Linear(6, 4), nn.LayerNorm(4)
    >>> plan = plan_of(Block(), {"up": "colwise", "down": "rowwise"})
    >>> {name: type(style).__name__ for name, style in plan.items()}
    {'up': 'ColwiseParallel', 'down': 'RowwiseParallel', 'norm': 'ReplicateParallel'}
    """
    base = base_of(model)
    entries = checked_entries(base, tp_plan)
    return styles_of(base, entries, attentions_of(base, entries))


def checked_entries(model: nn.Module, tp_plan: Mapping[str, str] | None) -> list[Entry]:
    """Entries of the plan, all of whose names are known."""
    names = names_of(model) if tp_plan is None else dict(tp_plan)
    check_names(names)
    return entries_of(model, names, each_matches=tp_plan is not None)


def styles_of(
    model: nn.Module, entries: list[Entry], attentions: Mapping[str, AnyAttention]
) -> dict[str, ParallelStyle]:
    """Styles by dotted name: those of heads, of the other entries, of ties, and of everything else."""
    of_heads = {
        id(projection): style for attention in attentions.values() for projection, style in attention.input_styles()
    }
    found: dict[str, ParallelStyle] = {}
    experts, others = experts_of(entries)
    for entry in others:
        attention = attention_of(entry.name, attentions) if entry.style == "rowwise" else None
        if id(entry.module) in of_heads:
            style = of_heads[id(entry.module)]
        elif attention is not None and not isinstance(entry.module, nn.Embedding):
            style = attention.output_style(entry.module)
        else:
            style = _made(entry.style, entry.module)
        found[entry.own_name] = style
        if entry.wrapper is not None and not isinstance(style, ReplicateParallel):
            found |= adapter_styles(entry.name, entry.wrapper, style)
    found |= experts
    found |= _tied_styles(model, found)
    return found | _replicated_rest(model, found)


def _tied_styles(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Styles of modules without one that share a parameter with one that the plan cuts."""
    found: dict[str, ParallelStyle] = {}
    for users in ties_of(model):
        names = {user.name.rpartition(".")[0]: user for user in users}
        planned = [name for name in names if name in styles]
        if not planned or isinstance(styles[planned[0]], ReplicateParallel):
            continue
        for name, user in names.items():
            if name not in styles:
                found[name] = _tied_style(name, user, names[planned[0]], planned[0], styles)
    return found


def _tied_style(name: str, user: User, cut: User, planned: str, styles: Mapping[str, ParallelStyle]) -> ParallelStyle:
    style = styles[planned]
    if isinstance(user.module, nn.Embedding):
        return _made("embedding_rowwise", user.module)
    if isinstance(user.module, nn.Linear):
        return _made("colwise_gather_output", user.module)
    if planned.startswith(f"{name}.") and isinstance(style, WeightStyle):
        return HeldAlike(user.key, cut.module, cut.key, style)
    raise ParallelizeError(
        f"{name} ({type(user.module).__name__}) shares a parameter with {planned}, which the tp_plan cuts; allowed are "
        "nn.Embedding and nn.Linear that share a table, or a tp_plan that names both"
    )


def _replicated_rest(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Styles of the modules that have parameters of their own and no style, those inside of others first."""
    names = [name for name, module in model.named_modules() if module._parameters and name not in styles]
    return {name: ReplicateParallel() for name in sorted(names, key=lambda name: -len(name.split(".")))}
