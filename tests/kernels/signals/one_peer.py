"""Tables of slots of a few peers in memory of one process, with the words and counters that they touch."""

from typing import Any

import torch

from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.signals import PeerSlots, SlotSignals, SlotTensors, Stop

NUM_SLOTS, ELEMENTS = 2, 8


def stop_words(asked: int = 0, met: int = 0) -> Stop:
    return Stop(torch.tensor([asked], dtype=torch.int32), torch.tensor([met]))


def word_of(count: int, fingerprint: int) -> int:
    """As int64, of which the count has the upper half."""
    return ((count << 32 | fingerprint) + 2**63) % 2**64 - 2**63


class Peers:
    """Slots of peers, and a table's way to pack a row for each of them, or with `lands` to unpack theirs."""

    def __init__(
        self, counts: list[int], *, lands: bool = False, fingerprint: int = 7, stop: Stop | None = None
    ) -> None:
        size, self.lands, self.fingerprint = len(counts), lands, fingerprint
        self.awaited, self.published = (torch.zeros(size, NUM_SLOTS, 2, dtype=torch.int64) for _ in range(2))
        self.counters = torch.tensor([[count, count % NUM_SLOTS * 4 * ELEMENTS] for count in counts])
        self.ended, self.stop = torch.zeros(1, dtype=torch.int64), stop or stop_words()
        self.slots = torch.full((size, NUM_SLOTS, ELEMENTS), -1.0)
        self.rows = torch.arange(float(size * ELEMENTS)).reshape(size, ELEMENTS)
        lag, awaited, published = (0, fingerprint, 0) if lands else (NUM_SLOTS, 0, fingerprint)
        peers = tuple(
            PeerSlots(*(each[number].data_ptr() for each in (self.awaited, self.published, self.counters)))
            for number in range(size)
        )
        layout = NUM_SLOTS, 4 * ELEMENTS, 16, self.ended.data_ptr()
        self.signals = SlotSignals(peers, lag, awaited, published, *layout, self.stop)

    def come(self, number: int) -> None:
        """Has a peer say what this rank waits for."""
        count = int(self.counters[number, 0])
        expected = max(count + 1 - self.signals.lag, 0)
        self.awaited[number, count % NUM_SLOTS, 0] = word_of(expected, self.signals.awaited)

    def tensors(self, **flags: bool) -> SlotTensors:
        numbers = tuple(range(1, 1 + len(self.rows)))
        return SlotTensors(self.signals, numbers, are_targets=not self.lands, **flags)

    def boxes(self) -> list[CopyBox]:
        """A row for each peer, or from each of them; the first source and the first target are the tensor of rows."""
        box = CopyBox(0, 0, 0, 0, 4, (ELEMENTS,), (1,), (1,))
        return [
            box._replace(source=1 + number, target_offset=number * ELEMENTS)
            if self.lands
            else box._replace(target=1 + number, source_offset=number * ELEMENTS)
            for number in range(len(self.rows))
        ]

    def run(self, table: Any) -> None:
        rows, slots = [self.rows.data_ptr()], [each.data_ptr() for each in self.slots]
        table.run([0, *slots] if self.lands else rows, rows if self.lands else [0, *slots], 1)

    def state(self) -> list[list[float]]:
        """All numbers that a run may have changed."""
        tensors = self.awaited, self.published, self.counters, self.ended, self.slots, self.rows, *self.stop
        return [tensor.flatten().tolist() for tensor in tensors]
