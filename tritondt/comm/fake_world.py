"""The world of torch's "fake" process group: one rank of many, without the others."""

from collections.abc import Sequence

from tritondt import environment, logs
from tritondt.comm.communicator import Communicator
from tritondt.comm.forked import InheritedWorld
from tritondt.comm.member import CommunicatorContext
from tritondt.comm.monitor.flight import Flight
from tritondt.comm.process_world import default_costs
from tritondt.comm.registry import World, numbered
from tritondt.comm.transports.fake import FakeCommunicator
from tritondt.errors import WorldError
from tritondt.identity import Identity
from tritondt.planning.cost import CostTable


class FakeWorld:
    """One rank of a world of any size, whose exchanges move nothing; it opens no store, no thread and no file."""

    def __init__(self, who: Identity) -> None:
        logs.set_up()
        self.identity, self._costs = who, default_costs(who.size)
        self.flight = Flight(who.rank, who.size, None)
        self._communicators: dict[tuple[int, ...], FakeCommunicator] = {}
        self._closed = False

    @property
    def costs(self) -> CostTable:
        """Prices for tensors on the CPU."""
        return self._costs["cpu"]

    def costs_for(self, device_type: str) -> CostTable:
        """Prices for tensors on such devices; the CPU's for a type without prices."""
        return self._costs.get(device_type, self._costs["cpu"])

    def hosts(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Number of the host of each of `ranks`, as many consecutive ones as the launcher says on each."""
        per_host = environment.ranks_per_host() or self.identity.size
        return numbered([rank // per_host for rank in ranks])

    def communicator(self, ranks: Sequence[int], device_type: str = "cpu", inside: Sequence[int] = ()) -> Communicator:
        """The communicator of `ranks`: one for all types of devices, `inside` others or not."""
        if self._closed:
            raise WorldError("this world is closed; tritondt.comm.world.current() is the one that follows")
        members = tuple(sorted(ranks))
        found = self._communicators.get(members)
        if found is None:
            name = f"{len(members)} fake ranks"
            context = CommunicatorContext(name, name, members, self.identity.rank, self.flight, environment.compares())
            found = self._communicators[members] = FakeCommunicator(context)
        return found

    def set_timeout(self, ranks: Sequence[int], device_type: str, seconds: float) -> None:
        """Changes nothing: nobody is waited for."""
        self.communicator(ranks, device_type).set_timeout(seconds)

    def report(self, error: BaseException) -> None:
        """Reports to nobody."""

    def close(self) -> None:
        """Ends all communicators."""
        self._closed = True
        for communicator in self._communicators.values():
            communicator.close()

    def abort(self) -> None:
        """Ends all communicators; what was issued fails."""
        self._closed = True
        for communicator in self._communicators.values():
            communicator.abort()

    def inherited(self) -> World:
        """The world of a forked child: it refuses everything."""
        return InheritedWorld(self.identity.rank, self._communicators.values())

    def successor(self) -> None:
        """None: the next world of this process is made on first use."""
