"""What reaches Triton's launcher, which a recording driver stands in for."""

import gc
import weakref
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.runtime import _allocation
from triton.runtime.driver import driver

from tests.kernels.recording_driver import STREAM, RecordingDriver
from tritondt.kernels.boxes import CopyBox, ReduceBox, Slot
from tritondt.kernels.gpu import device_table
from tritondt.kernels.gpu.ahead_of_time import Architecture
from tritondt.kernels.gpu.box_table import box_table, by_pointers
from tritondt.kernels.gpu.copy_boxes import DeviceCopyTable, copies, copy_boxes, copy_kernel
from tritondt.kernels.gpu.device_table import Form, Launch, Shared, compile_form
from tritondt.kernels.gpu.launcher import _without_hooks
from tritondt.kernels.gpu.loop_nest import copy_nest, reduce_nest
from tritondt.kernels.gpu.pieces import Grain, copy_pieces, run_pieces
from tritondt.kernels.gpu.reduce_slots import ELEMENTS, reduce_kernel, reductions
from tritondt.kernels.gpu.specialization import DIMS
from tritondt.kernels.gpu.tuning import Choice

CHOICE = Choice(512, 4, 10)


@pytest.fixture
def recording(monkeypatch):
    """Triton with a driver that records; what it compiles is forgotten, for no GPU could run it."""
    double = RecordingDriver()
    monkeypatch.setattr(driver, "_active", double)
    for kernel in (copy_kernel, reduce_kernel):
        kernel.device_caches.clear()
    yield double
    for kernel in (copy_kernel, reduce_kernel):
        kernel.device_caches.clear()
    # A kernel that outlives the double asks the real driver to unload it, from Triton 3.9 on.
    for found in gc.get_objects():
        if type(found) is CompiledKernel:
            found.module = None


def made_launch(kernel, pieces):
    ((pointers, members),) = by_pointers(pieces)
    table = box_table(pointers, members, CHOICE.block, DIMS[0])
    return table, Launch(kernel, table, range(len(pointers)), torch.device("cpu"), CHOICE)


def test_a_copy_is_launched_with_its_arguments_in_order(recording):
    boxes = [CopyBox(0, 0, 0, 16 * k, 16, (9,), (1,), (1,)) for k in range(3)]
    pieces = [piece for box in boxes for piece in copy_pieces(copy_nest(0, box))]
    table, launch = made_launch(copies(), pieces)
    assert recording.launches == []
    addresses = (1 << 45, 1 << 46)
    launch.run(addresses)
    (found,) = recording.launches
    assert found.pop("table").tolist() == list(table.cells)
    padded = found.pop("pointers")
    assert padded == (*addresses, *[addresses[0]] * 6)
    assert found == {
        "grid": (3, 1, 1),
        "stream": STREAM,
        "num_walks": 3,
        "num_bisections": 0,
        "num_tiles": 3,
        "NUM_POINTERS": 8,
        "NUM_DIMS": 4,
        "MODES": 16,
        "BLOCK": 512,
        "IS_BOUNDED": True,
    }


def test_a_reduction_is_launched_with_its_arguments_in_order(recording):
    box = ReduceBox(0, 0, (4 * 512 * 11,), (1,), (Slot(0, 0, (1,)), Slot(1, 0, (1,))))
    kernel = reductions("float32", "sum", 3)
    _, launch = made_launch(kernel, list(run_pieces(reduce_nest(0, box, 4), Grain())))
    launch.run((1 << 45, 1 << 46, 1 << 47))
    (found,) = recording.launches
    assert found["grid"] == (CHOICE.max_ctas, 1, 1)
    assert found["pointers"] == (1 << 45, 1 << 46, 1 << 47, *[1 << 45] * 5)
    assert (found["divisor"], found["num_walks"], found["num_bisections"], found["num_tiles"]) == (3, 1, 0, 11)
    constants = {"UNROLL": 4, "ELEMENT": ELEMENTS["float32"], "DTYPE": "float32", "OP": "sum", "DIVIDES": True}
    assert {name: found[name] for name in constants} == constants


@pytest.mark.parametrize(("architecture", "registers"), [(80, 64), (90, 64), (100, 64), (120, 72), (121, 72)])
def test_registers_are_bounded_for_the_architecture_of_the_driver(monkeypatch, architecture, registers):
    monkeypatch.setattr(driver, "_active", Architecture(architecture))
    monkeypatch.setattr(reduce_kernel, "warmup", lambda *_, **options: options)
    kernel = reductions("float32", "sum")
    for num_dims, bound in ((DIMS[0], registers), (DIMS[1], 128)):
        form = Form(kernel.modes[0], num_dims, 8, 256)
        options = compile_form(kernel, form, 4, torch.int64, (1, 1, 1), (1, 1, 1))
        assert options == {"grid": (1, 1, 1), "num_warps": 4, "enable_fp_fusion": False, "maxnreg": bound}


