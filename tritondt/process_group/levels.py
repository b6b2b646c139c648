"""The communicators of a group that run its collectives: of all its ranks and, on several hosts, of those of each."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, NamedTuple

import torch

from tritondt.comm.communicator import CPU
from tritondt.comm.packing.arena_transfer import ArenaTransfer, ProgramTransfer
from tritondt.comm.packing.packed_transfer import PackedTransfer
from tritondt.comm.process_world import ProcessWorld
from tritondt.comm.transports import table as transport_table
from tritondt.comm.transports.arenas import share_arenas
from tritondt.comm.transports.shared_memory import SharedMemoryCommunicator
from tritondt.comm.transports.sockets import SocketCommunicator
from tritondt.errors import WorldError
from tritondt.kernels.memory import allocate
from tritondt.planning.exchange import Exchange
from tritondt.planning.fingerprint import exchange_fingerprint
from tritondt.process_group import shared_memory_programs, socket_programs, two_levels
from tritondt.process_group.collective import Collective, PeerSpan, TermExchange
from tritondt.process_group.shared_memory_programs import Members
from tritondt.process_group.two_levels import MOST_STAGES, Division, Hosts, Stage

# Memory of a rank in a group: two slots that hold a chunk for each of 15 others, and shorter ones for more.
_ARENA_BYTES = 16 << 20
# Numbers of exchanges that a collective takes of each of two communicators, whether it needs all of them or a rank
# takes no part in it, so that the next one has the same numbers on all ranks. TRITONDT_DEBUG takes two for a stage.
_NUMBERS = 128
assert 2 * MOST_STAGES < _NUMBERS
_NOTHING = Exchange((), (), ())
Tensors = Sequence[torch.Tensor]
Plan = ArenaTransfer | PackedTransfer


class Part(NamedTuple):
    """One exchange of a collective, among the ranks of this host where it `is_near`.

    It `reads` sources, or targets that an earlier one has written. In stages it reads and writes one list, of sources,
    targets and a scratch tensor.
    """

    transfer: ProgramTransfer
    reads: Literal["sources", "targets", "list"] = "sources"
    is_near: bool = False


class Program(NamedTuple):
    """The exchanges of a collective, in order, what is divided before them, and the bytes of its scratch tensor."""

    parts: tuple[Part, ...]
    scratch_bytes: int = 0
    divisions: tuple[Division, ...] = ()

    @property
    def description(self) -> str:
        """Text of the collective."""
        return self.parts[0].transfer.description


class Levels:
    """One rank's communicators of a group: of the `whole`, and of its ranks on this host where these are not all.

    `ranks` are the group's, as ranks of the world. Exchanges inside the host run in the order of the whole. A rank that
    fails in one exchange of a collective takes no part in those that follow, and says so: not all ranks have had
    messages of the one at fault.
    """

    def __init__(
        self, ranks: Sequence[int], whole: SocketCommunicator, hosts: Hosts, near: SocketCommunicator | None = None
    ) -> None:
        self._ranks, self.whole, self._hosts, self._near = tuple(ranks), whole, hosts, near
        self._all = (whole,) if near is None else (whole, near)
        if near is not None:
            whole.contain(near)
        # Where there is one communicator, its exchanges are counted by themselves.
        self.is_numbered, self._number = hosts.saves, 0

    def compiled(self, collective: Collective, num_tensors: tuple[int, int], description: str) -> Program:
        """A collective of so many sources and targets as exchanges."""
        fingerprint = exchange_fingerprint(f"{description} {self._ranks}")
        sources = _ends(collective.sends, num_tensors[0])
        targets = _ends(collective.receives, num_tensors[1])

        def transfer(plan: Plan, number: int, *needed: tuple[int, ...]) -> ProgramTransfer:
            read, written = needed
            return ProgramTransfer(
                _NOTHING, (), (), (), (), fingerprint + number, description, plan=plan, ends=(read, written)
            )

        staged = two_levels.stages(collective, self._hosts, *num_tensors)
        if staged is not None:
            everything = (*sources, *targets, staged.scratch_bytes)
            parts, counts = list[Part](), [0, 0]  # a host may have more stages inside than another one
            for stage in staged.stages:
                made = transfer(self._plan(stage), counts[stage.is_near], everything, everything)
                parts.append(Part(made, "list", stage.is_near))
                counts[stage.is_near] += 1
            return Program(tuple(parts), staged.scratch_bytes, staged.divisions)
        if isinstance(self.whole, SharedMemoryCommunicator):
            return Program((Part(transfer(_in_slots(collective, self.whole, self._ranks), 0, sources, targets)),))
        exchanges = socket_programs.compiled(collective, _places(self.whole, self._ranks))
        return Program(
            tuple(
                Part(transfer(exchange.plan, number, targets, targets), "targets")
                if exchange.reads_targets
                else Part(transfer(exchange.plan, number, sources, targets))
                for number, exchange in enumerate(exchanges)
            )
        )

    def _plan(self, stage: Stage) -> Plan:
        what, is_near = stage
        if isinstance(what, TermExchange):
            return socket_programs.of_terms(what, _places(self.whole, self._ranks))
        if not is_near:
            (exchange,) = socket_programs.compiled(what, _places(self.whole, self._ranks))
            return exchange.plan
        ranks = [self._ranks[number] for number in self._hosts.near]
        assert self._near is not None, "a stage inside a host is of several ranks"
        if isinstance(self._near, SharedMemoryCommunicator):
            return _in_slots(what, self._near, ranks)
        (exchange,) = socket_programs.compiled(what, _places(self._near, ranks))
        return exchange.plan

    def run(self, sources: Tensors, targets: Tensors, program: Program) -> None:
        """Runs a collective of these tensors, with the turn of the whole."""
        self._begin()
        carriers = [self._near if part.is_near and self._near is not None else self.whole for part in program.parts]
        num_begun = 0
        try:
            everything: Tensors = ()
            if program.parts[0].reads == "list":
                everything = [*sources, *targets, allocate((program.scratch_bytes,), torch.uint8, CPU)]
                for division in program.divisions:
                    _divide(division, everything)
            for carrier, (transfer, reads, _) in zip(carriers, program.parts, strict=True):
                num_begun += 1
                if reads == "list":
                    carrier.exchange(everything, everything, transfer)
                else:
                    carrier.exchange(sources if reads == "sources" else targets, targets, transfer)
        except BaseException as error:
            self._leave(carriers[num_begun:], error)
            raise

    def refuse(self, error: BaseException) -> None:
        """Tells the others why this rank takes no part in the next collective, which counts as run."""
        self.whole.drain()
        self._begin()
        for carrier in self._all:
            carrier.refuse(error)

    def _begin(self) -> None:
        """Numbers the exchanges of the next collective, where it may be in stages."""
        if self.is_numbered:
            self._number += 1
            for carrier in self._all:
                carrier.sequence = self._number * _NUMBERS
                carrier.collective = f"{self.whole.key}/collective", self._number

    def _leave(self, carriers: Sequence[SocketCommunicator], error: BaseException) -> None:
        """Takes no part in the exchanges that are left, where the communicators have not failed for good."""
        for carrier in carriers if self.is_numbered else ():
            if carrier.is_usable:
                carrier.refuse(error)

    def set_timeout(self, seconds: float) -> None:
        """Sets how long an exchange may take from now on, in seconds."""
        for carrier in self._all:
            carrier.set_timeout(seconds)

    def close(self) -> None:
        """Waits for what was issued, and ends the communicators without meeting the others.

        Messages that have been sent can be read without this rank.
        """
        if self.whole.is_usable:
            self.whole.settle()
        for carrier in self._all:
            carrier.abort()
            carrier.release()

    def abort(self) -> None:
        """Ends the communicators without the other ranks."""
        for carrier in self._all:
            carrier.abort()

    def disown(self, error: WorldError) -> None:
        """Refuses all further use in a forked process, and closes its connections."""
        for carrier in self._all:
            carrier.disown(error)

    def end_with_process(self, limit_s: float) -> None:
        """Ends the communicators with the process."""
        for carrier in self._all:
            carrier.end_with_process(limit_s)


def connect(world: ProcessWorld, name: str, ranks: Sequence[int], own: int, timeout: timedelta) -> Levels:
    """The communicators of a group in which this rank has number `own`; a collective call."""
    whole = _joined(world, name, ranks, timeout)
    if isinstance(whole, SharedMemoryCommunicator):
        return Levels(ranks, whole, Hosts([0] * len(ranks), own))
    hosts = Hosts(world.hosts(ranks), own)
    if not hosts.saves or len(hosts.near) == 1:
        return Levels(ranks, whole, hosts)
    near = [ranks[number] for number in hosts.near]
    try:
        return Levels(ranks, whole, hosts, _joined(world, f"{name}, host {hosts.own_host}", near, timeout))
    except BaseException as error:
        whole.fail(error)
        raise


def _joined(world: ProcessWorld, name: str, ranks: Sequence[int], timeout: timedelta) -> SocketCommunicator:
    with world.joining(name, tuple(sorted(ranks)), timeout) as context:
        asks = transport_table.chosen("cpu").groups_share_memory
        arenas = share_arenas(context, "collectives go over sockets", _ARENA_BYTES, asks_for_arenas=asks)
        return SocketCommunicator(context) if arenas is None else SharedMemoryCommunicator(context, arenas)


def _divide(division: Division, tensors: Tensors) -> None:
    dtype = getattr(torch, division.reduction.dtype)
    with torch.no_grad():
        source, target = (
            tensors[number].view(-1).view(torch.uint8)[start : start + num_bytes].view(dtype)
            for number, start, num_bytes in (division.source, division.target)
        )
        torch.div(source, division.reduction.divisor, out=target)


def _ends(spans: Sequence[PeerSpan], num_tensors: int) -> tuple[int, ...]:
    """The first bytes of so many tensors behind all their spans."""
    ends = [0] * num_tensors
    for _, (tensor, start, num_bytes) in spans:
        if num_bytes:  # else of no tensor: there may be none
            ends[tensor] = max(ends[tensor], start + num_bytes)
    return tuple(ends)


def _places(communicator: SocketCommunicator, ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(communicator.ranks.index(rank) for rank in ranks)


def _in_slots(collective: Collective, communicator: SharedMemoryCommunicator, ranks: Sequence[int]) -> ArenaTransfer:
    members = Members(_places(communicator, ranks), communicator.slot_bytes, communicator.num_cores)
    return shared_memory_programs.compiled(collective, members)
