"""Candidates of a plan: styles that may lay a region, a linear layer or a table out over the tensor axis."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from tritondt.found_plan.attention_heads import HeadCut
from tritondt.found_plan.regions import FeatureUnits, Region, is_linear, is_transposed, num_features
from tritondt.found_plan.style_choice import StyleChoice, style
from tritondt.interop.transformers.experts import feature_styles
from tritondt.parallel.ties import ties_of


class Ends(NamedTuple):
    """The first and the last of the repeated blocks like `block`, and the styles of the two, `entering` and `leaving`.

    Between them activations of `shape` are cut along `dim`.
    """

    block: str
    entering: StyleChoice
    leaving: StyleChoice
    shape: tuple[int, ...]
    dim: int


class Candidate(NamedTuple):
    """Styles of some modules of a model, by name, in place of whole parameters on every rank.

    `label` says in words what is cut. With `replicates_plain` what is between is distributed tensors, beside which
    plain ones count as alike on every rank. `ends` are those of repeated blocks that hand parts of activations on.
    """

    label: str
    styles: tuple[tuple[str, StyleChoice], ...]
    heads: tuple[HeadCut, ...] = ()
    replicates_plain: bool = False
    ends: Ends | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names of the modules."""
        return frozenset(name for name, _ in self.styles)


def joined_candidate(candidates: Sequence[Candidate]) -> Candidate | None:
    """The styles of several candidates in one; None for no candidate."""
    if not candidates:
        return None
    return Candidate(
        ", ".join(each.label for each in candidates),
        tuple(choice for each in candidates for choice in each.styles),
        tuple(cut for each in candidates for cut in each.heads),
        any(each.replicates_plain for each in candidates),
    )


class RegionForm(NamedTuple):
    """A way to cut a region: the units of its entries, and the dim of those inside on which heads lie."""

    region: Region
    units: tuple[FeatureUnits, ...]
    inside_dim: int


