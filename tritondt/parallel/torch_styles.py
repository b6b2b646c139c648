"""Styles of torch.distributed.tensor.parallel as ours, for plans that were written for torch."""

from collections.abc import Callable, Mapping
from typing import Any

from tritondt.errors import ParallelizeError
from tritondt.parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from tritondt.parallel.sequence import SequenceParallel
from tritondt.parallel.style import ParallelStyle
from tritondt.parallel.weights import ColwiseParallel, RowwiseParallel
from tritondt.sharding.placement import Shard, as_placement

_MODULE = "torch.distributed.tensor.parallel.style"


def as_style(given: Any, where: str) -> ParallelStyle:
    """The style itself, or ours of a style of torch's, which is known by name so that torch's are not imported.

    ParallelizeError, which says `where` the plan has it, for anything else.
    """
    if isinstance(given, ParallelStyle):
        return given
    kind = type(given)
    if kind.__module__ == _MODULE and kind.__name__ in _STYLES:
        return _STYLES[kind.__name__](given)
    if any(base.__module__ == _MODULE for base in kind.__mro__):
        raise ParallelizeError(
            f"{where}: {kind.__name__} is of torch.distributed.tensor.parallel, and tritondt has no form of it; write "
            "one that inherits tritondt.parallel.ParallelStyle"
        )
    raise ParallelizeError(where)


def _layout(layouts: Any, default: int | None = None) -> Any:
    """The layout of torch's tuple of one; None where it is the cut of the last dim that torch fills in."""
    found = as_placement(layouts[0])
    return None if default is not None and found == Shard(default) else found


def _inputs(style: Any) -> dict[str, Any]:
    return {
        "input_layouts": style.input_layouts,
        "desired_input_layouts": style.desired_input_layouts,
        "input_kwarg_layouts": style.input_kwarg_layouts,
        "desired_input_kwarg_layouts": style.desired_input_kwarg_layouts,
    }


def _outputs(style: Any) -> dict[str, Any]:
    return {
        "output_layouts": style.output_layouts,
        "desired_output_layouts": style.desired_output_layouts,
        "use_local_output": style.use_local_output,
    }


# torch cuts by chunks where ours cuts by `unit`s and sizes: what torch fills in is left out, as by hand.
_STYLES: Mapping[str, Callable[[Any], ParallelStyle]] = {
    "ColwiseParallel": lambda style: ColwiseParallel(
        input_layouts=_layout(style.input_layouts),
        output_layouts=_layout(style.output_layouts, -1),
        use_local_output=style.use_local_output,
    ),
    "RowwiseParallel": lambda style: RowwiseParallel(
        input_layouts=_layout(style.input_layouts, -1),
        output_layouts=_layout(style.output_layouts),
        use_local_output=style.use_local_output,
    ),
    "SequenceParallel": lambda style: SequenceParallel(
        sequence_dim=style.sequence_sharding[0].dim, use_local_output=style.use_local_output
    ),
    "PrepareModuleInput": lambda style: PrepareModuleInput(**_inputs(style), use_local_output=style.use_local_output),
    "PrepareModuleOutput": lambda style: PrepareModuleOutput(**_outputs(style)),
    "PrepareModuleInputOutput": lambda style: PrepareModuleInputOutput(
        **_inputs(style.prepare_module_input),
        use_local_input=style.prepare_module_input.use_local_output,
        **_outputs(style.prepare_module_output),
    ),
}
