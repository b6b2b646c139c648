"""The kernels on a GPU, against the reference on the CPU; see tests/kernels/interpreted for the same without one."""

import itertools
import random

import pytest
import torch
from torch.testing import assert_close

from tests.harness.gpu_device import DEVICE
from tests.kernels.random_boxes import (
    random_bytes,
    random_cast_boxes,
    random_copy_boxes,
    random_reduce_boxes,
    random_values,
    same_nan,
)

pytest.importorskip("triton", reason="Triton is not installed")

from tritondt.kernels import reference
from tritondt.kernels.boxes import CopyBox, ReduceBox, Slot
from tritondt.kernels.gpu.cast_boxes import cast_boxes
from tritondt.kernels.gpu.quantize_boxes import dequantize_boxes, quantize_boxes
from tritondt.kernels.reduction_dtypes import DTYPES
from tritondt.kernels.tables import copy_table, reduce_table

# In a dry run NumPy, which interprets the kernels, warns of the infinities and NaN that are put in on purpose.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]

REDUCTIONS = [
    (dtype, op, divisor)
    for dtype, found in DTYPES.items()
    for op in found.ops
    for divisor in ((1, 2, 3, 1000) if op == "sum" and found.divides else (1,))
]
CUDA = DEVICE
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def on_gpu(x, past=0):
    """A copy on the GPU that starts so many bytes behind a multiple of 16."""
    num_bytes = x.numel() * x.element_size()
    room = torch.empty(num_bytes + 32, dtype=torch.uint8, device=CUDA)
    placed = room[past : past + num_bytes]
    placed.copy_(x.view(torch.uint8))
    return placed.view(x.dtype)


def pointers(tensors):
    return [tensor.data_ptr() for tensor in tensors]


def assert_copies_as_reference(boxes, sources, targets, past=(0, 0, 0, 0)):
    expected = [target.clone() for target in targets]
    reference.copy_boxes(sources, expected, boxes)
    own_sources = [on_gpu(x, past[number]) for number, x in enumerate(sources)]
    own_targets = [on_gpu(x, past[2 + number]) for number, x in enumerate(targets)]
    copy_table(boxes, CUDA).run(pointers(own_sources), pointers(own_targets), 1)
    for target, wanted in zip(own_targets, expected, strict=True):
        assert_close(target.cpu(), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("first_seed", range(0, 500, 50))
@pytest.mark.timeout(600)
def test_random_copies(first_seed):
    for seed in range(first_seed, first_seed + 50):
        draw = random.Random(seed)
        boxes, needed, filled = random_copy_boxes(draw, draw.randint(1, 4))
        sources = [random_bytes(num_bytes) for num_bytes in needed]
        targets = [random_bytes(end + 40) for end in filled]
        past = [draw.choice((0, 0, 0, 1, 2, 4, 8)) for _ in range(4)]
        assert_copies_as_reference(boxes, sources, targets, past)


@pytest.mark.parametrize(("dtype", "op", "divisor"), REDUCTIONS)
@pytest.mark.timeout(600)
def test_random_reductions(dtype, op, divisor):
    torch_dtype = getattr(torch, dtype)
    for seed in range(10):
        draw = random.Random(f"{dtype} {op} {divisor} {seed}")
        boxes, needed, filled = random_reduce_boxes(draw, draw.randint(1, 3))
        sources = [random_values(num_elements, torch_dtype) for num_elements in needed]
        targets = [random_values(end + 5, torch_dtype) for end in filled]
        expected = [target.clone() for target in targets]
        reference.reduce_slots(sources, expected, boxes, op, divisor)
        itemsize = torch_dtype.itemsize
        own_sources = [on_gpu(x, itemsize * draw.choice((0, 0, 1)) % 16) for x in sources]
        own_targets = [on_gpu(x) for x in targets]
        table = reduce_table(boxes, op, dtype, divisor, CUDA)
        table.run(pointers(own_sources), pointers(own_targets), 1)
        for target, wanted in zip(own_targets, expected, strict=True):
            assert_close(same_nan(target.cpu()), same_nan(wanted), rtol=0, atol=0)


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(FLOATS, 2)))
@pytest.mark.timeout(600)
def test_random_casts(source, target):
    for seed in range(20):
        draw = random.Random(f"{source} {target} {seed}")
        boxes, needed, filled = random_cast_boxes(draw, draw.randint(1, 3))
        sources = [random_values(num_elements, source) for num_elements in needed]
        targets = [random_values(end + 5, target) for end in filled]
        expected = [x.clone() for x in targets]
        reference.cast_boxes(sources, expected, boxes)
        own_sources = [on_gpu(x, source.itemsize * draw.choice((0, 0, 1)) % 16) for x in sources]
        own_targets = [on_gpu(x) for x in targets]
        cast_boxes(own_sources, own_targets, boxes)
        for x, wanted in zip(own_targets, expected, strict=True):
            assert_close(x.cpu().view(torch.uint8), wanted.view(torch.uint8), rtol=0, atol=0)


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.timeout(600)
def test_random_boxes_to_fp8_and_back(wide, fp8):
    for seed in range(20):
        draw = random.Random(f"{wide} {fp8} {seed}")
        boxes, needed, filled = random_cast_boxes(draw, draw.randint(1, 3))
        sources = [random_values(n, wide) * 2.0 ** draw.randint(-60, 60) for n in needed]
        targets = [random_bytes(end + 5).view(fp8) for end in filled]
        backs = [torch.zeros(end, dtype=wide) for end in filled]
        scales = torch.full((len(boxes),), float("nan"))
        given = [[on_gpu(x) for x in tensors] for tensors in (sources, targets, [scales], backs)]
        quantize_boxes(given[0], given[1], given[2][0], boxes)
        again = [box._replace(source=box.target, source_offset=box.target_offset) for box in boxes]
        again = [box._replace(source_strides=box.target_strides) for box in again]
        dequantize_boxes(given[1], given[3], given[2][0], again)
        reference.quantize_boxes(sources, targets, scales, boxes)
        reference.dequantize_boxes(targets, backs, scales, again)
        for found, expected in zip(given[1:], (targets, [scales], backs), strict=True):
            for x, wanted in zip(found, expected, strict=True):
                assert_close(x.cpu().view(torch.uint8), wanted.view(torch.uint8), rtol=0, atol=0)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("shape", [(1023, 2049), (1024, 2048), (3, 5000), (5000, 3)])
