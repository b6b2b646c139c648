"""Which table a device gets, and that the CPU gets its own without Triton."""

import subprocess
import sys

import pytest
import torch

from tritondt.kernels.boxes import CopyBox, ReduceBox, Slot
from tritondt.kernels.reduction_dtypes import DTYPES, find_dtype
from tritondt.kernels.tables import copy_table, reduce_table

COPY = CopyBox(0, 0, 1, 0, 4, (2, 2), (3, 1), (2, 1))
REDUCTION = ReduceBox(0, 0, (3,), (1,), (Slot(0, 0, (1,)), Slot(0, 3, (1,))))


def test_the_cpu_has_tables_of_its_own():
    source, target = torch.arange(6.0), torch.zeros(4)
    table = copy_table([COPY], torch.device("cpu"))
    assert type(table).__module__ == "tritondt._C"
    table.run([source.data_ptr()], [target.data_ptr()], 1)
    assert target.tolist() == [1, 2, 4, 5]
    reducing = reduce_table([REDUCTION], "sum", "float32", 1, torch.device("cpu"))
    assert type(reducing).__module__ == "tritondt._C"
    reducing.run([source.data_ptr()], [target.data_ptr()], 1)
    assert target.tolist() == [3, 5, 7, 5]
    assert (table.num_boxes, table.num_bytes, reducing.num_boxes, reducing.num_bytes) == (1, 16, 1, 24)


@pytest.mark.parametrize("device", ["meta", "xpu"])
def test_other_devices_have_none(device):
    with pytest.raises(ValueError, match=rf"a table of boxes on {device}; there are tables for cpu and for cuda"):
        copy_table([COPY], torch.device(device))
    with pytest.raises(ValueError, match=rf"a table of boxes on {device}"):
        reduce_table([REDUCTION], "sum", "float32", 1, torch.device(device))


def test_triton_is_left_alone_until_a_device_needs_it():
    code = (
        "import sys, torch\n"
        "came_with_torch = 'triton' in sys.modules\n"
        "from tritondt.kernels.tables import copy_table\n"
        "copy_table([], torch.device('cpu')).run([], [], 1)\n"
        "assert came_with_torch or 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_are_those_of_the_cpu(dtype):
    def refusal(find, *asked):
        try:
            find(*asked)
        except ValueError as error:
            return str(error)
        return ""

    for op in ("sum", "product", "max", "min", "avg"):
        for divisor in (1, 3, 0):
            own = refusal(find_dtype, dtype, op, divisor)
            assert own == refusal(reduce_table, [], op, dtype, divisor, torch.device("cpu"))


def test_dtypes_without_reductions_are_refused():
    with pytest.raises(ValueError, match=r"dtype 'float8_e5m2' has no reductions; allowed are float32, bfloat16, "):
        find_dtype("float8_e5m2", "sum", 1)
