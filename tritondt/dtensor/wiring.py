"""Registrations of DTensor with torch: dispatch of operators, saved files, optimizers, composites and graphs."""

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import is_inference_mode_enabled
from torch.autograd import forward_ad
from torch.optim.optimizer import _foreach_supported_types as _optimizer_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as _utility_foreach_types

from tritondt.dtensor import flex_attention  # noqa: F401  has torch's operator take distributed tensors
from tritondt.dtensor.composites import let_composites_make_tensors
from tritondt.dtensor.construct import construct
from tritondt.dtensor.dispatch import Dispatcher, enter
from tritondt.dtensor.graph_ops import register_from_local
from tritondt.dtensor.mixed_gradients import keep_kinds
from tritondt.dtensor.pending import pending_class
from tritondt.dtensor.serialization import rebuild_dtensor
from tritondt.dtensor.tensor import DTensor, wrap
from tritondt.dtensor.views.copied_views import copied_view_class, track_base
from tritondt.dtensor.views.recorded_views import requires_grad_
from tritondt.ops import propagator
from tritondt.sharding.spec import DTensorSpec

_offset: Any = torch.Tensor.storage_offset
_construct_plain = partial(construct, DTensor, requires_grad=False)


def _wrap_all(local_tensors: Iterable[torch.Tensor], specs: Iterable[DTensorSpec]) -> list[Any]:
    """Distributed tensors of many local ones, for which a frame each would take a fifth of the time."""
    local_tensors = list(local_tensors)
    if forward_ad._current_level >= 0 or is_inference_mode_enabled() or any(map(_offset, local_tensors)):
        return list(map(DTensor, local_tensors, specs))
    return list(map(_construct_plain, local_tensors, specs))


dispatcher = Dispatcher(DTensor, wrap, _wrap_all, track_base, keep_kinds, propagator)
# Torch calls it for every operator; a static method is not bound to the class.
DTensor.__torch_dispatch__ = staticmethod(dispatcher.dispatch)
DTensor.requires_grad_ = requires_grad_  # type: ignore[method-assign,assignment]
let_composites_make_tensors(DTensor, wrap)
register_from_local(DTensor.from_local)

# Where a graph breaks, torch.compile looks at every frame that runs, and would trace dispatch itself, operator by
# operator. A mark on the code, which costs a call nothing, keeps it and what it calls out. An index with a list ends a
# graph; in the frames that then run, torch fails with errors of its own (2.10: AssertionError of a guard on Identity,
# 2.14: "'slice' object has no attribute 'dtype'").
_eval_frame: Any = torch._C._dynamo.eval_frame
_SKIP = _eval_frame._FrameAction.SKIP
_subclasses = pending_class(DTensor), copied_view_class(DTensor)
_indexing = DTensor.__getitem__, DTensor.__setitem__
for _function in (enter, *_indexing, *(cast("Any", _class.__torch_dispatch__) for _class in _subclasses)):
    _code = _function.__code__
    _eval_frame.set_code_exec_strategy(_code, _eval_frame._FrameExecStrategy(_SKIP, _SKIP))

# torch.load with weights_only takes what is listed; everything else in a saved tensor is plain values.
# Saved files name the room, so that they load wherever the class stands.
DTensor.__module__ = rebuild_dtensor.__module__ = "tritondt.dtensor"
torch.serialization.add_safe_globals([DTensor, rebuild_dtensor])

# Optimizers and clip_grad_norm_ take their list operators for these classes.
for _types in (_optimizer_foreach_types, _utility_foreach_types):
    cast("list[type]", _types).append(DTensor)
