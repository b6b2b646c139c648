"""Prediction of a step of one rank of a whole model that is laid out: what moves, is computed and is held."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from tritondt.found_plan.attention_heads import HeadCut
from tritondt.found_plan.data_sharding import (
    Group,
    data_movements,
    groups_of,
    largest_shard,
    shard_counted,
    sharded_bytes,
    sharded_names,
)
from tritondt.found_plan.dry_run import Axis, Movement, Phase, Tally, dry_run
from tritondt.found_plan.given_results import GivenResults
from tritondt.found_plan.live_bytes import LiveBytes
from tritondt.found_plan.mesh_axes import MeshAxes
from tritondt.found_plan.prices import Prices
from tritondt.found_plan.recomputation import recompute
from tritondt.found_plan.stand_in import fake_inputs, stand_in, without_memory
from tritondt.found_plan.step_cost import Memory, StepCost
from tritondt.found_plan.style_choice import StyleChoice
from tritondt.found_plan.traffic import Traffic
from tritondt.found_plan.work import OptimizerWork, optimizer_work
from tritondt.sharding.mesh import Mesh

# Tensors as large as a parameter that Adam and AdamW hold for each.
_OF_ADAM = 2
_PHASES: tuple[Phase, ...] = ("forward", "backward")
_AXES: tuple[Axis, ...] = ("tensor", "data")


class LaidOut(NamedTuple):
    """A layout of a model: styles by pattern of names, heads that are cut, patterns of modules that are sharded, and
    names of blocks that are recomputed in backward. `given` are results of modules that were not run to find it."""

    styles: tuple[tuple[str, StyleChoice], ...]
    heads: tuple[HeadCut, ...]
    replicates_plain: bool
    sharded: tuple[str, ...]
    recomputed: tuple[str, ...] = ()
    given: tuple[GivenResults, ...] = ()


def predicted_step(
    model: nn.Module,
    inputs: tuple[Sequence[Any], dict[str, Any]],
    axes: MeshAxes,
    laid_out: LaidOut,
    prices: Prices,
    rank: int,
    *,
    train: bool,
    optimizer_tensors: int,
) -> StepCost:
    """The step of a rank of a model, whose parameters may be anywhere; takes no memory, and needs no world."""
    found = predict(model, inputs, axes, laid_out, prices, rank, train=train, optimizer_tensors=optimizer_tensors)
    return found.step


def predict(
    model: nn.Module,
    inputs: tuple[Sequence[Any], dict[str, Any]],
    axes: MeshAxes,
    laid_out: LaidOut,
    prices: Prices,
    rank: int,
    *,
    train: bool,
    optimizer_tensors: int,
    of_others: Callable[["Computing"], Sequence["Computing"]] | None = None,
) -> "Prediction":
    """The prediction of a rank's step of a model, from which that of other groups of parameters follows.

    Where ranks take turns on cores, `of_others` gives what the other ranks of the tensor axis compute, for what this
    one does, in place of a dry run of each.
    """

    def run(of: int) -> _DryStep:
        return _run_dry(model, inputs, axes, laid_out, of, train=train, optimizer_tensors=optimizer_tensors)

    own = run(rank)
    computing = [own.computing(prices)]
    if prices.turns > 1:
        # Ranks that take turns on the cores of a host last as long as the work of all; those of a data axis are alike.
        others = [it for it in axes.ranks_along(axes.tensor, rank) if it != rank]
        if of_others is None:
            computing += [run(other).computing(prices) for other in others]
        else:
            computing += of_others(computing[0])
    return Prediction(axes, prices, rank, train, own, _in_turns(computing, prices.turns))


class Computing(NamedTuple):
    """Seconds of computing of a rank in forward, in backward and in the optimizer."""

    forward: float
    backward: float
    optimizer: float


class _DryStep(NamedTuple):
    """Counts of a dry run of a whole model on one rank, the laid out stand-in, its groups of sharded parameters, and
    what the rank holds.

    `update` is the work of the optimizer for each parameter; None without training.
    """

    tally: Tally
    model: nn.Module
    groups: list[Group]
    memory: Memory
    update: OptimizerWork | None

    def computing(self, prices: Prices) -> Computing:
        """Seconds of a rank that has a core, or a device, to itself."""
        forward, backward = (prices.computing_s(self.tally.work[phase]) for phase in _PHASES)
        if self.update is None:
            return Computing(forward, backward, 0.0)
        # Optimizers take lists of parameters at once on devices, and each by itself on the CPU.
        num_times = self.tally.num_trained if prices.device_type == "cpu" else 1
        operators_s = num_times * self.update.operators * prices.costs.operator_s
        moved_s = self.memory.gradients * self.update.bytes_a_byte / prices.costs.operator_bandwidth
        return Computing(forward, backward, operators_s + moved_s)


class Prediction(NamedTuple):
    """A rank's step: what was counted of it, and the seconds that computing takes."""

    axes: MeshAxes
    prices: Prices
    rank: int
    train: bool
    own: _DryStep
    computing: Computing

    @property
    def step(self) -> StepCost:
        """The step."""
        movements = self.own.tally.movements
        if self.axes.data is not None:
            ranks = self.axes.ranks_along(self.axes.data_axes, self.rank)
            num_replicas = self.axes.size(self.axes.replicate)
            movements = movements + data_movements(self.own.groups, ranks, num_replicas, train=self.train)
        return _step_cost(self.prices, self.rank, self.own, movements, self.computing)

    def without_memory(self, sharded: Sequence[str]) -> StepCost:
        """The step with other modules sharded one by one, but for its memory, which is that of `step`."""
        groups = groups_of(self.own.model, sharded_names(self.own.model, sharded))
        return self._replace(own=self.own._replace(groups=groups)).step


