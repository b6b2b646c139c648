"""Random numbers of ranks that draw different amounts: for dropout of their own heads, or of their own features.

Ranks drop the elements that all of them have with numbers that are alike on all ranks, as long as all have drawn as
many. A rank that draws for its own part does so from a stream of its own, and is back in the shared stream afterwards.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_SEEDS = 2**31


class OwnStream:
    """Hooks of modules around what a rank drops of its own; copied with the modules."""

    def __init__(self, place: int, device_type: str) -> None:
        self.place, self.device_type = place, device_type
        self.shared: torch.Tensor | None = None

    @property
    def _source(self) -> Any:
        return torch.random if self.device_type == "cpu" else torch.get_device_module(self.device_type)

    def enter(self, module: nn.Module, *_: Any) -> None:
        """Goes to this rank's stream, which starts at a number that all ranks draw."""
        if not module.training:
            return
        seed = int(torch.randint(_SEEDS, (), device=self.device_type)) + self.place
        self.shared = self._source.get_rng_state()
        if self.device_type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            self._source.manual_seed(seed)

    def leave(self, module: nn.Module, *_: Any) -> None:
        """Goes back to the stream that ranks share; nothing for a rank that is there."""
        if self.shared is not None:
            self._source.set_rng_state(self.shared)
            self.shared = None

    def between(self, inputs: Iterable[nn.Module], outputs: Iterable[nn.Module], whole: nn.Module) -> None:
        """Has a rank draw from its own stream behind the forward of `inputs` and before that of `outputs`.

        All are in `whole`, which may raise between the two: programs that go on then draw in the shared stream again.
        """
        whole.register_forward_hook(self.leave, always_call=True)
        for module in inputs:
            module.register_forward_pre_hook(self.leave)
            module.register_forward_hook(self.enter)
        for module in outputs:
            module.register_forward_pre_hook(self.leave)

    def within(self, module: nn.Module) -> None:
        """Has a rank draw from its own stream in the forward of `module`."""
        module.register_forward_pre_hook(self.enter)
        module.register_forward_hook(self.leave, always_call=True)


def attention_drops(module: nn.Module) -> bool:
    """Whether an attention module of transformers has dropout, by the names that such modules give it."""
    found = [getattr(module, name, 0.0) for name in ("attention_dropout", "attn_dropout", "dropout")]
    return any((getattr(value, "p", 0.0) if isinstance(value, nn.Module) else value) for value in found)
