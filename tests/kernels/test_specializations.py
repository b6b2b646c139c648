"""How many kernels are compiled: few for a training step, not many more for all operations; counted without a GPU."""

import itertools
import os
import random
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.conftest import REPOSITORY
from tests.fsdp.models import loss_of, sharded
from tests.harness.oracle.cases import check_cases, random_case
from tests.kernels.bytes_of import bytes_of
from tests.kernels.counting_kernels import counted
from tests.kernels.random_boxes import random_cast_boxes, random_copy_boxes, random_reduce_boxes
from tests.kernels.signals.one_peer import Peers
from tritondt.comm.transports.threads import run_ranks
from tritondt.kernels.boxes import CopyBox, ReduceBox, Slot
from tritondt.kernels.gpu import ahead_of_time, device_table
from tritondt.kernels.gpu.cast_boxes import FLOATS, DeviceCastTable
from tritondt.kernels.gpu.copy_boxes import DeviceCopyTable
from tritondt.kernels.gpu.fp8_tables import EXACT_IN_FLOAT32, FP8, DeviceDequantizeTable, DeviceQuantizeTable
from tritondt.kernels.gpu.loop_nest import coalesce, copy_nest
from tritondt.kernels.gpu.reduce_slots import DeviceReduceTable
from tritondt.kernels.gpu.specialization import few_dims
from tritondt.kernels.reduction_dtypes import DTYPES

ALL_TESTS, A_STEP = 100, 8
AHEAD_AND_LATER = """
from pathlib import Path
import os
import torch
from triton.runtime.driver import driver
from tests.kernels.recording_driver import RecordingDriver
from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.gpu import ahead_of_time
from tritondt.kernels.gpu.box_table import box_table, by_pointers
from tritondt.kernels.gpu.copy_boxes import copies, copy_kernel
from tritondt.kernels.gpu.device_table import Launch
from tritondt.kernels.gpu.loop_nest import copy_nest
from tritondt.kernels.gpu.pieces import copy_pieces
from tritondt.kernels.gpu.tuning import choose

def count():
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))

ahead_of_time._compile_part((90, "default", 0, 1000))
ahead = count()
copy_kernel.device_caches.clear()
driver.set_active(RecordingDriver())
((pointers, pieces),) = by_pointers(copy_pieces(copy_nest(0, CopyBox(0, 0, 0, 0, 16, (9,), (1,), (1,)))))
choice = choose("default", "copy", 16, 4)
launch = Launch(copies(), box_table(pointers, pieces, choice.block, 4), (0, 1), torch.device("cpu"), choice)
print(f"{ahead} compiled ahead, {count() - ahead} later")
"""
CPU = torch.device("cpu")


