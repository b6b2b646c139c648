"""The kernel of signals as the compiler makes it for Hopper and Blackwell, and as it is launched."""

import gc
import re
import weakref

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.driver import driver

from tests.kernels.compiled import _resource_usage
from tests.kernels.recording_driver import STREAM, RecordingDriver
from tritondt.kernels.gpu import device_table
from tritondt.kernels.gpu import signals as module
from tritondt.kernels.gpu.side_by_side import compiling_side_by_side
from tritondt.kernels.gpu.signals import DeviceSignals, signal_kernel
from tritondt.kernels.signals import Signal, Stop

TYPES = {"rows": "*i64", "asked": "*i32", "met": "*i64", "BLOCK": "constexpr", "BY_STORE": "constexpr"}
# Order and scope in either order, as versions of Triton and PTX have it.
SYSTEM = r"(?:\.global)?(?:\.sys\.{0}|\.{0}\.sys)(?:\.global)?"
RELEASE = r"\batom" + SYSTEM.format("release") + r"\.exch\.b64\b"
RELEASING_STORE = r"@%\w+ st\.release\.sys\.global\.b64\b"
ACQUIRING_LOAD = r"@%\w+ ld\.acquire\.sys\.global\.b64\b"
ACQUIRE = rf"\b(?:atom{SYSTEM.format('acquire')}\.(?:add|or)|ld{SYSTEM.format('acquire')})\.[bus]64\b"
LOOK_AT_STOP = r"\bld\.volatile(?:\.global)?\.[bus]32\b"
STORE = r"\bst\.global\.[bus]64\b"
LABEL = r"^(\$L__BB\w+):"


def stop_words():
    return Stop(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))


def compiled_for(architecture, block, by_store):
    signature = {name: TYPES.get(name, "i32") for name in signal_kernel.arg_names}
    constants = {
        (signal_kernel.arg_names.index(name),): value for name, value in (("BLOCK", block), ("BY_STORE", by_store))
    }
    source = ASTSource(signal_kernel, signature, constants, {(0,): [["tt.divisibility", 16]]})
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 1})


def places(pattern, ptx):
    return [found.start() for found in re.finditer(pattern, ptx, re.MULTILINE)]


def loop_of(ptx):
    """Where the only loop begins and where it branches back."""
    loops = []
    for label in re.finditer(LABEL, ptx, re.MULTILINE):
        back = re.compile(rf"\bbra(?:\.uni)?\s+{re.escape(label[1])};").search(ptx, label.end())
        if back is not None:
            loops.append((label.start(), back.start()))
    (loop,) = loops
    return loop


@pytest.mark.in_core(16)
@pytest.mark.parametrize("by_store", [False, True])
@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
@pytest.mark.parametrize("block", [32, 64])
def test_orders_and_scopes(block, architecture, by_store):
    compiled = compiled_for(architecture, block, by_store)
    ptx = compiled.asm["ptx"]
    lanes_of_thread = block // 32
    release, other = (RELEASING_STORE, RELEASE) if by_store else (RELEASE, RELEASING_STORE)
    acquire = ACQUIRING_LOAD if by_store else ACQUIRE
    releases, acquires, looks = (places(pattern, ptx) for pattern in (release, acquire, LOOK_AT_STOP))
    assert not places(other, ptx)
    start, end = loop_of(ptx)
    # Each lane publishes once and before the loop; in it words are looked at, and then whether a stop is asked for.
    assert len(releases) == len(acquires) == lanes_of_thread
    assert max(releases) < start < min(acquires)
    inside = [place for place in looks if start < place < end]
    assert max(acquires) < min(inside)
    assert inside == looks
    # Nothing else orders memory, and no word is written but by the release.
    assert len(places(r"\b(?:atom|red|fence|membar)\.", ptx)) == (0 if by_store else 2) * lanes_of_thread
    assert len(places(STORE, ptx)) == 3 * lanes_of_thread
    # Counters go to memory before their count is published, and after the loop once it has come, or else the stop.
    stores = places(STORE, ptx)
    assert max(stores[:lanes_of_thread]) < min(releases)
    assert min(stores[lanes_of_thread:]) > end
    usage = _resource_usage(compiled.asm["cubin"])
    assert usage["STACK"] == usage["LOCAL"] == 0


@pytest.mark.parametrize("pattern", [RELEASE, ACQUIRE])
@pytest.mark.parametrize(
    "line",
    [
        "atom.global.gpu.release.exch.b64",
        "atom.global.sys.relaxed.exch.b64",
        "atom.global.gpu.acquire.add.u64",
        "atom.global.sys.relaxed.add.u64",
        "ld.global.sys.relaxed.b64",
        "ld.volatile.global.b64",
        "atom.global.sys.acquire.add.u32",
    ],
)
def test_weaker_instructions_would_be_told_apart(line, pattern):
    assert not re.search(pattern, line)


