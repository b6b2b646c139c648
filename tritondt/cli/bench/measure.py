"""Work of every rank: makes each case on both sides, checks it, counts its bytes, then times it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh

import tritondt as T
from tritondt.cli.bench import SLOWEST_RANK, WARM_UP_ROUNDS, own_pack
from tritondt.cli.bench.breakdown import Breakdown, measured_peak, parts_of
from tritondt.cli.bench.cases import Case
from tritondt.cli.bench.collective import engine
from tritondt.cli.bench.collective.sides import NotOfferedError, told_errors
from tritondt.cli.bench.harness import Run, Times, synchronized, time_interleaved
from tritondt.cli.bench.inputs import DTYPES, source_part, target_part
from tritondt.cli.bench.loopback import Loopback, count_loopback
from tritondt.cli.bench.minimum import fewest_elements, most_received
from tritondt.cli.user_error import BenchmarkError
from tritondt.comm.objects import gather_objects
from tritondt.events import StepRan, subscribe
from tritondt.interop.torch_specs import torch_placements

# Below this the headers of a message weigh too much for the loopback interface's count to say anything.
_LOOPBACK_BYTES = 1_000_000

# Names of implementations; any other is that of a pack kernel, MODULE:FUNCTION. Ranks start on Gloo, so that "gloo" is
# what "torch" is on the CPU.
TRITONDT, TORCH, SHARED_MEMORY = "tritondt", "torch", "shared-memory"
OF_TORCH = (TORCH, "gloo")


@dataclass(frozen=True)
class Request:
    """Cases, and the implementations beside tritondt; every rank is given the same request."""

    cases: tuple[Case, ...]
    dtype: str
    others: tuple[str, ...]
    rounds: int
    case_s: float
    num_threads: int
    loopback: bool
    warm_up_rounds: int = WARM_UP_ROUNDS
    num_checks: int = 1
    average: int = SLOWEST_RANK
    breaks_down: bool = False
    device: str = "cpu"


@dataclass(frozen=True)
class Counts:
    """Bytes and messages of one redistribution on one rank."""

    sent_bytes: int
    received_bytes: int
    num_sent: int
    num_received: int


@dataclass(frozen=True)
class Ratio:
    """Times of tritondt in units of another's, by medians and by fastest rounds."""

    median: float
    fastest: float


@dataclass(frozen=True)
class Measured:
    """Measurements of one case, of tritondt and, in `others` by name, of what took turns with it.

    `minimum_bytes` cannot be undercut, `counts` are those of all ranks in order.

    `received_over_limit` is the most that any rank received, in units of what a sum in pieces allows it:
    None where nothing is reduced, or every box has one holder and the minimum itself is the measure. Without a check
    there is no ratio: a wrong result may be fast.
    """

    case: Case
    itemsize: int
    ours: Times
    others: Mapping[str, Times]
    counts: tuple[Counts, ...]
    minimum_bytes: int
    received_over_limit: float | None
    loopback: Loopback | None
    is_checked: bool = True
    breakdown: Breakdown | None = None

    @property
    def busiest_bytes(self) -> int:
        """Bytes that the busiest rank sends, or receives where those are more."""
        return max(max(found.sent_bytes, found.received_bytes) for found in self.counts)

    @property
    def sent_bytes(self) -> int:
        """Bytes that the transport sent, all ranks together."""
        return sum(found.sent_bytes for found in self.counts)

    @property
    def num_messages(self) -> int:
        """Messages that the transport sent, all ranks together."""
        return sum(found.num_sent for found in self.counts)

    @property
    def ratios(self) -> dict[str, Ratio]:
        """Our times in units of each other's; none without a check."""
        if not self.is_checked:
            return {}
        return {
            name: Ratio(self.ours.median / theirs.median, self.ours.fastest / theirs.fastest)
            for name, theirs in self.others.items()
        }


def measure_on_rank(send: Callable[[object], None], request: Request) -> None:
    """Measures every case and passes it to `send` on rank 0; a collective call of all ranks.

    Raises BenchmarkError where explain does not foretell what ran, AssertionError for a wrong result.
    """
    torch.set_num_threads(request.num_threads)
    meshes: dict[tuple[int, ...], DeviceMesh | T.Mesh] = {}
    if request.device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    peak_bytes_per_s = measured_peak(request.rounds, request.case_s) if request.breaks_down else None
    for case in request.cases:
        if case.mesh_shape not in meshes:
            # Nothing of torch's own is timed on GPUs, and so no process groups are made.
            meshes[case.mesh_shape] = (
                T.init_device_mesh("cpu", case.mesh_shape)
                if request.device == "cpu"
                else T.Mesh(case.mesh_shape, device_type=request.device)
            )
        with torch.no_grad(), _quiet_torch(), told_errors(request.others, case):
            found = _measure(case, meshes[case.mesh_shape], request, peak_bytes_per_s)
        if dist.get_rank() == 0:
            send(found)


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Keeps DTensor's advice about its own speed out of the report."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


