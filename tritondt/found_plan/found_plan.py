"""FoundPlan: how a model is laid out over a mesh, what a step of it moves, computes and holds, and its application."""

import json
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tritondt.errors import ArgumentError, MeshError
from tritondt.errors.arguments import checked
from tritondt.found_plan.attention_heads import HeadCut, adapt_heads
from tritondt.found_plan.data_sharding import sharded_names
from tritondt.found_plan.given_results import GivenResults
from tritondt.found_plan.mesh_axes import MeshAxes, named_sizes
from tritondt.found_plan.predict import LaidOut
from tritondt.found_plan.recomputation import recompute, recomputing_code
from tritondt.found_plan.step_cost import Memory, PartCost, RecomputedCost, StepCost, explanation_text
from tritondt.found_plan.style_choice import StyleChoice
from tritondt.found_plan.traffic import Traffic
from tritondt.fsdp import fully_shard
from tritondt.fsdp.meshes import slice_of
from tritondt.parallel import parallelize_module
from tritondt.parallel.plain_tensors import PlainTensors
from tritondt.sharding.mesh import Mesh, canonical_mesh

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """A plan by `find_plan`: styles by name, modules that are sharded, and the predicted step of the rank `rank`.

    `code` is a program that lays the model out so, `explain()` a table, and `apply(model, mesh)` does it. `step` has
    the bytes, messages, FLOPs, seconds and memory of a step, `parts` those of the parts that are cut, and `recomputed`
    what blocks cost that compute their activations again. `is_exact` says whether the search looked at all choices.
    """

    mesh: MeshAxes
    laid_out: LaidOut
    rank: int
    step: StepCost
    parts: tuple[PartCost, ...]
    notes: tuple[str, ...]
    is_exact: bool
    recomputed: tuple[RecomputedCost, ...] = ()

    @property
    def code(self) -> str:
        """Lines of Python that lay `model` out over `mesh` by this plan, to be pasted and edited."""
        lines, laid_out = list[str](), self.laid_out
        over = f'mesh["{self.mesh.tensor}"]'
        if laid_out.styles:
            lines.append("plan = {")
            lines += [f"    {pattern!r}: {choice.code()}," for pattern, choice in laid_out.styles]
            lines.append("}")
            plain = ', plain_tensors="replicated"' if laid_out.replicates_plain else ""
            lines.append(f"parallelize_module(model, {over}, plan{plain})")
        if laid_out.heads:
            lines.append("heads = [")
            lines += [f"    HeadCut{tuple(cut)!r}," for cut in laid_out.heads]
            lines += ["]", f"adapt_heads(model, heads, {over})"]
        lines += recomputing_code(laid_out.recomputed)
        if self.mesh.data is not None:
            over_data = f"mesh[{', '.join(map(json.dumps, self.mesh.data_axes))}]"
            for pattern in laid_out.sharded:
                parent, _, last = pattern.rpartition(".")
                loop = last == "*"
                is_plain = all(part.isidentifier() for part in ("model", *parent.split(".")) if part)
                blocks = f"model.{parent}".rstrip(".") if is_plain else f"model.get_submodule({parent!r})"
                lines.append(f"for block in {blocks}:" if loop else f"block = model.get_submodule({pattern!r})")
                lines.append(f"{'    ' * loop}fully_shard(block, mesh={over_data})")
            lines.append(f"fully_shard(model, mesh={over_data})")
        return "\n".join([*self._imports("\n".join(lines)), *lines]) or "# the model stays as it is"

    def _imports(self, code: str) -> list[str]:
        """Lines that import the names of a program."""
        kinds = {(choice.package, choice.kind) for _, choice in self.laid_out.styles}
        experts = [kind for package, kind in kinds if package == "tritondt.interop.transformers"]
        styles = sorted(kind for package, kind in kinds if package == "tritondt.parallel")
        wanted = {
            "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": ["checkpoint_wrapper"]
            if self.laid_out.recomputed
            else [],
            "tritondt": [name for name in ("Replicate", "Shard") if f"{name}(" in code],
            "tritondt.found_plan": ["HeadCut", "adapt_heads"] if self.laid_out.heads else [],
            "tritondt.fsdp": ["fully_shard"] if self.mesh.data is not None else [],
            "tritondt.interop.transformers": experts,
            "tritondt.parallel": [*styles, "parallelize_module"] if kinds else [],
        }
        return [f"from {module} import {', '.join(names)}" for module, names in wanted.items() if names]

    @checked
    def apply(self, model: nn.Module, mesh: DeviceMesh | Mesh, *, src_data_rank: int | None = 0) -> nn.Module:
        """The model, laid out in place over `mesh`, whose axes are those that the plan was found for.

        Parameters take the values of rank `src_data_rank` of the tensor axis, or every rank's own with None. A
        collective call of all ranks of the mesh. Raises MeshError for a mesh of other axes, and what parallelize_module
        and fully_shard raise for a model that the plan does not fit.
        """
        names, sizes = named_sizes(mesh)
        if (names, sizes) != (self.mesh.names, self.mesh.sizes):
            got = ",".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
            raise MeshError(f"the plan was found for a mesh of {self.mesh}, and apply got {got}; find one for that")
        if self.laid_out.styles:
            tensor_mesh = self._slice(mesh, self.mesh.tensor)
            plan = {pattern: choice.make() for pattern, choice in self.laid_out.styles}
            plain: PlainTensors = "replicated" if self.laid_out.replicates_plain else "refused"
            parallelize_module(model, tensor_mesh, plan, src_data_rank=src_data_rank, plain_tensors=plain)
            adapt_heads(model, self.laid_out.heads, tensor_mesh)
        recompute(model, self.laid_out.recomputed)
        if self.mesh.data is not None:
            whole = canonical_mesh(mesh)
            over: dict[str, Any] = {"mesh": whole}
            if isinstance(mesh, DeviceMesh) and whole.ndim > 1:
                over = {"mesh": mesh[self.mesh.data_axes]}
            elif whole.ndim > 1:
                over["dp_mesh_dims"] = _DataAxes(self.mesh.data, self.mesh.replicate)
            for name in sharded_names(model, self.laid_out.sharded):
                fully_shard(model.get_submodule(name), **over)
            fully_shard(model, **over)
        return model

    def _slice(self, mesh: DeviceMesh | Mesh, name: str | None) -> Mesh:
        whole = canonical_mesh(mesh)
        if whole.ndim == 1:
            return whole
        assert name is not None, "a plan with styles has a tensor axis"
        return canonical_mesh(mesh[name]) if isinstance(mesh, DeviceMesh) else slice_of(whole, (whole.axis(name),))

    def explain(self) -> str:
        """A table of the parts that are cut, and the sums of a step of one rank: bytes, FLOPs, time and memory."""
        tables = self.step, self.parts, self.recomputed, self.notes
        return explanation_text(self.mesh, self.rank, *tables, is_exact=self.is_exact)

    def __str__(self) -> str:
        return f"{self.code}\n\n{self.explain()}"

    def to_json(self) -> str:
        """The whole plan as a JSON object, which `from_json` reads."""
        found = {
            "format": _FORMAT,
            "mesh": self.mesh._asdict(),
            "styles": [[pattern, choice.to_json()] for pattern, choice in self.laid_out.styles],
            "heads": [cut._asdict() for cut in self.laid_out.heads],
            "replicates_plain": self.laid_out.replicates_plain,
            "sharded": self.laid_out.sharded,
            "recomputed": self.laid_out.recomputed,
            "given": self.laid_out.given,
            "rank": self.rank,
            "step": asdict(self.step),
            "parts": [asdict(part) for part in self.parts],
            "recomputed_costs": [asdict(each) for each in self.recomputed],
            "notes": self.notes,
            "is_exact": self.is_exact,
        }
        return json.dumps(found)

    @classmethod
    def from_json(cls, text: str) -> "FoundPlan":
        """The plan of a JSON object by `to_json`; ArgumentError for any other text."""
        try:
            return _from_json(json.loads(text))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArgumentError(
                f"FoundPlan.from_json was given no plan of format {_FORMAT} ({type(error).__name__}: {error}); allowed "
                "is the text of FoundPlan.to_json"
            ) from error


