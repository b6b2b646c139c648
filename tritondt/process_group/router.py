"""The transport of a process group's operations: NCCL for tensors on a GPU, for others shared memory or sockets."""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler

from tritondt import environment
from tritondt._C import GroupCalls
from tritondt.comm import world
from tritondt.comm.communicator import Role
from tritondt.comm.nccl.programs import PLAIN
from tritondt.comm.store import presence
from tritondt.comm.store.client import StoreClient
from tritondt.comm.store.host import StoreHost
from tritondt.comm.transports import table as transport_table
from tritondt.errors import PeerError, TransportError, TritondtError, WorldError
from tritondt.process_group.checks import check_carried, check_group_rank, check_number, check_plain_dtypes
from tritondt.process_group.cpu_collectives import CPU, FIND, Asked
from tritondt.process_group.cpu_group import CpuGroup
from tritondt.process_group.debug_compare import Agreement, Compared, Parts
from tritondt.process_group.gloo_group import GlooGroup
from tritondt.process_group.kinds import Kind
from tritondt.process_group.mailbox import ANY, Mailbox
from tritondt.process_group.monitored_barrier import MonitoredBarrier
from tritondt.process_group.naming import text_of
from tritondt.process_group.nccl_group import NcclGroup
from tritondt.process_group.nccl_programs import GroupRank
from tritondt.process_group.operations import OperationCache
from tritondt.process_group.stream import nccl_devices

_NO_TIMEOUT = timedelta(0)  # torch's options say this, or less, where the group's timeout holds

# How often groups of a name have been made, since the default group was.
_num_makings: Counter[str] = Counter()


def _making_of(options: Any) -> int:
    """How often groups of this name have been made, this one included: alike on the group's ranks.

    torch names some groups by their ranks, and so again when one has been destroyed, which left its keys in the store.
    """
    if not options.global_ranks_in_group:  # the default group
        _num_makings.clear()
    _num_makings[options.group_id] += 1
    return _num_makings[options.group_id]


# Forks between the process that imported this module and this one; asking for a process's number is a system call.
_num_forks = 0


def _after_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_after_fork)


