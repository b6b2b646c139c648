"""Where the operations of a process group run: on Gloo for tensors on the CPU, on NCCL for those on a GPU."""

import os
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tritondt import environment
from tritondt.comm import world
from tritondt.comm.store.client import StoreClient
from tritondt.comm.store.host import StoreHost
from tritondt.errors import TransportError, TritondtError, WorldError
from tritondt.process_group.debug_compare import Agreement, Parts
from tritondt.process_group.naming import text_of
from tritondt.process_group.nccl_calls import GroupRank
from tritondt.process_group.nccl_group import NcclGroup
from tritondt.process_group.operation import Operation
from tritondt.process_group.operations import OperationCache
from tritondt.process_group.stream import nccl_devices

CPU = torch.device("cpu")
_AT_ALL = timedelta(0)  # torch's options say this or less where the group's timeout is meant

# How often groups of a name have been made, since the default group was.
_num_makings: Counter[str] = Counter()


def _making_of(options: Any) -> int:
    """The number of this making of a group of its name, alike on its ranks.

    torch names some groups by their ranks, and so again when one has been destroyed, which left its keys in the store.
    """
    if not options.global_ranks_in_group:  # the default group
        _num_makings.clear()
    _num_makings[options.group_id] += 1
    return _num_makings[options.group_id]


# Of this process, since it was the one that others were forked from; asking for its number is a call of the kernel's.
_num_forks = 0


def _after_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_after_fork)