def _run_dry(
    model: nn.Module,
    inputs: tuple[Sequence[Any], dict[str, Any]],
    axes: MeshAxes,
    laid_out: LaidOut,
    rank: int,
    *,
    train: bool,
    optimizer_tensors: int,
) -> _DryStep:
    update = optimizer_work(optimizer_tensors) if train else None
    with without_memory(rank, axes.num_ranks):
        made = stand_in(model, given=laid_out.given)
        names = sharded_names(made, laid_out.sharded)
        ranks = axes.ranks_along(axes.tensor, rank)

        num_shards, index = axes.size(axes.data), axes.index_along(axes.data, rank)

        def then(laid: nn.Module, live: LiveBytes) -> None:
            recompute(laid, laid_out.recomputed)
            if axes.data is not None:
                shard_counted(laid, names, num_shards, index, live)

        tally = dry_run(
            made,
            fake_inputs(inputs),
            Mesh((len(ranks),), ranks=ranks),
            dict(laid_out.styles),
            laid_out.heads,
            replicates_plain=laid_out.replicates_plain,
            train=train,
            then=then,
        )
        groups = [] if axes.data is None else groups_of(made, names)
    memory = _memory(axes, rank, tally, groups, train=train, optimizer_tensors=optimizer_tensors)
    return _DryStep(tally, made, groups, memory, update)


def _in_turns(computing: Sequence[Computing], turns: float) -> Computing:
    """Seconds of the first of some ranks of which `turns` share a core, where the others do as much as these."""
    shared = (turns * sum(each) / len(computing) for each in zip(*computing, strict=True))
    return Computing(*map(max, computing[0], shared))


def _step_cost(
    prices: Prices, rank: int, own: _DryStep, movements: Counter[Movement], computing: Computing
) -> StepCost:
    def total(axis: Axis, phase: Phase) -> Traffic:
        chosen = {it: number for it, number in movements.items() if (it.axis, it.phase) == (axis, phase)}
        return prices.total(chosen, rank)

    seconds = dict(zip(_PHASES, computing, strict=False))
    tensor, data = ({phase: total(axis, phase) for phase in _PHASES} for axis in _AXES)
    # All groups but the first are gathered, and reduced, while another one computes.
    # A link that keeps the rank's processor busy hides as much less.
    others = (1 - 1 / max(1, len(own.groups))) * (1 - prices.data_link.busy_share)
    hidden = {phase: min(found.seconds * others, seconds[phase]) for phase, found in data.items()}
    moving_s = tensor["forward"].seconds + data["forward"].seconds - hidden["forward"]
    return StepCost(
        tensor_forward=tensor["forward"],
        tensor_backward=tensor["backward"],
        data_forward=data["forward"],
        data_backward=data["backward"],
        forward_flops=own.tally.flops["forward"],
        backward_flops=own.tally.flops["backward"],
        compute_seconds=computing.forward + computing.backward,
        hidden_seconds=sum(hidden.values()),
        memory=own.memory,
        forward_seconds=computing.forward + moving_s,
        optimizer_seconds=computing.optimizer,
        rates=prices.rates_text,
    )


def _memory(
    axes: MeshAxes, rank: int, tally: Tally, groups: Sequence[Group], *, train: bool, optimizer_tensors: int
) -> Memory:
    parameters, trained, gathered = tally.parameter_bytes, tally.trained_bytes, 0
    if groups:
        num_ranks, index = axes.size(axes.data), axes.index_along(axes.data, rank)
        parameters = sharded_bytes(groups, num_ranks, index)
        trained = sharded_bytes([each._replace(members=each.trained) for each in groups], num_ranks, index)
        # Those of the outermost module, and of two of the others: the next is gathered while one computes.
        inner = sorted((each.num_bytes for each in groups if each.name), reverse=True)
        gathered = sum(each.num_bytes for each in groups if not each.name) + sum(inner[:2])
    if not train:
        return Memory(parameters, 0, 0, 0, gathered, parameters + tally.most_bytes)
    optimizer, kept = trained * optimizer_tensors, tally.kept_bytes
    # Adam's root of the second moment and its quotient are temporary, of one parameter at a time.
    largest = largest_shard(groups, axes.size(axes.data), axes.index_along(axes.data, rank)) or tally.largest_bytes
    updated = trained + (2 * largest if optimizer_tensors == _OF_ADAM else 0)
    most = parameters + optimizer + max(tally.most_bytes, updated)
    return Memory(parameters, trained, optimizer, kept, gathered, most)
