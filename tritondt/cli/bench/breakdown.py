"""Parts of a redistribution's time: local work alone, messages alone, and how far one hides behind the other.

The local work (pack, keep, unpack, reduce) runs as the transport would run it, on buffers that are there; the messages
go between such buffers with nothing packed. Both are timed in the rounds of the whole. Allocation is in neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import tritondt as T
from tritondt.cli.bench.harness import Run, Times, ms_text, time_interleaved
from tritondt.comm import world
from tritondt.comm.communicator import Communicator, Transfer
from tritondt.comm.packing.packed_transfer import PackedTransfer, packed_transfer
from tritondt.planning.exchange import Exchange, Message, Part
from tritondt.planning.fingerprint import exchange_fingerprint
from tritondt.planning.storage import message_block
from tritondt.redistribution.compile import compile_plan
from tritondt.redistribution.compiled_step import CompiledStep
from tritondt.redistribution.run import run_step
from tritondt.sharding.intervals import Region

# From each rank to each other one: below, calls decide, and which of them is fastest depends on caches.
PEAK_MESSAGE_BYTES = (256 << 10, 1 << 20, 8 << 20)


# Of a table of parts: above it, and its columns behind the first, and those of CSV.
TITLE = (
    "parts in ms, by fastest rounds: all; pack, keep, unpack, reduce alone (local);\n"
    "messages alone; the share of the shorter of these that runs beside the other\n"
    "(hidden); busbw in % of the peak, which is messages among all ranks, GB/s"
)
HEADER = ("all", "local", "messages", "hidden", "% of peak", "peak")
CSV_COLUMNS = ("local_us", "messages_us", "hidden_share", "share_of_peak", "peak_gbps")


@dataclass(frozen=True)
class Breakdown:
    """Times of the parts of a case and of the whole in the same rounds.

    `peak_bytes_per_s` is the peak rate of a rank, `busiest_bytes` are those of the rank that sends or receives most.
    """

    local: Times
    messages: Times
    whole: Times
    peak_bytes_per_s: float
    busiest_bytes: int

    @property
    def hidden_share(self) -> float | None:
        """Share of the shorter part that runs while the other does; None where one of them is nothing.

        >>> Breakdown(Times((2.0,)), Times((4.0,)), Times((5.0,)), 1.0, 1).hidden_share
        0.5
        """
        shorter = min(self.local.fastest, self.messages.fastest)
        if not shorter:
            return None
        hidden = self.local.fastest + self.messages.fastest - self.whole.fastest
        return min(max(hidden / shorter, 0.0), 1.0)

    @property
    def share_of_peak(self) -> float:
        """Rate of the rank that sends or receives most, in units of the peak's.

        >>> Breakdown(Times((2.0,)), Times((4.0,)), Times((5.0,)), 8.0, 20).share_of_peak
        0.5
        """
        return self.busiest_bytes / self.whole.fastest / self.peak_bytes_per_s

    def cells(self) -> list[str]:
        """Cells of a row, by HEADER."""
        hidden = self.hidden_share
        return [
            *(ms_text(times.fastest) for times in (self.whole, self.local, self.messages)),
            "-" if hidden is None else f"{100 * hidden:.0f}%",
            f"{100 * self.share_of_peak:.0f}",
            f"{self.peak_bytes_per_s / 1e9:.2f}",
        ]

    def fields(self) -> dict[str, Any]:
        """Fields in JSON."""
        return {
            "local_seconds": self.local.seconds,
            "local_fastest_s": self.local.fastest,
            "messages_seconds": self.messages.seconds,
            "messages_fastest_s": self.messages.fastest,
            "hidden_share": self.hidden_share,
            "share_of_peak": self.share_of_peak,
            "peak_gb_per_s": self.peak_bytes_per_s / 1e9,
        }

    def columns(self) -> dict[str, Any]:
        """Columns in CSV."""
        microseconds = (self.local.fastest * 1e6, self.messages.fastest * 1e6)
        shares = (self.hidden_share, self.share_of_peak, self.peak_bytes_per_s / 1e9)
        return dict(zip(CSV_COLUMNS, (*microseconds, *shares), strict=True))


def parts_of(local: torch.Tensor, source: T.DTensorSpec, target: T.DTensorSpec) -> tuple[Run, Run]:
    """Local work alone and messages alone of a redistribution on this rank; the latter is a collective call."""
    steps = compile_plan(source, target, local.stride(), local.device, None).steps
    packing, moving = [], []
    current = whole = local
    for step in steps:
        following, around = run_step(step, current, whole)
        if step.communicator is None or step.transfer is None:
            packing.append(_alone(step, current, whole))
        else:
            targets = around.view(-1) if step.step.kind == "gather" else following
            packed = packed_transfer(step.transfer)
            packing.append(_local_work(packed, current, targets))
            moving.append(_messages(step.communicator, packed, step.transfer.description))
        current, whole = following, around
    return _in_turn(packing), _in_turn(moving)


def peak_runs(communicator: Communicator, place: int) -> dict[int, Run]:
    """Runs in which all ranks send to each other from ready memory to ready memory, by bytes that a rank receives."""
    num_ranks, made = len(communicator.ranks), dict[int, Run]()
    for num_bytes in PEAK_MESSAGE_BYTES:
        sizes = [num_bytes if other != place else 0 for other in range(num_ranks)]
        made[sum(sizes)] = _exchange(communicator, sizes, sizes, f"the peak of the transport at {num_bytes} bytes")
    return made


def measured_peak(rounds: int, budget_s: float = 2.0) -> float:
    """Bytes a second that a rank receives at best, while all ranks send to each other; a collective call."""
    communicator = world.current().communicator(tuple(range(dist.get_world_size())), "cpu")
    runs = peak_runs(communicator, dist.get_rank())
    times = time_interleaved(list(runs.values()), rounds, budget_s)
    return max(num_bytes / found.fastest for num_bytes, found in zip(runs, times, strict=True))


def _in_turn(runs: Sequence[Callable[[], None]]) -> Run:
    def run() -> None:
        for each in runs:
            each()

    return run


def _alone(step: CompiledStep, current: torch.Tensor, whole: torch.Tensor) -> Callable[[], None]:
    """A step without messages, as it is."""

    def run() -> None:
        run_step(step, current, whole)

    return run


def _local_work(packed: PackedTransfer, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    """Tables of a transfer, on buffers that hold zeros: undefined floats may be slow ones."""
    buffer = torch.zeros(packed.packed_bytes + 1, dtype=torch.uint8)
    staging = torch.zeros(packed.staged_bytes + 1, dtype=torch.uint8)

    def run() -> None:
        threads = torch.get_num_threads()
        sources, targets = [source.data_ptr()], [target.data_ptr()]
        for table, inputs, outputs in (
            (packed.pack, sources, [buffer.data_ptr()]),
            (packed.keep, sources, targets),
            (packed.unpack, [staging.data_ptr()], targets),
        ):
            if table is not None:
                table.run(inputs, outputs, threads)
        for table in packed.reduces:
            table.run([*sources, staging.data_ptr()], targets, threads)

    return run


def _messages(communicator: Communicator, packed: PackedTransfer, text: str) -> Callable[[], None]:
    """Messages of a transfer, each from where nothing else is, and to such a place."""
    sizes = [[0] * len(communicator.ranks) for _ in range(2)]
    for of_peers, slices in zip(sizes, (packed.sends, packed.receives), strict=True):
        for found in slices:
            of_peers[found.peer] += found.num_bytes
    sent, received = sizes
    return _exchange(communicator, sent, received, f"the messages alone of {text}")


def _exchange(
    communicator: Communicator, sent: Sequence[int], received: Sequence[int], text: str
) -> Callable[[], None]:
    """Exchange of so many bytes with each peer, by place, between two pieces of memory."""
    sends, receives = _laid_end_to_end(sent), _laid_end_to_end(received)
    source, target = (torch.zeros(sum(sizes), dtype=torch.uint8) for sizes in (sent, received))
    transfer = Transfer(
        exchange=Exchange(sends, receives, ()),
        source_blocks=((message_block(_range(0, source.numel())),),),
        target_blocks=((message_block(_range(0, target.numel())),),),
        dtypes=(torch.uint8,),
        reductions=(None,),
        fingerprint=exchange_fingerprint(text),
        description=text,
    )

    def run() -> None:
        communicator.exchange([source], [target], transfer)

    return run


def _laid_end_to_end(sizes: Sequence[int]) -> tuple[Message, ...]:
    made, start = [], 0
    for peer, num_bytes in enumerate(sizes):
        if num_bytes:
            made.append(Message(peer, (Part(_range(start, start + num_bytes)),)))
        start += num_bytes
    return tuple(made)


def _range(start: int, stop: int) -> Region:
    return (((start, stop),),)