class Router:
    """That of one rank; `options` are torch's DistributedBackendOptions, `kinds` gives the devices it was made for."""

    def __init__(self, options: Any, kinds: Callable[[], tuple[str, ...]]) -> None:
        rank, size = options.group_rank, options.group_size
        self.place, self.timeout = GroupRank(rank, size), options.timeout
        self._timeout_s = self.timeout.total_seconds()
        self.ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
        self.group_id, self.num_operations = options.group_id, 0
        making = _making_of(options)
        self.name = f"process group {self.group_id}{'' if making == 1 else f', made again ({making})'}"
        self._kinds = kinds
        store = dist.PrefixStore(f"gloo/{making}", options.store)
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, options.timeout)
        # torch's own group over it, for it has methods that a Backend does not show.
        self.over_gloo: Any = dist.ProcessGroup(store, rank, size)
        self.over_gloo._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.over_gloo._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, self.gloo)
        self._sides: dict[str, NcclGroup] = {}
        self._num_forks, self._is_ended = _num_forks, False
        self._line: StoreClient | None = None
        self._agreement: Agreement | None = None
        if environment.compares():
            debug_store = dist.PrefixStore(f"tritondt/debug/{making}", options.store.clone())
            self._line = StoreClient(debug_store, StoreHost(options.store))
            self._agreement = Agreement(self._line, self.ranks, rank)

    def side(self, describe: Callable[[], str], device: torch.device) -> NcclGroup | None:
        """What carries tensors on such a device by NCCL; None for Gloo."""
        kind = device.type
        if self._num_forks != _num_forks:
            raise WorldError(
                f"{describe()} was asked of {self.name} by a process forked from the one that made it; fork before "
                "init_process_group, or start processes by the spawn method"
            )
        found = self._sides.get(kind)
        if found is not None:
            return found
        if self._is_ended:
            raise WorldError(f"{describe()} was asked of {self.name}, which has ended; make a new one")
        kinds = self._kinds()
        if kind not in kinds:
            raise TransportError(
                f"{describe()} was given a tensor on {device}; {self.name} was made for {' and '.join(kinds)}"
            )
        if kind not in nccl_devices:
            return None
        carrier = nccl_devices[kind](device)
        found = NcclGroup(f"{self.name} on {kind}", self.ranks, self.place.rank, carrier, self.timeout)
        self._sides[kind] = found
        return found

    def run(
        self,
        key: Hashable | None,
        tensors: Sequence[torch.Tensor],
        options: Any,
        describe: Callable[[], str],
        over_gloo: Callable[[Any], Any],
        over_nccl: Callable[[OperationCache, str], Operation],
        parts: Callable[[], Parts] = Parts,
    ) -> Any:
        """The Work of an operation of all ranks on `tensors`, this rank's own first, which say where it runs.

        Equal keys, and tensors alike, make equal operations, which are kept; None where they may not.
        """
        self.num_operations += 1
        if not tensors:
            raise WorldError(f"{describe()} was given no tensors")
        device = tensors[0].device
        side, timeout_s = self.side(describe, device), self._timeout_s_of(options)
        if side is None:
            self._agree(describe, device, parts, timeout_s)
            return over_gloo(self.over_gloo)
        try:
            operation = side.requests.operation(key, tensors, describe, over_nccl)
        except TritondtError as error:
            self._agree(describe, None, Parts, timeout_s, str(error))
            side.refuse(error)
            raise
        self._agree(describe, device, parts, timeout_s)
        return side.run(operation, tuple(tensors), timeout_s)  # the caller's list may change before it runs

    def message(self, kind: str, tensors: Sequence[torch.Tensor], peer: int, over_gloo: Callable[[Any], Any]) -> Any:
        """The Work of tensors to a place of the group ("send") or from one ("recv")."""

        def describe() -> str:
            return self._message_text(kind, tensors, peer)

        side = self.side(describe, tensors[0].device)
        if side is None:
            return over_gloo(self.over_gloo)
        own = self.place.rank
        source, target = (own, peer) if kind == "send" else (peer, own)
        number = side.peer_of_message(source, target) if 0 <= peer < self.place.size else peer
        operation = side.requests.operation(
            (kind, peer, number), tensors, describe, lambda on, text: on.message(text, kind, tensors, peer, number)
        )
        return side.send(operation, tuple(tensors), source, target, self._timeout_s)

    def _message_text(self, kind: str, tensors: Sequence[torch.Tensor], peer: int) -> str:
        counts = " + ".join(str(tensor.numel()) for tensor in tensors)
        own, other = self.ranks[self.place.rank], self.ranks[peer] if 0 <= peer < len(self.ranks) else peer
        ends = (own, other) if kind == "send" else (other, own)
        return f"a message of {counts} {text_of(tensors[0].dtype)} from rank {ends[0]} to rank {ends[1]}"

    def barrier(self, options: Any) -> Any:
        """The Work of a barrier, which lets the host wait."""
        device = getattr(options, "device", None) or CPU

        def describe() -> str:
            return "barrier"

        side, timeout_s = self.side(describe, device), self._timeout_s_of(options)
        self._agree(describe, device, Parts, timeout_s)
        if side is None:
            return self.over_gloo.barrier(options)
        return side.run(*side.requests.barrier(describe()), timeout_s)

    def _agree(
        self,
        describe: Callable[[], str],
        device: torch.device | None,
        parts: Callable[[], Parts],
        timeout_s: float,
        refusal: str = "",
    ) -> None:
        """In debug mode, returns when all ranks have come to the same on such a device, or to a refusal (no device)."""
        if self._agreement is not None:
            text = describe() if device is None else f"{describe()} on {device.type}"
            recorder = world.current().flight.recorder
            site = f", asked for at {recorder.site_text(recorder.site())}"
            self._agreement.check(text, site, parts(), timeout_s, refusal)

    def _timeout_s_of(self, options: Any) -> float:
        """As the call says, or the group's."""
        asked: timedelta = getattr(options, "timeout", _AT_ALL)
        return asked.total_seconds() if asked > _AT_ALL else self._timeout_s

    def set_timeout(self, timeout: timedelta) -> None:
        """How long operations may take from now on."""
        self.timeout, self._timeout_s = timeout, timeout.total_seconds()
        self.gloo._set_default_timeout(timeout)
        for side in self._sides.values():
            side.timeout = timeout

    def abort(self) -> None:
        """Ends what is under way without waiting for the others."""
        self._end()
        for side in self._sides.values():
            side.abort()
        self.gloo.abort()

    def close(self) -> None:
        """Waits for what is under way on NCCL, and ends."""
        self._end()
        for side in self._sides.values():
            side.close()
        self.gloo.shutdown()

    def _end(self) -> None:
        self._is_ended = True
        if self._line is not None:
            self._line.close()
