"""What the functions on tensors ask of them: one device, one dtype."""

import pytest
import torch

from tritondt.kernels.arguments import common_device, common_dtype

FLOATS = torch.zeros(10)


def test_devices_are_the_same():
    meta = torch.empty(3, device="meta")
    assert common_device([FLOATS], [FLOATS]) == torch.device("cpu")
    assert common_device([], []) == torch.device("cpu")
    with pytest.raises(ValueError, match=r"source 0 lies on cpu and target 1 on meta; all tensors must lie on one"):
        common_device([FLOATS], [FLOATS, meta])


def test_dtypes_are_the_same():
    assert common_dtype([FLOATS], [FLOATS]) == torch.float32
    assert common_dtype([], []) is None
    with pytest.raises(ValueError, match=r"source 0 is torch.float32 and target 1 is torch.float16; all must have one"):
        common_dtype([FLOATS], [FLOATS, FLOATS.half()])
