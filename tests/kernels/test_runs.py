"""Boxes that are runs of memory, and CUDA's copies of them, over the test double of its driver."""

import random

import pytest
import torch

from tests.doubles.fake_cuda.library import FakeCuda, build, header_folder
from tests.harness.doubled import doubled
from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.runs import EngineTable, Run, run_of
from tritondt.kernels.tables import CppMaker, copy_table, run_table

CPU = torch.device("cpu")


def random_box(draw):
    """A box of two tensors of 4,096 bytes: dense on both sides, on one, or on none."""
    itemsize = draw.choice((1, 2, 4, 8))
    lengths = tuple(draw.choice((0, 1, 1, 2, 3, 4)) for _ in range(draw.randint(1, 4)))
    sides = [strides_of(lengths, draw.random() < 0.2, draw) for _ in range(2)]
    return CopyBox(0, 0, draw.randint(0, 9), draw.randint(0, 9), itemsize, lengths, *sides)


def strides_of(lengths, is_padded, draw):
    strides, numel = [], 1
    order = draw.sample(range(len(lengths)), len(lengths)) if is_padded else list(reversed(range(len(lengths))))
    for dim in order:
        strides.append((dim, numel))
        numel = (numel + is_padded) * max(lengths[dim], 1)
    return tuple(stride for _, stride in sorted(strides))


def copied(table):
    source = torch.arange(1 << 13).to(torch.uint8)
    target = torch.full_like(source, 255)
    table.run([source.data_ptr()], [target.data_ptr()], 1)
    return target


def test_a_run_is_what_its_box_copies():
    draw, num_runs = random.Random(5), 0
    for _ in range(600):
        box = random_box(draw)
        run = run_of(box)
        if run is None:
            continue
        num_runs += 1
        as_bytes = CopyBox(0, 0, run.source_start, run.target_start, 1, (run.num_bytes,), (1,), (1,))
        assert torch.equal(copied(copy_table([box], CPU)), copied(copy_table([as_bytes], CPU)))
    assert 100 < num_runs < 500


def test_boxes_that_are_runs_and_boxes_that_are_none():
    whole = CopyBox(0, 1, 2, 3, 4, (2, 1, 3), (3, 77, 1), (3, 5, 1))
    assert run_of(whole) == Run(0, 1, 8, 12, 24)
    for box in (
        whole._replace(source_strides=(4, 1, 1)),
        whole._replace(target_strides=(4, 1, 1)),
        whole._replace(source_strides=(1, 1, 2), target_strides=(3, 1, 1)),
        whole._replace(source_strides=(0, 0, 0)),
        whole._replace(lengths=(2, 0, 3)),
    ):
        assert run_of(box) is None


class Noting(CppMaker):
    """The CPU's tables, which note the runs that they were asked for."""

    def __init__(self):
        self.runs = []

    def run_table(self, runs, boxes, device):
        self.runs.append(list(runs))
        return super().run_table(runs, boxes, device)


def test_engines_are_asked_for_where_all_boxes_are_runs():
    run, columns = CopyBox(0, 0, 0, 0, 4, (4,), (1,), (1,)), CopyBox(0, 0, 8, 8, 4, (2, 2), (3, 1), (2, 1))
    maker = Noting()
    with doubled("cpu", table_maker=maker):
        assert run_table([run], CPU).num_bytes == 16
        assert run_table([run, columns], CPU).num_bytes == 32
    assert maker.runs == [[Run(0, 0, 0, 0, 16)]]


@pytest.fixture
def cuda():
    if header_folder() is None:
        pytest.skip("the test double of libcuda needs cuda.h of the triton package")
    found = FakeCuda(build())
    yield found
    found.reset()


def test_every_run_is_one_call_of_the_driver(cuda):
    runs = [Run(0, 1, 8, 0, 16), Run(1, 0, 0, 24, 5)]
    sources = [torch.arange(64).to(torch.uint8), torch.arange(100, 164).to(torch.uint8)]
    targets = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    table = EngineTable(runs, CPU, str(cuda.path))
    table.run([each.data_ptr() for each in sources], [each.data_ptr() for each in targets], 1)
    assert (table.num_bytes, table.num_boxes) == (21, 2)
    assert targets[1].tolist() == [*range(8, 24), *[0] * 48]
    assert targets[0].tolist() == [*[0] * 24, *range(100, 105), *[0] * 35]


def test_a_copy_that_fails_is_told(cuda):
    table = EngineTable([Run(0, 0, 0, 0, 3)], CPU, str(cuda.path))
    cuda.fail("cuMemcpyDtoDAsync_v2", 1, 700)
    memory = torch.zeros(8)
    with pytest.raises(RuntimeError) as told:
        table.run([memory.data_ptr()], [memory.data_ptr() + 16])
    assert str(told.value) == "cuMemcpyDtoDAsync_v2 was called for 3 bytes and returned 700; it must return 0"
