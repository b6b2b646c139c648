"""Execution of the plan that takes a local tensor from one spec to another.

A pair of specs and the strides of the local tensor are compiled once (`compile.py`). Each call is then one look-up, one
allocation per step and the step itself.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import profiler

from tritondt import events
from tritondt.comm.work import Work
from tritondt.errors import LocalTensorError, MeshError, PeerError, TransportError, check_not_of_torch
from tritondt.events import subscribers
from tritondt.kernels.memory import allocate, has_memory
from tritondt.redistribution.compile import compile_plan
from tritondt.redistribution.compiled_step import CompiledPlan, CompiledStep
from tritondt.redistribution.in_graphs import call_in_graph
from tritondt.redistribution.refusals import refuse_redistribution, refuse_rest
from tritondt.sharding.placement import placements_text
from tritondt.sharding.spec import DTensorSpec, check_strided
from tritondt.sharding.spec_values import open_shape, spec_text

# Name of a redistribution's range in torch.profiler, while one is on; its argument says from where to where.
REDISTRIBUTE_RANGE = "tritondt::redistribute"


def redistribute_local(
    local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, wire_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Local tensor under `target` of the tensor that has `local` as its part under `source`; not differentiable.

    A new tensor unless nothing changes. A rank outside the target's mesh gets an empty tensor. `wire_dtype` is what
    messages hold, as `comm.packing.wire_dtype.narrower` gives it. Raises MeshError and LayoutError on all ranks alike;
    LocalTensorError and TransportError on the rank whose tensor is at fault, and PeerError on the others.
    """
    # What `_check_or_refuse` asks of a plain tensor, without its calls: others of the machine's ranks push the code of
    # each out of the caches between two exchanges.
    if (
        type(local) is not torch.Tensor
        or _num_modes()
        or local.shape != source.local_shape
        or local.dtype is not source.tensor_meta.dtype
        or local.layout is not torch.strided
        or not (local.is_cpu if source.mesh.device_type == "cpu" else _is_on(local, source.mesh.device_type))
        or not local.data_ptr()
    ):
        _check_or_refuse(local, source, target)
    if source is target:
        return local
    if source.coordinate is None and target.coordinate is None:
        return local.new_empty((0,))
    if type(local) is not torch.Tensor and not has_memory(local):
        _check_one_mesh(source, target)
        # The operator is defined where graphs are known (dtensor/graph_ops.py).
        redistribute = torch.ops.tritondt.redistribute
        # Of two specs of one shape, one may be open: a length that the graph has fixed meanwhile is known in the other.
        shape = open_shape(source) or open_shape(target)
        return call_in_graph(redistribute, local, spec_text(source), spec_text(target), wire_dtype, shape)
    if local.is_conj() or local.is_neg():
        local = with_memory(local)
    plan = compile_plan(source, target, local.stride(), local.device, wire_dtype)
    if profiler._is_profiler_enabled:
        with profiler.record_function(REDISTRIBUTE_RANGE, plan.description):
            return _run_plan(plan, local)
    steps = plan.steps
    if len(steps) != 1:
        return _run_plan(plan, local)
    if subscribers:
        return _observed_step(steps[0], local, local)[0]
    step, transfer, communicator, _, shape, piece, fill = steps[0]
    if communicator is None or transfer is None or piece is not None or fill is not None or step.kind == "gather":
        return run_step(steps[0], local, local)[0]
    result = allocate(shape, local.dtype, local.device)
    communicator.exchange([local], [result], transfer)
    return result


def _run_plan(plan: CompiledPlan, local: torch.Tensor) -> torch.Tensor:
    steps, communicator, _, description = plan
    if len(steps) == 1 or communicator is None:
        return _run_steps(steps, local)
    result: list[torch.Tensor] = []
    communicator.in_order(lambda: result.append(_run_steps(steps, local)), description)
    return result[0]


