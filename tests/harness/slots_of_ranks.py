"""All ranks of an exchange through slots in one process, phase by phase: nobody waits for what nobody has done yet.

    with phased(HostSignals):                     # or DeviceSignals, in Triton's interpreter
        ranks = SlotsOfRanks(3, 1 << 16)
        results = ranks.redistribute("S0", "S1", whole)

What the ranks' streams would keep in order is so a list of steps, each on all ranks before the next one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import tritondt as T
from tritondt.comm.communicator import Reduction, Transfer
from tritondt.comm.packing.placed_transfer import PlacedTransfer, placed_transfer
from tritondt.comm.transports import device_arenas
from tritondt.comm.transports.device_arenas import DeviceArenas
from tritondt.kernels.signals import Signal, SignalTable
from tritondt.planning.exchange import exchange
from tritondt.planning.slots import device_slots
from tritondt.planning.storage import blocks
from tritondt.sharding.layout import Layout

CPU = torch.device("cpu")


class TwoPhases:
    """Signals whose publishing and waiting are two calls."""

    def __init__(
        self,
        make: Callable[..., SignalTable],
        published: Sequence[Signal],
        awaited: Sequence[Signal],
        fingerprint: int,
        *others: Any,
    ) -> None:
        self.publish = make(published, [], fingerprint, *others)
        self.wait = make([], awaited, fingerprint, *others)

    def run(self) -> None:
        raise AssertionError("phases are run one by one")


@contextmanager
def phased(make: Callable[..., SignalTable]) -> Iterator[None]:
    """Arenas that are made within it have signals of two phases, each by `make`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_arenas, "signal_table", lambda *arguments: TwoPhases(make, *arguments))
        yield


class Memory:
    """An arena in the process's own memory."""

    def __init__(self, num_bytes: int) -> None:
        self.content = torch.zeros(num_bytes, dtype=torch.uint8)
        self.address = self.content.data_ptr()

    def close(self) -> None: ...


class SlotsOfRanks:
    """Ranks with arenas of so many bytes each, all on one host."""

    def __init__(self, size: int, arena_bytes: int) -> None:
        self.size, slots = size, device_slots(arena_bytes, size)
        self.memories = [Memory(slots.num_bytes) for _ in range(size)]
        by_place = dict(enumerate(self.memories))
        self.arenas = [DeviceArenas(range(size), place, slots, by_place, CPU) for place in range(size)]
        self._plans: dict[Any, list[PlacedTransfer]] = {}

    def redistribute(self, source: str, target: str, whole: torch.Tensor) -> list[torch.Tensor]:
        """The ranks' parts of a tensor under `target`; as a term of a sum, a rank has it times its number and one."""
        before, after = (
            Layout((self.size,), T.parse_placements(text), tuple(whole.shape)) for text in (source, target)
        )
        held = [whole * (rank + 1) if source == "P" else self._part(whole, source, rank) for rank in range(self.size)]
        wanted = [torch.full_like(self._part(whole, target, rank), -1) for rank in range(self.size)]
        key = source, target, tuple(whole.shape), whole.dtype
        if key not in self._plans:
            self._plans[key] = [
                self._plan(before, after, rank, whole.dtype, len(self._plans)) for rank in range(self.size)
            ]
        self._run(self._plans[key], held, wanted)
        return wanted

    def _part(self, whole: torch.Tensor, text: str, rank: int) -> torch.Tensor:
        if text in "PR":
            return whole.clone()
        dim = int(text[1])
        parts = whole.chunk(self.size, dim)
        return parts[rank].contiguous() if rank < len(parts) else whole.narrow(dim, 0, 0).contiguous()

    def _plan(self, before: Layout, after: Layout, rank: int, dtype: torch.dtype, fingerprint: int) -> PlacedTransfer:
        is_sum = "P" in str(before)
        transfer = Transfer(
            exchange(before, after, (rank,)),
            (blocks(before, (rank,)),),
            (blocks(after, (rank,)),),
            (dtype,),
            (Reduction("sum", 1) if is_sum else None,),
            fingerprint,
            f"{before} -> {after}",
        )
        found = placed_transfer(transfer, self.arenas[rank])
        assert found is not None, "every message fits a slot"
        assert not found.far_sends
        assert not found.far_receives
        return found

    def _run(
        self, plans: Sequence[PlacedTransfer], held: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
    ) -> None:
        begins: list[Any] = [plan.begin for plan in plans]
        meets: list[Any] = [plan.meet for plan in plans]
        for phase in (
            [each.publish for each in begins],
            [each.wait for each in begins],
        ):
            for table in phase:
                table.run()
        for plan, source in zip(plans, held, strict=True):
            if plan.pack is not None:
                plan.pack.run([source.data_ptr()], [0, *plan.slots], 1)
        for phase in ([each.publish for each in meets], [each.wait for each in meets]):
            for table in phase:
                table.run()
        for plan, arenas, source, target in zip(plans, self.arenas, held, wanted, strict=True):
            sources = [source.data_ptr()]
            if plan.unpack is not None:
                plan.unpack.run([0, arenas.address, *sources], [target.data_ptr()], 1)
            for table in plan.reduces:
                table.run([*sources, 0, arenas.address], [target.data_ptr()], 1)
