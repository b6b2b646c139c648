"""Origins of copied views: the view that a copy stands for, and the way back for what is written to it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from tritondt.dtensor.writes import ORIGIN, Count, LocalCount, Watch, memory_of, num_foreign_writes
from tritondt.errors import PropagationError
from tritondt.ops.propagation.fallback import admitted

aten = torch.ops.aten

# What writes a view's elements into the tensor that it is a view of, with the arguments of the view after both.
_SCATTER_OF: Mapping[OpOverload, OpOverload] = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
# Views of all elements in the same order.
_RESHAPES = frozenset({
    *(aten.view.default, aten._reshape_alias.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
})  # fmt: skip


class Origin(NamedTuple):
    """How a tensor was made as a view, and what had been written to its base then: the result at `place` of a call.

    `base`, the first of `args`, is an alias that keeps the shape and the memory that the viewed tensor had; `counted`
    is that tensor. A view of a copied view may share the copy's memory: it is an alias then. One that `is_local` is
    copied from this rank's part of the base alone.
    """

    base: Any
    counted: Any
    watch: Watch
    seen: Count
    seen_local: LocalCount
    op: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    place: int | None
    is_alias: bool = False
    is_local: bool = False
    # Whether the last write came from the view: autograd raises its version, which the base shares, after the operator.
    may_rise: bool = False
    # Writes to the copy itself that its base cannot see, when it was made; None where another tensor has the copy.
    seen_own: int | None = None

    def is_past(self) -> bool:
        """Whether operators have written to the base since, which all ranks know; alike on all ranks."""
        count = self.watch.count(self.counted)
        return count != self.seen and not (self.may_rise and count == (self.seen[0] + 1, self.seen[1]))

    def up_to_date(self, *, may_rise: bool = False) -> "Origin":
        """The origin of elements that are the base's present ones."""
        seen, seen_local = self.watch.count(self.counted), self.watch.local_count(self.base)
        return self._replace(seen=seen, seen_local=seen_local, may_rise=may_rise)

    def is_past_here(self) -> bool:
        """Whether anything has written to the base since, of which other ranks may not know."""
        return self.is_past() or self.watch.local_count(self.base) != self.seen_local

    def check_local(self) -> None:
        """Raises PropagationError where the base's local tensor was written to since: other ranks cannot know."""
        if self.watch.local_count(self.base) != self.seen_local:
            raise PropagationError(
                f"the local tensor of {self.base._spec} was written to without an operator on it, which its view by "
                f"{self.op} cannot see: its elements had to move; take the view again after writing"
            )

    def check_own(self, local: torch.Tensor) -> None:
        """Raises PropagationError where the copy was written to by other means than operators on the view."""
        if self.seen_own is not None and num_foreign_writes(local) != self.seen_own:
            raise PropagationError(
                f"the local tensor of a view by {self.op} of {self.base._spec} was written to without an operator on "
                "the view, which its base cannot see: its elements had to move; write to the view itself, as in "
                "view.copy_(...), on all ranks, or to the local tensor of its base"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Origin":
        """The same view of the base's copy, which shares its memory with the copy of what was viewed."""
        base = copy.deepcopy(self.base, memo)
        counted, watch = memo.get(id(self.counted), base), Watch(memory_of(base))
        seen, local, args = watch.count(counted), watch.local_count(base), (base, *copy.deepcopy(self.args[1:], memo))
        return self._replace(
            base=base, counted=counted, watch=watch, seen=seen, seen_local=local, args=args, seen_own=None
        )

    def past_text(self, what: str) -> str:
        """The sentence that refuses `what`, which would have to communicate, on a view that is out of date."""
        return (
            f"{what} would give what a view by {self.op} of {self.base._spec} was before its base was written to: its "
            "elements had to move, and are copied again by the next operator on the view, a collective call; on all "
            "ranks call one first, such as view = view.clone()"
        )

    def refusal(self, op: OpOverload) -> str:
        """The sentence that refuses an operator that would write to the view."""
        return (
            f"{op} would write to a view by {self.op} of {self.base._spec} whose elements had to move, and would not "
            "reach what it is a view of; write to that, or to a copy: view.clone()"
        )


def can_write_back(view: Any) -> bool:
    """Whether what is written to a copied view can be written to its base, and to that base's own."""
    origin: Origin | None = view.__dict__.get(ORIGIN)
    if origin is None:
        return True
    known = origin.op in _SCATTER_OF or origin.op in _RESHAPES or origin.op is aten.unbind.int
    # Elements of a base that share memory are written to by no copy.
    can_scatter = known and not origin.base._spec.tensor_meta.shares_elements
    return (origin.is_alias or can_scatter) and can_write_back(origin.base)


def write_back(view: Any, untracked: Callable[[Any], Any]) -> None:
    """Writes the elements of a copied view to its base, and from there on to that base's own."""
    origin: Origin = view.__dict__[ORIGIN]
    base, given = origin.base, (*origin.args[1:], *origin.kwargs.values())
    if origin.is_alias:
        write_back(base, untracked)
    elif origin.op in _RESHAPES:
        with admitted():
            base.copy_(aten.view.default(untracked(view), base.shape))
    elif origin.op is aten.unbind.int:
        base.copy_(aten.select_scatter.default(base, untracked(view), *(given or (0,)), origin.place))
    else:
        base.copy_(_SCATTER_OF[origin.op](base, untracked(view), *origin.args[1:], **origin.kwargs))
