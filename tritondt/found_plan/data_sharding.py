"""Parameters sharded over the data axis: the groups that fully_shard gathers, and the exchanges of a step."""

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from tritondt.found_plan.attention_heads import matches
from tritondt.found_plan.dry_run import Movement, local_shape
from tritondt.found_plan.repeated_blocks import RepeatedBlocks
from tritondt.fsdp.flat_layout import FlatLayout, Member
from tritondt.parallel.forward_pass import APART, terms_of
from tritondt.parallel.gradients import Terms, begin_pass, end_pass
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import Partial, Replicate, Shard


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


def data_movements(groups: Sequence[Group], ranks: tuple[int, ...], *, train: bool) -> Counter[Movement]:
    """Exchanges of a step over the data axis: parameters gathered in forward and in backward, gradients averaged."""
    found: Counter[Movement] = Counter()
    for group in groups:
        dtype, flat = str(group.dtype).removeprefix("torch."), FlatLayout(group.members, len(ranks))
        if flat.numel:
            shards, whole = _shards(flat), Layout((len(ranks),), (Replicate(),), (flat.numel,))
            found[Movement("forward", "data", ranks, shards, whole, dtype)] += 1
            if train and group.name:
                found[Movement("backward", "data", ranks, shards, whole, dtype)] += 1
        if train and group.trained:
            flat = FlatLayout(group.trained, len(ranks), len(group.trained))
            terms = Layout((len(ranks),), (Partial("avg"),), (flat.numel,))
            found[Movement("backward", "data", ranks, terms, _shards(flat), dtype)] += 1
    return found


def _shards(flat: FlatLayout) -> Layout:
    return Layout((flat.num_ranks,), (Shard(0, sizes=flat.lengths),), (flat.numel,))


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


def sum_apart(model: nn.Module, names: Sequence[str]) -> None:
    """Lets modules that are sharded one by one sum terms of gradients each by itself, as those of fully_shard do."""
    taken = set[int]()
    for name in (*names, ""):
        module = model.get_submodule(name)
        own = [each for each in module.modules() if id(each) not in taken]
        taken.update(map(id, own))
        for each in own:
            if each._parameters:
                each.__dict__[APART] = True
        _Pass(own).install(module)


class _Pass:
    """Hooks around the forward of a sharded module, by which its modules have a pass of their own."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules

    def _terms(self) -> Iterator[Terms]:
        for module in self._modules:
            yield from terms_of(module)

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda *_: begin_pass(self, self._terms, is_apart=True), prepend=True)
        module.register_forward_hook(lambda *_: end_pass(self))