def test_transpositions(itemsize, shape):
    rows, columns = shape
    box = CopyBox(0, 0, 0, 0, itemsize, shape, (1, rows), (columns, 1))
    num_bytes = rows * columns * itemsize
    assert_copies_as_reference([box], [random_bytes(num_bytes)], [random_bytes(num_bytes + 8)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uneven_columns_there_and_back(dtype):
    sizes = (1366, 1365, 0, 1365, 1)
    rows, columns = 4099, sum(sizes)
    whole = torch.randn(rows, columns, device=CUDA).to(dtype)
    packs, unpacks, start = [], [], 0
    for size in sizes:
        one, other = (columns, 1), (max(size, 1), 1)
        packs.append(CopyBox(0, 0, start, start * rows, dtype.itemsize, (rows, size), one, other))
        unpacks.append(CopyBox(0, 0, start * rows, start, dtype.itemsize, (rows, size), other, one))
        start += size
    buffer, back = torch.empty(rows * columns, dtype=dtype, device=CUDA), torch.empty_like(whole)
    copy_table(packs, CUDA).run([whole.data_ptr()], [buffer.data_ptr()], 1)
    packed = torch.cat([part.reshape(-1) for part in whole.split(sizes, dim=1)])
    assert_close(buffer.view(torch.uint8), packed.view(torch.uint8), rtol=0, atol=0)
    copy_table(unpacks, CUDA).run([buffer.data_ptr()], [back.data_ptr()], 1)
    assert_close(back.view(torch.uint8), whole.view(torch.uint8), rtol=0, atol=0)


def test_a_box_of_more_than_31_bits():
    num_bytes = 2**31 + 2**20 + 5
    if torch.cuda.mem_get_info()[0] < 3 * num_bytes:
        pytest.skip("needs 6 GiB of free memory on the GPU")
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=CUDA)
    target = torch.zeros(num_bytes + 3, dtype=torch.uint8, device=CUDA)
    # One byte apart, so that it is moved byte by byte.
    table = copy_table([CopyBox(0, 0, 0, 1, 1, (num_bytes,), (1,), (1,))], CUDA)
    table.run([source.data_ptr()], [target.data_ptr()], 1)
    assert torch.equal(target[1:-2], source)
    assert target[0] == 0
    assert not target[-2:].any()


def test_a_cached_run_allocates_and_uploads_nothing():
    boxes = [CopyBox(0, 0, 0, 16 * k, 4, (64, 3), (8, 1), (64, 1)) for k in range(4)]
    source = torch.randn(1024, device=CUDA)
    target = torch.zeros(8192, device=CUDA)
    table = copy_table(boxes, CUDA)
    table.run([source.data_ptr()], [target.data_ptr()], 1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    # To keep events of one cycle only, as by default, is warned of (2.11).
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(5):
            table.run([source.data_ptr()], [target.data_ptr()], 1)
        torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    on_device = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert on_device
    assert all("copy_kernel" in name for name in on_device)
    assert len(on_device) == 5


def test_a_table_runs_on_any_stream():
    box = CopyBox(0, 0, 0, 0, 4, (1 << 20,), (1,), (1,))
    source, target = torch.randn(1 << 20, device=CUDA), torch.zeros(1 << 20, device=CUDA)
    table = copy_table([box], CUDA)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        table.run([source.data_ptr()], [target.data_ptr()], 1)
    del table
    # What takes the place of the table's cells must wait until the stream has read them.
    torch.full((1 << 16,), -1, dtype=torch.int64, device=CUDA)
    torch.cuda.current_stream().wait_stream(stream)
    assert_close(target, source, rtol=0, atol=0)


def test_a_table_in_a_graph():
    boxes = [ReduceBox(0, 0, (1000,), (1,), tuple(Slot(0, 1000 * k, (1,)) for k in range(3)))]
    source, target = torch.zeros(3000, device=CUDA), torch.zeros(1000, device=CUDA)
    table = reduce_table(boxes, "sum", "float32", 3, CUDA)
    table.run([source.data_ptr()], [target.data_ptr()], 1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.run([source.data_ptr()], [target.data_ptr()], 1)
    for value in (3.0, 6.0):
        source.fill_(value)
        graph.replay()
        assert_close(target, torch.full_like(target, value), rtol=0, atol=0)


@pytest.mark.multigpu
def test_a_table_runs_on_its_own_device():
    device = torch.device("cuda", 1)
    source, target = torch.randn(100, device=device), torch.zeros(100, device=device)
    table = copy_table([CopyBox(0, 0, 0, 0, 4, (100,), (1,), (1,))], device)
    assert torch.cuda.current_device() == 0
    table.run([source.data_ptr()], [target.data_ptr()], 1)
    torch.cuda.synchronize(device)
    assert_close(target, source, rtol=0, atol=0)
