"""The two libraries that are measured: ours on its rank threads, torch.distributed.tensor on torch's threaded group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from math import ceil
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor

import tritondt as T
from benchmarks.ops.op_coverage.placing import local_part
from benchmarks.ops.op_coverage.sent_bytes import TorchBytes
from tritondt.comm.transports.threads import run_ranks


class Side(Protocol):
    """A library, by the functions that a trial needs of it."""

    name: str

    def run(self, num_ranks: int, body: Callable[[int], Any]) -> list[Any]:
        """Runs `body(rank)` on so many rank threads."""

    def mesh(self, num_ranks: int) -> Any:
        """A mesh of all ranks with one axis."""

    def placed(self, full: torch.Tensor, mesh: Any, placement: T.Placement) -> torch.Tensor:
        """This rank's part of a whole tensor, as a distributed one."""

    def is_distributed(self, found: Any) -> bool:
        """Whether a result is what it should be."""

    def flaw(self, found: Any) -> str:
        """The flaw in the local part of a result, in words; empty where there is none."""

    def whole(self, found: Any) -> torch.Tensor:
        """All of a result: a collective call."""

    def counting(self, num_ranks: int, add: Callable[[int], None]) -> AbstractContextManager[None]:
        """Tells how many bytes this rank sends within, where events of ours do not."""


class Ours:
    """This package."""

    name = "tritondt"

    def __init__(self) -> None:
        if hasattr(torch.nn.modules, "linear_cross_entropy"):  # torch 2.13 has it
            _let_threads_pass(torch.nn.modules.linear_cross_entropy)

    def run(self, num_ranks: int, body: Callable[[int], Any]) -> list[Any]:
        """On threads that take turns; a rank that waits in vain is told so."""

        def guarded(rank: int) -> Any:
            try:
                return body(rank)
            except T.PeerError as error:
                return error

        return run_ranks(num_ranks, guarded)

    def mesh(self, num_ranks: int) -> T.Mesh:
        """Of rank threads."""
        return T.Mesh((num_ranks,))

    def placed(self, full: torch.Tensor, mesh: T.Mesh, placement: T.Placement) -> torch.Tensor:
        """By from_local with the whole tensor's shape."""
        assert mesh.coordinate is not None, "every rank is in the mesh"
        local = local_part(full, placement, mesh.shape[0], mesh.coordinate[0])
        return T.DTensor.from_local(local, mesh, [placement], shape=full.shape)

    def is_distributed(self, found: Any) -> bool:
        """A DTensor."""
        return isinstance(found, T.DTensor)

    def flaw(self, found: Any) -> str:
        """The local tensor has the shape that the spec says."""
        spec, local = found._spec, tuple(found._local_tensor.shape)
        return (
            "" if local == spec.local_shape else f"a local tensor of shape {local} under {spec}, not {spec.local_shape}"
        )

    def whole(self, found: Any) -> torch.Tensor:
        """Gathered or reduced."""
        whole: torch.Tensor = found.detach().full_tensor()
        return whole

    def counting(self, num_ranks: int, add: Callable[[int], None]) -> AbstractContextManager[None]:
        """Nothing: steps are counted as events."""
        return nullcontext()


def _let_threads_pass(module: ModuleType) -> None:
    """Takes their locks from a module's cached properties.

    Until Python 3.12 a cached property is computed under a lock of its class. A rank thread that waits for another one
    in there would keep it out; ranks that are processes have a lock each.
    """
    for of_class in (vars(item) for item in vars(module).values() if isinstance(item, type)):
        for attribute in of_class.values():
            if isinstance(attribute, cached_property) and hasattr(attribute, "lock"):
                attribute.lock = nullcontext()


class Torchs:
    """torch.distributed.tensor; cuts by explicit sizes, which it does not have, are equal ones there."""

    name = "torch"

    def run(self, num_ranks: int, body: Callable[[int], Any]) -> list[Any]:
        """On free threads; when one ends badly the others are woken from their collectives."""
        # Imported for its effect on torch.distributed, which nobody wants who measures the other side only.
        from torch.testing._internal.distributed import multi_threaded_pg as threaded  # noqa: PLC0415

        torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
        threaded._install_threaded_pg()
        store, results = dist.HashStore(), [None] * num_ranks

        def run(rank: int) -> None:
            dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
            try:
                results[rank] = body(rank)
            except Exception as error:  # noqa: BLE001  it is the rank's result
                results[rank] = error  # type: ignore[call-overload]
            finally:
                if getattr(results[rank], "verdict", None) != "right":
                    threaded.ProcessLocalGroup.exception_handle(None)
                dist.destroy_process_group()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        return results

    def mesh(self, num_ranks: int) -> Any:
        """A DeviceMesh."""
        return dist.init_device_mesh("cpu", (num_ranks,))

    def placed(self, full: torch.Tensor, mesh: Any, placement: T.Placement) -> torch.Tensor:
        """By from_local with shape and stride, as it wants them for uneven shards."""
        theirs: Any = torch_tensor.Replicate()
        if isinstance(placement, T.Shard):
            placement = T.Shard(placement.dim)
            theirs = torch_tensor.Shard(placement.dim)
        elif isinstance(placement, T.Partial):
            theirs = torch_tensor.Partial()
        local = local_part(full, placement, mesh.size(), mesh.get_local_rank())
        return torch_tensor.DTensor.from_local(
            local, mesh, [theirs], run_check=False, shape=full.shape, stride=full.stride()
        )

    def is_distributed(self, found: Any) -> bool:
        """A DTensor of torch's."""
        return isinstance(found, torch_tensor.DTensor)

    def flaw(self, found: Any) -> str:
        """It is seen when the whole is compared."""
        return ""

    def whole(self, found: Any) -> torch.Tensor:
        """Gathered or reduced."""
        whole: torch.Tensor = found.detach().full_tensor()
        return whole

    @contextmanager
    def counting(self, num_ranks: int, add: Callable[[int], None]) -> Iterator[None]:
        """The least that its collectives send."""
        with TorchBytes(num_ranks) as counted:
            yield
        add(ceil(counted.sent_bytes))
