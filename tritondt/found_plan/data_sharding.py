"""Parameters sharded over the data axis: the groups that fully_shard gathers, and the exchanges of a step."""

from collections import Counter
from collections.abc import Sequence, Set
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tritondt.found_plan.attention_heads import matches
from tritondt.found_plan.dry_run import Movement, local_numel, local_shape
from tritondt.found_plan.live_bytes import LiveBytes
from tritondt.found_plan.repeated_blocks import RepeatedBlocks
from tritondt.fsdp.flat import aligned_length
from tritondt.fsdp.flat_layout import FlatLayout, Member
from tritondt.fsdp.state import ShardedState
from tritondt.parallel.forward_pass import APART
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard


class Group(NamedTuple):
    """Parameters of one dtype that are gathered together, as a rank computes with them, by the name of their module.

    `trained` are those with gradients. The outermost module's stay whole between forward and backward.
    """

    name: str
    dtype: torch.dtype
    members: tuple[Member, ...]
    trained: tuple[Member, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole parameters."""
        return sum(prod(member.shape) for member in self.members) * self.dtype.itemsize


def groups_of(model: nn.Module, names: Sequence[str]) -> list[Group]:
    """Groups of a laid out model whose modules `names` are sharded one by one, and then the model."""
    found, taken = [], set[int]()
    for name in (*names, ""):
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in model.get_submodule(name).parameters():
            if id(parameter) not in taken:
                taken.add(id(parameter))
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for dtype, parameters in by_dtype.items():
            members, trained = (
                tuple(Member(local_shape(each), 0) for each in chosen)
                for chosen in (parameters, [each for each in parameters if each.requires_grad])
            )
            found.append(Group(name, dtype, members, trained))
    return found


def sharded_bytes(groups: Sequence[Group], num_ranks: int, index: int) -> int:
    """Bytes of the shards that one rank of the data axis holds."""
    return sum(FlatLayout(each.members, num_ranks).lengths[index] * each.dtype.itemsize for each in groups)


def largest_shard(groups: Sequence[Group], num_ranks: int, index: int) -> int:
    """Bytes of the largest shard of a parameter with gradients that a rank holds; 0 for no groups."""
    shards = (
        prod(member.shard_shape(num_ranks, index)) * each.dtype.itemsize for each in groups for member in each.trained
    )
    return max(shards, default=0)


def data_movements(
    groups: Sequence[Group], ranks: tuple[int, ...], num_replicas: int = 1, *, train: bool
) -> Counter[Movement]:
    """Exchanges of a step over the data axes: parameters gathered in forward and in backward, gradients averaged.

    `ranks` are those of all replicas, of which each has the shards of all parameters.
    """
    found: Counter[Movement] = Counter()
    num_shards = len(ranks) // num_replicas
    shape = (num_shards,) if num_replicas == 1 else (num_replicas, num_shards)

    def layout(flat: FlatLayout, placement: Placement, of_replicas: Placement) -> Layout:
        return Layout(shape, (of_replicas, placement)[-len(shape) :], (flat.numel,))

    def shards_of(flat: FlatLayout) -> Layout:
        return layout(flat, Shard(0, sizes=flat.lengths), Replicate())

    for group in groups:
        dtype, flat = str(group.dtype).removeprefix("torch."), FlatLayout(group.members, num_shards)
        if flat.numel:
            shards, whole = shards_of(flat), layout(flat, Replicate(), Replicate())
            gather = Movement("forward", "data", ranks, shards, whole, dtype, len(group.members))
            found[gather] += 1
            if train and group.name:
                found[gather._replace(phase="backward")] += 1
        if train and group.trained:
            flat = FlatLayout(group.trained, num_shards, len(group.trained))
            terms = layout(flat, Partial("avg"), Partial("avg"))
            found[Movement("backward", "data", ranks, terms, shards_of(flat), dtype, len(group.trained))] += 1
    return found


def sharded_patterns(model: nn.Module, blocks: RepeatedBlocks, called_once: Set[str]) -> tuple[str, ...]:
    """Patterns of the modules that are sharded one by one: the repeated blocks that have parameters.

    Blocks that a step does not call exactly once stay in the group of the model: each call would gather them again, and
    without a call nothing would.
    """
    modules = {name: model.get_submodule(name) for name in blocks.names()}
    num_names = Counter(map(id, modules.values()))
    kept = {
        name: blocks.pattern(name)
        for name, module in modules.items()
        if name in called_once and num_names[id(module)] == 1 and next(module.parameters(), None) is not None
    }
    others = {blocks.pattern(name) for name in modules.keys() - kept.keys()}
    return tuple(dict.fromkeys(name if pattern in others else pattern for name, pattern in kept.items()))


def sharded_names(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Names of the modules that patterns name, in the patterns' order."""
    names = [name for name, _ in model.named_modules() if name]
    return [name for pattern in patterns for name in names if matches(name, pattern)]


def shard_counted(model: nn.Module, names: Sequence[str], num_ranks: int, index: int, live: LiveBytes) -> None:
    """Gives a model the hooks of fully_shard on the modules `names` and on the model, which count in place of moving.

    The order in which parameters are gathered and freed, and gradients reduced, is that of a real step. Bytes are those
    of the rank `index` on a data axis of so many ranks. Modules sum terms of gradients each by itself, as sharded ones.
    """
    taken, states = set[int](), list[ShardedState]()
    held = set[int]()
    for name in (*names, ""):
        module = model.get_submodule(name)
        own = [each for each in module.modules() if id(each) not in taken]
        taken.update(map(id, own))
        parameters = [found for each in own for found in each._parameters.values() if found is not None]
        chosen = list({id(found): found for found in parameters if id(found) not in held}.values())
        held.update(map(id, chosen))
        for each in own:
            if each._parameters:
                each.__dict__[APART] = True
        counted: Any = _CountedGroup(chosen, num_ranks, index, live) if chosen else None
        states.append(ShardedState([module], own, counted, MixedPrecisionPolicy(), None))
    root = states[-1]
    for state in states[:-1]:
        root.tree.take_over(state.tree)
    # The order of the pass before, by which what comes next is gathered ahead.
    for state in (root, *states[:-1]):
        root.tree.enter(state)
    for state in (root, *states[:-1]):
        root.tree.leave(state)


class _CountedGroup:
    """Parameters of one call of fully_shard, as its hooks see them: what they gather, free and reduce is counted."""

    def __init__(self, parameters: Sequence[nn.Parameter], num_ranks: int, index: int, live: LiveBytes) -> None:
        self.parameters, self._live = list(parameters), live
        self.is_whole = self._is_under_way = False
        self._gathered_bytes = self._whole_bytes = self._packed_bytes = self._reduced_bytes = 0
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for dtype, found in by_dtype.items():
            trained = [Member(local_shape(each), 0) for each in found if each.requires_grad]
            flat = FlatLayout(trained, num_ranks, len(trained))
            self._packed_bytes += flat.numel * dtype.itemsize
            self._reduced_bytes += flat.lengths[index] * dtype.itemsize
            self._gathered_bytes += sum(map(local_numel, found)) * dtype.itemsize
            self._whole_bytes += sum(map(aligned_length, map(local_shape, found))) * dtype.itemsize

    def issue_gather(self) -> None:
        """Counts what the exchange gives, unless it is here or under way."""
        if not self.is_whole and not self._is_under_way:
            self._is_under_way = True
            self._live.hold(self._gathered_bytes)

    def wait(self) -> None:
        """Counts the whole parameters in place of what was gathered, which is copied to them."""
        if self._is_under_way:
            self._is_under_way, self.is_whole = False, True
            self._live.hold(self._whole_bytes)
            self._live.release(self._gathered_bytes)

    def free(self, num_keepers: int = 0) -> None:
        """Counts the whole parameters no longer."""
        if self._is_under_way:
            self._is_under_way = False
            self._live.release(self._gathered_bytes)
        if self.is_whole:
            self.is_whole = False
            self._live.release(self._whole_bytes)

    def register(self, *, whole: bool) -> None:
        """The parameters stay where they are: they have no memory."""

    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient that was not reduced."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def issue_reduction(self, policy: object) -> None:
        """Counts the gradients that are packed and reduced, in place of those of the whole parameters."""
        self._live.hold(self._packed_bytes)
        for parameter in self.parameters:
            parameter.grad = None
        self._live.hold(self._reduced_bytes)
        self._live.release(self._packed_bytes)

    def finish_reductions(self) -> None:
        """The reduced gradients stay."""
