"""What is recorded of devices: every case has a default, and a device's own entry comes first."""

import json
import shutil

import pytest

from tritondt.kernels.gpu import ahead_of_time, tuning
from tritondt.kernels.gpu.specialization import DIMS
from tritondt.kernels.gpu.tuning import Choice, Entry, choose, record


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    """A copy of the file that ships."""
    path = tmp_path / "tuning.json"
    shutil.copy(tuning.PATH, path)
    monkeypatch.setattr(tuning, "PATH", path)
    tuning.forget()
    yield path
    monkeypatch.undo()
    tuning.forget()


def test_every_kernel_has_a_default():
    for kernel in ahead_of_time.kernels():
        for num_dims in DIMS:
            choice = choose("a device that nobody has tuned for", kernel.name, kernel.width, num_dims)
            assert choice.block >= 64
            assert choice.block.bit_count() == choice.num_warps.bit_count() == 1
            assert choice.max_ctas >= 1


def test_a_devices_own_entry_comes_first(own_file):
    few, many = Choice(128, 2, 7), Choice(256, 4, 9)
    record("GPU A", {"copy": [Entry(16, 4, many), Entry(16, 2, few)]}, own_file)
    assert choose("GPU A", "copy", 16, 1) == choose("GPU A", "copy", 16, 2) == few
    assert choose("GPU A", "copy", 16, 3) == many
    assert choose("GPU A", "copy", 16, 5) == choose("default", "copy", 16, 5)
    assert choose("GPU A", "cast", 8, 1) == choose("GPU B", "cast", 8, 1)
    record("GPU A", {"reduce 1": [Entry(16, 17, few)]}, own_file)
    assert choose("GPU A", "copy", 16, 3) == many
    assert choose("GPU A", "reduce 1", 16, 3) == few
    assert choose("GPU A", "reduce 2", 16, 1) == choose("default", "reduce 2", 16, 1)


def test_recording_replaces_one_device_and_keeps_the_others(own_file):
    before = json.loads(own_file.read_text())
    record("GPU A", {"copy": [Entry(16, 4, Choice(128, 2, 7))]}, own_file)
    record("GPU A", {"copy": [Entry(8, 4, Choice(512, 2, 7))]}, own_file)
    found = json.loads(own_file.read_text())
    assert found.pop("GPU A") == {"copy": [{"width": 8, "max_dims": 4, "block": 512, "num_warps": 2, "max_ctas": 7}]}
    assert found == before


def test_the_file_that_ships_is_written_as_record_writes(own_file):
    text = own_file.read_text()
    entries = json.loads(text)["default"]
    written = {
        kernel: [Entry(one.pop("width"), one.pop("max_dims"), Choice(**one)) for one in found]
        for kernel, found in entries.items()
    }
    record("default", written, own_file)
    assert own_file.read_text() == text


def test_a_missing_default_is_an_error():
    with pytest.raises(LookupError, match=r"tuning.json has no default for kernel 'sort', width 16 and 1 dims"):
        choose("default", "sort", 16, 1)
