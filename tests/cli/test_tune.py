"""`python -m tritondt tune`: what it times, what it records, and what it says where there is no GPU."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from tritondt.cli import tune
from tritondt.cli.main import main
from tritondt.kernels.gpu.loop_nest import cast_nest, copy_nest, reduce_nest
from tritondt.kernels.gpu.pieces import Grain, Kind, copy_pieces, run_pieces
from tritondt.kernels.gpu.tuning import Choice


def test_without_a_gpu_it_ends_with_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["tune", "--output", str(tmp_path / "tuning.json")])
    assert result.exit_code == 1
    assert f"tune needs a CUDA device, and torch {torch.__version__} sees none" in result.output
    assert not (tmp_path / "tuning.json").exists()


@pytest.mark.parametrize(("arguments", "has_gpu"), [(["--architecture", "90"], False), ([], True)])
def test_without_triton_a_line_says_what_to_install(monkeypatch, arguments, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["tune", *arguments])
    assert result.exit_code == 1
    assert result.output == "Error: triton is missing, which tune compiles kernels with: pip install triton\n"


@pytest.mark.parametrize(("kernel", "width", "num_dims"), [("copy", *case) for case in tune.cases("copy")])
def test_copies_that_are_timed_are_what_they_are_recorded_as(kernel, width, num_dims):
    (piece,) = copy_pieces(copy_nest(0, tune.copy_box(width, num_dims, 1 << 22)))
    assert (piece.width, len(piece.lengths)) == (width, num_dims)
    assert piece.num_bytes == pytest.approx(1 << 22, rel=0.05)


def test_copies_by_blocks_are_timed_beside_them():
    (piece,) = copy_pieces(copy_nest(0, tune.shifted_box(1 << 22)))
    assert (piece.kind, piece.width) == (Kind.SHIFTED, 2)
    assert piece.num_bytes == pytest.approx(1 << 22, rel=0.05)


@pytest.mark.parametrize(
    ("itemsize", "width", "num_dims"),
    [(itemsize, *case) for itemsize in (1, 2, 4, 8) for case in tune.cases(f"reduce {itemsize}")],
)
def test_reductions_that_are_timed_are_what_they_are_recorded_as(itemsize, width, num_dims):
    (piece,) = run_pieces(reduce_nest(0, tune.reduce_box(width, num_dims, itemsize, 1 << 22), itemsize), Grain())
    assert (piece.width, len(piece.lengths)) == (width, num_dims)
    assert piece.num_bytes == pytest.approx(1 << 22, rel=0.05)
    assert len(piece.operands) == 9


@pytest.mark.parametrize(("width", "num_dims"), list(tune.cases("cast")))
def test_casts_that_are_timed_are_what_they_are_recorded_as(width, num_dims):
    for itemsize in (2, 8):
        grain = Grain(widest=8, word=1, num_bytes=4)
        (piece,) = run_pieces(cast_nest(0, tune.cast_box(width, num_dims, itemsize, 1 << 24)), grain)
        assert (piece.width, len(piece.lengths)) == (width, num_dims)
        assert piece.num_bytes * itemsize == pytest.approx(1 << 24, rel=0.05)  # it counts elements


@pytest.fixture
def pretended_gpu(monkeypatch):
    """A GPU of which only the name and the number of processors are real; 512 units are its fastest block."""
    properties = SimpleNamespace(name="Pretended GPU", multi_processor_count=10)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    def timer(kernel, width, num_dims, num_bytes):
        return lambda choice: 1e-3 + abs(choice.block - 512) + num_dims * abs(choice.max_ctas - 80)

    monkeypatch.setattr(tune, "_timer", timer)


def test_the_fastest_choices_are_recorded_beside_other_devices(pretended_gpu, tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text('{"default": {}}')
    result = CliRunner().invoke(main, ["tune", "--kernel", "reduce 8", "--output", str(path)])
    assert result.exit_code == 0, result.output
    assert "reduce 8, 16 bytes, 4 dims: " in result.output
    assert f"recorded for Pretended GPU in {path}" in result.output
    found = json.loads(path.read_text())
    assert list(found) == ["default", "Pretended GPU"]
    best = Choice(512, 4, 80)._asdict()
    assert found["Pretended GPU"] == {"reduce 8": [{"width": 16, "max_dims": 17, **best}]}


def test_copies_are_recorded_for_the_dims_that_were_tuned(pretended_gpu, tmp_path):
    """Of more dims the block that is fastest for few may spill."""
    path = tmp_path / "tuning.json"
    result = CliRunner().invoke(main, ["tune", "--kernel", "copy", "--output", str(path)])
    assert result.exit_code == 0, result.output
    assert [entry["max_dims"] for entry in json.loads(path.read_text())["Pretended GPU"]["copy"]] == [4]


def test_kernels_are_compiled_for_a_gpu_that_is_not_there(monkeypatch, tmp_path):
    """tests/kernels/test_specializations.py compiles one."""
    ahead_of_time = pytest.importorskip("tritondt.kernels.gpu.ahead_of_time", reason="Triton is not installed")
    asked = []

    def compile_all(architecture, jobs):
        asked.append((architecture, jobs))
        return 75

    monkeypatch.setattr(ahead_of_time, "compile_all", compile_all)
    result = CliRunner().invoke(main, ["tune", "--architecture", "90", "--jobs", "3", "--output", str(tmp_path / "x")])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("75 kernels compiled for sm_90 in ")
    assert asked == [(90, 3)]
    assert not (tmp_path / "x").exists()


def test_a_device_that_is_not_there_is_refused(pretended_gpu):
    result = CliRunner().invoke(main, ["tune", "--device", "3"])
    assert result.exit_code == 2
    assert "3; this machine has devices 0..0" in result.output
