"""Collectives by which torch.distributed.tensor would redistribute a tensor, asked of the torch that is installed.

torch's own code runs on tensors without elements, as one rank of a world of torch's fake process group. The collectives
that it calls are written down. Nothing is sent, and no memory is taken.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tritondt.errors import LayoutError, TritondtError, WorldError
from tritondt.interop.torch_specs import torch_placements
from tritondt.sharding.layout import Coordinate, Layout


@dataclass(frozen=True)
class Collective:
    """One collective of torch's among `num_ranks` ranks, and the bytes that a rank receives in it, padding included.

    They are those of the form with the fewest: of a ring, where terms are added up.
    """

    name: str
    num_ranks: int
    received_bytes: int

    def __str__(self) -> str:
        return f"{self.name} of {self.num_ranks} ranks {self.received_bytes:,}"


# Bytes that one of n ranks receives, by those of the tensor that goes in and of the one that comes out.
_RECEIVED: Mapping[str, Callable[[int, int, int], int]] = {
    "all_gather_into_tensor": lambda n, given, result: result - given,
    "reduce_scatter_tensor": lambda n, given, result: given - result,
    "all_reduce": lambda n, given, result: -(-2 * (n - 1) * given // n),
    "shard_dim_alltoall": lambda n, given, result: given - given // n,
    "all_to_all_single": lambda n, given, result: given - given // n,
    "broadcast": lambda n, given, result: given,
}
_SILENT = frozenset({"wait_tensor", "_wrap_tensor_autograd"})


class UnknownCollectiveError(TritondtError, RuntimeError):
    """A collective of the installed torch that has no entry in the table of bytes."""


class _Recorder(TorchDispatchMode):
    """Collectives that functions of torch call within."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("_c10d_functional", "_dtensor"):
            name: str = func._schema.name.partition("::")[2]
            if name not in _SILENT:
                if name not in _RECEIVED:
                    raise UnknownCollectiveError(f"torch {torch.__version__} called {func}; what it moves is not known")
                size = dist.distributed_c10d._resolve_process_group(args[-1]).size()
                received = _RECEIVED[name](size, args[0].nbytes, result.nbytes)
                self.found.append(Collective(name, size, received))
        return result


def torch_moves(
    source: Layout, target: Layout, dtype: torch.dtype, coordinate: Coordinate, device_type: str
) -> list[Collective]:
    """Collectives in which torch takes a tensor from one layout to another, and what the rank at `coordinate` receives.

    `device_type` is that of the mesh: over Gloo torch gathers where NCCL exchanges all with all. Raises LayoutError
    where torch has no placements for one of the layouts, or refuses to go from one to the other, and WorldError in a
    process that is in a world already.
    """
    before, after = torch_placements(source), torch_placements(target)
    with _fake_world(source.position(coordinate), source.num_ranks), _silent():
        mesh = _torch_mesh(device_type, source.mesh_shape)
        local = torch.empty(source.local_shape(coordinate), dtype=dtype, device="meta")
        stride = torch.empty(source.shape, device="meta").stride()
        whole = TorchDTensor.from_local(
            local, mesh, before, run_check=False, shape=torch.Size(source.shape), stride=stride
        )
        recorder = _Recorder()
        try:
            with recorder:
                whole.redistribute(placements=after)
        except UnknownCollectiveError:
            raise
        except RuntimeError as error:
            raise LayoutError(f"torch's DTensor does not go from {source} to {target}: {error}") from error
    return recorder.found


def _torch_mesh(device_type: str, shape: tuple[int, ...]) -> TorchDeviceMesh:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # on the default device of ranks, which there are none of
            return init_device_mesh(device_type, shape)
    except ZeroDivisionError as error:  # torch 2.10 divides the ranks by this machine's devices
        raise LayoutError(
            f"torch makes no mesh of {device_type} on a machine without such a device; allowed are "
            "--device cpu, a machine with one, and torch from 2.11 on"
        ) from error


@contextmanager
def _fake_world(rank: int, size: int) -> Iterator[None]:
    if dist.is_initialized():
        raise WorldError(
            "what torch would move is asked in a process of its own world, and this one has called init_process_group: "
            "ask before, or in another process"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _silent() -> Iterator[None]:
    """Without torch's advice on how its collectives would be fewer, which is for programs."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