def tables_of_random_boxes(seeds: range) -> None:
    """Tables as the tests on a GPU make them, of the same draws."""
    for seed in seeds:
        draw = random.Random(seed)
        boxes, _, _ = random_copy_boxes(draw, draw.randint(1, 4))
        table = DeviceCopyTable(boxes, CPU)
        past = [draw.choice((0, 0, 0, 1, 2, 4, 8)) for _ in range(4)]
        table.prepared([4096 + past[0], 8192 + past[1]], [4096 + past[2], 8192 + past[3]])
    for seed in range(len(seeds) // 10):
        for dtype, found in DTYPES.items():
            for op, divisor in itertools.product(found.ops, (1, 3)):
                if divisor == 1 or (op == "sum" and found.divides):
                    draw = random.Random(f"{dtype} {op} {divisor} {seed}")
                    slots, _, _ = random_reduce_boxes(draw, draw.randint(1, 3))
                    DeviceReduceTable(slots, op, dtype, divisor, CPU)
        for source, target in itertools.permutations(FLOATS, 2):
            casts = random_cast_boxes(random.Random(f"{source} {target} {seed}"), 2)[0]
            DeviceCastTable(casts, source, target, CPU)
        for wide, fp8 in itertools.product(EXACT_IN_FLOAT32, FP8):
            casts = random_cast_boxes(random.Random(f"{wide} {fp8} {seed}"), 2)[0]
            DeviceQuantizeTable(casts, wide, fp8, CPU)
            DeviceDequantizeTable(casts, fp8, wide, CPU)


def ahead() -> set[tuple[Any, ...]]:
    """What `tune --architecture` compiles; within `counted`."""
    with counted() as found:
        for kernel, form, num_warps in ahead_of_time.compilations():
            device_table.compile_form(kernel, form, num_warps, None, (1, 1, 1), (1, 1, 1))
    return found


def test_all_operations_need_few_kernels() -> None:
    with counted() as found:
        tables_of_random_boxes(range(20))
    assert len(ahead()) == len(ahead_of_time.compilations()) <= ALL_TESTS
    assert len(found | ahead()) <= ALL_TESTS


@pytest.mark.extended
def test_the_tests_of_a_gpu_need_few_kernels() -> None:
    with counted() as found:
        tables_of_random_boxes(range(100))
        for chunk in range(4):
            world_size = (8, 4, 6, 4)[chunk]
            seeds = range(800_000 + 20 * chunk, 800_020 + 20 * chunk)
            check_cases([random_case(seed, world_size) for seed in seeds], world_size)
    assert len(found | ahead()) <= ALL_TESTS


def test_a_training_step_needs_few_kernels() -> None:
    def body(rank: int) -> None:
        model, num_parts, part = sharded("fsdp+tp", rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, 0, num_parts, part).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    with counted() as found:
        run_ranks(4, body)
    assert 0 < len(found) <= A_STEP
    assert found <= ahead()


def test_an_exchange_through_slots_needs_kernels_that_are_compiled_ahead() -> None:
    with counted() as found:
        packs, unpacks = Peers([0] * 7), Peers([0] * 7, lands=True)
        DeviceCopyTable(packs.boxes(), CPU, slots=packs.tensors()).prepared([4096], [4096] * 8)
        DeviceCopyTable(unpacks.boxes(), CPU, slots=unpacks.tensors()).prepared([4096] * 8, [4096])
        for dtype in ("float32", "bfloat16"):
            terms = [ReduceBox(0, 0, (8,), (1,), tuple(Slot(peer, 0, (1,)) for peer in range(8)))]
            DeviceReduceTable(terms, "sum", dtype, 1, CPU, slots=unpacks.tensors())
    assert {name for name, *_ in found} == {"slot_copy_kernel", "slot_reduce_kernel"}
    assert found <= ahead()


def strided_box(*lengths: int) -> CopyBox:
    """A box none of whose loops are one with another, in the source."""
    strides = [prod(lengths[place + 1 :]) for place in range(len(lengths))]
    return CopyBox(
        0, 0, 0, 0, 4, lengths, tuple(2**place * n for place, n in enumerate(reversed(strides))), tuple(strides)
    )


def test_the_shortest_loops_are_unrolled() -> None:
    nest = coalesce(copy_nest(0, strided_box(2, 5, 3, 5, 5, 5)))
    parts = few_dims(nest, 6)
    assert [len(part.lengths) for part in parts] == [5] * 6  # the run of 4 bytes included
    together: dict[Any, Any] = {}
    for part in parts:
        together.update(bytes_of(part))
    assert together == bytes_of(nest)


def test_loops_that_would_make_many_boxes_are_kept() -> None:
    nest = coalesce(copy_nest(0, strided_box(9, 9, 9, 9, 9, 9)))
    assert few_dims(nest, 6) == [nest]
    with counted() as found:
        assert DeviceCopyTable([strided_box(9, 9, 9, 9, 9, 9)], CPU).num_boxes == 1
    assert {dict(constants)["NUM_DIMS"] for _, constants, _ in found} == {8}


@pytest.mark.extended
def test_what_is_compiled_ahead_is_found_by_tables(tmp_path: Path) -> None:
    """`tune --architecture` leaves in Triton's cache what a table on such a GPU then takes from there."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", AHEAD_AND_LATER],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "1 compiled ahead, 0 later\n"
