"""Trainer of transformers for models that are laid out: each tensor-parallel group of ranks gets one batch.

Trainer leaves such a model alone, as one that transformers has sharded itself: it is not wrapped, gradients are the
model's own matter, and all ranks take part in a save.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tritondt import identity
from tritondt.dtensor.tensor import DTensor
from tritondt.errors import ParallelizeError
from tritondt.errors.arguments import checked
from tritondt.sharding.mesh import Mesh

# What of Trainer and accelerate is asked for here and no part of their interfaces.
_PRIVATE = "create_accelerator_and_postprocess", "_prepare_device_mesh"
_SYNC = "_sync_replicated_trainable_parameters"


@checked
def make_trainer(model: Any, *, kind: Any = None, **options: Any) -> Any:
    """The Trainer of transformers for a parallelized model, in whose training a tensor-parallel group gets one batch.

    `kind` is a subclass of Trainer, `options` are its arguments but for the model. Groups are runs of ranks, as the
    last axis of a mesh has them; several groups share the data out, and need `fully_shard(model, mesh=mesh["dp"])`
    before, which adds up their gradients. `trainer.save_model(folder)` writes by parts, a call of all ranks; Trainer's
    own checkpoints have no optimizer (`save_strategy="no"`, or `save_only_model=True`). A collective call of the world.

    Raises ParallelizeError for a model that is not laid out, or not over the whole world.
    """
    layout = getattr(getattr(model, "config", None), "distributed_config", None)
    if not isinstance(layout, TrainerLayout):
        raise ParallelizeError(
            f"make_trainer was given a {type(model).__name__} that is not laid out over ranks of torch.distributed; "
            "allowed is a model of transformers after parallelize(model, mesh['tp'])"
        )
    layout.check()
    transformers = import_module("transformers")
    base = transformers.Trainer if kind is None else kind
    asked = [(base, _PRIVATE[0]), (base, _SYNC), (import_module("accelerate").Accelerator, _PRIVATE[1])]
    missing = [f"{each.__name__}.{name}" for each, name in asked if not hasattr(each, name)]
    if missing:
        raise ParallelizeError(
            f"transformers {transformers.__version__} has no {', '.join(missing)}, by which a Trainer is told of "
            "groups; known are transformers 5.23 and accelerate 1.15"
        )
    methods = {_PRIVATE[0]: _create_accelerator(base, layout), _SYNC: _check_parameters}
    return type(base.__name__, (base,), methods)(model=model, **options)


def _check_parameters(trainer: Any, model: nn.Module) -> None:
    """Method of a Trainer, in place of one that averages gradients of what is no DTensor of torch over the world."""
    plain = [name for name, value in model.named_parameters() if value.requires_grad and not isinstance(value, DTensor)]
    if plain:
        raise ParallelizeError(
            f"{', '.join(plain[:3])} of {type(model).__name__} are trained and plain tensors beside distributed ones; "
            "allowed are adapters that are there before parallelize(model, mesh['tp'])"
        )


def _create_accelerator(base: Any, layout: "TrainerLayout") -> Callable[[Any], None]:
    """The method of a Trainer that makes its accelerator, which is told how ranks share data out."""

    def create(trainer: Any) -> None:
        model = trainer.model
        model._tp_size = None  # accelerate lays models out itself where it knows of this, and refuses to on a CPU
        try:
            getattr(base, _PRIVATE[0])(trainer)
        finally:
            model._tp_size = layout.tp_size
        shape = layout.data_size, layout.tp_size
        mesh = init_device_mesh(trainer.accelerator.device.type, shape, mesh_dim_names=("dp_shard", "tp"))
        setattr(trainer.accelerator, _PRIVATE[1], lambda: mesh)

    return create


class TrainerLayout:
    """The `distributed_config` of a model that `parallelize` has laid over `ranks` of a world of `world_size` ranks.

    Each group of `tp_size` ranks gets one batch; `data_size` of them share out the data.
    """

    dp_replicate_size = 1

    def __init__(self, ranks: tuple[int, ...], world_size: int) -> None:
        self.ranks, self.world_size = ranks, world_size
        self.tp_size, self.data_size = len(ranks), 1

    @property
    def dp_size(self) -> int:
        """Number of groups, which a Trainer of one's own asks for: ParallelizeError, with what to write."""
        raise ParallelizeError(
            f"Trainer would give each of {self.world_size} ranks a batch of its own, and {self.tp_size} ranks with a "
            "parallelized model need the same; allowed is tritondt.interop.transformers.make_trainer(model, args=..., "
            "train_dataset=...) in place of Trainer(model, ...)"
        )

    def check(self) -> None:
        """Raises ParallelizeError for a model that is not on all ranks, or on ranks that are no run."""
        first = self.ranks[0]
        if self.ranks != tuple(range(first, first + self.tp_size)) or first % self.tp_size:
            raise ParallelizeError(
                f"make_trainer gives each run of {self.tp_size} ranks one batch, and the model is laid over ranks "
                f"{', '.join(map(str, self.ranks))}; allowed is the last axis of a mesh of all ranks: "
                'init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))["tp"]'
            )
        if self.tp_size * self.data_size != self.world_size:
            raise ParallelizeError(
                f"make_trainer was given a model on {self.tp_size * self.data_size} of {self.world_size} ranks: "
                "nothing adds up the gradients of the others' batches; allowed are all ranks: parallelize(model, "
                "mesh['tp']), then fully_shard(model, mesh=mesh['dp']), or as many ranks as the model is laid over"
            )

    def to_dict(self) -> dict[str, Any]:
        """Nothing: configurations are written without the layout of a run."""
        return {}


def tell_trainer(model: Any, mesh: Mesh) -> None:
    """Notes for Trainer that a model is laid over a mesh; nothing for other models, or where there is no world."""
    if identity.is_assumed() or not dist.is_initialized():
        return
    if not hasattr(type(model), "_is_distributed_loading_by_transformers"):
        return
    model._tp_size = len(mesh.ranks)
    model._is_distributed_loading_by_transformers = True
    model.config.distributed_config = TrainerLayout(tuple(mesh.ranks), dist.get_world_size())


def tell_trainer_of_data_axis(module: nn.Module, num_ranks: int) -> None:
    """Notes for Trainer that the gradients of a model are added up over so many ranks of a data axis."""
    found = getattr(getattr(module, "config", None), "distributed_config", None)
    if isinstance(found, TrainerLayout):
        found.data_size = num_ranks
