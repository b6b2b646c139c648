"""Entries of a tp_plan: the modules and parameters of a model that its patterns name, and the names of their styles."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from tritondt.errors import ParallelizeError
from tritondt.interop.transformers.adapters import layer_of
from tritondt.interop.transformers.plans_by_type import plan_for_type

# What a name of transformers asks for, in words of the table in docs/transformers.md.
KNOWN = (
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "colwise_rep",
    "rowwise_split_input",
    "rowwise_rep",
    "packed_colwise",
    "embedding_rowwise",
    "embedding_colwise",
    "replicated_with_grad_allreduce",
    "replicate",
    "replicated",
    "moe_tp_experts",
    "ep_dispatch_experts",
    "grouped_gemm",
)
# Of a layer of experts itself, whose parameters have names of their own.
EXPERTS = ("moe_tp_experts", "ep_dispatch_experts")


class Entry(NamedTuple):
    """A module that a plan names, its dotted name, and the name of the style that it asks for.

    With a `key` that is the style of the module's parameter of this name alone. `wrapper` has the module as its base
    layer beside adapters of peft; then the name is that of the wrapper.
    """

    name: str
    module: nn.Module
    style: str
    key: str = ""
    wrapper: nn.Module | None = None

    @property
    def outer(self) -> nn.Module:
        """The module that the model calls: the one with the adapters, if any."""
        return self.module if self.wrapper is None else self.wrapper

    @property
    def own_name(self) -> str:
        """The dotted name of the module itself."""
        return self.name if self.wrapper is None else f"{self.name}.base_layer"


def is_transposed(module: nn.Module) -> bool:
    """Whether a module multiplies by a weight of (input, output) features, as Conv1D of transformers does."""
    return type(module).__name__ == "Conv1D" and not isinstance(module, nn.Linear)


def names_of(model: nn.Module) -> dict[str, str]:
    """Patterns and names of styles of a model of transformers, for its base model and its head.

    A plan for its type of model stands in where transformers has none. Raises ParallelizeError for a model without one.
    """
    config: Any = getattr(model, "config", None)
    found: Any = getattr(model, "_tp_plan", None) or getattr(config, "base_model_tp_plan", None)
    if not found:
        found = plan_for_type(getattr(config, "model_type", ""), _base_prefix(model))
    if not found:
        raise ParallelizeError(
            f"{type(model).__name__} has no tp_plan, neither its own nor one of its configuration; give one: "
            'parallelize(model, mesh, {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"})'
        )
    return dict(found)


def _base_prefix(model: nn.Module) -> str:
    """Prefix of the names in the base model: its own name and a dot, or nothing where the model is one itself."""
    name = getattr(model, "base_model_prefix", "")
    return f"{name}." if name and name in model._modules else ""


def check_names(names: Mapping[str, Any]) -> None:
    """Raises ParallelizeError for names of styles that are not known, with all of them."""
    unknown = {pattern: style for pattern, style in names.items() if style not in KNOWN}
    if unknown:
        raise ParallelizeError(
            f"the tp_plan has {', '.join(f'{style!r} for {pattern!r}' for pattern, style in unknown.items())}; allowed "
            f"are {', '.join(KNOWN)}"
        )


def entries_of(model: nn.Module, names: Mapping[str, str], *, each_matches: bool) -> list[Entry]:
    """Modules and parameters that the patterns name; a star stands for numbers and any other part of a name.

    Plans of configurations name modules that some models of the class have and others have not; with `each_matches`
    such a pattern is refused.
    """
    modules = dict(model.named_modules())
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found: dict[str, Entry] = {}
    for pattern, style in names.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        matches = [name for name in (*modules, *parameters) if expression.fullmatch(name)]
        if each_matches and not matches:
            raise ParallelizeError(_nothing_text(model, pattern, [*modules, *parameters]))
        found.update({name: _entry(modules, name, style) for name in matches})
    if not found:
        raise ParallelizeError(
            f"no pattern of the tp_plan matches a module or a parameter of {type(model).__name__}: {', '.join(names)}"
        )
    return list(found.values())


def _entry(modules: Mapping[str, nn.Module], name: str, style: str) -> Entry:
    if name in modules:
        module, wrapper = layer_of(name, modules[name])
        return Entry(name, module, style, wrapper=wrapper)
    owner, _, key = name.rpartition(".")
    return Entry(owner, modules[owner], style, key)


def _nothing_text(model: nn.Module, pattern: str, known: Iterable[str]) -> str:
    names = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in known if name)
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.6)
    hint = f"; near it come {', '.join(map(repr, near))}" if near else ""
    return f"the tp_plan's {pattern!r} matches no module and no parameter of {type(model).__name__}{hint}"