def test_launches_again_without_touching_a_tensor(recording):
    (piece,) = copy_pieces(copy_nest(0, CopyBox(0, 0, 0, 0, 16, (9,), (1,), (1,))))
    _, launch = made_launch(copies(), [piece])
    launch.run((1 << 45, 1 << 46))

    class NoTorch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} was called")

    with NoTorch():
        launch.run((1 << 46, 1 << 47))
    first, second = recording.launches
    assert first["table"] is second["table"]
    assert second["pointers"][:2] == (1 << 46, 1 << 47)


@pytest.fixture
def on_device(monkeypatch):
    """A launch as on a GPU whose current stream is STREAM."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    _, launch = made_launch(copies(), list(copy_pieces(copy_nest(0, CopyBox(0, 0, 0, 0, 16, (9,), (1,), (1,))))))
    launch._device = torch.device("cuda", 0)
    launch._cells._streams.add(STREAM)
    return launch


def test_a_launch_on_a_device_goes_straight_to_the_launcher(recording, on_device, monkeypatch):
    """It is given the table's address, of which it need not ask the driver; nothing is prepared for hooks."""
    asked = []
    monkeypatch.setattr(CompiledKernel, "launch_metadata", lambda *given: asked.append(given))
    on_device.run((1 << 45, 1 << 46))
    (found,) = recording.launches
    assert found["table"] == on_device._cells.values.data_ptr()
    assert (found["grid"], found["stream"]) == ((1, 1, 1), STREAM)
    assert asked == []


class Launcher(CudaLauncher):  # type: ignore[misc]
    """Triton's own launcher of a compiled kernel, whose part in C is a double that records what it is given."""

    def __init__(self, *, scratch_bytes=0):
        self.given: list[tuple[object, ...]] = []
        self.launch = lambda *given: self.given.append(given)
        self.num_ctas, self.global_scratch_size, self.global_scratch_align = 1, scratch_bytes, 1
        self.profile_scratch_size, self.profile_scratch_align = 0, 1
        self.launch_cooperative_grid, self.launch_pdl, self.gsan_enabled = False, True, False
        if "kernel_signature" in CudaLauncher.__init__.__code__.co_names:
            self.arg_annotations, self.kernel_signature = ("annotations",), b"signature"


def launched_by(launcher):
    """A launch through `launcher` of this module, on a stream and with arguments that tell themselves apart."""
    compiled = SimpleNamespace(run=launcher, function=5, packed_metadata=(4, 1, 0))
    _without_hooks(compiled, (7, 8, 9))(("table", (1, 2), 3), STREAM)
    (found,) = launcher.given
    return found


def test_what_triton_compiled_is_given_what_triton_gives_it(recording):
    own, tritons = Launcher(), Launcher()
    tritons(7, 8, 9, STREAM, 5, (4, 1, 0), None, None, None, "table", (1, 2), 3)
    assert [launched_by(own)] == tritons.given


def test_a_kernel_with_scratch_memory_is_launched_by_triton_which_allocates_it(recording, monkeypatch):
    allocated = []
    monkeypatch.setattr(
        _allocation, "_allocator", ContextVar("allocator", default=lambda *given: allocated.append(given))
    )
    launched_by(Launcher(scratch_bytes=16))
    assert allocated == [(7 * 8 * 9 * 16, 1, STREAM)]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_of_the_program_is_told_of_launches(recording, on_device, monkeypatch, name):
    """Triton's launcher calls the hooks that it is given."""
    hook, given = object(), []
    monkeypatch.setattr(knobs.runtime, name, hook)
    monkeypatch.setattr(recording.launcher_cls, "__call__", lambda self, *found: given.append(found))
    on_device.run((1 << 45, 1 << 46))
    (found,) = given
    assert hook in found[7:9]


def test_tensors_on_the_cpu_are_refused_where_nothing_is_interpreted():
    boxes = [CopyBox(0, 0, 0, 0, 4, (3,), (1,), (1,))]
    with pytest.raises(ValueError, match=r"a device table on cpu; Triton's kernels run on cuda, and on cpu only in"):
        DeviceCopyTable(boxes, "cpu")
    with pytest.raises(ValueError, match=r"a device table on cpu"):
        copy_boxes([torch.ones(3)], [torch.ones(3)], boxes)
    copy_boxes([], [], [])


@pytest.mark.parametrize("captures", [True, False])
def test_what_a_captured_graph_reads_outlives_its_table(monkeypatch, captures):
    """A replay reads it after the table is gone."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: captures, raising=False)
    monkeypatch.setattr(device_table, "_IN_GRAPHS", set())
    shared = Shared([1, 2, 3], torch.int64, torch.device("cpu"))
    shared._streams.add(STREAM)  # which it was read on before
    seen = weakref.ref(shared.values)
    assert shared.read_by_current_stream() == STREAM
    del shared
    gc.collect()
    assert (seen() is not None) == captures
