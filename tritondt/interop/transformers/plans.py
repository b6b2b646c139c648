"""plan_of: the styles that the names of a tp_plan ask for, module by module."""

from collections.abc import Callable, Mapping

from torch import nn

from tritondt.errors import ParallelizeError
from tritondt.interop.transformers.entries import Entry, check_names, entries_of, names_of
from tritondt.interop.transformers.heads import Attention, attentions_of
from tritondt.parallel import ColwiseParallel, ParallelStyle, ReplicateParallel, RowwiseParallel
from tritondt.parallel.ties import ties_of
from tritondt.parallel.weights import WeightStyle
from tritondt.sharding.placement import Replicate, Shard

_MAKERS: dict[str, Callable[[], WeightStyle]] = {
    "colwise": lambda: ColwiseParallel(balanced=True),
    "rowwise": lambda: RowwiseParallel(balanced=True),
    "colwise_gather_output": lambda: ColwiseParallel(balanced=True, output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(balanced=True, input_layouts=Replicate()),
    "packed_colwise": lambda: ColwiseParallel(balanced=True, repeats=2),
    # The terms of gradients are of whatever part a rank has; the dim is one that every input has.
    "replicated_with_grad_allreduce": lambda: ReplicateParallel(input_layouts=Shard(0)),
    "replicate": ReplicateParallel,
    "embedding_rowwise": lambda: RowwiseParallel(balanced=True),
    "embedding_colwise": lambda: ColwiseParallel(balanced=True, output_layouts=Replicate()),
}
_MAKERS |= {
    "colwise_rep": _MAKERS["colwise_gather_output"],
    "rowwise_rep": _MAKERS["rowwise_split_input"],
    "replicated": _MAKERS["replicate"],
}


def plan_of(model: nn.Module, tp_plan: Mapping[str, str] | None = None) -> dict[str, ParallelStyle]:
    """Styles of all modules of a model of transformers, by dotted name, as `parallelize_module` takes them.

    They follow the names of `tp_plan`, or of the model's own (`model._tp_plan`, `config.base_model_tp_plan`). Heads of
    attention are cut whole, other features evenly; a module that is tied to one of the plan is cut alike; everything
    else that has parameters and no modules inside is replicated. Not collective, and nothing is changed. Raises
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
    entries = checked_entries(model, tp_plan)
    return styles_of(model, entries, attentions_of(model, entries))


def checked_entries(model: nn.Module, tp_plan: Mapping[str, str] | None) -> list[Entry]:
    """Entries of the plan, all of whose names are known."""
    names = names_of(model) if tp_plan is None else dict(tp_plan)
    check_names(names)
    return entries_of(model, names, each_matches=tp_plan is not None)


def styles_of(model: nn.Module, entries: list[Entry], attentions: Mapping[str, Attention]) -> dict[str, ParallelStyle]:
    """Styles by dotted name: those of heads, of the other entries, of ties, and of everything else."""
    of_heads = {
        id(projection): style for attention in attentions.values() for projection, style in attention.input_styles()
    }
    found: dict[str, ParallelStyle] = {}
    for entry in entries:
        attention = _around(entry.name, attentions)
        if id(entry.module) in of_heads:
            found[entry.name] = of_heads[id(entry.module)]
        elif entry.style == "rowwise" and attention is not None and isinstance(entry.module, nn.Linear):
            found[entry.name] = attention.output_style(entry.module)
        else:
            found[entry.name] = _MAKERS[entry.style]()
    found |= _tied_styles(model, found)
    return found | _replicated_rest(model, found)


def _around(name: str, attentions: Mapping[str, Attention]) -> Attention | None:
    return attentions.get(name.rpartition(".")[0])


def _tied_styles(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Styles of modules without one that share a table with one that the plan cuts by its vocabulary."""
    found: dict[str, ParallelStyle] = {}
    for users in ties_of(model):
        names = {user.name.rpartition(".")[0]: user.module for user in users}
        planned = [name for name in names if name in styles]
        if not planned or isinstance(styles[planned[0]], ReplicateParallel):
            continue
        for name, module in names.items():
            if name not in styles:
                found[name] = _MAKERS[_tied_name(name, module, planned[0])]()
    return found


def _tied_name(name: str, module: nn.Module, planned: str) -> str:
    if isinstance(module, nn.Embedding):
        return "embedding_rowwise"
    if isinstance(module, nn.Linear):
        return "colwise_gather_output"
    raise ParallelizeError(
        f"{name} ({type(module).__name__}) shares a parameter with {planned}, which the tp_plan cuts; allowed are "
        "nn.Embedding and nn.Linear that share a table, or a tp_plan that names both"
    )


def _replicated_rest(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Styles of the innermost modules that have parameters and no style."""
    return {
        name: ReplicateParallel()
        for name, module in model.named_modules()
        if module._parameters and not module._modules and name not in styles
    }
