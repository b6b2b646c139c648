"""SharedExpertOverlap: the shared expert of a mixture computes while tokens travel to the others and back."""

from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh

from tritondt.errors import ParallelizeError
from tritondt.errors.arguments import first
from tritondt.parallel.local_run import run_of
from tritondt.parallel.style import ParallelStyle
from tritondt.sharding.mesh import Mesh

# On a layer of experts while the forward of its mixture runs: what to compute beside its messages.
_BESIDE = "_tritondt_beside"


class Beside:
    """The shared expert within one forward of its mixture: it stands in the module's place, and is computed in halves.

    `first` and `second` are called where tokens travel; the mixture's own call then finds the result.
    """

    def __init__(self, shared: nn.Module, x: torch.Tensor, name: str) -> None:
        self._shared, self._x, self._name = shared, x, name
        leading = list(x.shape[:-1])
        self._dim = leading.index(max(leading))
        self._version = x._version
        self._parts: list[torch.Tensor] = []
        self._is_used = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)

    def first(self) -> None:
        """Computes the first half of the tokens, unless the mixture has run the shared expert already."""
        length = self._x.shape[self._dim]
        if not self._is_used and not self._parts:
            self._parts.append(self._shared(self._x.narrow(self._dim, 0, length // 2)))

    def second(self) -> None:
        """Computes the other half."""
        length = self._x.shape[self._dim]
        if len(self._parts) == 1:
            half = self._x.narrow(self._dim, length // 2, length - length // 2)
            self._parts.append(self._shared(half))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Result of the shared expert for the mixture's input, in whatever shape it is given."""
        self._is_used = True
        if not self._parts:
            found: torch.Tensor = self._shared(x)
            return found
        is_input = x.data_ptr() == self._x.data_ptr() and x.numel() == self._x.numel()
        if not is_input or x.shape[-1] != self._x.shape[-1] or x._version != self._version:
            raise ParallelizeError(
                f"{self._name} was called with a tensor {tuple(x.shape)} that is not the first argument "
                f"{tuple(self._x.shape)} of its mixture, for which SharedExpertOverlap has computed it; allowed is "
                "that argument, or a view of all of it, unwritten"
            )
        self.second()
        whole = torch.cat(self._parts, self._dim)
        self._parts = []
        return whole.reshape(*x.shape[:-1], whole.shape[-1])


class SharedExpertOverlap(ParallelStyle):
    """Style of a mixture of experts whose shared expert computes while tokens travel.

    `experts` and `shared` are the names of the two in the mixture; the former has the style ExpertParallel. The shared
    expert takes the mixture's first argument, or a view of all of it, after the experts have run, and works token by
    token. One half is computed while tokens travel to their experts, the other while results return; gradients travel
    beside the backward of the same halves. Other styles lay out the parameters. A shared expert that runs first, and a
    torch.compile graph, compute without overlap. Raises ParallelizeError for names without a module, for experts
    without ExpertParallel, and where the shared expert gets another tensor.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.parallel.experts.expert_parallel import ExpertParallel
    >>> from tritondt.parallel.parallelize import parallelize_module
    >>> class Scales(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.factor = nn.Parameter(torch.tensor([[2.0], [3.0]]))
    ...     def forward(self, tokens, num_tokens_per_expert):
    ...         return tokens * self.factor.repeat_interleave(num_tokens_per_expert, 0)
    >>> class Mixture(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.experts, self.shared = Scales(), nn.Identity()
    ...     def forward(self, x):
    ...         return self.experts(x, torch.tensor([1, 2])) + self.shared(x)
    >>> def mixed_on(rank):
    ...     plan = {"experts": ExpertParallel(), "": SharedExpertOverlap("experts", "shared")}
    ...     return parallelize_module(Mixture(), Mesh((2,)), plan)(torch.ones(3, 1)).flatten().tolist()
    >>> run_ranks(2, mixed_on)
    [[3.0, 4.0, 4.0], [3.0, 4.0, 4.0]]
    """

    @first("experts", "shared")
    def __init__(self, experts: str, shared: str) -> None:
        self.experts, self.shared = experts, shared

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | Mesh) -> nn.Module:
        children = dict(module.named_children())
        for name in (self.experts, self.shared):
            if name not in children:
                raise ParallelizeError(
                    f"SharedExpertOverlap names {name!r}, and {type(module).__name__} has {', '.join(children)}; "
                    "allowed are names of modules right below it"
                )
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after, always_call=True)
        return module

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_dynamo_compiling():
            return
        x = next(iter((*args, *kwargs.values())), None)
        experts, shared = module._modules[self.experts], module._modules[self.shared]
        assert experts is not None, "modules that a style was applied to stay"
        assert shared is not None, "modules that a style was applied to stay"
        if run_of(experts) is None:
            raise ParallelizeError(
                f"SharedExpertOverlap names {self.experts!r}, a {type(experts).__name__} without ExpertParallel; give "
                "it that style in the same plan"
            )
        if type(x) is not torch.Tensor or x.ndim < 2:
            raise ParallelizeError(
                f"{type(module).__name__} under SharedExpertOverlap takes a plain tensor (tokens, ..., features) "
                f"first, got {type(x).__name__}{tuple(getattr(x, 'shape', ()))}"
            )
        beside = Beside(shared, x, self.shared)
        # An attribute hides the module of that name, which stays where it is.
        module.__dict__[self.shared] = experts.__dict__[_BESIDE] = beside

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        module.__dict__.pop(self.shared, None)
        experts = module._modules[self.experts]
        if experts is not None:
            experts.__dict__.pop(_BESIDE, None)


def beside_of(experts: nn.Module) -> Beside | None:
    """The computation beside the messages of this call; None where there is none."""
    found: Beside | None = experts.__dict__.get(_BESIDE)
    return found
