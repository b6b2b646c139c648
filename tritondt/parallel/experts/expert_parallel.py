"""ExpertParallel: the experts of a layer on different ranks, to which tokens travel."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from tritondt.dtensor.tensor import DTensor
from tritondt.errors import ParallelizeError
from tritondt.errors.arguments import first
from tritondt.parallel.boundary import InputPlan, activation_spec
from tritondt.parallel.experts.shared_expert import beside_of
from tritondt.parallel.experts.token_dispatch import DispatchedTokens, token_combine, token_dispatch
from tritondt.parallel.feature_cut import evenly
from tritondt.parallel.graphs import outside_of_graphs
from tritondt.parallel.local_run import LocalRun
from tritondt.parallel.weights import WeightStyle
from tritondt.redistribution.refusals import refuse_on, refusing_comparison
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Placement, Replicate, Shard

# The tokens that a module was given, kept in the module from before its forward until its output.
_DISPATCHED = "_tritondt_dispatched"


class ExpertParallel(WeightStyle):
    """Style of a layer of experts; each expert is on one rank, which computes all its tokens.

    The module's parameters have the experts as their first dim. Its forward takes this rank's tokens in one of two
    ways, and returns one row for each. `forward(tokens, num_tokens_per_expert)` takes them sorted by expert, as
    torch._grouped_mm does. `forward(tokens, indices, weights)` takes the numbers of their experts, (tokens, choices),
    and the factors with which the results are summed. Tokens are plain tensors, each on one rank; a rank may have any
    number of them, or none. They travel to their experts in one all-to-all and return in another, and so do gradients.
    The forward runs on the tokens of this rank's experts alone, whose numbers start at 0. It is skipped where no tokens
    arrive.

    Ranks have equal numbers of experts, the first ranks one more where they do not divide (6 over 4: 2, 2, 1 and 1), or
    as many as `sizes` lists. Gradients of experts are sums over the tokens of all ranks. Every forward is a collective
    call of the mesh. Raises ParallelizeError for parameters of different numbers of experts.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> from tritondt.parallel.parallelize import parallelize_module
    >>> class Scales(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.factor = nn.Parameter(torch.tensor([[2.0], [3.0], [5.0]]))
    ...     def forward(self, tokens, num_tokens_per_expert):
    ...         return tokens * self.factor.repeat_interleave(num_tokens_per_expert, 0)
    >>> def scaled_on(rank):
    ...     scales = parallelize_module(Scales(), Mesh((2,)), ExpertParallel())
    ...     found = scales(torch.ones(4, 1), torch.tensor([[1, 1, 2], [0, 4, 0]][rank]))
    ...     return len(scales.factor.to_local()), found.flatten().tolist()
    >>> run_ranks(2, scaled_on)
    [(2, [2.0, 3.0, 5.0, 5.0]), (1, [3.0, 3.0, 3.0, 3.0])]
    """

    @first("sizes")
    def __init__(self, *, sizes: Sequence[int] | None = None) -> None:
        self.sizes = None if sizes is None else tuple(sizes)

    def parameter_placements(self, module: nn.Module, mesh: Mesh) -> dict[str, Placement]:
        """Placement of every parameter by experts, its first dim."""
        return dict.fromkeys(module._parameters, Shard(0, sizes=self._sizes(module, mesh)))

    def local_run(self, module: nn.Module, mesh: Mesh) -> LocalRun:
        """Hooks that send tokens to their experts and fetch the results."""
        return _ExpertRun(mesh, self._sizes(module, mesh))

    def _sizes(self, module: nn.Module, mesh: Mesh) -> tuple[int, ...]:
        shapes = {name: tuple(value.shape) for name, value in module._parameters.items() if value is not None}
        numbers = {shape[:1] for shape in shapes.values()}
        if len(numbers) != 1 or numbers == {()}:
            raise ParallelizeError(
                f"ExpertParallel cuts the first dim of all parameters, which is of experts; {type(module).__name__} "
                f"has {shapes or 'none of its own'}; name the module whose parameters are (experts, ...)"
            )
        ((num_experts,),) = numbers
        num_ranks = mesh.shape[0]
        if self.sizes is None:
            return evenly(num_experts, num_ranks)
        if len(self.sizes) != num_ranks or sum(self.sizes) != num_experts or min(self.sizes) < 0:
            raise ParallelizeError(
                f"sizes={self.sizes} was given for {num_experts} experts on {num_ranks} ranks; allowed is a number of "
                "experts for each rank, which sum to all"
            )
        return self.sizes


class _ExpertsForward:
    """Forward of a layer of experts, left out where no token arrives; copied with its module.

    A rank without experts has no weights to stack or to loop over.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, tokens: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Results of the tokens, as the class of the module has them."""
        if not tokens.shape[0]:
            return tokens
        return type(self.module).forward(self.module, tokens, *arguments, **options)


class _ExpertRun(LocalRun):
    """A layer of experts that runs on the tokens of this rank's experts; `sizes` are the numbers of experts."""

    def __init__(self, mesh: Mesh, sizes: tuple[int, ...]) -> None:
        super().__init__(mesh)
        self.sizes = sizes

    def install(self, module: nn.Module) -> None:
        """Registers the hooks, and takes over the forward."""
        super().install(module)
        module.__dict__["forward"] = _ExpertsForward(module)

    def input_plan(self, module: nn.Module, x: torch.Tensor) -> InputPlan:
        """Plan of tokens that are where they belong; it has no shape, for they are as many as come."""
        spec = activation_spec(self.mesh, Replicate(), (0,), x.dtype)
        return InputPlan(spec, spec, spec, spec, moves=False, as_terms=False, is_shared=False)

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dispatch = outside_of_graphs(self._dispatch) if is_dynamo_compiling() else self._dispatch
        found = dispatch(module, [*args, *kwargs.values()])
        return tuple(found[: len(args)]), dict(zip(kwargs, found[len(args) :], strict=True))

    def _dispatch(self, module: nn.Module, given: list[Any]) -> list[Any]:
        """Arguments of the forward for this rank's experts."""
        with refusing_comparison(self.mesh):
            routed = _routed(module, given, sum(self.sizes))
        beside = beside_of(module)
        if beside is None:
            dispatched = token_dispatch(routed[0], routed[1], self.mesh, sizes=self.sizes)
        else:
            under_way = token_dispatch(routed[0], routed[1], self.mesh, sizes=self.sizes, async_op=True)
            beside.first()
            dispatched = under_way.wait()
        module.__dict__[_DISPATCHED] = dispatched, routed[2:]
        local = self._take_in(module, dispatched.tokens)
        if len(given) == 2:
            return [local, dispatched.num_tokens_per_expert]
        own = torch.arange(len(dispatched.num_tokens_per_expert), device=local.device)
        indices = own.repeat_interleave(dispatched.num_tokens_per_expert).unsqueeze(1)
        return [local, indices, given[2].new_ones(indices.shape)]

    def inputs(self, module: nn.Module, local: torch.Tensor, parameters: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """Tokens of this rank's experts; they and the parameters are kept for results that do not depend on them."""
        dispatched, home = module.__dict__.pop(_DISPATCHED)
        return local, (dispatched, home, [local, *parameters.values()])

    def output(self, module: nn.Module, output: torch.Tensor, input_plan: InputPlan, call: Any) -> torch.Tensor:
        """Results of this rank's tokens, from the ranks of their experts."""
        dispatched, home, sources = call
        self._check_output(module, output, dispatched)
        if torch.is_grad_enabled() and not (output.requires_grad and len(output)):
            # What gets no gradient here gets one of zeros: the others' backward waits for this rank's.
            output = DependentOn.apply(output, *sources)  # type: ignore[no-untyped-call]
        beside = beside_of(module)
        if beside is None:
            found = token_combine(output, dispatched)
        else:
            under_way = token_combine(output, dispatched, async_op=True)
            beside.second()
            found = under_way.wait()
        if not home:
            return found
        tokens, places, factors = home
        return found.new_zeros(tokens).index_add(0, places, (found * factors).to(found.dtype))

    def _check_output(self, module: nn.Module, output: torch.Tensor, dispatched: DispatchedTokens) -> None:
        expected = dispatched.tokens
        if output.shape == expected.shape and output.dtype == expected.dtype:
            return
        error = ParallelizeError(
            f"{type(module).__name__} got tokens {tuple(expected.shape)} of {expected.dtype} and gave "
            f"{tuple(output.shape)} of {output.dtype}; allowed are results of the tokens' shape and dtype"
        )
        refuse_on(self.mesh, error)
        raise error

    def leave_out(self, module: nn.Module, input_plan: InputPlan, call: Any, error: Exception) -> None:
        """The others hear why no results of this rank come back."""
        refuse_on(self.mesh, error)


def _routed(module: nn.Module, given: list[Any], num_experts: int) -> list[Any]:
    """Tokens sorted by expert and their counts; with indices also the shape of the tokens, their places and factors."""
    tensors = [value for value in given if isinstance(value, torch.Tensor) and not isinstance(value, DTensor)]
    if len(tensors) != len(given) or len(given) not in (2, 3):
        kinds = ", ".join(type(value).__name__ for value in given)
        raise ParallelizeError(
            f"{type(module).__name__} under ExpertParallel was called with ({kinds}); allowed are plain tensors, "
            "(tokens, num_tokens_per_expert) or (tokens, indices, weights): x.to_local() of tokens that ranks share out"
        )
    if len(given) == 2:
        return given
    tokens, indices, weights = given
    order = indices.flatten().argsort(stable=True)
    places = order // max(1, indices.shape[-1])
    counts = torch.bincount(indices.flatten(), minlength=num_experts)
    factors = weights.flatten().index_select(0, order).unsqueeze(-1)
    return [tokens.index_select(0, places), counts, tuple(tokens.shape), places, factors]


class DependentOn(torch.autograd.Function):
    """A tensor that depends on others, whose gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        ctx.shapes = [(source.shape, source.dtype, source.device) for source in sources]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of `x`, and zeros."""
        needed = ctx.needs_input_grad[1:]
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if needs else None
            for needs, (shape, dtype, device) in zip(needed, ctx.shapes, strict=True)
        ]
        return grad, *zeros
