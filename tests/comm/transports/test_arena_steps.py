"""What a recording has of exchanges through arenas: their steps, and messages that both sides name alike."""

from typing import Any, NamedTuple

import torch

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.ops.sharded import distribute
from tritondt.comm.transports import announced
from tritondt.comm.transports.shared_memory import SharedMemoryCommunicator
from tritondt.debug.tracing.record import Span
from tritondt.debug.tracing.recording import Recording

ALL = (0, 1, 2, 3)


class Recorded(NamedTuple):
    """Spans of an exchange and within it, (peer, exchange, bytes) of messages, and steps noted when all was over."""

    exchange: Span
    inside: list[Span]
    sends: list[tuple[int, int, int]]
    receives: list[tuple[int, int, int]]
    noted_later: int


def recorded(rank: int, source: str, target: list[Any], shape: tuple[int, int]) -> Recorded:
    x: Any = distribute(torch.zeros(shape), T.Mesh((4,)), source)
    x.redistribute(placements=target)  # makes the communicator, and is not recorded
    recording = Recording()
    recording.begin()
    try:
        x.redistribute(placements=target)
    finally:
        recording.end()
    x.redistribute(placements=target)
    later = sum(len(found.take_steps()) for found in announced.made if isinstance(found, SharedMemoryCommunicator))
    record = recording.record(rank, 4)
    (exchange,) = [span for span in record.spans if span.kind == "exchange"]
    inside = [
        span
        for span in record.spans
        if span is not exchange and exchange.start_ns <= span.start_ns <= span.end_ns <= exchange.end_ns
    ]
    sends, receives = (
        [(found.peer, found.sequence, found.num_bytes) for found in messages]
        for messages in (record.sends, record.receives)
    )
    return Recorded(exchange, inside, sends, receives, later)


def test_steps_of_every_round_are_spans_in_the_order_they_ran(four_shared_memory_ranks: GlooRanks) -> None:
    # Messages of 2 MB are four rounds of 512 kB.
    for found in four_shared_memory_ranks.run(recorded, "S0", [T.Shard(1)], (2048, 4096)):
        assert [span.kind for span in found.inside] == ["wait", "pack", "keep", "wait", "unpack"] * 4
        ends = [time for span in found.inside for time in (span.start_ns, span.end_ns)]
        assert ends == sorted(ends)
        names = {span.name for span in found.inside}
        assert names == {"pack", "keep", "unpack", found.exchange.name}, "waits say for what"
        assert found.noted_later == 0


def test_both_sides_have_the_same_messages(four_shared_memory_ranks: GlooRanks) -> None:
    for source, target, num_bytes in (("S0", [T.Shard(1)], 240), ("P", [T.Replicate()], 3840)):
        found = four_shared_memory_ranks.run(recorded, source, target, (24, 40))
        for rank in ALL:
            assert sorted(peer for peer, _, _ in found[rank].sends) == [peer for peer in ALL if peer != rank]
            for peer, sequence, sent in found[rank].sends:
                assert (rank, sequence, sent) in found[peer].receives
                assert sent == num_bytes
