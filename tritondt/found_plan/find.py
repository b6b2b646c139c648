"""find_plan: the plan of a model over a mesh, found from one recording, trials of its parts, and a search."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tritondt.errors import ArgumentError, ParallelizeError
from tritondt.errors.arguments import checked
from tritondt.found_plan.attention_heads import HeadCut, knows_heads, matches
from tritondt.found_plan.candidates import Candidate, joined_candidate
from tritondt.found_plan.data_sharding import sharded_patterns
from tritondt.found_plan.dry_run import Movement, Phase, Tally, dry_run
from tritondt.found_plan.found_plan import FoundPlan
from tritondt.found_plan.given_results import GivenResults, given_results
from tritondt.found_plan.mesh_axes import MeshAxes, mesh_axes
from tritondt.found_plan.parts import FAILURES, Trials
from tritondt.found_plan.predict import LaidOut, Prediction, predict
from tritondt.found_plan.prices import Prices, built_in_prices, prices_of_world
from tritondt.found_plan.recomputation import BlockKind, block_kinds, fewest
from tritondt.found_plan.recording import Recording, record
from tritondt.found_plan.repeated_blocks import RepeatedBlocks
from tritondt.found_plan.search import Chosen, Cost, Priced, best, frontier
from tritondt.found_plan.stand_in import fake_inputs, stand_in, without_memory
from tritondt.found_plan.step_cost import PartCost, RecomputedCost, StepCost
from tritondt.found_plan.style_choice import WHOLE, StyleChoice
from tritondt.found_plan.traffic import Traffic
from tritondt.planning.cost import CostTable
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import Replicate, Shard

Objective = Literal["step time", "bytes", "memory"]
# Tensors as large as a parameter that optimizers hold for each.
OPTIMIZER_TENSORS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd with momentum": 1}
# Choices of the search of which it is tried how many blocks would have to compute activations again.
_MOST_RECOMPUTED = 4


class Wanted(NamedTuple):
    """The objective of a plan, the kind of step, and the bound of memory."""

    objective: str
    memory_bytes: int | None
    train: bool
    optimizer_tensors: int


@checked
def find_plan(
    model: nn.Module,
    mesh: DeviceMesh | Mesh | Mapping[str, int],
    example_inputs: Any,
    *,
    axes: Mapping[str, str] | None = None,
    memory_bytes: int | None = None,
    objective: Objective = "step time",
    train: bool = True,
    optimizer: str = "adamw",
    costs: CostTable | None = None,
    device_type: str = "cpu",
    ranks_per_host: int = 8,
    module_results: Mapping[str, Any] | None = None,
) -> FoundPlan:
    """The plan that lays `model` over `mesh` best, with the bytes, messages, FLOPs, time and memory of a step.

    `mesh` is one of the running world, whose prices count then, or sizes by name, for which no world is needed: then
    `costs`, or the built-in prices of `device_type`, count, with `ranks_per_host` consecutive ranks on each host; a
    table of `costs` has a number of ranks on each host of its own. Over a world all ranks give the same `costs`, or
    none: others lead to other plans, whose ranks would wait for each other.
    `axes` has the names of the axes of three roles, "tensor" (default: tp), "data" (dp) and "replicate": the first cuts
    modules by the styles of parallelize_module, the second shards parameters by fully_shard, and the third, before it
    in the mesh, has copies of these shards, as over hosts. `example_inputs` are those of one rank of the data axes: a
    tensor, a tuple of positional arguments or a mapping of named ones; their values do not count. The model may be on
    the device "meta". `objective` is what is least: the predicted time of a step, the bytes that a rank receives, or
    the memory of a rank, of which at most `memory_bytes` are allowed; `optimizer` says what it holds.
    `module_results` has results of modules whose forward does not run without values, by name, with * for an index: a
    tensor, whose values do not count, or a tuple of them. They stay whole, and their FLOPs do not count.

    Numbers are those of this rank, or of the first without a world; not a collective call, and styles are alike on all
    ranks. Between the parts that are cut activations are whole on all ranks of the tensor axis, or inside of repeated
    blocks cut along the sequence where that is better; results are whole.

    Raises ParallelizeError for a model whose forward does not run without values, by operator and module, and where no
    plan needs so little memory; MeshError for an axis that has no role; ArgumentError for other values.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    >>> print(find_plan(model, {"tp": 2}, torch.zeros(4, 8), objective="memory").code)
    from tritondt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    plan = {
        '0': ColwiseParallel(balanced=True),
        '2': RowwiseParallel(balanced=True),
    }
    parallelize_module(model, mesh["tp"], plan)
    """
    if memory_bytes is not None and memory_bytes < 1:
        raise ArgumentError(f"memory_bytes got {memory_bytes:,}; allowed is a number of bytes of at least 1")
    wanted = Wanted(objective, memory_bytes, train, _checked(optimizer, objective))
    found = mesh_axes(mesh, axes)
    if isinstance(mesh, Mapping):
        prices, rank = built_in_prices(device_type, found.num_ranks, ranks_per_host, costs), 0
    else:
        known = canonical_mesh(mesh)
        prices = prices_of_world(known) if costs is None else prices_of_world(known)._replace(costs=costs)
        rank = 0 if known.coordinate is None else known.ranks.index(known.identity.rank)
    given = given_results(model, module_results)
    return _Finder(model, found, arguments(example_inputs), prices, wanted, given).find(rank)


def _checked(optimizer: str, objective: str) -> int:
    if objective not in ("step time", "bytes", "memory"):
        raise ArgumentError(f"objective got {objective!r}; allowed are 'step time', 'bytes' and 'memory'")
    if optimizer not in OPTIMIZER_TENSORS:
        raise ArgumentError(f"optimizer got {optimizer!r}; allowed are {', '.join(OPTIMIZER_TENSORS)}")
    return OPTIMIZER_TENSORS[optimizer]


def arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments of a model: of a mapping, a list or tuple, or a lone value."""
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given), {}) if isinstance(given, list | tuple) else ((given,), {})


