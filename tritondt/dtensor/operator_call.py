"""A call of an operator, compiled: what the extension runs for each call of a signature that was decided before."""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch._ops import OpOverload

from tritondt.ops.propagation.schema import LocalOp
from tritondt.sharding.spec import DTensorSpec


class Wrap(Protocol):
    """Makes a distributed tensor of a local tensor and its spec."""

    def __call__(self, local: torch.Tensor, spec: DTensorSpec, /) -> torch.Tensor:
        """The distributed tensor."""


# Runs a signature: positional and keyword arguments with local tensors in place, then the arguments as they came.
Compiled = Callable[[Sequence[Any], Mapping[str, Any], Sequence[Any], Mapping[str, Any]], Any]


class Kind(IntEnum):
    """Work of a compiled call besides its operator on local tensors."""

    GENERAL = 0  # anything: `general` says what
    ONE = 1  # wraps one result
    LIST = 2  # wraps a list of results
    VIEW = 3  # wraps a view; autograd's record of it is noted
    WRITE = 4  # gives the argument that was written to, or None
    DETACH = 5  # wraps an alias, which has the memory of the argument


class CompiledCall(NamedTuple):
    """A signature as the extension runs it (csrc/bindings/operator_calls), which reads these fields in this order.

    `general` is the same as a function, for calls with keyword arguments and whatever else the extension leaves.
    """

    kind: Kind
    local: LocalOp | None = None
    # The result's; of a list one for each.
    spec: DTensorSpec | tuple[DTensorSpec, ...] | None = None
    general: Compiled | None = None
    # Of a view in another shape, that of this rank's part; of a write, see `Signature.compiled`.
    details: tuple[Any, ...] | None = None
    # torch's own binding of `local`, see `direct_binding`.
    direct: LocalOp | None = None

    def run(
        self,
        wrap: Wrap,
        local_args: Sequence[Any],
        local_kwargs: Mapping[str, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """The results, with distributed tensors for tensors."""
        if self.general is not None:
            return self.general(local_args, local_kwargs, args, kwargs)
        assert self.local is not None, "a compiled call that runs nothing"
        return wrap(self.local(*local_args, **local_kwargs), cast(DTensorSpec, self.spec))


# Overloads that a function, or method, of torch's of the same name runs for the same positional arguments.
_FUNCTIONS = frozenset({
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg.default", "exp.default", "rsqrt.default"),
    *("relu.default", "sigmoid.default", "tanh.default", "_softmax.default", "_log_softmax.default"),
    *("mm.default", "bmm.default", "addmm.default", "t.default", "transpose.int", "unsqueeze.default"),
    *("sum.default", "sum.dim_IntList", "mean.default", "mean.dim"),
})  # fmt: skip
_METHODS = frozenset({"add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor", "zero_.default"})


def direct_binding(op: OpOverload, local: LocalOp) -> LocalOp | None:
    """torch's own binding of an operator that runs as it is; None where `local` is another, or no binding is known.

    torch looks at arguments against a schema for `op`, and for its own binding in code that was made for it: of an add
    of two small tensors, 1.25 us against 0.95.

    >>> direct_binding(torch.ops.aten.mm.default, torch.ops.aten.mm.default._op) is torch.mm
    True
    """
    if local is not op._op:
        return None
    name = op._schema.name.removeprefix("aten::")
    overload = f"{name}.{op._overloadname}"
    of = torch._C._VariableFunctions if overload in _FUNCTIONS else torch.Tensor if overload in _METHODS else None
    return getattr(of, name, None)
