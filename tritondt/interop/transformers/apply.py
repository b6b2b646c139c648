"""parallelize: a model of transformers laid over a mesh axis, as its plan says."""

from collections.abc import Mapping
from types import MethodType
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tritondt.errors import ParallelizeError
from tritondt.errors.arguments import checked
from tritondt.interop.transformers.adapter_saving import save_adapters_method
from tritondt.interop.transformers.adapters import base_of, refuse_late_adapters
from tritondt.interop.transformers.entries import Entry
from tritondt.interop.transformers.heads import AnyAttention, attention_of, attentions_of
from tritondt.interop.transformers.plans import checked_entries, styles_of
from tritondt.interop.transformers.saving import save_method
from tritondt.interop.transformers.streams import OwnStream, attention_drops
from tritondt.interop.transformers.trainer import tell_trainer
from tritondt.parallel import parallelize_module
from tritondt.sharding.mesh import Mesh, canonical_mesh

Model = TypeVar("Model", bound=nn.Module)


@checked
def parallelize(
    model: Model, mesh: DeviceMesh | Mesh, tp_plan: Mapping[str, str] | None = None, *, src_data_rank: int | None = 0
) -> Model:
    """The model of transformers, laid over a mesh of one axis in place by the styles of `plan_of(model, tp_plan)`.

    Parameters take the values of rank `src_data_rank` of the mesh, or every rank's own with None. Attention modules
    are told how many heads this rank has, so that caches of `generate` hold those alone, and `model.save_pretrained` is
    the function of this name from then on. A model of peft is laid out with its adapters, which its `save_pretrained`
    writes alone; afterwards there are none to be added. Every rank must be given the same input. A collective call of
    all ranks of the mesh. Raises what `plan_of` and `parallelize_module` raise, before anything is changed, and
    ParallelizeError for a mesh on which a rank would be without heads.
    """
    base: Any = base_of(model)
    entries = checked_entries(base, tp_plan)
    attentions = attentions_of(base, entries)
    found = canonical_mesh(mesh)
    if found.ndim == 1:
        for attention in attentions.values():
            attention.heads_on(found)
    parallelized = parallelize_module(base, mesh, styles_of(base, entries, attentions), src_data_rank=src_data_rank)
    if parallelized is not base:
        raise ParallelizeError(f"{type(base).__name__} itself was given a style; allowed are styles of modules in it")
    for attention in attentions.values():
        attention.adapt(found)
    _separate_streams(entries, attentions, found)
    if hasattr(base, "save_pretrained"):
        base.__dict__["save_pretrained"] = MethodType(save_method, base)
    if model is not base:
        model.__dict__["save_pretrained"] = MethodType(save_adapters_method(found), model)
    refuse_late_adapters()
    tell_trainer(base, found)
    return model


def _separate_streams(entries: list[Entry], attentions: Mapping[str, AnyAttention], mesh: Mesh) -> None:
    """Has ranks draw for dropout of their own heads, and of their own features before LoRA's factors, by themselves."""
    assert mesh.coordinate is not None, "this rank is on the mesh"
    place = mesh.coordinate[0]
    for attention in attentions.values():
        if attention_drops(attention.module):
            own = {id(module) for module, _ in attention.input_styles()}
            inputs = [entry.outer for entry in entries if id(entry.module) in own]
            outputs = [entry.outer for entry in entries if _projects(entry, attention, attentions)]
            OwnStream(place, mesh.device_type).between(inputs, outputs, attention.module)
    for entry in entries:
        if entry.wrapper is not None and entry.style.startswith("rowwise"):
            dropouts: Any = entry.wrapper.lora_dropout
            for dropout in dropouts.values():
                if getattr(dropout, "p", 0.0):
                    OwnStream(place, mesh.device_type).within(dropout)


def _projects(entry: Entry, attention: AnyAttention, attentions: Mapping[str, AnyAttention]) -> bool:
    return entry.style == "rowwise" and attention_of(entry.name, attentions) is attention
