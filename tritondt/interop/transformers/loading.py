"""from_pretrained: a model of transformers that comes to be laid out, of whose weights a rank reads its own part."""

import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_parameter_registration_hook

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import CheckpointError
from tritondt.errors.arguments import checked
from tritondt.interop.checkpoint import chunks
from tritondt.interop.transformers.apply import parallelize
from tritondt.interop.transformers.pieces import Piece, Pieces, pieces_of
from tritondt.interop.transformers.together import together
from tritondt.interop.transformers.weight_files import weights_in
from tritondt.redistribution.agreement import check_agreed
from tritondt.sharding.mesh import Mesh, canonical_mesh

_Places = dict[str, Pieces]


@checked
def from_pretrained(
    folder: str | os.PathLike[str],
    mesh: DeviceMesh | Mesh,
    kind: Any = None,
    *,
    tp_plan: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """The model of a folder of safetensors files and a config.json, as `parallelize(model, mesh, tp_plan)` gives it.

    No rank holds or reads the whole: the model is made without memory for its parameters, and each rank reads the parts
    of the files that it keeps. `kind` is a class of transformers, by default that of the configuration's
    `architectures`; `dtype` of the parameters is the configuration's where it is not given, and `options` go to the
    class as `kind.from_config` takes them ("attn_implementation", "experts_implementation"). The model comes in eval
    mode. A collective call of all ranks of the mesh, each of which must see the folder, or a copy.

    Raises CheckpointError, on all ranks and before anything is laid out, for a folder, file or configuration that one
    of them cannot read, a truncated file, and for entries that the model has not, lacks, or has in another shape; and
    what `parallelize` raises. transformers must be installed.
    """
    source, found = Path(folder), canonical_mesh(mesh)

    def prepare() -> tuple[Any, _Places]:
        model = _without_memory(source, kind, dtype, options)
        return model, _checked(model, source)

    model, places = together(found, prepare, "reading a model")
    weights = {name: [(piece.weight, piece.offsets) for piece in pieces.parts] for name, pieces in places.items()}
    check_agreed(found, "from_pretrained", f"{type(model).__name__} of {sorted(weights.items())}")
    parallelize(model, mesh, tp_plan, src_data_rank=None)
    together(found, lambda: _read(model, places, found), "reading a model")
    model.eval()
    return model


def _without_memory(source: Path, kind: Any, dtype: torch.dtype | None, options: dict[str, Any]) -> Any:
    """The model of a folder with its parameters on the meta device, and its buffers as its code makes them."""
    transformers = import_module("transformers")
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{source} has no config.json; allowed is a folder that save_pretrained has written")
    config = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
    if kind is None:
        names = getattr(config, "architectures", None) or [""]
        kind = getattr(transformers, names[0], None)
        if kind is None:
            raise CheckpointError(
                f"the config.json of {source} has architectures {names}, of which transformers has no class; give one: "
                "from_pretrained(folder, mesh, LlamaForCausalLM)"
            )
    make = getattr(kind, "_from_config", None) or kind.from_config
    if dtype is not None:
        options = {**options, "dtype": dtype}
    with _parameters_on_meta():
        model = make(config, **options)
    model.tie_weights()
    if hasattr(model, "can_generate") and model.can_generate() and (source / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(source, local_files_only=True)
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Context in which modules that are made get parameters without memory, each as soon as it is registered.

    Buffers keep their values: many are no part of a checkpoint, and a model under torch.device("meta") has lost them.
    Modules that other threads make meanwhile are theirs.
    """
    caller = threading.get_ident()

    def without_memory(_module: nn.Module, _name: str, param: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != caller:  # the hook is one of the process
            return None
        return nn.Parameter(param.to("meta"), param.requires_grad)

    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]  # says None
    try:
        yield
    finally:
        hook.remove()


def _checked(model: Any, source: Path) -> _Places:
    """Entries of the files by the name that the model has first for each."""
    found = pieces_of(model, weights_in(source))
    wanted = _wanted(model)
    first = {id(value): name for name, value in wanted.items()}
    again = {name: first[id(value)] for name, value in model.named_parameters(remove_duplicate=False)}
    places = {again.get(name, name): place for name, place in reversed(found.items())}
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    extra = [name for name in places if name not in wanted and not any(each.search(name) for each in ignored)]
    missing = [name for name in wanted if name not in places]
    if extra or missing:
        raise CheckpointError(
            f"{source} does not fit {type(model).__name__}: it lacks {_listed(missing)} and has {_listed(extra)}, "
            "which the model has not; allowed are all entries of the model and no others"
        )
    for name, value in wanted.items():
        if places[name].shape != tuple(value.shape):
            raise CheckpointError(
                f"{name} is {places[name].shape} in {places[name].parts[0].path}, and {tuple(value.shape)} in "
                f"{type(model).__name__}; the configuration is that of another model"
            )
    return {name: places[name] for name in wanted}


def _wanted(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, each once, and buffers that are part of the model's state."""
    saved = model.state_dict(keep_vars=True)
    buffers = {name: value for name, value in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more if names else "nothing"


def _read(model: nn.Module, places: _Places, mesh: Mesh) -> None:
    """Gives every parameter of a model memory for this rank's part, with what the files have of it."""
    device = torch.device(mesh.device_type)
    made: dict[int, nn.Parameter] = {}
    with ExitStack() as stack:
        slices = _Slices(places, stack)
        for name, value in _wanted(model).items():
            if isinstance(value, nn.Parameter):
                made[id(value)] = nn.Parameter(_filled(value, name, slices, device), value.requires_grad)
            else:
                value.copy_(slices.of(name, (slice(None),) * value.ndim))
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = made[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)


def _filled(value: Any, name: str, slices: "_Slices", device: torch.device) -> torch.Tensor:
    assert isinstance(value, DTensor), f"{name} is distributed, as all parameters of a model that is laid out"
    spec = value._spec
    local = torch.empty(spec.local_shape, dtype=spec.dtype, device=device)
    for chunk in chunks(spec):
        box = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        if local.numel():
            local[chunk.local].copy_(slices.of(name, box))
    return DTensor(local, spec)


class _Slices:
    """Boxes of tensors in files, which are opened as they are asked for."""

    def __init__(self, places: _Places, stack: ExitStack) -> None:
        self.places, self.stack = places, stack
        self.opened: dict[Path, Any] = {}

    def of(self, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        """A box of an entry, on the CPU."""
        parts = self.places[name].parts
        if not parts[0].offsets:
            return self._read(parts[0], box)
        found = torch.empty([each.stop - each.start for each in box], dtype=parts[0].weight.dtype)
        for piece in parts:
            overlap = piece.overlap(box)
            if overlap is not None:
                own, within = overlap
                found[within].copy_(self._read(piece, own))
        return found

    def _read(self, piece: Piece, box: tuple[slice, ...]) -> torch.Tensor:
        if piece.path not in self.opened:
            file = import_module("safetensors").safe_open(piece.path, framework="pt", device="cpu")
            self.opened[piece.path] = self.stack.enter_context(file)
        file, name = self.opened[piece.path], piece.weight.name
        found: torch.Tensor = file.get_slice(name)[box] if box else file.get_tensor(name)
        return found
