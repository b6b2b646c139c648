"""Adapters of peft in a model: LoRA's two factors beside a layer are cut as that layer is."""

import copy
from threading import Lock
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from tritondt.errors import ParallelizeError
from tritondt.parallel import ParallelStyle, RowwiseParallel
from tritondt.parallel.local_run import run_of
from tritondt.parallel.weights import WeightStyle

# What the layers of other methods, or other forms of LoRA, have in places of these names.
_OTHER_FORMS = ("lora_embedding_A", "lora_magnitude_vector", "lora_variant")
_registered = False
_registration = Lock()


def base_of(model: nn.Module) -> nn.Module:
    """The model of transformers in a model of peft, whose adapters are inside it; other models themselves.

    Raises ParallelizeError for adapters beside the model, as prompts are.
    """
    find = getattr(model, "get_base_model", None)
    if find is None or not hasattr(model, "peft_config"):
        return model
    base: nn.Module = find()
    inside = {id(parameter) for parameter in base.parameters()}
    beside = [name for name, parameter in model.named_parameters() if id(parameter) not in inside]
    if beside:
        raise ParallelizeError(
            f"{', '.join(beside[:3])} of {type(model).__name__} are beside the model of transformers; allowed are "
            "adapters inside of its layers, as those of LoRA"
        )
    return base


def layer_of(name: str, module: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """The layer that a module is, or has adapters for, and then the module with the adapters.

    Raises ParallelizeError for adapters that are not LoRA's two factors.
    """
    base = module._modules.get("base_layer")
    if base is None:
        return module, None
    factors = [getattr(module, key, None) for key in ("lora_A", "lora_B")]
    others = [key for key in _OTHER_FORMS if len(getattr(module, key, ()))]
    linear = all(isinstance(factor, nn.Linear) for found in factors if found is not None for factor in found.values())
    if None in factors or others or not linear or not factors[0]:
        kinds = ", ".join(others) or type(module).__name__
        raise ParallelizeError(
            f"{name} has adapters ({kinds}) that the tp_plan of the layer does not cut; allowed are LoRA's two factors "
            "as nn.Linear, without DoRA, and none for embeddings"
        )
    return base, module


def adapter_styles(name: str, module: Any, style: ParallelStyle) -> dict[str, ParallelStyle]:
    """Styles of the adapters of a layer by dotted name: of two factors, that which is as wide as what is cut."""
    if not isinstance(style, WeightStyle):
        return {}
    alike: Any = copy.copy(style)
    alike.transposed = False
    factor = "lora_A" if isinstance(style, RowwiseParallel) else "lora_B"
    return {f"{name}.{factor}.{adapter}": alike for adapter in getattr(module, factor)}


def refuse_late_adapters() -> None:
    """Has layers that are laid out refused, from now on and in this process, where peft puts them below adapters."""
    global _registered
    with _registration:
        if not _registered:
            register_module_module_registration_hook(_check_base_layer)
            _registered = True


def _check_base_layer(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if name == "base_layer" and submodule is not None and run_of(submodule) is not None:
        raise ParallelizeError(
            f"{type(module).__name__} was given a {type(submodule).__name__} that is laid out over ranks, and would "
            "make adapters of the whole layer's size; allowed is peft first, then the plan: "
            "parallelize(get_peft_model(model, config), mesh)"
        )