def _in_range(kind: Kind, run: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a collective in a range of torch.profiler, "tritondt::allreduce" and the like."""
    with profiler.record_function(f"tritondt::{kind.gloo}"):
        return run(*arguments)


def _agree_on_gloo(store: "dist.Store", name: str, rank: int, *, uses_gloo: bool) -> None:
    """WorldError where this rank's collectives go over Gloo, and those of the rank that came first do not, or so."""
    own = json.dumps([rank, "Gloo" if uses_gloo else "shared memory or sockets"])
    (first, carrier), (_, here) = json.loads(store.compare_set("tritondt/carrier", "", own)), json.loads(own)
    if carrier != here:
        raise WorldError(
            f"rank {first} runs collectives of {name} on the CPU over {carrier}, rank {rank} over {here}; set "
            "TRITONDT_TRANSPORT alike on all ranks"
        )


def _refuse_in_world(rank: int, group: str, error: BaseException) -> None:
    """Tells who waits for this rank in a part of the group, once there is a default group, why it does not come."""
    if dist.is_initialized():
        store: Any = dist.distributed_c10d._get_default_store()
        presence.refuse_group(presence.of_group(store), rank, group, error)


class Router:
    """The choice of what carries the operations of one rank of a process group.

    `options` are torch's DistributedBackendOptions; `device_types` gives the types of devices that the group is for.
    """

    def __init__(self, options: Any, device_types: Callable[[], tuple[str, ...]]) -> None:
        rank, size = options.group_rank, options.group_size
        self.group_rank, self.timeout = GroupRank(rank, size), options.timeout
        self._timeout_s = self.timeout.total_seconds()
        self.ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
        self.group_id, self.calls = options.group_id, GroupCalls(PLAIN, profiler)
        self.calls.timeout_s = self._timeout_s
        making = _making_of(options)
        self.name = f"process group {self.group_id}{'' if making == 1 else f', made again ({making})'}"
        self._device_types = device_types
        store = dist.PrefixStore(f"gloo/{making}", options.store)
        try:
            presence.announce(store, rank)
            uses_gloo = transport_table.chosen("cpu").name == "gloo"  # WorldError for a name of none
            _agree_on_gloo(store, self.name, self.ranks[rank], uses_gloo=uses_gloo)
            apart = dist.PrefixStore(f"gloo/{making}", options.store.clone())
        except BaseException as error:
            if not isinstance(error, PeerError):
                presence.refuse(store, rank, error)
                _refuse_in_world(self.ranks[rank], self.name, error)
            raise
        self._nccl_groups: dict[str, NcclGroup] = {}
        self._cpu_group: CpuGroup | GlooGroup = (GlooGroup if uses_gloo else CpuGroup)(
            self.name, self.ranks, rank, self.timeout
        )
        self._mailbox = Mailbox(self.name, self.ranks, rank, self.timeout)
        own_store = dist.PrefixStore(f"tritondt/barrier/{making}", apart)
        self._barrier_client = StoreClient(own_store, StoreHost(options.store), apart)
        self._monitored = MonitoredBarrier(self._barrier_client, self.ranks, rank)
        self._num_forks, self._is_ended = _num_forks, False
        self._checked_forks = -1  # forks when a tensor on the CPU was last found to be no one of NCCL's
        self._store_client: StoreClient | None = None
        self._agreement: Agreement | None = None
        if environment.compares():
            debug_store = dist.PrefixStore(f"tritondt/debug/{making}", options.store.clone())
            self._store_client = StoreClient(debug_store, StoreHost(options.store))
            self._agreement = Agreement(self._store_client, self.ranks, rank)

    def nccl_group(self, device: torch.device, describe: Callable[..., str], *arguments: Any) -> NcclGroup | None:
        """The part that carries tensors on such a device by NCCL; None on the CPU.

        `describe` says of `arguments` what was asked, where it is refused.
        """
        device_type = device.type
        if device_type == "cpu" and self._checked_forks == _num_forks and not self._is_ended:
            return None  # as said before, and on the way of every operation
        if self._num_forks != _num_forks:
            raise WorldError(
                f"{describe(*arguments)} was asked of {self.name} by a process forked from the one that made it; fork "
                "before init_process_group, or start processes by the spawn method"
            )
        found = self._nccl_groups.get(device_type)
        if found is not None:
            return found
        if self._is_ended:
            raise WorldError(f"{describe(*arguments)} was asked of {self.name}, which has ended; make a new one")
        device_types = self._device_types()
        if device_type not in device_types:
            raise TransportError(
                f"{describe(*arguments)} was given a tensor on {device}; "
                f"{self.name} was made for {' and '.join(device_types)}"
            )
        if device_type not in nccl_devices:
            self._checked_forks = _num_forks
            return None
        found = NcclGroup(
            f"{self.name}{presence.PART_OF_GROUP}{device_type}",
            self.ranks,
            self.group_rank.rank,
            nccl_devices[device_type](device),
            self.timeout,
            self.calls if self._agreement is None and not self._nccl_groups else None,
        )
        self._nccl_groups[device_type] = found
        return found

    def run(self, kind: Kind, tensors: Sequence[torch.Tensor], arguments: tuple[Any, ...]) -> Any:
        """The Work of an operation of all ranks on `tensors`, this rank's own first, which say where it runs.

        `arguments` are those of torch's call, its options last.
        """
        self.calls.num_operations += 1
        timeout_s = self._timeout_s_of(arguments[-1])
        if not tensors:
            missing = WorldError(f"{kind.describe(*arguments)} was given no tensors")
            self._refuse_of_no_device(missing, Asked(kind.describe, arguments), timeout_s)
            raise missing
        device = tensors[0].device
        try:
            nccl_group = self.nccl_group(device, kind.describe, *arguments)
        except TransportError as error:
            self._refuse_of_no_device(error, Asked(kind.describe, arguments), timeout_s)
            raise
        try:
            check_plain_dtypes(tensors, kind.describe, *arguments)
        except TritondtError as error:
            self._refuse(error, Asked(kind.describe, arguments), nccl_group, timeout_s)
            raise
        if nccl_group is None:
            if profiler._is_profiler_enabled:
                return _in_range(kind, self._on_cpu, kind, arguments, timeout_s)
            return self._on_cpu(kind, arguments, timeout_s)
        try:
            key = kind.key(*arguments)
            operation = nccl_group.operations.operation(key, tensors, kind.describe, kind.make, arguments)
        except TritondtError as error:
            self._refuse(error, Asked(kind.describe, arguments), nccl_group, timeout_s)
            raise
        if self._agreement is not None:
            self._agree(kind, arguments, device, timeout_s)
        given = tuple(tensors)  # the caller's list may change before it runs
        is_synchronous = not getattr(arguments[-1], "asyncOp", True)
        if profiler._is_profiler_enabled:
            run = partial(nccl_group.run, is_synchronous=is_synchronous)
            return _in_range(kind, run, operation, given, timeout_s)
        return nccl_group.run(operation, given, timeout_s, is_synchronous=is_synchronous)

    def _refuse(self, error: Exception, asked: Asked, nccl_group: NcclGroup | None, timeout_s: float) -> None:
        """Tells the others why this rank takes no part in an operation."""
        if self._agreement is not None:
            self._compare(str(asked), Parts(), None, timeout_s, str(error))
        elif nccl_group is not None:
            nccl_group.refuse(error)
        else:
            self._cpu_group.refuse(error, asked)

    def _refuse_of_no_device(self, error: Exception, asked: Asked, timeout_s: float) -> None:
        """As `_refuse`, where no tensor says on what devices the others run it: on those that the group has run on.

        A group that has run on several cannot tell.
        """
        found, uses_cpu = list(self._nccl_groups.values()), self._cpu_group.is_connected
        if not found and (uses_cpu or not torch.cuda.is_available()):
            self._refuse(error, asked, None, timeout_s)
        elif self._agreement is not None or (len(found) == 1 and not uses_cpu):
            self._refuse(error, asked, found[0] if found else None, timeout_s)

    def _on_cpu(self, kind: Kind, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        """The Work of an operation on the CPU."""
        asked, (rank, size) = Asked(kind.describe, arguments), self.group_rank
        try:
            call = FIND[kind.gloo](asked, rank, size, *arguments)
        except TritondtError as error:
            self._refuse(error, asked, None, timeout_s)
            raise
        if self._agreement is not None:
            self._agree(kind, arguments, CPU, timeout_s)
        return self._cpu_group.run(kind.gloo, call, asked, arguments, timeout_s)

    def message(self, kind: str, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        """The Work of tensors to a rank of the group ("send") or from one ("recv"), on the CPU from any, -1, too.

        NCCL looks at no tag.
        """
        check_plain_dtypes(tensors, self._message_text, kind, tensors, peer)
        nccl_group = self.nccl_group(tensors[0].device, self._message_text, kind, tensors, peer)
        if nccl_group is None:
            return self._message_on_cpu(kind, tensors, peer, tag)
        if peer < 0 and kind == "recv":
            raise TransportError("a receive from any rank was asked for; NCCL receives from a rank that is named")
        own = self.group_rank.rank
        source, target = (own, peer) if kind == "send" else (peer, own)
        number = nccl_group.peer_of_message(source, target) if 0 <= peer < self.group_rank.size else peer
        operation = nccl_group.operations.operation(
            (kind, peer, number), tensors, self._message_text, OperationCache.message, (kind, tensors, peer, number)
        )
        return nccl_group.send(operation, tuple(tensors), source, target, self._timeout_s)

    def _message_on_cpu(self, kind: str, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        asked = Asked(self._message_text, (kind, tensors, peer))
        check_carried(asked, tensors, CPU)
        check_number(asked, "tensors", len(tensors), 1)
        if peer != ANY or kind == "send":
            check_group_rank(asked, peer, self.group_rank.size)
        if isinstance(self._cpu_group, GlooGroup):
            return self._cpu_group.message("recv_anysource" if peer == ANY else kind, tensors, peer, tag, asked)
        carry = self._mailbox.send if kind == "send" else self._mailbox.receive
        return carry(tensors[0], peer, tag, str(asked))

    def monitored_barrier(self, timeout: timedelta | None, *, names_all: bool) -> None:
        """Returns when all ranks have come; PeerError that names those who have not."""
        self._monitored.wait((timeout or self.timeout).total_seconds(), names_all=names_all)

    def _message_text(self, kind: str, tensors: Sequence[torch.Tensor], peer: int, _number: int = 0) -> str:
        counts = " + ".join(str(tensor.numel()) for tensor in tensors)
        own: int | str = self.ranks[self.group_rank.rank]
        other: int | str = self.ranks[peer] if 0 <= peer < len(self.ranks) else peer
        if peer == ANY and kind == "recv":
            return f"a message of {counts} {text_of(tensors[0].dtype)} from any rank to rank {own}"
        ends = (own, other) if kind == "send" else (other, own)
        return f"a message of {counts} {text_of(tensors[0].dtype)} from rank {ends[0]} to rank {ends[1]}"

    def barrier(self, options: Any) -> Any:
        """The Work of a barrier, which lets the host wait."""
        device = getattr(options, "device", None) or CPU
        nccl_group, timeout_s = self.nccl_group(device, str, "barrier"), self._timeout_s_of(options)
        if self._agreement is not None:
            self._compare(f"barrier on {device.type}", Parts(), None, timeout_s)
        if nccl_group is None:
            asked = Asked(lambda _: "barrier", (options,))
            call = FIND["barrier"](asked, *self.group_rank, options)
            return self._cpu_group.run("barrier", call, asked, (options,), timeout_s)
        return nccl_group.run(*nccl_group.operations.barrier("barrier"), timeout_s)

    def _agree(self, kind: Kind, arguments: tuple[Any, ...], device: torch.device, timeout_s: float) -> None:
        """Returns when all ranks have come to this operation on such a device."""
        text = f"{kind.describe(*arguments)} on {device.type}"
        root = getattr(arguments[-1], "rootRank", -1)
        role: Role = ""
        if root >= 0:  # who gives, or takes, from all others is a branch of many programs
            role = "source" if root == self.group_rank.rank else "target"
        self._compare(text, kind.parts(self.group_rank.size, *arguments), role, timeout_s)

    def _compare(self, text: str, parts: Parts, role: Role | None, timeout_s: float, refusal: str = "") -> None:
        """Returns when all ranks have come to the same text and parts, or to a refusal."""
        assert self._agreement is not None
        recorder = world.current().flight.recorder
        self._agreement.check(Compared(text, recorder.site_text(recorder.site()), role, parts), timeout_s, refusal)

    def _timeout_s_of(self, options: Any) -> float:
        """The timeout that the call gives, or else the group's, in seconds."""
        asked: timedelta = getattr(options, "timeout", _NO_TIMEOUT)
        return asked.total_seconds() if asked > _NO_TIMEOUT else self._timeout_s

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of operations from now on."""
        self.timeout, self._timeout_s = timeout, timeout.total_seconds()
        self.calls.timeout_s = self._timeout_s
        self._cpu_group.timeout = self._mailbox.timeout = timeout
        for nccl_group in self._nccl_groups.values():
            nccl_group.timeout = timeout

    def abort(self) -> None:
        """Ends what is under way without waiting for the others."""
        self._end()
        for nccl_group in self._nccl_groups.values():
            nccl_group.abort()
        self._cpu_group.abort()
        self._mailbox.end("was aborted")

    def close(self) -> None:
        """Waits for what is under way, and ends."""
        self._end()
        for nccl_group in self._nccl_groups.values():
            nccl_group.close()
        self._cpu_group.close()
        self._mailbox.end("was destroyed")

    def _end(self) -> None:
        self._is_ended = True
        self.calls.end()
        self._barrier_client.close()
        if self._store_client is not None:
            self._store_client.close()
