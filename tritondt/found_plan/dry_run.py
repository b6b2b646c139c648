"""Dry runs: one step of a laid out model on one rank, without memory and without the other ranks.

The layers, the autograd graph and the operators are those of a real step. So the redistributions that are counted here
are those that a real step asks for.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import ParallelizeError
from tritondt.found_plan.attention_heads import HeadCut, adapt_heads
from tritondt.found_plan.live_bytes import LiveBytes
from tritondt.found_plan.style_choice import StyleChoice
from tritondt.found_plan.work import Work, num_groups, work_of
from tritondt.parallel import parallelize_module
from tritondt.sharding.layout import Layout
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.spec_values import spec_from_text

Phase = Literal["forward", "backward"]
Axis = Literal["tensor", "data"]


class Movement(NamedTuple):
    """A redistribution among some ranks of the mesh: in forward or in backward, its layouts, and the dtype's name.

    On the data axis it is of a group of so many parameters, which are copied from it or to it.
    """

    phase: Phase
    axis: Axis
    ranks: tuple[int, ...]
    source: Layout
    target: Layout
    dtype: str
    num_parameters: int = 0


class LocalCall(NamedTuple):
    """An operator of forward that makes new values, and the shapes of its tensors on this rank."""

    op: str
    shapes: tuple[tuple[int, ...], ...]


@dataclass
class Tally:
    """Counts of one rank's step: redistributions, floating-point operations and the work of each operator; bytes of
    parameters, of those with gradients and of the largest of these, of what is kept for backward, and the most at one
    time of what a step makes.
    """

    movements: Counter[Movement] = field(default_factory=Counter)
    flops: Counter[Phase] = field(default_factory=Counter)
    work: dict[Phase, Counter[Work]] = field(default_factory=lambda: {"forward": Counter(), "backward": Counter()})
    parameter_bytes: int = 0
    trained_bytes: int = 0
    num_trained: int = 0
    largest_bytes: int = 0
    kept_bytes: int = 0
    most_bytes: int = 0
    local_calls: Counter[LocalCall] = field(default_factory=Counter)


class _Counting(TorchDispatchMode):
    """Counts what runs on local tensors, and redistributions."""

    def __init__(self, shares: Mapping[int, float] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tally, self.live, self._shares = Tally(), LiveBytes(), shares or {}
        self.phase: Phase = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        self.live.made(found)
        if func is torch.ops.tritondt.redistribute.default:
            shape = args[4] if len(args) > 4 else None
            source, target = (spec_from_text(text, shape) for text in args[1:3])
            dtype = str(source.dtype).removeprefix("torch.")
            layouts = source.layout, target.layout
            self.tally.movements[Movement(self.phase, "tensor", source.mesh.ranks, *layouts, dtype)] += 1
        elif not func.is_view and func.namespace == "aten":
            work = work_of(func, args, kwargs, found)
            share = self._shares.get(num_groups(func, args, kwargs), 1)
            work = work._replace(flops=round(work.flops * share))
            self.tally.flops[self.phase] += work.flops
            self.tally.work[self.phase][work] += 1
            if self.phase == "forward":
                tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
                self.tally.local_calls[LocalCall(str(func), tuple(tuple(each.shape) for each in tensors))] += 1
        return found


def counted(run: Callable[[], Any]) -> tuple[Counter[Movement], Any]:
    """Redistributions of a call that begins on whole layouts or parts, and its result."""
    counting = _Counting()
    with counting, torch.no_grad():
        result = run()
    return counting.tally.movements, result


def dry_run(
    model: nn.Module,
    inputs: tuple[Sequence[Any], dict[str, Any]],
    mesh: Mesh | None,
    styles: Mapping[str, StyleChoice],
    heads: Sequence[HeadCut],
    *,
    replicates_plain: bool = False,
    train: bool = True,
    then: Callable[[nn.Module, LiveBytes], None] | None = None,
) -> Tally:
    """Tally of one step of the calling rank of a model without memory, laid out in place by `styles`, and by `then`.

    Backward starts from a result of one number, the loss, or else from gradients of all results. Raises what
    parallelize_module and the model raise, and ParallelizeError for results that are not whole.
    """
    if mesh is not None and styles:
        plan = {name: choice.make() for name, choice in styles.items()}
        plain = "replicated" if replicates_plain else "refused"
        parallelize_module(model, mesh, plan, src_data_rank=None, plain_tensors=plain)  # type: ignore[arg-type]
        adapt_heads(model, heads, mesh)
    counting, kept = _Counting(_expert_shares(model)), LiveBytes()
    if then is not None:
        then(model, counting.live)
    if replicates_plain:
        # The first call of an operator on distributed tensors runs it once more, on whole shapes.
        _run_step(model, inputs, _Counting(), train=train)
        model.zero_grad()
        counting.live.restart()
    given = list(model.parameters()), list(model.buffers()), inputs
    counting.live.know(given)
    kept.know(given[0])

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.made(tensor)
        return tensor

    state_bytes = torch.get_rng_state().nbytes

    def keep_for_recomputation(module: nn.Module, args: Any, kwargs: Any) -> None:
        # A checkpoint keeps what it took in, and the generator's state, 5,056 bytes; autograd is told of neither.
        kept.made((args, kwargs))
        kept.hold(state_bytes)
        counting.live.hold(state_bytes)

    for module in model.modules():
        if isinstance(module, CheckpointWrapper):
            module.register_forward_pre_hook(keep_for_recomputation, with_kwargs=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
        _run_step(model, inputs, counting, train=train)
    tally = counting.tally
    tally.kept_bytes, tally.most_bytes = kept.most, counting.live.most
    for parameter in model.parameters():
        num_bytes = local_numel(parameter) * parameter.element_size()
        tally.parameter_bytes += num_bytes
        if parameter.requires_grad:
            tally.trained_bytes += num_bytes
            tally.num_trained += 1
            tally.largest_bytes = max(tally.largest_bytes, num_bytes)
    return tally


def _expert_shares(model: nn.Module) -> dict[int, float]:
    """Share of all experts that a rank has, by their number: of rows that choose experts alike it multiplies as many.

    All rows are taken in, and shapes do not say which of them are for other ranks' experts.
    """
    found: dict[int, float] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if isinstance(parameter, DTensor) and parameter.ndim == 3 and parameter._spec.placements[0].is_shard(0):
                own, number = local_shape(parameter)[0], parameter.shape[0]
                found[own] = own / number
    return found


def _run_step(
    model: nn.Module, inputs: tuple[Sequence[Any], dict[str, Any]], counting: _Counting, *, train: bool
) -> None:
    args, kwargs = inputs
    with counting, torch.set_grad_enabled(train):
        results = model(*args, **kwargs)
        if any(isinstance(result, DTensor) for result in tree_leaves(results)):
            raise ParallelizeError(f"{type(model).__name__} would give distributed tensors in place of whole ones")
        counting.phase = "backward"
        if train:
            start_backward(results)


def start_backward(results: Any) -> None:
    """Backward from those results of a model that are one number, the loss, or else from gradients of all."""
    trained = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    trained = [result for result in trained if not result.ndim] or trained
    if trained:
        torch.autograd.backward(trained, [torch.ones_like(result) for result in trained])


def local_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of the part of a tensor that the calling rank has."""
    return tensor._spec.local_shape if isinstance(tensor, DTensor) else tuple(tensor.shape)


def local_numel(tensor: torch.Tensor) -> int:
    """Number of elements that the calling rank has of a tensor."""
    return prod(local_shape(tensor))
