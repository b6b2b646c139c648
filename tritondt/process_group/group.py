"""The names, parts, timeout and end of a process group, as torch.distributed asks for them."""

import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from tritondt import logs
from tritondt._importing import BACKEND
from tritondt.errors import TransportError
from tritondt.process_group.cpu_collectives import CPU
from tritondt.process_group.router import Router

CUDA = torch.device("cuda")
_Base: Any = dist.ProcessGroup


def _backend_base() -> Any:
    """torch's class of backends where Python may make one (2.15), else object."""
    try:
        c10d.Backend(0, 1)
    except TypeError:  # "No constructor defined!"
        return object
    return c10d.Backend


_BackendBase: Any = _backend_base()


def _configured_types(group: "weakref.ref[Group]") -> tuple[str, ...]:
    """The types of devices that a group is for: "cuda:tritondt" names one.

    The group owns the router, which asks this: a reference the other way would keep a group that was destroyed, and 2
    to 13 descriptors, until the garbage collector runs.
    """
    of_groups: Any = dist.distributed_c10d._world.pg_backend_config
    config = of_groups.get(group(), "")
    return tuple(part.partition(":")[0] for part in config.split(",") if ":" in part) or ("cpu", "cuda")


class Group(_Base):  # type: ignore[misc]
    """One rank's part in a group, without operations; `options` are torch's DistributedBackendOptions."""

    def __init__(self, options: Any, backend_options: object = None) -> None:
        if backend_options is not None:
            raise TransportError(
                f"a process group was given the options {backend_options!r}; the backend {BACKEND!r} takes none: "
                "TRITONDT_NCCL_OPTIONS sets those of its communicators"
            )
        super().__init__(options.group_rank, options.group_size)
        self._store, self._num_splits = options.store, 0
        self._own_name, self._own_desc = "", "undefined"
        self._router = Router(options, partial(_configured_types, weakref.ref(self)))
        self._calls = self._router.calls
        logs.set_up()
        logs.world.info("rank %d: %s made of ranks %s", options.group_rank, self._router.name, self._router.ranks)
        # What C++ asks a group for and does not forward to this class, it asks of these.
        rank, size, kind = options.group_rank, options.group_size, dist.ProcessGroup.BackendType
        self._set_default_backend(kind.CUSTOM)  # 2.15 asks it for hooks
        self._parts = {CPU: PartOnCpu(rank, size), CUDA: Part(rank, size)}
        for device, part in self._parts.items():
            # torch 2.15 asks every part, which None cannot answer, and has what Python may derive one from; before, C++
            # takes no part of Python's, and asks for none.
            self._register_backend(device, kind.CUSTOM, part if isinstance(part, c10d.Backend) else None)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> "Group | None":
        """A group of some ranks of this one, None for a rank of the others; `dist.split_group` calls it on all ranks.

        `device_types` are those of the config that torch.distributed keeps for it. Its communicators are made on first
        use, by those that take part. They meet by the number of the split: the name that torch gives follows from how
        many groups a rank is in, and differs among those of different groups (2.13).
        """
        self._num_splits += 1
        group_rank, own = self._router.group_rank, self._router.ranks
        if group_rank.rank not in ranks:
            return None
        options = c10d._DistributedBackendOptions()
        options.group_id = f"{self._router.group_id}, part {self._num_splits} of places {','.join(map(str, ranks))}"
        options.store = dist.PrefixStore(f"{options.group_id}/", self._store)
        options.group_rank, options.group_size = list(ranks).index(group_rank.rank), len(ranks)
        options.timeout = timeout or self._router.timeout
        options.global_ranks_in_group = [own[rank] for rank in ranks]
        made = type(self)(options, opts)
        made._set_group_name(group_name or options.group_id)
        made._set_group_desc(group_desc or "undefined")
        return made

    def getBackendName(self) -> str:  # noqa: N802  C++ looks for it
        """The backend's name in torch.distributed."""
        return BACKEND

    def name(self) -> str:
        """The backend's name in torch.distributed."""
        return BACKEND

    # C++ keeps these with a part of its own, of which there may be none, and asks here first.
    def getGroupName(self) -> str:  # noqa: N802  C++ looks for it
        """The name by which torch finds the group; RuntimeError before it has one, as of any other group."""
        if not self._own_name:
            raise RuntimeError("ProcessGroup name not set")
        return self._own_name

    def setGroupName(self, group_name: str) -> None:  # noqa: N802
        """Names the group."""
        self._own_name = group_name

    def getGroupDesc(self) -> str:  # noqa: N802
        """The group's description."""
        return self._own_desc

    def setGroupDesc(self, group_desc: str) -> None:  # noqa: N802
        """Describes the group."""
        self._own_desc = group_desc

    def get_group_store(self) -> dist.Store:
        """The store in which the group's ranks meet."""
        store: dist.Store = self._store
        return store

    def _get_backend(self, device: torch.device) -> Any:
        return self._parts[CPU if torch.device(device).type == "cpu" else CUDA]

    def _get_sequence_number_for_group(self) -> int:
        return self._calls.num_operations

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: operations are counted from 0 on all ranks."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of operations from now on."""
        self._router.set_timeout(timeout)

    def abort(self) -> None:
        """Ends what is under way without waiting for the others; the group takes no more operations."""
        self._router.abort()

    def shutdown(self) -> None:
        """Waits for what is under way, and ends; `dist.destroy_process_group` calls it."""
        self._router.close()


class Part(_BackendBase):  # type: ignore[misc]
    """Answers to what torch.distributed asks about the part of a group that is on devices of one type."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(*((rank, size) if _BackendBase is not object else ()))

    supports_splitting = True
    supports_coalescing = True
    supports_time_estimate = False
    supports_shrinking = False

    def getBackendName(self) -> str:  # noqa: N802  C++ looks for it
        """The backend's name in torch.distributed."""
        return BACKEND

    def name(self) -> str:
        """The backend's name in torch.distributed."""
        return BACKEND

    @property
    def options(self) -> None:
        """The options of a part of the group: none."""

    def eager_connect_single_device(self, _device: torch.device) -> None:
        """Nothing: communicators are made on first use, when there is a world."""

    def perform_nocolor_split(self, _device: torch.device) -> None:
        """Nothing: a part of the group is made by the ranks in it."""

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: operations are counted from 0 on all ranks."""

    def supports_tensor_alloc(self, _device: torch.device) -> bool:
        """Whether the backend allocates tensors: no."""
        return False


class PartOnCpu(Part):
    """The part of a group that is on the CPU, where operations run one by one."""

    supports_coalescing = False