def _measure(case: Case, mesh: DeviceMesh | T.Mesh, request: Request, peak_bytes_per_s: float | None) -> Measured:
    dtype = DTYPES[request.dtype]
    meta = T.TensorMeta.contiguous(case.shape, dtype)
    source = T.DTensorSpec(mesh, case.pair.source, meta)
    target = T.DTensorSpec(mesh, case.pair.target, meta)
    assert source.coordinate is not None, "every rank is on the mesh"
    local = source_part(case, dtype, source.coordinate).to(request.device)

    def ours() -> torch.Tensor:
        return T.redistribute(local, source, target)

    runs = {TRITONDT: ours} | {name: _bind(name, local, source, target, (case, mesh)) for name in request.others}
    if request.device == "cuda":
        runs = {name: synchronized(run) for name, run in runs.items()}
    for _ in range(request.num_checks):
        _check_results(case, runs, target_part(case, dtype, source.coordinate).to(request.device))
    counts = _checked_counts(ours, source, target)
    loopback = None
    moves = any(found.num_sent for found in counts)
    if request.loopback and moves and case.numel * dtype.itemsize >= _LOOPBACK_BYTES:
        loopback = count_loopback(ours)
    parts = parts_of(local, source, target) if peak_bytes_per_s is not None and moves else ()
    busiest_bytes = max(max(found.sent_bytes, found.received_bytes) for found in counts)
    timed = [*runs.values(), *parts]
    times = time_interleaved(timed, request.rounds, request.case_s, request.warm_up_rounds, request.average)
    return Measured(
        case=case,
        itemsize=dtype.itemsize,
        ours=times[0],
        others=dict(zip(request.others, times[1:], strict=False)),
        counts=counts,
        minimum_bytes=fewest_elements(case.source, case.target) * dtype.itemsize,
        received_over_limit=_received_over_limit(case, counts, dtype.itemsize),
        loopback=loopback,
        is_checked=request.num_checks > 0,
        breakdown=None
        if not parts or peak_bytes_per_s is None
        else Breakdown(times[-2], times[-1], times[0], peak_bytes_per_s, busiest_bytes),
    )


def _bind(
    name: str, local: torch.Tensor, source: T.DTensorSpec, target: T.DTensorSpec, of: tuple[Case, DeviceMesh | T.Mesh]
) -> Callable[[], torch.Tensor]:
    """Redistribution by another implementation, of a case on a mesh; a collective call."""
    case, mesh = of
    if name in OF_TORCH:
        assert isinstance(mesh, DeviceMesh), "torch is timed on the CPU"
        return _torch_run(local, mesh, case)
    if name != SHARED_MEMORY:
        return own_pack.bind(name, local, source, target)
    try:
        return engine.redistribution(local, source, target)
    except NotOfferedError as refusal:
        raise BenchmarkError(f"{SHARED_MEMORY} cannot be timed: {refusal}") from refusal


def _torch_run(local: torch.Tensor, mesh: DeviceMesh, case: Case) -> Callable[[], torch.Tensor]:
    """Redistribution of the case by torch.distributed.tensor, its DTensor made beforehand."""
    before, after = torch_placements(case.source), torch_placements(case.target)
    stride = torch.empty(case.shape, device="meta").stride()
    tensor = torch_tensor.DTensor.from_local(
        local, mesh, before, run_check=False, shape=torch.Size(case.shape), stride=stride
    )

    def theirs() -> torch.Tensor:
        result: torch.Tensor = tensor.redistribute(mesh, after).to_local()
        return result

    return theirs


def _check_results(case: Case, runs: Mapping[str, Callable[[], torch.Tensor]], expected: torch.Tensor) -> None:
    for name, run in runs.items():
        found = run()
        # DTensor may hand out a tensor that is still to come; its time would not be in the measurement.
        assert type(found) is torch.Tensor, f"{name} returned a {type(found).__name__} of {case}"
        said = partial(_wrong_text, name, case)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=said)


def _wrong_text(name: str, case: Case, text: str) -> str:
    return f"{name} moved {case} wrongly: {text}"


def _checked_counts(run: Run, source: T.DTensorSpec, target: T.DTensorSpec) -> tuple[Counts, ...]:
    """Counts of one run on every rank, as the transport counts them and as explain foretells them."""
    steps: list[StepRan] = []
    unsubscribe = subscribe(steps.append)
    try:
        run()
    finally:
        unsubscribe()
    counted = Counts(
        sum(step.sent_bytes for step in steps),
        sum(step.received_bytes for step in steps),
        sum(step.num_sent for step in steps),
        sum(step.num_received for step in steps),
    )
    explained = T.explain(source, target)
    foretold = Counts(
        explained.sent_bytes,
        explained.received_bytes,
        explained.messages,
        sum(step.num_received for step in explained.steps),
    )
    pairs = gather_objects((counted, foretold))
    for rank, (ran, said) in enumerate(pairs):
        if ran != said:
            raise BenchmarkError(
                f"explain({source}, {target}) foretells {said} on rank {rank}, but the transport "
                f"counted {ran}; they must be equal"
            )
    return tuple(ran for ran, _ in pairs)


def _received_over_limit(case: Case, counts: tuple[Counts, ...], itemsize: int) -> float | None:
    source, target = case.source, case.target
    if not source.axes_where(T.Partial) or not target.axes_where(T.Replicate):
        return None
    limits = [most_received(source, target, coordinate) * itemsize for coordinate in source.coordinates()]
    return max(found.received_bytes / max(limit, 1) for found, limit in zip(counts, limits, strict=True))