class _DataAxes(NamedTuple):
    """The axis that shards, and the one that replicates, as torch's DataParallelMeshDims has them."""

    shard: str
    replicate: str | None = None


def _from_json(found: dict[str, Any]) -> FoundPlan:
    if found.pop("format") != _FORMAT:
        raise ValueError("another format")
    mesh, step, heads = found.pop("mesh"), found.pop("step"), found.pop("heads")
    for name in [name for name in step if name.startswith(_AXES)]:
        step[name] = Traffic(**step[name])
    step["memory"] = Memory(**step["memory"])
    parts = found.pop("parts")
    return FoundPlan(
        mesh=MeshAxes(**{**mesh, "names": tuple(mesh["names"]), "sizes": tuple(mesh["sizes"])}),
        laid_out=LaidOut(
            tuple((pattern, StyleChoice.from_json(choice)) for pattern, choice in found.pop("styles")),
            tuple(HeadCut(**{**cut, "projections": tuple(cut["projections"])}) for cut in heads),
            found.pop("replicates_plain"),
            tuple(found.pop("sharded")),
            tuple(found.pop("recomputed")),
            tuple(map(GivenResults.from_json, found.pop("given"))),
        ),
        step=StepCost(**step),
        parts=tuple(
            PartCost(**{**part, "forward": Traffic(**part["forward"]), "backward": Traffic(**part["backward"])})
            for part in parts
        ),
        notes=tuple(found.pop("notes")),
        recomputed=tuple(
            RecomputedCost(**{**each, "traffic": Traffic(**each["traffic"])}) for each in found.pop("recomputed_costs")
        ),
        **found,
    )


_AXES = ("tensor_", "data_")
