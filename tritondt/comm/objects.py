"""Python objects of all ranks, carried as bytes without NumPy, which torch's own collectives of objects import."""

import ctypes
import hmac
import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tritondt import environment
from tritondt.comm.secret import SIGNATURE_BYTES, Secret
from tritondt.errors import WorldError

Object = TypeVar("Object")

# The first byte of what a rank sends.
_PLAIN, _SIGNED, _REFUSED = b"p", b"s", b"r"

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
    Loading a pickle runs what is in it: with a secret each rank signs its own. WorldError, and nothing is loaded, where
    one is not signed by this rank's secret.
    """
    device, size = _device_of(dist.group.WORLD if group is None else group), dist.get_world_size(group)
    secret, refusal = _secret()
    content = _REFUSED if refusal else _sealed(pickle.dumps(own), secret, dist.get_rank(group))
    lengths = torch.empty(size, dtype=torch.int64, device=device)
    _gather(lengths, torch.tensor([len(content)], device=device), group=group)
    counts: list[int] = lengths.tolist()
    longest = max(counts)
    sent = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8).to(device)
    rows = torch.empty(size * longest, dtype=torch.uint8, device=device)
    _gather(rows, sent, group=group)
    received = bytes_of(rows)
    if refusal is not None:  # the others have been told
        raise refusal
    sealed = [received[place * longest :][:count] for place, count in enumerate(counts)]
    return [pickle.loads(content) for content in _opened(sealed, secret)]


def _secret() -> tuple[Secret | None, WorldError | None]:
    """This rank's secret, or why it has none that is allowed: the others wait for it all the same."""
    try:
        content = environment.secret()
    except WorldError as error:
        return None, error
    return None if content is None else Secret(content), None


def _sealed(content: bytes, secret: Secret | None, place: int) -> bytes:
    """The content behind a byte that says whether it is signed, and its signature where it is."""
    return _PLAIN + content if secret is None else _SIGNED + secret.signature(place, content) + content


def _opened(sealed: Sequence[bytes], secret: Secret | None) -> list[bytes]:
    """The contents of all places; WorldError where one is not signed by the secret, or is, and there is none."""
    if secret is None:
        strange = [place for place, each in enumerate(sealed) if each[:1] != _PLAIN]
        contents = [each[1:] for each in sealed]
    else:
        strange = [place for place, each in enumerate(sealed) if not _is_signed(each, secret, place)]
        contents = [each[1 + SIGNATURE_BYTES :] for each in sealed]
    if strange:
        what = "signed, and this rank has no secret" if secret is None else "not signed by the secret of this rank"
        raise WorldError(
            f"objects of ranks {strange} of a process group are {what}: none was loaded; set TRITONDT_SECRET or "
            "TRITONDT_SECRET_FILE to the same on all ranks, or on none"
        )
    return contents


def _is_signed(sealed: bytes, secret: Secret, place: int) -> bool:
    signature, content = sealed[1 : 1 + SIGNATURE_BYTES], sealed[1 + SIGNATURE_BYTES :]
    return sealed[:1] == _SIGNED and hmac.compare_digest(signature, secret.signature(place, content))


def _device_of(group: Any) -> torch.device:
    """Device whose tensors a process group carries; the CPU where it carries those, or has not said yet."""
    types = [device.type for device in group._device_types]
    if not types or "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], torch.accelerator.current_device_index())
