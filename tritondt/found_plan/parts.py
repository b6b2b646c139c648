"""Parts of a model that may be cut, and their candidates, each tried on a stand-in of the model before it counts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tritondt.errors import ParallelizeError, TritondtError
from tritondt.found_plan.candidates import Candidate, RegionForm, lone_candidates, loss_candidates, region_candidate
from tritondt.found_plan.dry_run import Tally, dry_run
from tritondt.found_plan.live_bytes import LiveBytes
from tritondt.found_plan.prices import Prices
from tritondt.found_plan.recomputation import recompute
from tritondt.found_plan.recording import Recording
from tritondt.found_plan.regions import Region, regions_of, unit_patterns
from tritondt.found_plan.repeated_blocks import RepeatedBlocks
from tritondt.found_plan.streams import CutRegion, stream_candidate
from tritondt.sharding.mesh import Mesh

# Ranks of the mesh on which it is tried whether a region can be cut at all: every head count but one allows it.
_FEWEST = 2
# Operators by which two forms of one computation may differ.
_COPIES = ("aten.clone", "aten.empty", "aten._to_copy", "aten.copy_", "aten.detach", "aten._unsafe_view", "aten.zeros")
# Refusals of layouts, and what the code of a model raises on shapes that it was not written for.
FAILURES = (TritondtError, RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError)
_WRITTEN_OUT = "its code has its number of heads written out, or draws random numbers, and ranks cannot share key heads"


@dataclass
class Trials:
    """Dry runs of a model of one block of each kind, by `make`, which gives a new stand-in each time."""

    make: Callable[[], tuple[nn.Module, tuple[Any, dict[str, Any]]]]
    prices: Prices
    tensor_ranks: tuple[int, ...]
    train: bool
    # Why regions are not cut, by the name of the layer that they end at.
    refused: dict[str, str] = field(default_factory=dict)
    # Why sequences are not cut, by the name of the block.
    whole_sequences: dict[str, str] = field(default_factory=dict)

    def run(self, candidate: Candidate | None, num_ranks: int | None = None, recomputed: Sequence[str] = ()) -> Tally:
        """Tally with one candidate, on so many ranks or those of the tensor axis; None for the model as it is."""
        model, inputs = self.make()

        def then(laid: nn.Module, _: LiveBytes) -> None:
            recompute(laid, recomputed)

        if candidate is None:
            return dry_run(model, inputs, None, {}, (), train=self.train, then=then)
        ranks = self.tensor_ranks if num_ranks is None else tuple(range(num_ranks))
        plain = candidate.replicates_plain
        mesh, styles = Mesh((len(ranks),), ranks=ranks), dict(candidate.styles)
        heads = candidate.heads
        return dry_run(model, inputs, mesh, styles, heads, replicates_plain=plain, train=self.train, then=then)

    def candidates(
        self, model: nn.Module, recording: Recording, blocks: RepeatedBlocks
    ) -> Iterator[tuple[Candidate, Tally]]:
        """Candidates that run, and the tally of each."""
        cut: list[CutRegion] = []
        for region in regions_of(model, recording):
            names = (*region.entries, *region.inside, region.exit, *filter(None, [region.shared_from]))
            if len({blocks.block_of(blocks.from_stand_in(name)) for name in names}) == 1:
                for candidate, tally in self._of_region(model, region):
                    cut.append(CutRegion(region, candidate))
                    yield candidate, tally
        yield from self._streams(model, recording, blocks, cut)
        layers = [name for name in recording.called if name]
        lone = [*lone_candidates(model, layers, len(self.tensor_ranks))]
        if recording.gives_loss:
            outside = [name for name in layers if not blocks.block_of(blocks.from_stand_in(name))]
            lone += loss_candidates(model, outside, len(self.tensor_ranks))
        for candidate in lone:
            found = self._try(candidate)
            if isinstance(found, Tally):
                yield candidate, found

    def _streams(
        self, model: nn.Module, recording: Recording, blocks: RepeatedBlocks, cut: list[CutRegion]
    ) -> Iterator[tuple[Candidate, Tally]]:
        """Candidates that cut the sequence between the cut parts of repeated blocks."""
        in_blocks = {blocks.block_of(each.region.exit) for each in cut}
        for block in sorted(filter(None, in_blocks)):
            try:
                candidate = stream_candidate(model, recording, blocks, block, cut)
            except ParallelizeError as error:
                self.whole_sequences[block] = str(error)
                continue
            # Plain tensors beside distributed ones are alike on every rank, which is said where there are any.
            for plain in dict.fromkeys((candidate.replicates_plain, True)):
                found = self._try(candidate._replace(replicates_plain=plain))
                if isinstance(found, Tally):
                    yield candidate._replace(replicates_plain=plain), found
                    break
                self.whole_sequences[block] = found

    def _of_region(self, model: nn.Module, region: Region) -> Iterator[tuple[Candidate, Tally]]:
        num_ranks, why = len(self.tensor_ranks), "its layers have fewer heads or features than there are ranks"
        for units in unit_patterns(region):
            for dim in self._dims(model, region):
                form = RegionForm(region, units, dim)
                if region_candidate(model, form, num_ranks, as_distributed=False) is None:
                    continue
                fits = self._form(model, form)
                if isinstance(fits, str):
                    why = fits
                    continue
                candidate = region_candidate(model, form, num_ranks, as_distributed=fits)
                found = _WRITTEN_OUT if candidate is None else self._try(candidate)
                if candidate is not None and isinstance(found, Tally):
                    yield candidate, found
                    return
                why = str(found)
        self.refused[region.exit] = why

    def _dims(self, model: nn.Module, region: Region) -> tuple[int, ...]:
        """Dims on which heads may lie where layers inside of a region take them in."""
        return (2, 1) if region.inside else (0,)

    def _form(self, model: nn.Module, form: RegionForm) -> bool | str:
        """Whether distributed tensors have to flow in a region; or why the region cannot be cut.

        Cut in two as distributed tensors, nothing may move but what the layer at the end sums. Local tensors may take
        their place where each operator is one that distributed tensors have run, on the same shapes.
        """
        if (candidate := region_candidate(model, form, _FEWEST, as_distributed=True)) is None:
            return "its heads cannot be cut in two"
        found = self._try(candidate, _FEWEST)
        if isinstance(found, str):
            return found
        if (moved := self._moved(found)) is not None:
            return moved
        if form.region.draws:
            return True  # distributed tensors draw by the place in the whole; local ones would draw alike on all ranks
        local = region_candidate(model, form, _FEWEST, as_distributed=False)
        assert local is not None, f"{form} is cut in two as distributed tensors"
        tally = self._try(local, _FEWEST)
        if isinstance(tally, str):
            return True
        others = [call for call in tally.local_calls - found.local_calls if not call.op.startswith(_COPIES)]
        return bool(others)

    def _moved(self, tally: Tally) -> str | None:
        """The redistribution that code inside of a region would ask for; None where it asks for none."""
        sums = 0
        for movement, number in tally.movements.items():
            source, target = str(movement.source), str(movement.target)
            if (source, target) == ("(P(sum))", "(R)"):
                sums += number if movement.phase == "forward" else 0
            elif any(
                self.prices.traffic(movement._replace(ranks=tuple(range(_FEWEST))), rank).received_bytes
                for rank in range(_FEWEST)
            ):
                return f"the code inside moves {source} -> {target} of {movement.source.shape}"
        return None if sums == 1 else f"{sums} sums over the ranks are made in it, where one is"

    def _try(self, candidate: Candidate, num_ranks: int | None = None) -> Tally | str:
        """Tally of a candidate; the error where it does not run."""
        try:
            return self.run(candidate, num_ranks)
        except FAILURES as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