@dataclass
class _Part:
    """A candidate of the model of one block of each kind, and what it changes in a step of one such part."""

    candidate: Candidate
    name: str
    number: int
    traffic: dict[Phase, Traffic]
    flops: int
    cost: Cost


class _Plan(NamedTuple):
    """A choice laid out, the first rank's step, and the costs of blocks that compute activations again."""

    chosen: Chosen
    laid_out: LaidOut
    step: StepCost
    recomputed: tuple[RecomputedCost, ...] = ()


class _Recomputing(NamedTuple):
    """A choice, with the costs that it adds with recomputed blocks, and the names and costs of these, best first."""

    chosen: Chosen
    added: Cost
    names: tuple[str, ...]
    costs: tuple[RecomputedCost, ...]


class _Finder:
    """The search for one model, mesh and set of inputs."""

    def __init__(
        self,
        model: nn.Module,
        axes: MeshAxes,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        prices: Prices,
        wanted: Wanted,
        given: tuple[GivenResults, ...],
    ) -> None:
        self.model, self.axes, self.inputs, self.prices, self.wanted = model, axes, inputs, prices, wanted
        self.given = given
        self.blocks = RepeatedBlocks(model)
        self.is_truncated = True

    def find(self, rank: int) -> FoundPlan:
        """The best plan, with the numbers of a rank."""
        with without_memory(0, self.axes.num_ranks):
            recording = self._record()
            parts, notes, whole = self._parts(recording)
            notes += [
                f"{each.pattern} was not run: its results are given, its FLOPs do not count" for each in self.given
            ]
            listed, is_exact = self._listed(parts)
            chosen = self._chosen(listed, whole)
        # Each block by itself, or the whole model at once: more memory, and one gather for both passes.
        groups: set[tuple[str, ...]] = {(), *([] if self.axes.data is None else [self._sharded(recording)])}
        try:
            plan = self._predicted(chosen, whole, recording, groups)
        except FAILURES as error:
            streams = [each for each in chosen.candidates if each.ends is not None]
            if not streams:
                raise
            # One block of each kind ran with a part of the sequence, and all of them do not.
            notes.append(f"sequences stay whole: {type(error).__name__}: {error}")
            parts = [part for part in parts if part.candidate.ends is None]
            listed, is_exact = self._listed(parts)
            chosen = self._chosen(listed, whole)
            plan = self._predicted(chosen, whole, recording, groups)
        plan = self._within_bound(plan, listed, whole, recording, groups, notes)
        chosen, laid_out, step, recomputed = plan
        if rank:
            step = self._step(laid_out, rank)
        if self.axes.tensor is not None and not chosen.candidates:
            notes.append(
                f"nothing is cut over {self.axes.tensor}, whose ranks all compute the same: each of the {len(parts)} "
                f"cuts that run would take more {self.wanted.objective}"
            )
        if self.wanted.memory_bytes is not None and step.memory.most > self.wanted.memory_bytes:
            raise ParallelizeError(self._lacks_text(laid_out, step, notes))
        costs = tuple(_part_cost(part) for part in parts if part.candidate in chosen.candidates)
        return FoundPlan(self.axes, laid_out, rank, step, costs, tuple(notes), is_exact, recomputed)

    def _predicted(self, chosen: Chosen, whole: Cost, recording: Recording, groups: set[tuple[str, ...]]) -> _Plan:
        """The best of the layouts whose modules are sharded by some patterns, and the first rank's step.

        Of the second only its memory needs a run of its own, which is left out where its time or bytes are more anyway.
        """
        styles = self._laid_out(chosen, recording)
        first, *others = (
            LaidOut(*styles, sharded, given=self.given) for sharded in self._likely(groups, chosen, whole)
        )
        prediction = self._predict(first)
        plans = [_Plan(chosen, first, prediction.step)]
        for other in others:
            is_by_memory = self.wanted.objective == "memory" or self.wanted.memory_bytes is not None
            if is_by_memory or self._lead(prediction.without_memory(other.sharded)) <= self._lead(prediction.step):
                plans.append(_Plan(chosen, other, self._step(other)))
        return self._best(plans)

    def _lead(self, step: StepCost) -> float:
        return step.key(self.wanted.objective)[0]

    def _likely(self, groups: set[tuple[str, ...]], chosen: Chosen, whole: Cost) -> list[tuple[str, ...]]:
        """Patterns of sharded modules, those of the better step most likely first.

        Blocks by themselves are gathered once more than as one group, and hide two thirds of what moves in backward.
        """
        cost = whole.plus(chosen.cost)
        moving_s, free_share = self._over_data(cost)[0].seconds, 1 - self.prices.data_link.busy_share
        hidden = (min(passes * moving_s * free_share, passes * cost.seconds / 3) for passes in (1, 2))
        by_blocks = self.wanted.objective != "bytes" and sum(hidden) > moving_s
        return sorted(groups, reverse=by_blocks)

    def _over_data(self, cost: Cost) -> tuple[Cost, Cost]:
        """Bytes and seconds of one gather of all parameters over the axis that shards, as of a reduction, and of the
        mean over the axis that replicates.
        """
        num_shards, num_replicas = self.axes.size(self.axes.data), self.axes.size(self.axes.replicate)
        hosts = {self.prices.hosts[rank] for rank in self.axes.ranks_along(self.axes.data, 0)}
        inner = self.prices.costs.network if len(hosts) > 1 else self.prices.costs.host
        copied_s = cost.parameter_bytes / self.prices.costs.copy_bandwidth if self.axes.data is not None else 0.0
        gathered = cost.parameter_bytes * (num_shards - 1) // num_shards
        averaged = 2 * cost.parameter_bytes * (num_replicas - 1) // (num_replicas * num_shards)
        return (
            Cost(gathered / inner.bandwidth + copied_s, gathered),
            Cost(averaged / self.prices.data_link.bandwidth, averaged),
        )

    def _predict(self, laid_out: LaidOut, rank: int = 0) -> Prediction:
        options: Any = {"train": self.wanted.train, "optimizer_tensors": self.wanted.optimizer_tensors}
        return predict(self.model, self.inputs, self.axes, laid_out, self.prices, rank, **options)

    def _step(self, laid_out: LaidOut, rank: int = 0) -> StepCost:
        return self._predict(laid_out, rank).step

    def _best(self, plans: Sequence[_Plan]) -> _Plan:
        """The best plan by the objective among those within the bound; the one of the least memory where none is."""
        bound = self.wanted.memory_bytes
        fitting = [each for each in plans if bound is None or each.step.memory.most <= bound]
        if fitting:
            return min(fitting, key=lambda each: each.step.key(self.wanted.objective))
        return min(plans, key=lambda each: each.step.memory.most)

    def _within_bound(
        self,
        plan: _Plan,
        listed: Sequence[Chosen],
        whole: Cost,
        recording: Recording,
        groups: set[tuple[str, ...]],
        notes: list[str],
    ) -> _Plan:
        """The plan, or a better one within the bound of memory whose blocks compute activations again."""
        bound, key = self.wanted.memory_bytes, self._key(whole)
        best_of_all = min(listed, key=key)
        if bound is None or not self.wanted.train or (plan.chosen == best_of_all and plan.step.memory.most <= bound):
            return plan
        kinds, refused = block_kinds(self.model, recording, is_truncated=self.is_truncated)
        notes += refused
        with without_memory(0, self.axes.num_ranks):
            choices = sorted(listed, key=key)[:_MOST_RECOMPUTED] if kinds else []
            tried = [self._recomputing(chosen, whole, kinds) for chosen in choices]
        found = [plan]

        def order(each: _Recomputing) -> tuple[float, ...]:
            memory = self._memory(whole.plus(each.added))
            return (0, *key(Chosen((), each.added))) if memory <= bound else (1, memory)

        for each in sorted(tried, key=order):
            try:
                found += [self._fewest(each, recording, sharded) for sharded in sorted(groups, reverse=True)]
            except FAILURES as error:  # one block of each kind ran with a part of the sequence, and all of them do not
                notes.append(f"not recomputed with parts of sequences: {type(error).__name__}: {error}")
            if min(other.step.memory.most for other in found) <= bound:
                break
        return self._best(found)

    def _recomputing(self, chosen: Chosen, whole: Cost, kinds: Sequence[BlockKind]) -> _Recomputing:
        """A choice with as many blocks that compute their activations again as sums of memory ask for."""
        trials = Trials(self._stand_in, self.prices, self.axes.ranks_along(self.axes.tensor, 0), self.wanted.train)
        joined = joined_candidate(chosen.candidates)
        base = trials.run(joined)
        costs = [
            (kind, self._recomputed_cost(kind, base, trials.run(joined, recomputed=[kind.stand_in]))) for kind in kinds
        ]
        costs.sort(key=lambda each: each[1].seconds / max(1, each[1].saved_bytes))
        bound, added = self.wanted.memory_bytes, chosen.cost
        assert bound is not None, "blocks compute again to keep within a bound"
        for kind, cost in costs:
            lacking = self._memory(whole.plus(added)) - bound
            if lacking > 0 and cost.saved_bytes > 0:
                number = min(len(kind.names), ceil(lacking / cost.saved_bytes))
                each = Cost(cost.seconds, cost.traffic.received_bytes, 0, -cost.saved_bytes)
                added = added.plus(each.times(number))
        names = tuple(name for kind, _ in costs for name in kind.names)
        return _Recomputing(chosen, added, names, tuple(cost for _, cost in costs))

    def _recomputed_cost(self, kind: BlockKind, base: Tally, tally: Tally) -> RecomputedCost:
        """Costs that one block of a kind adds to a step, and the activations that it does not keep."""
        flops = sum(tally.flops.values()) - sum(base.flops.values())
        traffic = self.prices.total(tally.movements - base.movements, 0)
        saved = base.kept_bytes - tally.kept_bytes
        name = RepeatedBlocks(self.model).pattern(kind.names[0])
        seconds = traffic.seconds + flops / self.prices.costs.flop_rate
        return RecomputedCost(name, 0, len(kind.names), flops, traffic, seconds, saved)

    def _fewest(self, found: _Recomputing, recording: Recording, sharded: tuple[str, ...]) -> _Plan:
        """The plan with the fewest blocks that compute again within the bound; with all of them where none is."""
        bound = self.wanted.memory_bytes
        assert bound is not None, "blocks compute again to keep within a bound"
        laid_out = LaidOut(*self._laid_out(found.chosen, recording), sharded, given=self.given)
        steps: dict[int, StepCost] = {}

        def most_bytes(number: int) -> int:
            steps[number] = self._step(laid_out._replace(recomputed=found.names[:number]))
            return steps[number].memory.most

        number = fewest(len(found.names), most_bytes, bound)
        number = len(found.names) if number is None else number
        names = found.names[:number]
        recomputed = [(cost, sum(matches(name, cost.name) for name in names)) for cost in found.costs]
        costs = tuple(replace(cost, number=number) for cost, number in recomputed if number)
        return _Plan(found.chosen, laid_out._replace(recomputed=names), steps[number], costs)

    def _sharded(self, recording: Recording) -> tuple[str, ...]:
        """Patterns of the modules that are sharded one by one."""
        once = [self._real(name) for name, number in recording.num_calls.items() if number == 1]
        called_once = {alike for name in once for alike in self.blocks.all_alike(name)}
        return sharded_patterns(self.model, RepeatedBlocks(self.model), called_once)

    def _stand_in(self) -> tuple[nn.Module, tuple[Any, dict[str, Any]]]:
        model = stand_in(self.model, self.blocks.kept() if self.is_truncated else None, self.given)
        return model, fake_inputs(self.inputs)

    def _record(self) -> Recording:
        """Recording of one block of each kind, or of the whole model where that does not run with fewer blocks."""
        try:
            model, (args, kwargs) = self._stand_in()
            return record(model, args, kwargs)
        except ParallelizeError:
            if not self.blocks.names():
                raise
        self.is_truncated, self.blocks = False, RepeatedBlocks(nn.Module())
        model, (args, kwargs) = self._stand_in()
        return record(model, args, kwargs)

    def _parts(self, recording: Recording) -> tuple[list[_Part], list[str], Cost]:
        """Parts that may be cut, notes on those that cannot, and the cost of the model with nothing cut."""
        if self.axes.tensor is None:
            return [], [], Cost()
        ranks = self.axes.ranks_along(self.axes.tensor, 0)
        trials = Trials(self._stand_in, self.prices, ranks, self.wanted.train)
        base = trials.run(None)
        model, _ = self._stand_in()
        found = list(trials.candidates(model, recording, self.blocks))
        parts = [self._part(candidate, tally, base) for candidate, tally in found]
        ends = {self.blocks.pattern(self._real(name)): why for name, why in trials.refused.items()}
        notes = [f"the part that ends at {pattern} is not cut: {why}" for pattern, why in ends.items()]
        for name, why in trials.whole_sequences.items():
            notes.append(f"between the parts of {self.blocks.pattern(self._real(name))} sequences stay whole: {why}")
        if not parts:
            raise ParallelizeError(self._unused_text(notes))
        return parts, notes, self._whole_cost(base)

    def _listed(self, parts: Sequence[_Part]) -> tuple[list[Chosen], bool]:
        """Choices among parts of which none is worse than another, and whether all were looked at."""
        return frontier([Priced(part.candidate, part.cost) for part in parts])

    def _chosen(self, listed: Sequence[Chosen], whole: Cost) -> Chosen:
        """The best choice."""
        bound = self.wanted.memory_bytes
        chosen = best(
            listed, self._key(whole), lambda each: bound is None or self._memory(whole.plus(each.cost)) <= bound
        )
        # Without one that fits, the one of the least memory says how much is lacking.
        return chosen or min(listed, key=lambda each: self._memory(whole.plus(each.cost)))

    def _real(self, name: str) -> str:
        return self.blocks.from_stand_in(name)

    def _part(self, candidate: Candidate, tally: Tally, base: Tally) -> _Part:
        name = self._real(candidate.styles[0][0])
        number = self.blocks.number_of(name)
        phases: tuple[Phase, ...] = ("forward", "backward")
        at_ends = _movements_at_ends(candidate, tally)
        inside = tally.movements - at_ends
        traffic = {
            phase: self.prices.total({m: n for m, n in inside.items() if m.phase == phase}, 0) for phase in phases
        }
        flops = sum(base.flops.values()) - sum(tally.flops.values())
        both, once = traffic["forward"] + traffic["backward"], self.prices.total(at_ends, 0)
        seconds = both.seconds + self._computing_s(tally) - self._computing_s(base)
        held = tally.parameter_bytes - base.parameter_bytes, tally.kept_bytes - base.kept_bytes
        cost = Cost(seconds, both.received_bytes, *held).times(number)
        return _Part(candidate, name, number, traffic, flops, cost.plus(Cost(once.seconds, once.received_bytes)))

    def _whole_cost(self, base: Tally) -> Cost:
        """Cost of the model with nothing cut, of which `base` has one block of each kind."""
        found = first = self._cost_of(base)
        if not self.is_truncated:
            return found
        try:
            for number, kept in self.blocks.kept_with_another():
                found = found.plus(self._uncut_cost(kept).plus(first.times(-1)).times(number))
        except FAILURES:  # code that runs with one block of each kind, and with all of them, but not with two of one
            return self._uncut_cost(None)
        return found

    def _uncut_cost(self, kept: Mapping[str, Sequence[int]] | None) -> Cost:
        """Cost of the model with nothing cut, of whose blocks it has some."""
        model = stand_in(self.model, kept, self.given)
        return self._cost_of(dry_run(model, fake_inputs(self.inputs), None, {}, (), train=self.wanted.train))

    def _cost_of(self, tally: Tally) -> Cost:
        return Cost(self._computing_s(tally), 0, tally.parameter_bytes, tally.kept_bytes)

    def _computing_s(self, tally: Tally) -> float:
        return self.prices.turns * sum(map(self.prices.computing_s, tally.work.values()))

    def _memory(self, cost: Cost) -> float:
        """Bytes of a rank, by sums: parameters, gradients and optimizer in shards, and what is kept for backward."""
        copies = 2 + self.wanted.optimizer_tensors if self.wanted.train else 1
        return cost.parameter_bytes * copies / self.axes.size(self.axes.data) + cost.kept_bytes

    def _key(self, whole: Cost) -> Any:
        """The key that the search makes least: the objective first, and the others where that is equal."""

        def key(chosen: Chosen) -> tuple[float, ...]:
            cost = whole.plus(chosen.cost)
            gathered, averaged = self._over_data(cost)
            over_data_s = 3 * gathered.seconds + averaged.seconds
            received, memory = cost.received_bytes, self._memory(cost)
            received += 3 * gathered.received_bytes + averaged.received_bytes
            hidden_s = min(over_data_s, cost.seconds) * (1 - self.prices.data_link.busy_share)
            seconds = cost.seconds + over_data_s - hidden_s
            objective = self.wanted.objective
            return {
                "step time": (seconds, received, memory),
                "bytes": (received, memory, seconds),
                "memory": (memory, seconds, received),
            }[objective]

        return key

    def _laid_out(
        self, chosen: Chosen, recording: Recording
    ) -> tuple[tuple[tuple[str, StyleChoice], ...], tuple[HeadCut, ...], bool]:
        """Styles by pattern, those of modules that stay whole too, and the heads that are cut."""
        if not chosen.candidates:
            return (), (), False
        cut = {name: choice for candidate in chosen.candidates for name, choice in candidate.styles}
        styles: dict[str, StyleChoice] = {}
        for ends in (candidate.ends for candidate in chosen.candidates if candidate.ends is not None):
            both, alike = cut.pop(ends.block), self.blocks.all_alike(self._real(ends.block))
            styles |= {alike[0]: ends.entering, alike[-1]: ends.leaving} if len(alike) > 1 else {alike[0]: both}
        for name in recording.called:
            if name in cut:
                styles |= dict.fromkeys(self._patterns(name), cut[name])
        whole = [name for name in recording.called if name not in cut and self._stays_whole(name, recording)]
        for name in sorted(whole, key=lambda name: -len(name.split(".")) if name else 0):
            styles |= dict.fromkeys(self._patterns(name), WHOLE)
        heads = tuple(
            each._replace(pattern=pattern)
            for candidate in chosen.candidates
            for each in candidate.heads
            if knows_heads(self.model.get_submodule(self._real(each.pattern)), each)
            for pattern in self._patterns(each.pattern)
        )
        plain = any(candidate.replicates_plain for candidate in chosen.candidates)
        return tuple(styles.items()), heads, plain

    def _patterns(self, name: str) -> list[str]:
        real = self._real(name)
        pattern = self.blocks.pattern(real)
        return [pattern] if "*" in pattern else self.blocks.all_alike(real)

    def _stays_whole(self, name: str, recording: Recording) -> bool:
        """Whether a module has parameters of its own that every rank is to have whole, as distributed tensors.

        Modules that are called without a tensor, or that read parameters of modules inside by themselves, keep plain
        ones.
        """
        module = self.model.get_submodule(self._real(name))
        if not any(held is not None for held in module._parameters.values()) or not recording.called[name]:
            return False
        inside = [f"{name}.{child}".lstrip(".") for child, each in module.named_modules() if child and each._parameters]
        return all(child in recording.called for child in inside)

    def _unused_text(self, notes: Sequence[str]) -> str:
        name, size = self.axes.tensor, self.axes.size(self.axes.tensor)
        whys = "".join(f"; {note}" for note in notes)
        return (
            f"nothing can use the axis {name!r} of {size} ranks: {type(self.model).__name__} has no linear layer or "
            f"table inside that can be cut in {size}{whys}; allowed are fewer ranks on it, or an axis that shards "
            "parameters in its place"
        )

    def _lacks_text(self, laid_out: LaidOut, step: StepCost, notes: Sequence[str]) -> str:
        bound, total = self.wanted.memory_bytes, step.memory.most
        assert bound is not None, "a bound was given"
        held, again = step.memory, len(laid_out.recomputed)
        whys = "".join(f"; {note}" for note in notes if " not recomputed" in note)
        return (
            f"no plan over {self.axes} keeps a rank within memory_bytes={bound:,}; the nearest needs {total:,}, "
            f"{total - bound:,} more: parameters {held.parameters:,}, gradients {held.gradients:,}, optimizer "
            f"{held.optimizer:,}, activations {held.activations:,} with {again:,} blocks recomputed, gathered "
            f"{held.gathered:,}{whys}; allowed is a larger mesh, or a smaller batch"
        )


def _movements_at_ends(candidate: Candidate, tally: Tally) -> Counter[Movement]:
    """Redistributions where repeated blocks begin and end, which one block has, and many have once as well.

    The last makes its results whole, and in backward the first the gradients of what it took in.
    """
    ends = candidate.ends
    if ends is None:
        return Counter()
    return Counter(
        movement
        for movement in tally.movements
        if movement.source.shape == ends.shape
        and movement.source.placements == (Shard(ends.dim),)
        and movement.target.placements == (Replicate(),)
    )


def _part_cost(part: _Part) -> PartCost:
    traffic = part.traffic
    return PartCost(
        name=part.name,
        layout=part.candidate.label,
        number=part.number,
        forward=traffic["forward"],
        backward=traffic["backward"],
        saved_flops=part.flops,
        instead_seconds=-part.cost.seconds,
        instead_bytes=-part.cost.received_bytes,
    )
