"""Files of weights in the safetensors format: which tensor lies where, and what a folder of them has.

A file is 8 bytes with the length of a header, the header, which is JSON, and the tensors' bytes, row by row and one
after another. A folder has one file, or an index of several.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tritondt.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# What a reader of the format refuses to take for a header.
_MAX_HEADER_BYTES = 100_000_000


class Weight(NamedTuple):
    """A tensor of a file: its name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes.

        >>> Weight("bias", (3,), torch.bfloat16).num_bytes
        6
        """
        return prod(self.shape) * self.dtype.itemsize


class WeightFile(NamedTuple):
    """A file that is to be written by the rank at `owner`, a position on the mesh: what it has, in this order."""

    name: str
    owner: int
    weights: tuple[Weight, ...]

    def header(self) -> bytes:
        """The bytes before the tensors' own, padded so that these start at a multiple of 8."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for weight, start in self.starts():
            places = [start, start + weight.num_bytes]
            entries[weight.name] = {
                "dtype": _NAMES[weight.dtype],
                "shape": list(weight.shape),
                "data_offsets": places,
            }
        content = json.dumps(entries, separators=(",", ":")).encode()
        content += b" " * (-len(content) % 8)
        return len(content).to_bytes(8, "little") + content

    def starts(self) -> Iterable[tuple[Weight, int]]:
        """The tensors and where each starts behind the header."""
        at = 0
        for weight in self.weights:
            yield weight, at
            at += weight.num_bytes


def files_for(weights: Sequence[Weight], num_ranks: int) -> list[WeightFile]:
    """Files by owner: each tensor is one rank's, the largest first to who has least; ranks without any have no file.

    Raises CheckpointError for a dtype that the format has not.

    >>> [[weight.name for weight in file.weights] for file in files_for(
    ...     [Weight("a", (2,), torch.float32), Weight("b", (8,), torch.float32), Weight("c", (3,), torch.float32)], 2)]
    [['b'], ['a', 'c']]
    """
    unknown = [weight for weight in weights if weight.dtype not in _NAMES]
    if unknown:
        raise CheckpointError(
            f"{unknown[0].name} is {unknown[0].dtype}; allowed in safetensors are {', '.join(map(str, _NAMES))}"
        )
    filled, owners = [0] * num_ranks, {}
    for weight in sorted(weights, key=lambda weight: -weight.num_bytes):
        owner = filled.index(min(filled))
        owners[weight.name] = owner
        filled[owner] += weight.num_bytes
    # Wide elements first, so that each tensor lies at a multiple of its element's size.
    ordered = sorted(weights, key=lambda weight: -weight.dtype.itemsize)
    held = [(rank, tuple(weight for weight in ordered if owners[weight.name] == rank)) for rank in range(num_ranks)]
    held = [(rank, own) for rank, own in held if own]
    names = [f"model-{place:05}-of-{len(held):05}.safetensors" for place in range(1, len(held) + 1)]
    return [
        WeightFile(SINGLE if len(held) == 1 else name, rank, own) for name, (rank, own) in zip(names, held, strict=True)
    ]


def index_of(files: Sequence[WeightFile]) -> str:
    """The index of several files: the name of the file of each tensor, and the bytes of all."""
    total = sum(weight.num_bytes for file in files for weight in file.weights)
    places = {weight.name: file.name for file in files for weight in file.weights}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2, sort_keys=True) + "\n"


def weights_in(folder: Path) -> dict[str, tuple[Weight, Path]]:
    """The tensors of a folder and their files, by the headers of these.

    Raises CheckpointError for a folder without weights, a file that is not there, is truncated or has no header, and
    for an index that names what its files have not.
    """
    index = folder / INDEX
    if (folder / SINGLE).is_file():
        return {weight.name: (weight, folder / SINGLE) for weight in read_header(folder / SINGLE)}
    if not index.is_file():
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}; allowed is a folder of safetensors files")
    places = _read_index(index)
    headers = {name: {weight.name: weight for weight in read_header(folder / name)} for name in set(places.values())}
    absent = [name for name, file in places.items() if name not in headers[file]]
    if absent:
        raise CheckpointError(f"{index} has {absent[0]} in {places[absent[0]]}, which has no tensor of that name")
    return {name: (headers[file][name], folder / file) for name, file in places.items()}


def _read_index(index: Path) -> Mapping[str, str]:
    try:
        places = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is no index of weights: {type(error).__name__}: {error}") from error
    is_map = isinstance(places, dict) and all(isinstance(file, str) for file in places.values())
    if not is_map or any(Path(file).name != file for file in places.values()):
        raise CheckpointError(f"the weight_map of {index} is {places!r:.200}; allowed are names of files beside it")
    found: Mapping[str, str] = places
    return found


def read_header(path: Path) -> list[Weight]:
    """The tensors of a file; CheckpointError where it is not whole."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            content = file.read(length) if length <= _MAX_HEADER_BYTES else b""
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if size < 8 or len(content) != length:
        raise CheckpointError(
            f"{path} has {size} bytes and no whole header of a safetensors file: it is truncated or none"
        )
    try:
        entries = json.loads(content)
        entries.pop("__metadata__", None)
        found = [Weight(name, tuple(entry["shape"]), DTYPES[entry["dtype"]]) for name, entry in entries.items()]
        ends = [entry["data_offsets"][1] for entry in entries.values()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"the header of {path} cannot be read: {type(error).__name__}: {error}") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise CheckpointError(
            f"{path} has {size} bytes, and its header speaks of {expected}: it is truncated or damaged"
        )
    return found
