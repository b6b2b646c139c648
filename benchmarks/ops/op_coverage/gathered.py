"""Operators that are right, but never seen to run on shards without moving their arguments, each with the reason."""

from collections.abc import Mapping

from tritondt.ops.families.gathering import REASONS

_NUMBER = "a number for Python has to be the same on every rank"
_ONE_IMAGE = "its samples have one image with one channel, or one group of them: nothing that could be cut"
_ONE_MATRIX = "all dims are rows and columns of one matrix"

GATHERED: Mapping[str, str] = {
    **dict.fromkeys(("item", "allclose", "equal"), _NUMBER),
    **dict.fromkeys(
        ("nn.functional.conv3d", "nn.functional.pixel_shuffle", "nn.functional.pixel_unshuffle"), _ONE_IMAGE
    ),
    **dict.fromkeys(("linalg.tensorinv", "linalg.tensorsolve"), _ONE_MATRIX),
    **dict.fromkeys(("corrcoef", "cov"), "every row is multiplied with every other"),
    **dict.fromkeys(("diag", "diagflat"), "a rank that has a piece of a dim lacks what is beside it on the diagonal"),
    "stft": "windows reach beyond a piece",
    **{name: REASONS[name] for name in ("masked_scatter", "masked_select", "put", "bincount", "unique_consecutive")},
    "combinations": REASONS["masked_select"],
    "unique": REASONS["_unique2"],
    "histogram": REASONS["histogram.bin_ct"],
    "nn.functional.ctc_loss": REASONS["_ctc_loss"],
    "nn.functional.pdist": REASONS["_pdist_forward"],
    **dict.fromkeys(("_segment_reduce.lengths", "_segment_reduce.offsets"), REASONS["segment_reduce"]),
    **dict.fromkeys(("linalg.lstsq", "linalg.lstsq.grad_oriented"), REASONS["linalg_lstsq"]),
}
