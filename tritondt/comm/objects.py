"""Python objects of all ranks, carried as bytes without NumPy, which torch's own collectives of objects import."""

import ctypes
import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Object = TypeVar("Object")

# The name that a torch which has it warns to use instead of the other.
_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Content of a dense tensor in row-major order.

    >>> bytes_of(torch.tensor([1, -1], dtype=torch.int16))
    b'\\x01\\x00\\xff\\xff'
    """
    held = tensor.detach().to("cpu").contiguous()
    return ctypes.string_at(held.data_ptr(), held.nbytes) if held.numel() else b""


def gather_objects(own: Object, group: dist.ProcessGroup | None = None) -> list[Object]:
    """Objects of all ranks of a process group, by rank in it; a collective call. `own` is what pickle can write.

    Bytes travel on the CPU where the group carries such tensors, and on the current device of its first type else.
    """
    device, size = _device_of(dist.group.WORLD if group is None else group), dist.get_world_size(group)
    content = pickle.dumps(own)
    lengths = torch.empty(size, dtype=torch.int64, device=device)
    _gather(lengths, torch.tensor([len(content)], device=device), group=group)
    counts: list[int] = lengths.tolist()
    longest = max(counts)
    sent = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8).to(device)
    rows = torch.empty(size * longest, dtype=torch.uint8, device=device)
    _gather(rows, sent, group=group)
    received = bytes_of(rows)
    return [pickle.loads(received[place * longest :][:count]) for place, count in enumerate(counts)]


def _device_of(group: Any) -> torch.device:
    """Device whose tensors a process group carries; the CPU where it carries those, or has not said yet."""
    types = [device.type for device in group._device_types]
    if not types or "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], torch.accelerator.current_device_index())
