"""save_pretrained: a model that is laid out, as files that transformers reads, without the whole of it on any rank."""

import copy
import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from tritondt.dtensor.many import redistribute_many
from tritondt.dtensor.tensor import DTensor
from tritondt.errors import CheckpointError
from tritondt.errors.arguments import checked
from tritondt.interop.transformers.together import together
from tritondt.interop.transformers.weight_files import INDEX, SINGLE, Weight, WeightFile, files_for, index_of
from tritondt.redistribution.agreement import check_agreed
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Placement, Replicate, Shard

# Tensors that travel together; a rank holds what it owns of these, or one larger tensor, beside the model.
_BUCKET_BYTES = 64 << 20


@checked
def save_pretrained(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """The folder, in which all ranks have written a parallelized model for `from_pretrained`, here or of transformers.

    Tensors are whole in these files, as the format has no parts: each is one rank's, the bytes evenly dealt out, and
    comes to it while it is written, at most 64 MiB or one tensor at a time. There are config.json and `model-0000X-of-
    0000N.safetensors` with an index, or `model.safetensors`; names are those of the model here, of tied ones the first.
    Each file comes to be by a rename, and other such files are removed: an older model of the folder is no longer whole
    where a process is killed meanwhile. A collective call of all ranks of the model's mesh, which must see one folder.

    Raises CheckpointError, on all ranks, where one cannot write, for a model without distributed tensors, one on
    several meshes, and terms of sums (Partial).

    >>> import tempfile
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.parallel import ColwiseParallel, parallelize_module
    >>> folder = tempfile.TemporaryDirectory()
    >>> def files_on(rank):
    ...     linear = parallelize_module(nn.Linear(4, 6), Mesh((2,)), ColwiseParallel())
    ...     return sorted(path.name for path in save_pretrained(linear, folder.name).glob("*.safetensors"))
    >>> run_ranks(2, files_on)[1]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    >>> folder.cleanup()
    """
    target = Path(folder)
    state = _own_state(model)
    mesh = _mesh_of(state)
    weights = [Weight(name, tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()]
    check_agreed(mesh, "save_pretrained", f"{target} for {weights}")
    files = files_for(weights, len(mesh.ranks))
    position = 0 if mesh.coordinate is None else _position(mesh, mesh.coordinate)
    together(mesh, lambda: target.mkdir(parents=True, exist_ok=True), "making a folder")
    own = next((file for file in files if file.owner == position), None)
    error = _write(state, files, mesh, target, own)
    try:
        together(mesh, lambda: _raise(error), "writing a model")
    except CheckpointError:
        if own is not None and _draft(target, own).is_file():
            _draft(target, own).unlink()
        raise
    if own is not None:
        _draft(target, own).rename(target / own.name)
    together(mesh, lambda: _finish(model, target, files) if position == 0 else None, "writing a model")
    return target


def save_method(model: nn.Module, save_directory: str | os.PathLike[str], **options: Any) -> None:
    """The method `save_pretrained` of a model that is laid out, in place of transformers', which has plain tensors.

    A collective call, as the function is. Raises CheckpointError for options that the files have not.
    """
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    given.pop("is_main_process", None)
    if given:
        raise CheckpointError(
            f"save_pretrained of a parallelized {type(model).__name__} was given {', '.join(given)}; allowed is the "
            "folder alone: all ranks write what the model has, a file for each"
        )
    save_pretrained(model, save_directory)


def _own_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, each once, and what else the state of a model has."""
    once = {name for name, _ in model.named_parameters()}
    again = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    return {name: value for name, value in model.state_dict().items() if name not in again}


def _mesh_of(state: dict[str, torch.Tensor]) -> Mesh:
    meshes: dict[Mesh, str] = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            meshes.setdefault(value._spec.mesh, name)
    if len(meshes) != 1:
        found = " and ".join(f"{mesh} ({name})" for mesh, name in meshes.items()) or "none"
        raise CheckpointError(
            f"save_pretrained takes a model whose parameters are distributed over one mesh, found {found}; a plain "
            "model has transformers' own save_pretrained"
        )
    for name, value in state.items():
        if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
            raise CheckpointError(
                f"{name} is {value._spec}, terms of a sum; redistribute it to Shard or Replicate first"
            )
    return next(iter(meshes))


def _position(mesh: Mesh, coordinate: Sequence[int]) -> int:
    found = 0
    for size, place in zip(mesh.shape, coordinate, strict=True):
        found = found * size + place
    return found


def _held_by(mesh: Mesh, owner: int, shape: Sequence[int]) -> list[Placement]:
    """Placements by which the rank at a mesh position has the whole tensor: an axis cuts a dim, as far as there are."""
    found: list[Placement] = []
    for axis in reversed(range(mesh.ndim)):
        owner, place = divmod(owner, mesh.shape[axis])
        sizes = (
            tuple(shape[axis] if rank == place else 0 for rank in range(mesh.shape[axis])) if axis < len(shape) else ()
        )
        found.insert(0, Shard(axis, sizes=sizes) if sizes else Replicate())
    return found


def _write(
    state: dict[str, torch.Tensor], files: list[WeightFile], mesh: Mesh, target: Path, own: WeightFile | None
) -> Exception | None:
    """Writes this rank's file as a draft while tensors come; what went wrong, for the others wait for this rank."""
    error: Exception | None = None
    with ExitStack() as stack:
        draft: BinaryIO | None = None
        places: dict[str, int] = {}
        if own is not None:
            try:
                draft = stack.enter_context(_draft(target, own).open("wb"))
                header = own.header()
                draft.write(header)
                places = {weight.name: len(header) + start for weight, start in own.starts()}
            except OSError as raised:
                error = raised
        for owners in _buckets(files):
            for name, whole in _come(state, owners, mesh):
                if draft is None or error is not None or name not in places:
                    continue
                try:
                    draft.seek(places[name])
                    _write_bytes(draft, whole)
                except OSError as raised:
                    error = raised
        if draft is not None and error is None:
            try:
                draft.flush()
                os.fsync(draft.fileno())
            except OSError as raised:
                error = raised
    return error


def _draft(target: Path, file: WeightFile) -> Path:
    return target / f".draft-{file.name}"


def _buckets(files: list[WeightFile]) -> Iterator[list[tuple[str, int]]]:
    """Names of tensors and their owners that travel together: of each owner one after another, up to a limit each."""
    waiting = {file.owner: list(file.weights) for file in files}
    while any(waiting.values()):
        bucket = list[tuple[str, int]]()
        for owner, weights in waiting.items():
            filled = 0
            while weights and (not filled or filled + weights[0].num_bytes <= _BUCKET_BYTES):
                filled += max(1, weights[0].num_bytes)
                bucket.append((weights.pop(0).name, owner))
        yield bucket


def _come(
    state: dict[str, torch.Tensor], owners: list[tuple[str, int]], mesh: Mesh
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors whole on their owners; on other ranks something else."""
    tensors: list[Any] = [state[name] for name, _ in owners]
    distributed = [place for place, tensor in enumerate(tensors) if isinstance(tensor, DTensor)]
    with torch.no_grad():
        moves = [(tensors[place], _held_by(mesh, owners[place][1], tensors[place].shape)) for place in distributed]
        for place, moved in zip(distributed, redistribute_many(moves, bucket_bytes=_BUCKET_BYTES), strict=True):
            tensors[place] = moved.to_local()
    for (name, _), tensor in zip(owners, tensors, strict=True):
        yield name, tensor


def _write_bytes(file: BinaryIO, whole: torch.Tensor) -> None:
    """Writes the bytes of a tensor, without a copy of what may be the largest one of the model."""
    held = whole.detach().to("cpu").contiguous()
    if held.numel():
        file.write((ctypes.c_ubyte * held.nbytes).from_address(held.data_ptr()))


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _finish(model: Any, target: Path, files: list[WeightFile]) -> None:
    """Writes what is beside the weights, and removes weights of an earlier save."""
    names = {file.name for file in files}
    for path in (*target.glob("model-*-of-*.safetensors"), target / SINGLE, target / INDEX):
        if path.name not in names:
            path.unlink(missing_ok=True)
    if len(files) > 1:
        draft = target / f".draft-{INDEX}"
        draft.write_text(index_of(files))
        draft.rename(target / INDEX)
    config = getattr(model, "config", None)
    if config is not None:
        config = copy.deepcopy(config)
        config.architectures = [_class_of(model).__name__]
        config.save_pretrained(target)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(target)


def _class_of(model: nn.Module) -> type:
    """The class of a model that its module has by that name: fully_shard puts two of ours before it."""
    others = [kind for kind in type(model).__mro__ if not kind.__module__.startswith("tritondt.")]
    own: type = next(kind for kind in others if getattr(sys.modules[kind.__module__], kind.__name__, None) is kind)
    return own
