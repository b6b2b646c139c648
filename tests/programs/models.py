"""Random trees of modules, with checkpoints, hooks and units of fully_shard drawn over them."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

WIDTH = 5
LEAVES = ("mlp", "mlp", "linear", "norm", "tied")
CONTAINERS = ("residual", "residual", "twice", "branch", "recomputed", "recomputed reentrant", "segments")
WRAPS = ("wrapper", "reentrant", "selective")
HOOKS = ("scaled", "reads weights", "full", "of parameters")
RESHARDS = (None, True, False, 2)
UNITS = ("inside", "outside", "list")


class Node(NamedTuple):
    """A module of a program: its kind, its wrapper, which of both is sharded, with which option, and a user's hook."""

    kind: str
    children: tuple["Node", ...] = ()
    size: int = WIDTH
    wrap: str | None = None
    unit: str | None = None
    reshard: bool | int | None = None
    hook: str | None = None
    is_frozen: bool = False


def random_node(chosen: random.Random, depth: int) -> Node:
    """A tree of at most so many levels."""
    children: tuple[Node, ...] = ()
    if depth == 0 or chosen.random() < 0.2:
        kind = chosen.choice(LEAVES)
    else:
        kind = chosen.choice(CONTAINERS)
        count = 2 if kind == "branch" else chosen.randint(2, 4) if kind in ("residual", "segments") else 1
        children = tuple(random_node(chosen, depth - 1) for _ in range(count))
    return Node(
        kind,
        children,
        chosen.randint(1, 9),
        chosen.choice(WRAPS) if chosen.random() < 0.3 else None,
        chosen.choice(UNITS) if chosen.random() < 0.5 else None,
        chosen.choice(RESHARDS),
        chosen.choice(HOOKS) if chosen.random() < 0.15 else None,
        chosen.random() < 0.07,
    )


class Mlp(nn.Module):
    """Two layers, which a plan may cut over a tensor axis."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, size), nn.Linear(size, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.up(x).tanh())
        return found


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x).tanh())
        return found


class Container(nn.Module):
    """Modules that run one after the other, twice, side by side, or within a checkpoint."""

    def __init__(self, kind: str, inner: list[nn.Module]) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.ModuleList(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: Any = self.inner[0]
        if self.kind == "residual":
            return x + self._chain(x)
        if self.kind == "twice":
            return cast(torch.Tensor, first(first(x).tanh()))
        if self.kind == "branch":
            return cast(torch.Tensor, first(x) + self.inner[1](x).tanh())
        if self.kind == "segments":
            return cast(torch.Tensor, checkpoint_sequential(list(self.inner), 2, x, use_reentrant=False))
        return cast(torch.Tensor, checkpoint(first, x, use_reentrant=self.kind.endswith("reentrant")))

    def _chain(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.inner:
            x = module(x)
        return x


def _saves_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


WRAPPERS: dict[str | None, Callable[[nn.Module], nn.Module]] = {
    None: lambda module: module,
    "wrapper": checkpoint_wrapper,
    "reentrant": partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "selective": partial(checkpoint_wrapper, context_fn=partial(create_selective_checkpoint_contexts, _saves_products)),
}


class Unit(NamedTuple):
    """Modules of one call of fully_shard, and its reshard_after_forward."""

    modules: list[nn.Module]
    reshard: bool | int | None


def build(node: Node, units: list[Unit]) -> nn.Module:
    """The module of a tree; to `units` come those to shard, inner ones first."""
    inner = [build(child, units) for child in node.children]
    module: nn.Module
    if node.kind in CONTAINERS:
        module = Container(node.kind, inner)
    elif node.kind == "mlp":
        module = Mlp(node.size)
    elif node.kind == "tied":
        module = Tied()
    else:
        module = nn.Linear(WIDTH, WIDTH) if node.kind == "linear" else nn.LayerNorm(WIDTH)
    module.double()
    if node.is_frozen:
        module.requires_grad_(False)
    wrapped = WRAPPERS[node.wrap](module)
    if node.unit is not None and any(True for _ in module.parameters()):
        if node.unit == "list" and node.kind == "residual" and not any(child.unit for child in node.children):
            units.append(Unit(inner, node.reshard))
        else:
            units.append(Unit([module if node.unit == "inside" else wrapped], node.reshard))
    return wrapped


def add_hooks(node: Node, module: nn.Module) -> None:
    """Registers the hooks of a tree, before or after fully_shard."""
    module = getattr(module, "_checkpoint_wrapped_module", module)
    for child, inner in zip(node.children, cast(Any, module).inner if node.children else (), strict=True):
        add_hooks(child, inner)
    if node.hook in ("scaled", "reads weights"):
        module.register_forward_hook(partial(_hook_output, node.hook))
    elif node.hook == "full":
        module.register_full_backward_hook(_scale_gradients)
    elif node.hook == "of parameters":
        for parameter in own_parameters(module):
            if parameter.requires_grad:
                parameter.register_hook(lambda grad: grad * 0.5)


def _scale_gradients(module: nn.Module, grads: Any, of_outputs: Any) -> Any:
    return tuple(None if grad is None else grad * 1.5 for grad in grads)


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of a module that has any, of its first layers else."""
    return iter(list(module.parameters())[:2])


def _hook_output(kind: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
    if not output.requires_grad:
        return
    if kind == "scaled":
        output.register_hook(lambda grad: grad * 1.25)
        return
    # What the module has in backward, read then: whole where it is of this module's own unit.
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if names:
        output.register_hook(lambda grad: grad * (1 + module._parameters[names[0]].detach().square().mean()))  # type: ignore[union-attr]
