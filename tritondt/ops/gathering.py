"""Operators that run on gathered tensors only, each with the reason why no shard is enough."""

from collections.abc import Iterator, Mapping

import torch
from torch._ops import OpOverload

from tritondt.ops.fallback import gathered
from tritondt.ops.propagator import propagator

aten = torch.ops.aten

_COUNTED = "how many elements there are is known when all have been seen"
_SORTED = "all elements are put in one order"
_POSITIONS = "positions are counted through the whole tensor, whatever its dims"
_RAGGED = "rows of different lengths lie one after the other, and lengths are held by tensors"
_ALL_PAIRS = "every row meets every other, and the result is one long row of them"

_BINS = "bins follow from all elements"

REASONS: Mapping[str, str] = {
    **dict.fromkeys(("nonzero", "nonzero_static", "masked_select"), _COUNTED),
    **dict.fromkeys(("masked_scatter", "masked_scatter_backward"), _COUNTED),
    **dict.fromkeys(("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"), _COUNTED),
    **dict.fromkeys(("bincount", "repeat_interleave.Tensor", "linalg_lstsq"), _COUNTED),
    **dict.fromkeys(("median", "nanmedian"), _SORTED),
    **dict.fromkeys(("histogram.bin_ct", "histogram.bins_tensor", "_histogramdd_bin_edges"), _BINS),
    **dict.fromkeys(("_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors"), _BINS),
    "put": _POSITIONS,
    **dict.fromkeys(("segment_reduce", "_segment_reduce_backward"), _RAGGED),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_backward"), _RAGGED),
    **dict.fromkeys(("_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward"), _RAGGED),
    **dict.fromkeys(("_ctc_loss", "_ctc_loss.Tensor", "_ctc_loss_backward", "_ctc_loss_backward.Tensor"), _RAGGED),
    **dict.fromkeys(("_pdist_forward", "_pdist_backward"), _ALL_PAIRS),
}


def _operators(names: Iterator[str] | Mapping[str, str]) -> Iterator[OpOverload]:
    for name in names:
        packet, _, overload = name.partition(".")
        found = getattr(getattr(aten, packet, None), overload or "default", None)
        if found is not None:
            yield found


for _op in _operators(REASONS):
    propagator.set_rule(_op, gathered)