def region_candidate(model: nn.Module, form: RegionForm, num_ranks: int, *, as_distributed: bool) -> Candidate | None:
    """The candidate that cuts a region in so many parts; None where it has fewer heads, or units do not fit.

    With `as_distributed` distributed tensors flow inside, so that what moves there is seen.
    """
    region, units, _ = form
    widths = [num_features(model.get_submodule(name))[1] for name in region.entries]
    in_width = num_features(model.get_submodule(region.exit))[0]
    heads = [width // (it.unit * it.repeats) for width, it in zip(widths, units, strict=True)]
    most, fewest = max(heads), min(heads)
    if most < num_ranks or in_width % most or set(heads) - {most, fewest} or most % fewest:
        return None
    if fewest == most:
        styles = _even_heads(model, form, most, as_distributed=as_distributed)
    elif fewest == 1 or any(it.repeats > 1 for it in units) or (as_distributed and fewest < num_ranks):
        return None
    else:
        styles = _grouped_heads(model, form, heads, as_distributed=as_distributed)
    inside = _inside_style(form, as_distributed=as_distributed)
    styles |= dict.fromkeys(region.inside, inside)
    if region.shared_from:
        # As one distributed tensor: the gradients of all entries are added before they are summed over the ranks.
        styles[region.shared_from] = style("ReplicateParallel", use_local_output=False)
    label = f"cut {most} heads" if max(it.unit for it in units) > 1 else f"cut {most} features"
    if fewest != most:
        label += f" of {fewest} key heads"
    # Distributed tensors tell the code of a module the shapes of all heads.
    known = () if as_distributed else _head_cuts(model, form, heads)
    return Candidate(label, tuple(styles.items()), known, as_distributed)


def _inside_style(form: RegionForm, *, as_distributed: bool) -> StyleChoice:
    if as_distributed:
        return style("ReplicateParallel", input_layouts=f"S{form.inside_dim}", use_local_output=False)
    # The terms of gradients are of whatever part a rank has; the dim is one that every input has.
    return style("ReplicateParallel", input_layouts="S0")


def _even_heads(model: nn.Module, form: RegionForm, num_heads: int, *, as_distributed: bool) -> dict[str, StyleChoice]:
    local = False if as_distributed else None
    found = {}
    for name, it in zip(form.region.entries, form.units, strict=True):
        transposed = is_transposed(model.get_submodule(name)) or None
        found[name] = _plain_options(
            "ColwiseParallel", it.unit, it.repeats, balanced=True, transposed=transposed, use_local_output=local
        )
    exit_module = model.get_submodule(form.region.exit)
    unit, transposed = num_features(exit_module)[0] // num_heads, is_transposed(exit_module) or None
    found[form.region.exit] = _plain_options("RowwiseParallel", unit, 1, balanced=True, transposed=transposed)
    return found


def _grouped_heads(
    model: nn.Module, form: RegionForm, heads: Sequence[int], *, as_distributed: bool
) -> dict[str, StyleChoice]:
    """Styles of queries that share key heads."""
    groups, found = min(heads), {}
    local = False if as_distributed else None
    for name, it, number in zip(form.region.entries, form.units, heads, strict=True):
        if number == groups and not as_distributed:
            found[name] = style("KeyValueParallel", unit=it.unit)
        else:
            found[name] = style("ColwiseParallel", unit=it.unit, groups=groups, use_local_output=local)
    unit = num_features(model.get_submodule(form.region.exit))[0] // max(heads)
    found[form.region.exit] = style("RowwiseParallel", unit=unit, groups=groups)
    return found


def _plain_options(kind: str, unit: int, repeats: int, **options: bool | None) -> StyleChoice:
    return style(kind, unit=unit, repeats=repeats, **options)


def _head_cuts(model: nn.Module, form: RegionForm, heads: Sequence[int]) -> tuple[HeadCut, ...]:
    """The attention whose code may know its number of heads; () for a region of features."""
    if max(it.unit for it in form.units) == 1:
        return ()
    parents = {name.rpartition(".")[0] for name in form.region.entries}
    if len(parents) != 1 or not isinstance(model.get_submodule(form.region.entries[0]), nn.Module):
        return ()
    (parent,) = parents
    names = tuple(name.rpartition(".")[2] for name in form.region.entries)
    if len(names) == 3 and heads[1] != heads[2]:
        return ()
    return (HeadCut(parent, names, heads[0], heads[-1], form.units[0].unit),) if len(names) in (1, 3) else ()


def lone_candidates(model: nn.Module, names: Sequence[str], num_ranks: int) -> Iterator[Candidate]:
    """Candidates of linear layers and tables each by itself, and of tables that a linear layer shares."""
    modules = {name: model.get_submodule(name) for name in names}
    tied = {user.name.rpartition(".")[0] for users in ties_of(model) for user in users}
    for name, module in modules.items():
        if name in tied:
            continue
        features = feature_styles(module)
        if features is not None:
            yield Candidate("cut features of experts", ((name, style("ShardedExperts", features=features)),))
            if module._parameters["down_proj"].shape[0] >= num_ranks:  # type: ignore[union-attr]
                yield Candidate("whole experts", ((name, style("ShardedExperts")),))
        elif isinstance(module, nn.Embedding):
            if min(module.weight.shape) >= num_ranks and not _needs_rows(module):
                yield Candidate("cut rows", ((name, style("RowwiseParallel", balanced=True)),))
                gathered = style("ColwiseParallel", balanced=True, output_layouts="R")
                yield Candidate("cut columns", ((name, gathered),))
        elif is_linear(module) and min(num_features(module)) >= num_ranks:
            transposed = is_transposed(module) or None
            columns = style("ColwiseParallel", balanced=True, transposed=transposed, output_layouts="R")
            rows = style("RowwiseParallel", balanced=True, transposed=transposed, input_layouts="R")
            yield Candidate("cut columns", ((name, columns),))
            yield Candidate("cut rows", ((name, rows),))
    yield from _tied(model, modules, num_ranks)


def loss_candidates(model: nn.Module, names: Sequence[str], num_ranks: int) -> Iterator[Candidate]:
    """Candidates of a model that gives its loss: a linear layer by columns, whose scores the loss takes in parts.

    Plain targets beside these count as alike on every rank, as under loss_parallel, and the model gives a plain loss.
    """
    plain = style("PrepareModuleOutput", output_layouts="R", desired_output_layouts="R")
    tied = {user.name.rpartition(".")[0] for users in ties_of(model) for user in users}
    for name in names:
        module = model.get_submodule(name)
        if name not in tied and is_linear(module) and min(num_features(module)) >= num_ranks:
            transposed = is_transposed(module) or None
            columns = style("ColwiseParallel", balanced=True, transposed=transposed, use_local_output=False)
            yield Candidate("cut columns, and the loss", ((name, columns), ("", plain)), replicates_plain=True)


def _tied(model: nn.Module, modules: Mapping[str, nn.Module], num_ranks: int) -> Iterator[Candidate]:
    for users in ties_of(model):
        found = {user.name.rpartition(".")[0]: user.module for user in users}
        kinds = all(isinstance(module, nn.Embedding) or type(module) is nn.Linear for module in found.values())
        if not kinds or not set(found) <= modules.keys() or any(user.key != "weight" for user in users):
            continue
        if any(isinstance(module, nn.Embedding) and _needs_rows(module) for module in found.values()):
            continue
        if users[0].module._parameters["weight"].shape[0] < num_ranks:  # type: ignore[union-attr]
            continue
        rows = style("RowwiseParallel", balanced=True)
        columns = style("ColwiseParallel", balanced=True, output_layouts="R")
        styles = {name: rows if isinstance(module, nn.Embedding) else columns for name, module in found.items()}
        yield Candidate("cut rows of a shared table", tuple(styles.items()))


def _needs_rows(module: nn.Embedding) -> bool:
    """Whether a table has options that need whole rows, which the styles refuse to cut."""
    return module.max_norm is not None or module.scale_grad_by_freq or module.sparse