def redistribute_local_async(
    local: torch.Tensor,
    source: DTensorSpec,
    target: DTensorSpec,
    before: Work | None = None,
    wire_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, Work | None]:
    """Tensor that will hold the result of a redistribution, and the Work to wait for; None where the result is there.

    `local` is read until then. `before` is the Work that fills it, which is waited for at once where other ranks had a
    part in that Work than in this redistribution. A redistribution that needs no peer is done at once.
    """
    # As in `redistribute_local`.
    if (
        type(local) is not torch.Tensor
        or _num_modes()
        or local.shape != source.local_shape
        or local.dtype is not source.tensor_meta.dtype
        or local.layout is not torch.strided
        or not (local.is_cpu if source.mesh.device_type == "cpu" else _is_on(local, source.mesh.device_type))
        or not local.data_ptr()
    ):
        _check_or_refuse(local, source, target)
    is_outside = source.coordinate is None and target.coordinate is None
    if source is target or is_outside or type(local) is not torch.Tensor:
        if before is not None:
            before.wait()
        return redistribute_local(local, source, target, wire_dtype), None
    held = with_memory(local) if local.is_conj() or local.is_neg() else local
    steps, communicator, last, description = compile_plan(source, target, held.stride(), held.device, wire_dtype)
    if before is not None and (communicator is None or not communicator.has_issued(before)):
        before.wait()
        before = None
    if communicator is None:
        return _run_steps(steps, held), None
    whole = allocate(steps[last].target_shape, held.dtype, held.device)
    if subscribers:
        emit_issued(steps)
    step, transfer, carrying, _, _, piece, fill = steps[0]
    if (
        len(steps) != 1
        or transfer is None
        or carrying is None
        or piece is not None
        or fill is not None
        or step.kind == "gather"
    ):
        run = partial(run_into, steps, held, whole, last)
    else:
        run = partial(carrying.exchange, (held,), (whole,), transfer)
    if profiler._is_profiler_enabled:
        with profiler.record_function(REDISTRIBUTE_RANGE, description):
            return whole, communicator.issue(run, description, (held,), sources_ready=before is None)
    return whole, communicator.issue(run, description, (held,), sources_ready=before is None)


def run_into(steps: Sequence[CompiledStep], held: torch.Tensor, whole: torch.Tensor, last: int) -> None:
    """Runs steps on `held`; step `last` writes the result to `whole`."""
    current = around = held
    for place, step in enumerate(steps):
        try:
            current, around = run_step(step, current, around, whole if place == last else None)
        except PeerError as error:
            refuse_rest(steps[place + 1 :], error)
            raise


