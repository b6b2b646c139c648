"""parallelize_module: finds the modules that a plan names, checks the whole plan, then applies it."""

import difflib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tritondt.errors import LayoutError, MeshError, ParallelizeError
from tritondt.errors.arguments import check_types, checked
from tritondt.parallel.forward_pass import APART, sum_together
from tritondt.parallel.local_run import run_of
from tritondt.parallel.plain_tensors import PlainTensors, check_plain_tensors, replicate_plain_tensors
from tritondt.parallel.prepare import PREPARING
from tritondt.parallel.style import ParallelStyle, check_own_weights
from tritondt.parallel.ties import User, check_applied, check_planned, ties_of
from tritondt.parallel.torch_styles import as_style
from tritondt.parallel.weights import WeightStyle
from tritondt.redistribution.agreement import agreed, check_agreed
from tritondt.redistribution.refusals import refusing_comparison
from tritondt.sharding.mesh import Mesh, canonical_mesh, mesh_or_current
from tritondt.sharding.placement import Placement


class Assignment(NamedTuple):
    """A module of the tree, its dotted name, and the style that the plan gives it."""

    name: str
    module: nn.Module
    style: ParallelStyle


@checked
def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | Mesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
    plain_tensors: PlainTensors = "refused",
) -> nn.Module:
    """Lays a module out over a mesh of one axis, in place, as `parallelize_plan` names its styles, and returns it.

    The plan is a style for the module itself, or a dict of styles by dotted name. Every part of a name may hold fnmatch
    wildcards ("layers.*.attention.w[qkv]"; "" is the module itself). torch's styles become ours. Parameters take the
    values of rank `src_data_rank` of the mesh, or every rank's own with None. With plain_tensors="replicated", plain
    tensors beside distributed ones within the module's forward count as the same on every rank, as in
    `tritondt.implicit_replication()`. The mesh defaults to that of the `with mesh:` around the call. A collective call
    of all ranks of the mesh.

    Raises ParallelizeError, before anything is changed, for a name that matches no module, a module that its style
    cannot handle, tied parameters that would be cut differently, and a module that is parallelized already; ranks whose
    own plan fits raise MismatchError. Also raises ParallelizeError, after the change, where styles of your own have
    split tied parameters. MeshError for a mesh of several axes. Source:
    torch.distributed.tensor.parallel.parallelize_module.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.parallel.weights import ColwiseParallel, RowwiseParallel
    >>> def placements_on(rank):
    ...     model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    ...     parallelize_module(model, Mesh((2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ...     return [parameter.placements for parameter in model.parameters()]
    >>> run_ranks(2, placements_on)[0]
    [(S0,), (S0,), (S1,), (R,)]
    """
    check_plain_tensors(plain_tensors)
    mesh = mesh_or_current(device_mesh)
    _check_mesh(mesh)
    if parallelize_plan is None:
        warnings.warn("parallelize_module was given no parallelize_plan and changes nothing", stacklevel=3)
        return module

    def prepare() -> tuple[str, tuple[list[Assignment], list[list[User]]]]:
        _check_not_sharded(module)
        assignments, ties = _assignments(module, parallelize_plan), ties_of(module)
        _check_ties(ties, assignments, canonical_mesh(mesh))
        return "a plan that fits its module", (assignments, ties)

    # What follows sends weights, unless every rank has its own: the others would wait for one whose plan is wrong.
    sends = src_data_rank is not None and not _is_on_meta(module)
    assignments, ties = agreed(canonical_mesh(mesh), "parallelize_module", prepare) if sends else prepare()[1]
    has_own_styles = any(not type(style).__module__.startswith("tritondt.") for _, _, style in assignments)
    with refusing_comparison(canonical_mesh(mesh)) if sends and has_own_styles else nullcontext():
        for name, found, style in assignments:
            style.src_data_rank = src_data_rank
            with _named(name, found):
                made = style._apply(found, mesh)
            if (run := run_of(made)) is not None:
                run.name = name
            if made is not found and name:
                parent, _, child = name.rpartition(".")
                setattr(module.get_submodule(parent), child, made)
            elif made is not found:
                module = made
    if sends and has_own_styles:  # one may have raised on one rank
        check_agreed(canonical_mesh(mesh), "parallelize_module", "styles that are applied")
    check_applied(ties)
    sum_together(module)
    if plain_tensors == "replicated":
        replicate_plain_tensors(module)
    return module


