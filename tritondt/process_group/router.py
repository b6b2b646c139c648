"""The transport of a process group's operations: NCCL for tensors on a GPU, for others Gloo or shared memory."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler

from tritondt import environment
from tritondt.comm import world
from tritondt.comm.communicator import Role
from tritondt.comm.daemons import within
from tritondt.comm.store import presence
from tritondt.comm.store.client import StoreClient
from tritondt.comm.store.host import StoreHost
from tritondt.comm.transports import table as transport_table
from tritondt.errors import PeerError, TransportError, TritondtError, WorldError
from tritondt.process_group.checks import check_parts, check_plain_dtypes
from tritondt.process_group.cpu_works import FinishedWork, StagedWork
from tritondt.process_group.debug_compare import Agreement, Asked, Parts
from tritondt.process_group.kinds import Kind
from tritondt.process_group.naming import text_of
from tritondt.process_group.nccl_calls import GroupRank
from tritondt.process_group.nccl_group import NcclGroup
from tritondt.process_group.one_rank import is_empty, run_alone
from tritondt.process_group.operations import OperationCache
from tritondt.process_group.shared_memory_group import SharedMemoryGroup
from tritondt.process_group.staging import NewCopies, as_real, flattened, staged, tensors_of
from tritondt.process_group.stream import nccl_devices

CPU = torch.device("cpu")
# Collectives whose complex tensors torch does not take apart beforehand, as others', and of which Gloo knows none.
_NOT_TAKEN_APART = frozenset({"gather", "allgather_into_tensor_coalesced"})
# Collectives whose tensors may have any shapes of so many elements, which Gloo compares.
_BY_ELEMENTS = frozenset(
    {
        *("_allgather_base", "_reduce_scatter_base"),
        *("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
    }
)
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


# What the ranks of a group write in its store: whether they move tensors on the CPU through shared memory.
_MEMORY, _GLOO = "memory", "gloo"


def _wish(rank: int) -> str:
    return f"tritondt/wish/{rank}"


def _all_want_memory(store: "dist.Store", name: str, ranks: Sequence[int]) -> bool:
    """Whether all ranks of a group want shared memory; a RuntimeWarning names those that do not."""
    wishes = store.multi_get([_wish(place) for place in range(len(ranks))])
    others = [rank for rank, wish in zip(ranks, wishes, strict=True) if wish.decode() != _MEMORY]
    if others:
        warnings.warn(
            f"collectives of {name} on the CPU go over Gloo: TRITONDT_TRANSPORT names another transport "
            f"than shared-memory on ranks {others}, and shared memory takes all ranks; set it alike on all of them",
            RuntimeWarning,
            stacklevel=2,
        )
    return not others


class Router:
    """The choice between Gloo and NCCL for one rank of a process group.

    `options` are torch's DistributedBackendOptions; `device_types` gives the types of devices that the group is for.
    """

    def __init__(self, options: Any, device_types: Callable[[], tuple[str, ...]]) -> None:
        rank, size = options.group_rank, options.group_size
        self.group_rank, self.timeout = GroupRank(rank, size), options.timeout
        self._timeout_s = self.timeout.total_seconds()
        self.ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
        self.group_id, self.num_operations = options.group_id, 0
        making = _making_of(options)
        self.name = f"process group {self.group_id}{'' if making == 1 else f', made again ({making})'}"
        self._device_types = device_types
        store = asked = dist.PrefixStore(f"gloo/{making}", options.store)
        try:
            presence.announce(store, rank)
            wants_memory = size > 1 and transport_table.chosen("cpu").groups_share_memory
            # Before Gloo connects the ranks: afterwards all wishes are there.
            store.set(_wish(rank), _MEMORY if wants_memory else _GLOO)
            asked = dist.PrefixStore(f"gloo/{making}", options.store.clone())
            self.gloo: Any = self._connected(store, asked)
        except BaseException as error:
            if not isinstance(error, PeerError):
                presence.refuse(asked, rank, error)
            raise
        # torch's own group over it, for it has methods that a Backend does not show.
        self.over_gloo: Any = dist.ProcessGroup(store, rank, size)
        self.over_gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.over_gloo._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, self.gloo)
        self._nccl_groups: dict[str, NcclGroup] = {}
        self._shared_memory: SharedMemoryGroup | None = None
        if wants_memory and _all_want_memory(store, self.name, self.ranks):
            self._shared_memory = SharedMemoryGroup(self.name, self.ranks, rank, self.timeout)
        self._num_forks, self._is_ended = _num_forks, False
        self._checked_forks = -1  # forks when a tensor on the CPU was last found to be one for Gloo
        self._store_client: StoreClient | None = None
        self._agreement: Agreement | None = None
        if environment.compares():
            debug_store = dist.PrefixStore(f"tritondt/debug/{making}", options.store.clone())
            self._store_client = StoreClient(debug_store, StoreHost(options.store))
            self._agreement = Agreement(self._store_client, self.ranks, rank)

    def _connected(self, store: "dist.Store", asked: "dist.Store") -> Any:
        """Gloo's group by `store`; PeerError where some do not come in time, or as soon as one cannot.

        `asked` is the same store by another connection: that of `store` is Gloo's while Gloo waits.
        """
        rank, size = self.group_rank
        others = [place for place in range(size) if place != rank]

        def look() -> None:
            failed = presence.refusal(asked, others) or presence.ended(asked, others)
            if failed is not None:
                raise PeerError(
                    f"rank {self.ranks[failed.rank]} failed while rank {self.ranks[rank]} made {self.name}: "
                    f"{failed.error}"
                )

        make = partial(dist.ProcessGroupGloo, store, rank, size, self.timeout)
        try:
            return within(self.timeout, make, "tritondt-gloo", look)
        except TimeoutError:
            raise PeerError(
                f"rank {self.ranks[rank]} waited {self._timeout_s:g} s for the ranks of {self.name} to connect by Gloo"
            ) from None

    def nccl_group(self, device: torch.device, describe: Callable[..., str], *arguments: Any) -> NcclGroup | None:
        """The part that carries tensors on such a device by NCCL; None for Gloo.

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
            f"{self.name} on {device_type}",
            self.ranks,
            self.group_rank.rank,
            nccl_devices[device_type](device),
            self.timeout,
        )
        self._nccl_groups[device_type] = found
        return found

    def run(self, kind: Kind, tensors: Sequence[torch.Tensor], arguments: tuple[Any, ...]) -> Any:
        """The Work of an operation of all ranks on `tensors`, this rank's own first, which say where it runs.

        `arguments` are those of torch's call, its options last.
        """
        self.num_operations += 1
        if not tensors:
            raise WorldError(f"{kind.describe(*arguments)} was given no tensors")
        device = tensors[0].device
        nccl_group, timeout_s = self.nccl_group(device, kind.describe, *arguments), self._timeout_s_of(arguments[-1])
        try:
            check_plain_dtypes(tensors, kind.describe, *arguments)
        except TritondtError as error:
            self._refuse(error, kind.describe(*arguments), nccl_group, timeout_s)
            raise
        if nccl_group is None:
            if self._agreement is not None:
                self._agree(kind, arguments, device, timeout_s)
            if profiler._is_profiler_enabled:
                return _in_range(kind, self._on_cpu, kind.gloo, kind.describe, arguments, timeout_s)
            return self._on_cpu(kind.gloo, kind.describe, arguments, timeout_s)
        try:
            key = kind.key(*arguments)
            operation = nccl_group.operations.operation(key, tensors, kind.describe, kind.make, arguments)
        except TritondtError as error:
            self._refuse(error, kind.describe(*arguments), nccl_group, timeout_s)
            raise
        if self._agreement is not None:
            self._agree(kind, arguments, device, timeout_s)
        given = tuple(tensors)  # the caller's list may change before it runs
        is_synchronous = not getattr(arguments[-1], "asyncOp", True)
        if profiler._is_profiler_enabled:
            run = partial(nccl_group.run, is_synchronous=is_synchronous)
            return _in_range(kind, run, operation, given, timeout_s)
        return nccl_group.run(operation, given, timeout_s, is_synchronous=is_synchronous)

    def _refuse(self, error: Exception, text: str, nccl_group: NcclGroup | None, timeout_s: float) -> None:
        """Tells the others why this rank takes no part in an operation; over Gloo alone there is no way to."""
        if self._agreement is not None:
            self._compare(text, Parts(), None, timeout_s, str(error))
        elif nccl_group is not None:
            nccl_group.refuse(error)
        elif self._shared_memory is not None:
            self._shared_memory.refuse(error, text)

    def _on_cpu(self, kind: str, describe: Callable[..., str], arguments: tuple[Any, ...], timeout_s: float) -> Any:
        """The Work of an operation on the CPU: through shared memory where that has the operation, else on Gloo."""
        if len(self.ranks) == 1 and (is_empty(kind, arguments) or run_alone(kind, arguments)):
            return FinishedWork(tensors_of(arguments[0]))
        if is_empty(kind, arguments):
            if self._shared_memory is not None:
                self._shared_memory.pass_by(describe, arguments, timeout_s)
            return FinishedWork(tensors_of(arguments[0]))
        work = None
        if self._shared_memory is not None:
            work = self._shared_memory.run(kind, describe, arguments, timeout_s)
        if work is not None:
            return work
        try:
            check_parts(kind, describe, arguments, len(self.ranks))
            return self._on_gloo(kind, arguments)
        except Exception as error:
            # The others may wait in shared memory, where their own arguments are right.
            if self._shared_memory is not None:
                self._shared_memory.refuse(error, describe(*arguments))
            raise

    def _on_gloo(self, kind: str, arguments: tuple[Any, ...]) -> Any:
        """The Work of an operation on Gloo, which looks at the memory of tensors and not at their strides."""
        copies: NewCopies = []
        root, own = getattr(arguments[-1], "rootRank", -1), self.group_rank.rank
        is_only_read = (kind == "reduce" and own != root) or (kind == "broadcast" and own == root) or kind == "send"
        run = getattr(self.over_gloo, kind)
        if kind == "barrier":
            return run(*arguments)
        memory = staged(arguments, None if is_only_read else copies)
        if kind in _NOT_TAKEN_APART:
            memory = as_real(memory)
        if kind in _BY_ELEMENTS:
            memory = flattened(memory)
        if not copies:
            return run(*memory)
        return StagedWork(run(*memory), tensors_of(arguments[0]), copies)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> Any:
        """The Work of a receive from any rank, on Gloo."""
        check_plain_dtypes(tensors, lambda: "a receive from any rank")
        return self._on_gloo("recv_anysource", (tensors, tag))

    def message(self, kind: str, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        """The Work of tensors to a rank of the group ("send") or from one ("recv"); Gloo alone looks at the tag."""
        check_plain_dtypes(tensors, self._message_text, kind, tensors, peer)
        nccl_group = self.nccl_group(tensors[0].device, self._message_text, kind, tensors, peer)
        if nccl_group is None:
            return self._on_gloo(kind, (tensors, peer, tag))
        own = self.group_rank.rank
        source, target = (own, peer) if kind == "send" else (peer, own)
        number = nccl_group.peer_of_message(source, target) if 0 <= peer < self.group_rank.size else peer
        operation = nccl_group.operations.operation(
            (kind, peer, number), tensors, self._message_text, OperationCache.message, (kind, tensors, peer, number)
        )
        return nccl_group.send(operation, tuple(tensors), source, target, self._timeout_s)

    def _message_text(self, kind: str, tensors: Sequence[torch.Tensor], peer: int, _number: int = 0) -> str:
        counts = " + ".join(str(tensor.numel()) for tensor in tensors)
        own, other = self.ranks[self.group_rank.rank], self.ranks[peer] if 0 <= peer < len(self.ranks) else peer
        ends = (own, other) if kind == "send" else (other, own)
        return f"a message of {counts} {text_of(tensors[0].dtype)} from rank {ends[0]} to rank {ends[1]}"

    def barrier(self, options: Any) -> Any:
        """The Work of a barrier, which lets the host wait."""
        device = getattr(options, "device", None) or CPU
        nccl_group, timeout_s = self.nccl_group(device, str, "barrier"), self._timeout_s_of(options)
        if self._agreement is not None:
            self._compare(f"barrier on {device.type}", Parts(), None, timeout_s)
        if nccl_group is None:
            return self._on_cpu("barrier", lambda _: "barrier", (options,), timeout_s)
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
        self._agreement.check(Asked(text, recorder.site_text(recorder.site()), role, parts), timeout_s, refusal)

    def _timeout_s_of(self, options: Any) -> float:
        """The timeout that the call gives, or else the group's, in seconds."""
        asked: timedelta = getattr(options, "timeout", _NO_TIMEOUT)
        return asked.total_seconds() if asked > _NO_TIMEOUT else self._timeout_s

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of operations from now on."""
        self.timeout, self._timeout_s = timeout, timeout.total_seconds()
        self.gloo._set_default_timeout(timeout)
        if self._shared_memory is not None:
            self._shared_memory.timeout = timeout
        for nccl_group in self._nccl_groups.values():
            nccl_group.timeout = timeout

    def abort(self) -> None:
        """Ends what is under way without waiting for the others."""
        self._end()
        for nccl_group in self._nccl_groups.values():
            nccl_group.abort()
        if self._shared_memory is not None:
            self._shared_memory.abort()
        self.gloo.abort()

    def close(self) -> None:
        """Waits for what is under way on NCCL and in shared memory, and ends."""
        self._end()
        for nccl_group in self._nccl_groups.values():
            nccl_group.close()
        if self._shared_memory is not None:
            self._shared_memory.close()
        self.gloo.shutdown()

    def _end(self) -> None:
        self._is_ended = True
        if self._store_client is not None:
            self._store_client.close()