def _check_or_refuse(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> None:
    if _num_modes():
        _check_is_traced(local, source, target)
    try:
        check_local(local, source)
    except (LocalTensorError, TransportError) as error:
        refuse_redistribution(source, target, error)
        raise


_num_modes = torch._C._len_torch_dispatch_stack


def _check_is_traced(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> None:
    """Refuses what a trace by make_fx would lose: it sees tensors that it was given, and no messages.

    The graph would hold what was received while it was traced, as a constant.
    """
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None or source is target or isinstance(local, FunctionalTensor):
        return
    if has_memory(local) or local not in mode.tracer.tensor_tracker:
        raise TransportError(
            f"a redistribution of {source} to {placements_text(target.placements)} cannot be traced by make_fx "
            f"{'with real tensors' if has_memory(local) else 'for a distributed argument'}: trace a function of local "
            "tensors, with DTensor.from_local inside and tracing_mode='fake'; or use torch.compile"
        )


def _check_one_mesh(source: DTensorSpec, target: DTensorSpec) -> None:
    """Refuses a redistribution between two meshes in a graph that torch traces."""
    if source.mesh is not target.mesh:
        raise MeshError(
            f"a redistribution of {source} from {source.mesh} to {target.mesh} was asked for in a graph that torch "
            "traces; a graph redistributes on one mesh only: go from mesh to mesh outside of torch.compile"
        )


def with_memory(local: torch.Tensor) -> torch.Tensor:
    """Local tensor whose memory holds its values, without lazy conjugation or negation."""
    return local.resolve_conj().resolve_neg() if local.is_conj() or local.is_neg() else local


def _run_steps(steps: Sequence[CompiledStep], local: torch.Tensor) -> torch.Tensor:
    whole = current = local
    run = _observed_step if subscribers else run_step
    for place, step in enumerate(steps):
        try:
            current, whole = run(step, current, whole)
        except PeerError as error:
            refuse_rest(steps[place + 1 :], error)
            raise
    return current


def check_local(local: torch.Tensor, spec: DTensorSpec) -> None:
    """Raises LocalTensorError or TransportError for a tensor that is not this rank's part under `spec`."""
    if local.layout is not torch.strided or local.is_nested:
        check_strided(f"redistribution of {spec}", local)
    if local.shape != spec.local_shape or local.dtype is not spec.tensor_meta.dtype:  # a property is a call
        raise LocalTensorError(
            f"{spec} gives rank {spec.mesh.identity.rank} at coordinate {spec.coordinate} a local tensor of shape "
            f"{spec.local_shape} and {spec.dtype}; found shape {tuple(local.shape)} and {local.dtype}"
        )
    if not _is_on(local, spec.mesh.device_type):
        raise TransportError(f"{spec.mesh} takes local tensors on {spec.mesh.device_type}, got one on {local.device}")
    if type(local) is not torch.Tensor or not local.data_ptr():
        check_address(local, spec)


def _is_on(local: torch.Tensor, device_type: str) -> bool:
    """Whether a tensor is on a device of a type; torch makes an object and a string of `device.type`, in 0.3 us."""
    if device_type == "cpu":
        return local.is_cpu
    return local.is_cuda if device_type == "cuda" else local.device.type == device_type


def check_memory(local: torch.Tensor, taker: str) -> None:
    """Raises LocalTensorError for a tensor that a table of copies could not read, of which `taker` was given."""
    if local.layout is not torch.strided or local.is_nested:
        check_strided(taker, local)
    if has_memory(local) and local.numel() and not local.data_ptr():
        check_not_of_torch(local, taker)
        raise LocalTensorError(
            f"{taker} got a tensor of {tuple(local.shape)} {local.dtype} at address 0, whose storage is empty, as "
            "after resize_(0); allowed is one that holds its values"
        )


def check_address(local: torch.Tensor, spec: DTensorSpec) -> None:
    """Raises LocalTensorError where a tensor has elements and no address to read them from."""
    # A plain tensor has memory: asked for here, as a call takes longer than the answer.
    if local.numel() and (type(local) is torch.Tensor or has_memory(local)) and not local.data_ptr():
        check_not_of_torch(local, str(spec))
        is_plain = type(local) in (torch.Tensor, torch.nn.Parameter)
        why = "whose storage is empty, as after resize_(0)" if is_plain else f"a {type(local).__name__}, without memory"
        raise LocalTensorError(
            f"{spec} takes a local tensor with memory on rank {spec.mesh.identity.rank}; found one of "
            f"{tuple(local.shape)} {local.dtype} at address 0, {why}; allowed is a plain tensor that holds its values: "
            "x.to_local() of a distributed one"
        )


def run_step(
    compiled: CompiledStep, current: torch.Tensor, whole: torch.Tensor, into: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a step on `current`; `whole` is the tensor around flat pieces, and `current` itself otherwise.

    The result is written to `into` where that is given.
    """
    step, transfer, communicator, keep, _, _, _ = compiled
    if step.kind == "gather":
        assert communicator is not None, f"{step} needs a communicator"
        assert transfer is not None, f"{step} needs a transfer"
        communicator.exchange([current], [whole.view(-1)], transfer)
        return whole, whole
    target, whole = target_of(compiled, current, into)
    if transfer is None:
        factor, divisor = step.scale
        torch.mul(current, factor, out=whole)
        return (whole if divisor == 1 else whole.div_(divisor)), whole
    if communicator is not None:
        communicator.exchange([current], [target], transfer)
    elif keep is not None:
        keep.run([current.data_ptr()], [target.data_ptr()], torch.get_num_threads())
    return target, whole


def target_of(
    compiled: CompiledStep, current: torch.Tensor, into: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensor that a step other than a gather writes, and the tensor around it: `into`, or a new one."""
    whole = allocate(compiled.target_shape, current.dtype, current.device) if into is None else into
    if compiled.fill is not None:
        whole.fill_(compiled.fill)
    piece = compiled.piece
    return (whole if piece is None else whole.view(-1)[piece[0] : piece[1]]), whole


def _observed_step(
    runnable: CompiledStep, current: torch.Tensor, whole: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a step and emits what it moved and how long it took."""
    communicator, step, moved = runnable.communicator, runnable.step, None
    started = time.perf_counter()
    result = run_step(runnable, current, whole)
    seconds = time.perf_counter() - started
    if communicator is not None and runnable.transfer is not None:
        # Not what the communicator has counted meanwhile: issued steps run beside this one, and have been told of.
        moved = communicator.traffic_of(runnable.transfer)
    events.emit_step(step.kind, str(step.source), str(step.target), step.target_layout.shape, moved, seconds=seconds)
    return result


def emit_issued(steps: Sequence[CompiledStep]) -> None:
    """Emits what issued steps will move; how long they take is not known yet, and given as 0."""
    for runnable in steps:
        step, moved = runnable.step, None
        if runnable.transfer is not None and runnable.communicator is not None:
            moved = runnable.communicator.traffic_of(runnable.transfer)
        events.emit_step(step.kind, str(step.source), str(step.target), step.target_layout.shape, moved)