@pytest.fixture
def recording(monkeypatch):
    """Triton with a driver that records, for a GPU that is not there; tables take the CPU for one."""
    double = RecordingDriver()
    monkeypatch.setattr(driver, "_active", double)
    monkeypatch.setattr(module, "resolved", lambda device, function: device)
    signal_kernel.device_caches.clear()
    yield double
    signal_kernel.device_caches.clear()
    # A kernel that outlives the double asks the real driver to unload it, from Triton 3.9 on.
    for found in gc.get_objects():
        if type(found) is CompiledKernel:
            found.module = None


def table_on_device(monkeypatch, fingerprint, stop, num_awaited=2):
    """Signals as on a GPU whose current stream is STREAM."""
    for name, value in (("CurrentRawStream", STREAM), ("Device", 0)):
        monkeypatch.setattr(torch._C, f"_cuda_get{name}", lambda *_, value=value: value, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    awaited = [Signal(8 * number, 8000 + 8 * number, 1) for number in range(1, num_awaited + 1)]
    table = DeviceSignals([Signal(80, 88, 0)], awaited, fingerprint, stop, "cpu")
    table._number = 0
    rows = table._rows.values
    table._arguments = (rows.data_ptr(), stop.asked.data_ptr(), stop.met.data_ptr(), *table._arguments[3:])
    table._rows._streams.add(STREAM)
    return table, rows


@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_run_is_one_launch_of_one_program(recording, monkeypatch, side_by_side):
    stop = stop_words()
    if side_by_side:
        with compiling_side_by_side():
            table, rows = table_on_device(monkeypatch, 7, stop)
    else:
        table, rows = table_on_device(monkeypatch, 7, stop)
    assert rows.tolist() == [80, 88, 0, 8, 8008, 1, 16, 8016, 1]
    table.run()
    table.run()
    assert (
        recording.launches
        == [
            {
                "grid": (1, 1, 1),
                "stream": STREAM,
                "rows": rows.data_ptr(),
                "asked": stop.asked.data_ptr(),
                "met": stop.met.data_ptr(),
                "fingerprint": 7,
                "num_published": 1,
                "num_awaited": 2,
                "BLOCK": 32,
                "BY_STORE": False,
            }
        ]
        * 2
    )


def compiled_kernels():
    """Those of the only device."""
    (cache, *_) = signal_kernel.device_caches[0]
    return list(cache.values())


def test_a_kernel_serves_all_signals_of_as_many_lanes(recording, monkeypatch):
    """Whatever the fingerprint, the numbers of signals, and how the stop word is aligned."""
    asked, met = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    stops = [Stop(asked[place : place + 1], met[place : place + 1]) for place in range(8)]
    for place, (fingerprint, num_awaited) in enumerate([(0, 0), (1, 1), (16, 16), (2**31, 32), (2**32 - 1, 3)]):
        table_on_device(monkeypatch, fingerprint, stops[place], num_awaited)[0].run()
    (kernel,) = compiled_kernels()
    assert kernel.metadata.num_warps == 1
    # Of no other argument than the rows is it known by what it can be divided; BLOCK and BY_STORE are constants.
    constants = {signal_kernel.arg_names.index(name) for name in ("BLOCK", "BY_STORE")}
    assert {place for (place,) in kernel.src.attrs} <= {0, *constants}
    assert [launch["fingerprint"] for launch in recording.launches] == [0, 1, 16, -(2**31), -1]
    assert [launch["num_awaited"] for launch in recording.launches] == [0, 1, 16, 32, 3]
    table_on_device(monkeypatch, 0, stops[0], 33)[0].run()
    assert len(compiled_kernels()) == 2
    assert recording.launches[-1]["BLOCK"] == 64


def test_what_a_captured_graph_reads_outlives_its_table(recording, monkeypatch):
    """A replay reads the stop word, too."""
    stop = stop_words()
    table, rows = table_on_device(monkeypatch, 0, stop)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True)
    monkeypatch.setattr(device_table, "_IN_GRAPHS", set())
    table.run()
    seen = [weakref.ref(rows), *map(weakref.ref, stop)]
    recording.launches.clear()
    del table, rows, stop
    gc.collect()
    assert all(found() is not None for found in seen)


def test_signals_on_the_cpu_are_refused_where_nothing_is_interpreted():
    sentence = r"^a device table on cpu; Triton's kernels run on cuda, and on cpu only in Triton's interpreter$"
    with pytest.raises(ValueError, match=sentence):
        DeviceSignals([], [], 0, stop_words(), "cpu")
