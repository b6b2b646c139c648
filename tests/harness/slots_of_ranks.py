"""All ranks of an exchange through slots in one process: nobody waits for what nobody has done yet.

    ranks = SlotsOfRanks(3, 1 << 16)
    results = ranks.redistribute("S0", "S1", whole)

All ranks pack, then all unpack; `pack` and `unpack` have a rank do so by itself, ahead of others.
"""

from typing import Any

import torch

import tritondt as T
from tritondt.comm.communicator import Reduction, Transfer
from tritondt.comm.packing.placed_transfer import PlacedTransfer, placed_transfer
from tritondt.comm.transports.device_arenas import DeviceArenas
from tritondt.planning.exchange import exchange
from tritondt.planning.slots import device_slots
from tritondt.planning.storage import blocks
from tritondt.sharding.layout import Layout

CPU = torch.device("cpu")


class Memory:
    """An arena in memory of the process's own, of the host or of a GPU."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.content = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.address = self.content.data_ptr()

    def close(self) -> None: ...


class SlotsOfRanks:
    """Ranks with arenas of so many bytes each, all on one host."""

    def __init__(self, size: int, arena_bytes: int, device: torch.device = CPU) -> None:
        self.size, slots = size, device_slots(arena_bytes, size)
        self.memories = [Memory(slots.num_bytes, device) for _ in range(size)]
        by_place = dict(enumerate(self.memories))
        self.arenas = [DeviceArenas(range(size), place, slots, by_place, device) for place in range(size)]
        self._device, self._plans = device, dict[Any, list[PlacedTransfer]]()

    def redistribute(self, source: str, target: str, whole: torch.Tensor) -> list[torch.Tensor]:
        """The ranks' parts of a tensor under `target`; as a term of a sum, a rank has it times its number and one."""
        held = [whole * (rank + 1) if source == "P" else self.part(whole, source, rank) for rank in range(self.size)]
        wanted = [torch.full_like(self.part(whole, target, rank), -1) for rank in range(self.size)]
        plans = self.plans(source, target, whole)
        for rank, local in enumerate(held):
            self.pack(plans[rank], local)
        for rank, (local, result) in enumerate(zip(held, wanted, strict=True)):
            self.unpack(plans[rank], local, result)
        return wanted

    def plans(self, source: str, target: str, whole: torch.Tensor) -> list[PlacedTransfer]:
        """The ranks' plans for a tensor, made once."""
        key = source, target, tuple(whole.shape), whole.dtype
        if key not in self._plans:
            number = len(self._plans)
            transfers = [self.transfer(source, target, whole, rank, number) for rank in range(self.size)]
            self._plans[key] = [self._plan(each, rank) for rank, each in enumerate(transfers)]
        return self._plans[key]

    @staticmethod
    def pack(plan: PlacedTransfer, source: torch.Tensor) -> None:
        """A rank's first launch."""
        if plan.pack is not None:
            plan.pack.run([source.data_ptr()], [0, *plan.slots], 1)

    @staticmethod
    def unpack(plan: PlacedTransfer, source: torch.Tensor, target: torch.Tensor) -> None:
        """A rank's second launch."""
        sources = [source.data_ptr()]
        if plan.unpack is not None:
            plan.unpack.run([0, *plan.own_slots, *sources], [target.data_ptr()], 1)
        for table in plan.reduces:
            table.run([*sources, 0, *plan.own_slots], [target.data_ptr()], 1)

    def part(self, whole: torch.Tensor, text: str, rank: int) -> torch.Tensor:
        """A rank's part of a tensor under a placement."""
        if text in "PR":
            return whole.clone()
        dim = int(text[1])
        parts = whole.chunk(self.size, dim)
        return parts[rank].contiguous() if rank < len(parts) else whole.narrow(dim, 0, 0).contiguous()

    def transfer(self, source: str, target: str, whole: torch.Tensor, rank: int, fingerprint: int = 0) -> Transfer:
        """A rank's side of a redistribution in one exchange."""
        before, after = (
            Layout((self.size,), T.parse_placements(text), tuple(whole.shape)) for text in (source, target)
        )
        return Transfer(
            exchange(before, after, (rank,)),
            (blocks(before, (rank,)),),
            (blocks(after, (rank,)),),
            (whole.dtype,),
            (Reduction("sum", 1) if source == "P" else None,),
            fingerprint,
            f"{before} -> {after}",
            self._device,
        )

    def _plan(self, transfer: Transfer, rank: int) -> PlacedTransfer:
        found = placed_transfer(transfer, self.arenas[rank])
        assert found is not None, "every message fits a slot"
        assert not found.far_sends
        assert not found.far_receives
        return found
