"""The command `bench calibrate`: prices of links, collectives, launches, copies and matmuls, for TRITONDT_COSTS."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import tritondt as T
from tritondt.cli import ranks as joined_ranks
from tritondt.cli.bench.json_result import is_printed, write_json
from tritondt.cli.launch import num_cores
from tritondt.cli.outputs import is_first
from tritondt.cli.surroundings import surroundings
from tritondt.found_plan import FoundPlan
from tritondt.found_plan.dry_run import dry_run
from tritondt.found_plan.mesh_axes import mesh_axes
from tritondt.found_plan.predict import LaidOut, predicted_step
from tritondt.found_plan.prices import built_in_prices
from tritondt.found_plan.stand_in import fake_inputs, stand_in, without_memory
from tritondt.found_plan.style_choice import style
from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.tables import copy_table
from tritondt.planning.cost import FlopRates

Run = Callable[[], object]
Send = Callable[[object], None]
# Messages of two sizes give a line: what one takes of any size, and what each byte adds.
_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 1 << 24
_COPY_BYTES = 1 << 26
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the name from 2.13 on
_MATMUL = {"cpu": 1024, "cuda": 8192}
# Large messages between ranks that share memory: those of many megabytes measure the memory.
_LARGE_BYTES_ON_HOST = 1 << 22
# Rows and features of a model so small that the number of operators of a training step is all that counts.
_ROWS, _FEATURES, _HIDDEN, _BLOCKS = 4, 16, 64, 4
# Sides of what operators without matmuls take: 1 MB on the CPU, in caches as activations are, and 64 MB on a GPU.
# A sum of two has 3 of them read or written, a GELU and a layer norm 2 each, a sum over rows 1.
_OPERAND_PASSES = 8
_OPERAND = {"cpu": 512, "cuda": 4096}
# Rounds of what computes on the CPU: at least so many, and then for so long at most.
_FEWEST_ROUNDS, _MOST_COMPUTING_S = 3, 0.5
_CUT = ("up", "ColwiseParallel"), ("down", "RowwiseParallel")
_OF_EXCHANGES = ("exchange_s", "group_s", "group_parameter_s")
_DTYPES = tuple(field.name for field in fields(FlopRates))


class Asked(NamedTuple):
    """The measurement that ranks are asked for: type of device, number of rounds, and sizes divided by `shrink`.

    Collectives are measured where plans may have them: on GPUs, by NCCL. `rates` are those of computing.
    """

    device_type: str
    rounds: int
    shrink: int
    num_ranks: int = 2
    collectives: bool = False
    rates: bool = False


class Figures(NamedTuple):
    """Seconds: of a small and a large message each way, a launch, a copy, a matmul, and a small and a large all_gather.

    Then what a large matmul takes more than a small one, in each dtype, a training step of a small model, and
    some operators that read and write memory. Figures that are not measured are 0.
    """

    small_s: float
    large_s: float
    launch_s: float
    copy_s: float
    matmul_s: float
    small_gather_s: float = 0.0
    large_gather_s: float = 0.0
    float64_s: float = 0.0
    float32_s: float = 0.0
    bfloat16_s: float = 0.0
    float16_s: float = 0.0
    step_s: float = 0.0
    operators_s: float = 0.0
    exchange_s: float = 0.0
    group_s: float = 0.0
    group_parameter_s: float = 0.0


def prices_of(found: Figures, asked: Asked) -> dict[str, Any]:
    """Prices in the form of TRITONDT_COSTS.

    The link is that between ranks 0 and 1. A share of processors that a link keeps busy is not measured, nor a first
    connection. A copy is of bytes that are read and written once; a matmul is in bfloat16 on a GPU, on one thread in
    float32 on the CPU. The host's time of an operator is that of a training step of a small model, over the number of
    its operators.

    >>> prices_of(Figures(2e-6, 52e-6, 1e-5, 1e-3, 1e-2), Asked("cuda", 1, 1))["host"]
    {'latency_s': 2e-06, 'bandwidth': 335523840000.0}
    """
    is_host, copied = asked.device_type == "cpu", _COPY_BYTES // asked.shrink
    moved_s = max(found.large_s - found.small_s, 1e-9)
    bandwidth = (_large_bytes(asked) - _SMALL_BYTES) / moved_s
    # On the CPU a message is measured as a whole redistribution, whose launch is no part of the link.
    latency_s = max(found.small_s - found.launch_s, 1e-9) if is_host else found.small_s
    return {
        "host": {"latency_s": latency_s, "bandwidth": round(bandwidth, 3)},
        "copy_bandwidth": round(copied / max(found.copy_s - found.launch_s, 1e-9), 3),
        "flop_rate": round(2 * _side(asked) ** 3 / found.matmul_s, 3),
        "launch_s": found.launch_s,
        **(_collective_prices(found, asked, bandwidth) if asked.collectives else {}),
        **(_rates(found, asked) if found.step_s else {}),
        "is_measured": True,
    }


def _rates(found: Figures, asked: Asked) -> dict[str, Any]:
    """Prices of computing: matmuls by dtype, other operators, and the cores that ranks share."""
    (small_side, large_side), is_host = _sides(asked), asked.device_type == "cpu"
    more = 2 * (large_side**3 - small_side**3)
    by_dtype = {name: round(more / max(getattr(found, f"{name}_s"), 1e-9), 3) for name in _DTYPES}
    operator_s = found.step_s / _num_operators()
    num_bytes = 4 * _OPERAND_PASSES * _OPERAND[asked.device_type] ** 2 // asked.shrink
    return {
        "flop_rates": by_dtype,
        "operator_s": operator_s,
        "operator_bandwidth": round(num_bytes / found.operators_s, 3),
        **(_host_prices(found) if is_host else {}),
    }


def _host_prices(found: Figures) -> dict[str, Any]:
    of_exchanges = {name: getattr(found, name) for name in _OF_EXCHANGES}
    return {**of_exchanges, "cores_per_host": num_cores()}


def _large_bytes(asked: Asked) -> int:
    """Bytes of a large message."""
    return (_LARGE_BYTES_ON_HOST if asked.device_type == "cpu" else _LARGE_BYTES) // asked.shrink


def _sides(asked: Asked) -> tuple[int, int]:
    """Sides of a small and a large matmul, between which the rate of a dtype is measured."""
    return _side(asked) // 8, _side(asked) // 2


def _step_dtype(asked: Asked) -> str:
    return "bfloat16" if asked.device_type == "cuda" else "float32"


class _Block(nn.Module):
    """A norm and two layers, added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_FEATURES)
        self.up, self.down = nn.Linear(_FEATURES, _HIDDEN), nn.Linear(_HIDDEN, _FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (rows, features) in and out."""
        found: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return found


class _Small(nn.Module):
    """Blocks, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number for rows of features."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _num_operators() -> int:
    """Number of operators of a training step of the small model, counted without memory."""
    with without_memory(0, 1):
        tally = dry_run(stand_in(_Small()), fake_inputs(((torch.zeros(_ROWS, _FEATURES),), {})), None, {}, ())
    return sum(each.total() for each in tally.work.values())


def _collective_prices(found: Figures, asked: Asked, bandwidth: float) -> dict[str, float]:
    """Seconds that a collective takes beside a ring's messages, and how much faster than those it moves bytes.

    >>> asked = Asked("cuda", 1, 1, 8, True)
    >>> gathered_s = [5e-6 + 7 * (2e-6 + part / 6e11) for part in (_SMALL_BYTES, _LARGE_BYTES // 8)]
    >>> _collective_prices(Figures(2e-6, 5e-5, 1e-5, 1e-3, 1e-2, *gathered_s), asked, 3e11)
    {'collective_launch_s': 5e-06, 'collective_speedup': 2.0}
    """
    hops, small, large = asked.num_ranks - 1, _SMALL_BYTES, _gathered_bytes(asked)
    byte_s = max(found.large_gather_s - found.small_gather_s, 1e-9) / (hops * (large - small))
    launch_s = found.small_gather_s - hops * (found.small_s + small * byte_s)
    return {
        "collective_launch_s": max(round(launch_s, 9), 0.0),
        "collective_speedup": max(round(1 / (byte_s * bandwidth), 3), 1e-3),
    }


def _gathered_bytes(asked: Asked) -> int:
    """Bytes that each rank gives in a large all_gather, more than in a small one."""
    return max(_LARGE_BYTES // asked.shrink // asked.num_ranks, 2 * _SMALL_BYTES)


def _side(asked: Asked) -> int:
    return max(_MATMUL[asked.device_type] // asked.shrink, 16)


def measure_on_rank(send: Send, asked: Asked) -> None:
    """Measures on all ranks side by side, as they would work; rank 0 sends the figures of the slowest."""
    if asked.device_type == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        own = torch.tensor(measure(asked), dtype=torch.float64)
    finally:
        torch.set_num_threads(threads)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        send(Figures(*own.tolist()))


def measure(asked: Asked) -> Figures:
    """This rank's figures; a collective call."""
    device = torch.device(asked.device_type)
    # Tensors of a GPU go over NCCL, those of the CPU over the group that is there.
    group = dist.new_group(backend="nccl") if asked.device_type == "cuda" else None
    send = _swap if asked.device_type == "cuda" else _redistribution
    small, large = (
        _seconds(send(num_bytes, device, group), asked) for num_bytes in (_SMALL_BYTES, _large_bytes(asked))
    )
    copy = _seconds(_copy(_COPY_BYTES // asked.shrink, device), asked)
    on_gpu = asked.device_type == "cuda"
    launch = _seconds(_copy(64, device), asked) if on_gpu else _processor_s(_local_redistribution(), asked)
    matmul = _computing_s(_matmul(_side(asked), getattr(torch, _step_dtype(asked)), device), asked)
    gathers = 0.0, 0.0
    if asked.collectives:
        small_gather, large_gather = (
            _seconds(_gather(num_bytes, device, group), asked) for num_bytes in (_SMALL_BYTES, _gathered_bytes(asked))
        )
        gathers = small_gather, large_gather
    of_rates = _rate_figures(asked, device) if asked.rates else {}
    return Figures(small, large, launch, copy, matmul, *gathers, **of_rates)


def _rate_figures(asked: Asked, device: torch.device) -> dict[str, float]:
    """The figures of computing, and on the CPU those of the host's time of exchanges, by name."""
    found = {}
    for name in _DTYPES:
        less_s, more_s = (_computing_s(_matmul(side, getattr(torch, name), device), asked) for side in _sides(asked))
        found[f"{name}_s"] = more_s - less_s
    found["step_s"] = _computing_s(_training_step(_Small().to(device), device), asked)
    found["operators_s"] = _computing_s(_operators(asked), asked)
    if asked.device_type == "cpu":
        found |= dict(zip(_OF_EXCHANGES, _exchanges_s(asked), strict=True))
    return found


def _matmul(side: int, dtype: torch.dtype, device: torch.device) -> Run:
    left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    return lambda: left @ right


def _exchanges_s(asked: Asked) -> tuple[float, float, float]:
    """Host seconds of an exchange of a parallel style, of a group of fully_shard and of each parameter in one; a
    collective call.

    They follow from what a step of the small model takes more on the processor than one without exchanges: with layers
    cut, with blocks sharded, and with the whole model as one group.
    """
    num_ranks, device = dist.get_world_size(), torch.device("cpu")
    cut = {f"blocks.*.{name}": style(kind, balanced=True) for name, kind in _CUT}
    plans = (
        ("tp", LaidOut(tuple(cut.items()), (), False, ())),
        ("dp", LaidOut((), (), False, ("blocks.*",))),
        ("dp", LaidOut((), (), False, ())),
    )
    alone_s, found = _processor_s(_training_step(_Small(), device), asked), []
    for name, laid_out in plans:
        axes, prices = mesh_axes({name: num_ranks}), built_in_prices("cpu", num_ranks, num_ranks, None)
        given: Any = (_Small(), ((torch.zeros(_ROWS, _FEATURES),), {}), axes, laid_out, prices, dist.get_rank())
        predicted = predicted_step(*given, train=True, optimizer_tensors=0)
        model = FoundPlan(axes, laid_out, 0, predicted, (), (), True).apply(_Small(), T.Mesh((num_ranks,), (name,)))
        more_s = max(_processor_s(_training_step(model, device), asked) - alone_s, 0.0)
        found.append((more_s, predicted.traffic.exchanges))
    (cut_s, num_cut), by_blocks, as_one = found
    group_s, parameter_s = group_prices(by_blocks, as_one, len(list(_Small().parameters())) // _BLOCKS)
    return cut_s / num_cut, group_s, parameter_s


def group_prices(by_blocks: tuple[float, int], as_one: tuple[float, int], num_parameters: int) -> tuple[float, float]:
    """Seconds of an exchange of a group and of each parameter in it, from seconds and numbers of exchanges of a step
    whose blocks, of so many parameters, are groups, and of one whose model is a group.

    >>> group_prices((12 * (2e-4 + 6 * 1e-5), 12), (2 * (2e-4 + 24 * 1e-5), 2), 6)
    (0.0002, 1e-05)
    """
    (blocks_s, num_of_blocks), (one_s, num_of_one) = by_blocks, as_one
    of_group, of_all = blocks_s / num_of_blocks, one_s / num_of_one
    parameter_s = min(max(of_all - of_group, 0.0) / (num_parameters * (_BLOCKS - 1)), of_group / num_parameters)
    return round(of_group - num_parameters * parameter_s, 9), round(parameter_s, 9)


def _processor_s(run: Run, asked: Asked) -> float:
    """Seconds of all threads of this process in a call that all ranks make: the least of the rounds."""
    found = []
    for _ in range(asked.rounds + 2):
        dist.barrier()
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


def _training_step(model: nn.Module, device: torch.device) -> Run:
    """Forward and backward of the small model."""
    rows = torch.ones(_ROWS, _FEATURES, device=device)

    def run() -> None:
        model.zero_grad()
        model(rows).backward()

    return run


def _operators(asked: Asked) -> Run:
    """A sum, a GELU, a layer norm and a sum over rows, in float32; together they move 8 tensors."""
    side = _OPERAND[asked.device_type]
    left, right = (torch.ones(side // asked.shrink, side, device=asked.device_type) for _ in range(2))

    def run() -> None:
        (left + right, F.gelu(left), F.layer_norm(left, (side,)), left.sum(0))

    return run


def _swap(num_bytes: int, device: torch.device, group: Any) -> Run:
    """Messages of ranks 0 and 1 to each other; the others wait for the next figure."""
    rank = dist.get_rank()
    if rank > 1:
        return lambda: None
    sent, arrived = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))

    def run() -> None:
        peer = 1 - rank
        operations = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, arrived, peer, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return run


def _redistribution(num_bytes: int, device: torch.device, _: Any) -> Run:
    """A redistribution that brings ranks 0 and 1 so many bytes each, by the transport that plans have."""
    if dist.get_rank() > 1:
        return lambda: None
    mesh = T.Mesh((2,), ranks=(0, 1))
    part = T.DTensor.from_local(torch.zeros(num_bytes, dtype=torch.uint8, device=device), mesh, [T.Shard(0)])
    return lambda: part.redistribute(mesh, [T.Replicate()])


def _local_redistribution() -> Run:
    """A redistribution that sends nothing: the host's time of a step."""
    mesh = T.Mesh((dist.get_world_size(),))
    whole = T.DTensor.from_local(torch.zeros(16 * dist.get_world_size()), mesh, [T.Replicate()])
    return lambda: whole.redistribute(mesh, [T.Shard(0)])


def _gather(num_bytes: int, device: torch.device, group: Any) -> Run:
    """An all_gather of so many bytes from each rank."""
    given = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    gathered = torch.zeros(num_bytes * dist.get_world_size(), dtype=torch.uint8, device=device)
    return lambda: _all_gather(gathered, given, group)


def _copy(num_bytes: int, device: torch.device) -> Run:
    """A copy by a table, as a pack is: rows of 64 bytes from every other place."""
    source = torch.zeros(2 * num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    table = copy_table([CopyBox(0, 0, 0, 0, 16, (num_bytes // 64, 4), (8, 1), (4, 1))], device)
    return lambda: table.run([source.data_ptr()], [target.data_ptr()], 1)


def _seconds(run: Run, asked: Asked) -> float:
    """Seconds until all of a call has run: the fastest round, which other programs on the machine disturb least."""
    synchronize = torch.cuda.synchronize if asked.device_type == "cuda" else _nothing_to_wait_for
    found = []
    for number in range(asked.rounds + 2):
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        if number >= 2:
            found.append(time.perf_counter() - start)
    return min(found)


def _computing_s(run: Run, asked: Asked) -> float:
    """Seconds of a call that computes: those of the thread's processor on the CPU, which other programs do not take."""
    if asked.device_type == "cuda":
        return _seconds(run, asked)
    found: list[float] = []
    # A product in float16 takes 100 times as long as one in float32 on processors without instructions for it.
    while len(found) < asked.rounds + 2 and (len(found) < _FEWEST_ROUNDS or sum(found) < _MOST_COMPUTING_S):
        start = time.thread_time()
        run()
        found.append(time.thread_time() - start)
    return min(found)


def _nothing_to_wait_for() -> None:
    """On the CPU what was called has run."""


def calibrate(ranks: int | None, device_type: str, rounds: int, shrink: int, json_to: str | None) -> None:
    """Measures prices, and prints them for TRITONDT_COSTS."""
    if device_type == "cuda" and not torch.cuda.is_available():
        raise click.ClickException(f"prices on cuda were asked for; torch {torch.__version__} sees no CUDA device")
    num_ranks = joined_ranks.join(ranks, 2)
    asked = Asked(device_type, rounds, shrink, num_ranks, collectives=device_type == "cuda", rates=True)
    found: list[Figures] = []

    def add(message: object) -> None:
        assert isinstance(message, Figures), f"ranks send figures, not {message!r}"
        found.append(message)

    status, errors = joined_ranks.run(num_ranks, measure_on_rank, asked, add)
    if status:
        raise click.ClickException("; ".join(errors))
    if is_first():
        prices = {device_type: prices_of(found[0], asked)}
        click.echo(f"export TRITONDT_COSTS='{json.dumps(prices)}'", err=is_printed(json_to))
        write_json({"benchmark": "calibrate", **surroundings(), "ranks": num_ranks, "prices": prices}, json_to)
    joined_ranks.leave()
