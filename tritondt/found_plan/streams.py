"""Sequence parallelism: repeated blocks between whose cut parts each rank has some positions of the activations.

Megatron's: what a norm gives is gathered before the layers that are cut by columns, and what those cut by rows give is
scattered to the positions. Between them flow distributed tensors, whose operators know the positions of each rank.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import ParallelizeError
from tritondt.found_plan.candidates import Candidate, Ends
from tritondt.found_plan.dry_run import counted
from tritondt.found_plan.recording import Call, Recording, Value, is_layer
from tritondt.found_plan.regions import Region
from tritondt.found_plan.repeated_blocks import RepeatedBlocks
from tritondt.found_plan.style_choice import WHOLE, StyleChoice, style
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Replicate, Shard


class CutRegion(NamedTuple):
    """A region, and the candidate that cuts it."""

    region: Region
    candidate: Candidate


def stream_candidate(
    model: nn.Module, recording: Recording, blocks: RepeatedBlocks, block: str, regions: Sequence[CutRegion]
) -> Candidate:
    """The candidate that cuts the sequence between the parts of the repeated blocks like `block`, a stand-in's name.

    ParallelizeError, with the reason, where that cannot be.
    """
    if "*" not in blocks.pattern(blocks.from_stand_in(block)):
        raise ParallelizeError("its list has blocks of several kinds")
    if recording.num_calls[block] != 1 or block not in recording.crossings:
        raise ParallelizeError("it is not called exactly once")
    taken, given, num_args, num_results = recording.crossings[block]
    if taken is None or given is None or given.shape != taken.shape or len(taken.shape) < 2:
        raise ParallelizeError("its first argument and its first result are no tensors of one shape and two dims")
    if any(_is_inside(name, block) for name in recording.answered):
        raise ParallelizeError("results of a module in it are given for whole sequences")
    if _has_parameters(model.get_submodule(block)):
        raise ParallelizeError("it has parameters of its own beside those of its layers")
    search = _Stream(model, recording, block, taken, [it for it in regions if _is_inside(it.region.exit, block)])
    return Candidate(
        f"cut the sequence, dim {search.dim}, between cut parts",
        ((block, _both(search.dim, num_args, num_results)), *search.styles().items()),
        tuple(cut for each in search.regions for cut in each.candidate.heads),
        any(each.candidate.replicates_plain for each in search.regions),
        Ends(block, _entering(search.dim, num_args), _leaving(search.dim, num_results), taken.shape, search.dim),
    )


def _has_parameters(module: nn.Module) -> bool:
    return any(held is not None for held in module._parameters.values())


def _is_inside(name: str, block: str) -> bool:
    return name.startswith(f"{block}.")


def _layouts(first: str, number: int) -> Any:
    """Layout of the first of so many values; the others are left as they are."""
    return first if number == 1 else (first, *[None] * (number - 1))


def _entering(dim: int, num_args: int) -> StyleChoice:
    given, wanted = _layouts("R", num_args), _layouts(f"S{dim}", num_args)
    return style("PrepareModuleInput", input_layouts=given, desired_input_layouts=wanted)


def _leaving(dim: int, num_results: int) -> StyleChoice:
    given, wanted = _layouts(f"S{dim}", num_results), _layouts("R", num_results)
    return style("PrepareModuleOutput", output_layouts=given, desired_output_layouts=wanted)


def _both(dim: int, num_args: int, num_results: int) -> StyleChoice:
    options = (*_entering(dim, num_args).options, *_leaving(dim, num_results).options)
    return StyleChoice("PrepareModuleInputOutput", options)


class _Stream:
    """Values between the cut parts of one block, and the styles of its layers."""

    def __init__(
        self, model: nn.Module, recording: Recording, block: str, taken: Value, regions: Sequence[CutRegion]
    ) -> None:
        self._model, self._recording, self._block, self._taken = model, recording, block, taken
        self.dim = len(taken.shape) - 2
        self.regions = _disjoint(regions)
        if not self.regions:
            raise ParallelizeError("nothing in it is cut")
        self._in_regions = {
            name for each in self.regions for name in (*each.region.entries, *each.region.inside, each.region.exit)
        }

    def styles(self) -> dict[str, StyleChoice]:
        """Styles of all modules of the block that have parameters."""
        found: dict[str, StyleChoice] = {}
        for region, candidate in self.regions:
            found |= self._of_region(region, dict(candidate.styles))
        flowing = self._flowing()
        for name in self._recording.called:
            module = self._model.get_submodule(name)
            if not _is_inside(name, self._block) or name in found or not _has_parameters(module):
                continue
            calls = self._recording.calls_of(name)
            by_position = calls and all(call.inputs and call.inputs[0].number in flowing for call in calls)
            if by_position and self._keeps_positions(name, calls):
                found[name] = style("SequenceParallel", sequence_dim=self.dim)
            elif by_position:
                raise ParallelizeError(f"{name} is no layer that treats every position by itself")
            else:
                found[name] = WHOLE
        return found

    def _of_region(self, region: Region, styles: dict[str, StyleChoice]) -> dict[str, StyleChoice]:
        """Styles of a region that takes positions in and gives positions."""
        source = region.fed_by
        if source and _is_inside(source, self._block):
            calls = self._recording.calls_of(source)
            if not self._keeps_positions(source, calls):
                raise ParallelizeError(f"{source} is no layer that treats every position by itself")
            # Layers that share a tensor gather it once, and the code between is told of all positions.
            styles[source] = style("SequenceParallel", sequence_dim=self.dim, output_layouts="R")
        else:
            styles |= {name: styles[name].with_options(input_layouts=f"S{self.dim}") for name in region.entries}
        scattered = {"output_layouts": f"S{self.dim}", "use_local_output": False}
        styles[region.exit] = styles[region.exit].with_options(**scattered)
        return styles

    def _flowing(self) -> set[int]:
        """Numbers of the values between the parts that follow from what the block takes in, or the parts give."""
        found = {self._taken.number}
        for call in self._recording.calls:
            is_part = call.name in self._in_regions and call.name not in {each.region.exit for each in self.regions}
            reads = any(value.number in found for value in call.inputs)
            if call.name in self._exits or (reads and not is_part):
                found |= {value.number for value in call.outputs}
        return found

    @property
    def _exits(self) -> set[str]:
        return {each.region.exit for each in self.regions}

    def _keeps_positions(self, name: str, calls: Sequence[Call]) -> bool:
        module = self._model.get_submodule(name)
        shapes = {call.inputs[0].shape for call in calls}
        return is_layer(module) and all(keeps_positions(module, shape, self.dim) for shape in shapes)


def _disjoint(regions: Sequence[CutRegion]) -> list[CutRegion]:
    """Regions of which no two have a layer in common, the first ones first."""
    found, taken = [], set[str]()
    for each in regions:
        names = {*each.region.entries, *each.region.inside, each.region.exit}
        if taken.isdisjoint(names):
            taken |= names
            found.append(each)
    return found


def keeps_positions(layer: nn.Module, shape: Sequence[int], dim: int) -> bool:
    """Whether a layer treats every index of `dim` by itself: on distributed tensors cut there, nothing would move.

    Called where tensors take no memory.
    """
    if len(shape) <= dim or shape[dim] < 2:
        return False
    mesh, alike = Mesh((2,), ranks=(0, 1)), copy.copy(layer)
    for kind in ("_parameters", "_buffers"):
        held = vars(layer)[kind].items()
        vars(alike)[kind] = {
            name: None if value is None else DTensor.from_local(value.detach(), mesh, (Replicate(),))
            for name, value in held
        }
    parts = (*shape[:dim], -(-shape[dim] // 2), *shape[dim + 1 :])
    dtype = next((value.dtype for value in layer.parameters()), torch.float32)
    x = DTensor.from_local(
        torch.empty(parts, dtype=dtype), mesh, (Shard(dim),), shape=torch.Size(shape), stride=_strides(shape)
    )
    moved, output = counted(lambda: alike(x))
    if moved or not isinstance(output, DTensor) or output.ndim != len(shape):
        return False
    placement = output._spec.placements[0]
    return isinstance(placement, Shard) and placement.dim == dim and output.shape[dim] == shape[dim]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()
