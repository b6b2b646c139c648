"""The kernels of slots as the compiler makes them: orders and scopes of memory, and no spills."""

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels.compiled import compile_kernel
from tests.kernels.signals.one_peer import Peers
from tritondt.kernels.gpu.copy_boxes import DeviceCopyTable, slot_copies
from tritondt.kernels.gpu.reduce_slots import reductions
from tritondt.kernels.gpu.signals import num_lanes
from tritondt.kernels.gpu.specialization import ALL_TILES, COPY_RUNS, DIMS, POINTERS, SHORT_ROWS, WIDE_RUNS
from tritondt.kernels.gpu.tuning import choose

FEW = DIMS[0]
OTHERS = (80, 100, 120)


def marked(mark, *cases):
    """Parameters of cases that another tier than the core has: a kernel takes the compiler seconds."""
    return [pytest.param(*case, marks=mark) for case in cases]


EXTENDED, SOAK = pytest.mark.extended, pytest.mark.soak


def ordered(scope, order):
    """Scope and order in either order, as versions of Triton and PTX have it."""
    return rf"(?:\.global)?(?:\.{scope}\.{order}|\.{order}\.{scope})(?:\.global)?"


RELEASE = r"\batom" + ordered("sys", "release") + r"\.exch\.b64\b"
RELEASING_STORE = r"@%\w+ st\.release\.sys\.global\.b64\b"
ACQUIRING_LOAD = r"@%\w+ ld\.acquire\.sys\.global\.b64\b"
ACQUIRE = rf"\b(?:atom{ordered('sys', 'acquire')}\.(?:add|or)|ld{ordered('sys', 'acquire')})\.[bus]64\b"
COUNT = rf"\batom{ordered('gpu', 'acq_rel')}\.add\.[us]32\b"
BARRIER = r"\bbar(?:rier)?\.sync\b"
LOOK_AT_STOP = r"\bld\.volatile(?:\.global)?\.[bus]32\b"
WIDE = r"\b{}\.global(?:\.\w+)*\.(?:v4\.b32|v2\.b64)"


def places(pattern, ptx):
    return [found.start() for found in re.finditer(pattern, ptx, re.MULTILINE)]


def slots_of(kernel, *, num_warps=4, by_store=False):
    return kernel.with_signals(100, num_lanes(7, num_warps), by_store=by_store)


@pytest.mark.parametrize(
    ("architecture", "by_store"),
    [
        (90, False),
        (90, True),
        *marked(EXTENDED, *((number, False) for number in OTHERS)),
        *marked(SOAK, *((number, True) for number in OTHERS)),
    ],
)
def test_orders_and_scopes(architecture, by_store):
    compiled = compile_kernel(slots_of(slot_copies(), by_store=by_store), WIDE_RUNS, FEW, architecture)
    ptx = compiled.ptx
    release, other = (RELEASING_STORE, RELEASE) if by_store else (RELEASE, RELEASING_STORE)
    patterns = (ACQUIRING_LOAD if by_store else ACQUIRE, LOOK_AT_STOP, COUNT, release)
    (acquire,), (look,), (count,), (publish,) = (places(pattern, ptx) for pattern in patterns)
    loads, stores, barriers = (places(pattern, ptx) for pattern in (WIDE.format("ld"), WIDE.format("st"), BARRIER))
    assert not places(other, ptx)
    # Words are looked at, and the stop word, before anything is moved; a barrier lets all threads see what one did.
    assert acquire < look < min(loads)
    assert any(look < barrier < min(loads) for barrier in barriers)
    # What is moved is before the count of programs, behind a barrier, and that before the words.
    assert any(max(stores) < barrier < count for barrier in barriers)
    assert any(count < barrier < publish for barrier in barriers)
    assert len(places(r"\b(?:atom|red|fence|membar)\.", ptx)) == (1 if by_store else 3)
    assert compiled.spilled_bytes == 0
    choice = choose("default", "copy", 16, FEW)
    assert compiled.wide_loads == compiled.wide_stores == choice.block // (32 * choice.num_warps)


@pytest.mark.parametrize(
    ("modes", "architecture"),
    [
        *marked(EXTENDED, *((modes, number) for modes in (COPY_RUNS, ALL_TILES) for number in (90, 120))),
        *marked(SOAK, *((modes, number) for modes in (COPY_RUNS, ALL_TILES) for number in (80, 100))),
        *marked(SOAK, *((SHORT_ROWS, number) for number in (90, *OTHERS))),
    ],
)
def test_no_copy_of_slots_spills(architecture, modes):
    compiled = compile_kernel(slots_of(slot_copies()), modes, FEW, architecture)
    assert compiled.spilled_bytes == 0
    assert compiled.registers <= 128  # 32 programs of 128 threads: others find room beside them


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        (90, "float32"),
        *marked(EXTENDED, *((number, "bfloat16") for number in (90, *OTHERS))),
        *marked(SOAK, *((number, dtype) for number in (90, *OTHERS) for dtype in ("int8", "complex128"))),
    ],
)
def test_no_sum_of_slots_spills(architecture, dtype):
    kernel = slots_of(reductions(dtype, "sum", is_of_slots=True), num_warps=8)
    compiled = compile_kernel(kernel, kernel.modes[0], FEW, architecture)
    assert compiled.spilled_bytes == 0
    assert compiled.wide_loads == 5 * compiled.wide_stores > 0
    for pattern in (ACQUIRE, COUNT, RELEASE):
        assert len(places(pattern, compiled.ptx)) == 1


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *marked(EXTENDED, (100, "float32")),
        *marked(
            SOAK, (100, "bfloat16"), *((number, dtype) for number in (80, 90, 120) for dtype in ("float32", "bfloat16"))
        ),
    ],
)
def test_no_sum_of_many_slots_spills(architecture, dtype):
    kernel = slots_of(reductions(dtype, "sum", is_of_slots=True), num_warps=8)
    compiled = compile_kernel(kernel, kernel.modes[0], FEW, architecture, POINTERS[1])
    assert compiled.spilled_bytes == 0
    assert compiled.registers <= 168


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (RELEASE, "atom.global.gpu.release.exch.b64"),
        (RELEASE, "atom.global.sys.relaxed.exch.b64"),
        (ACQUIRE, "atom.global.gpu.acquire.add.u64"),
        (ACQUIRE, "ld.volatile.global.b64"),
        (COUNT, "atom.global.gpu.relaxed.add.u32"),
        (COUNT, "atom.global.cta.acq_rel.add.u32"),
    ],
)
def test_weaker_instructions_would_be_told_apart(pattern, line):
    assert not re.search(pattern, line)


def test_tables_of_slots_on_the_cpu_are_refused_where_nothing_is_interpreted():
    sentence = r"^a device table on cpu; Triton's kernels run on cuda, and on cpu only in Triton's interpreter$"
    peers = Peers([0])
    with pytest.raises(ValueError, match=sentence):
        DeviceCopyTable(peers.boxes(), "cpu", slots=peers.tensors())