def _is_on_meta(module: nn.Module) -> bool:
    return isinstance(module, nn.Module) and all(parameter.is_meta for parameter in module.parameters())


def _check_not_sharded(module: nn.Module) -> None:
    """Refuses what is no module, and one whose parameters are sharded over a data axis, which the tensor axis has to
    cut first.
    """
    check_types(parallelize_module, module=module)
    for name, found in module.named_modules():
        if APART in found.__dict__:
            raise ParallelizeError(
                f"{name or type(found).__name__} was sharded by fully_shard before parallelize_module; lay the module "
                "out first: parallelize_module(model, mesh['tp'], plan), then fully_shard(model, mesh=mesh['dp'])"
            )


@contextmanager
def _named(name: str, module: nn.Module) -> Iterator[None]:
    """Context in which errors of a style get the module's name in front."""
    try:
        yield
    except (ParallelizeError, LayoutError) as error:
        raise ParallelizeError(
            f"parallelize_module cannot lay out {name or 'the module'} ({type(module).__name__}): {error}"
        ) from error


def _check_mesh(mesh: DeviceMesh | Mesh) -> None:
    found = canonical_mesh(mesh)
    if found.ndim == 1:
        return
    names = found.names
    slices = ", ".join(f"mesh[{name!r}]" for name in names) if names else "one made by init_device_mesh with names"
    raise MeshError(f"parallelize_module takes a mesh of one axis, got {found}; give it one slice: {slices}")


def _assignments(root: nn.Module, plan: ParallelStyle | Mapping[str, ParallelStyle]) -> list[Assignment]:
    """Assignments of all modules that the plan names, in the plan's order."""
    if not isinstance(plan, Mapping):
        style = as_style(plan, f"a parallelize_plan is a ParallelStyle, or styles by module name; got {plan!r}")
        return [Assignment("", root, style)]
    found: list[Assignment] = []
    for pattern, given in plan.items():
        if not isinstance(pattern, str):
            raise ParallelizeError(f"the plan names a module by {pattern!r}; allowed is its dotted name, a str")
        style = as_style(given, f"the plan has {given!r} for {pattern!r}; allowed is a ParallelStyle")
        # A module that has two names is one module.
        modules = {id(module): Assignment(name, module, style) for name, module in _matches(root, pattern)}
        found += modules.values()
    return found


def _matches(root: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Modules whose dotted names match the pattern part by part."""
    found = [("", root)]
    for part in pattern.split(".") if pattern else ():
        deeper = [
            (f"{name}.{child}" if name else child, module)
            for name, parent in found
            for child, module in parent._modules.items()
            if module is not None and fnmatchcase(child, part)
        ]
        if not deeper:
            raise ParallelizeError(_nothing_text(root, pattern, part, found))
        found = deeper
    return found


def _nothing_text(root: nn.Module, pattern: str, part: str, reached: Sequence[tuple[str, nn.Module]]) -> str:
    """Error text for a pattern that matches nothing: where names and pattern diverge, and names that come near."""
    name, parent = reached[0]
    children = ", ".join(child for child, _ in parent.named_children()) or "no modules"
    # Layers differ by a number only: one stands for all.
    names = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name, _ in root.named_modules() if name)
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.6)
    hint = f"; near it come {', '.join(map(repr, near))}" if near else ""
    return (
        f"the plan's {pattern!r} matches no module of {type(root).__name__}: nothing in {name or 'it'} is called "
        f"{part!r}, it has {children}{hint}"
    )


def _check_ties(ties: Sequence[Sequence[User]], assignments: Sequence[Assignment], mesh: Mesh) -> None:
    """Refuses a parameter of two modules that would not be cut alike in both, as far as our styles say."""
    placements: dict[int, dict[str, Placement]] = {}
    unknown: set[int] = set()
    for name, module, style in assignments:
        if isinstance(style, WeightStyle):
            with _named(name, module):
                check_own_weights(module, style)
                placements[id(module)] = style.parameter_placements(module, mesh)
        elif not isinstance(style, PREPARING):
            # What a style of somebody else does with parameters is seen when it is applied.
            unknown.update(map(id, module.modules()))
    check_planned(ties, placements, unknown)
