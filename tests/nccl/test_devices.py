"""What is said where ranks on a GPU cannot be started, and how they are told which library is theirs."""

import ctypes
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tritondt as T
from tests.doubles.fake_nccl.library import build
from tests.harness.gloo_ranks import GlooRanks
from tests.nccl import devices
from tests.nccl import libraries as nccls
from tests.nccl.conftest import SettingOf
from tritondt import environment
from tritondt._C import NcclLibrary
from tritondt.cli import machine
from tritondt.comm.nccl.streams import CudaStreams, driver_function


def path_of(version: str) -> str:
    return f"/nccl/{version}/nvidia/nccl/lib/libnccl.so.2"


def libraries(monkeypatch: pytest.MonkeyPatch, *found: tuple[str, int]) -> None:
    made = [SimpleNamespace(version=version, version_code=code, path=path_of(version)) for version, code in found]
    monkeypatch.setattr(devices, "libraries", lambda: made)
    monkeypatch.setattr(nccls, "libraries", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_without_a_device_there_are_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert devices.why_not("gpu", 1) == f"needs a CUDA device; torch {torch.__version__} sees none"
    assert devices.why_not("host", 2) is None


def test_two_on_one_gpu_need_a_library_that_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries(monkeypatch, ("2.28.9", 22809))
    assert devices.why_not("gpu", 1) is None
    assert devices.why_not("gpu", 2) == (
        f"2 ranks on one GPU need NCCL 2.30.7 or later, and found is 2.28.9 ({path_of('2.28.9')}); name one with "
        "TRITONDT_NCCL_SO, or put it into a folder of NCCL_LIBRARIES"
    )
    libraries(monkeypatch)
    assert "and found is none; name one" in (devices.why_not("gpu", 2) or "")


def test_torch_finds_the_library_that_we_use(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries(monkeypatch, ("2.28.9", 22809), ("2.30.7", 23007))
    monkeypatch.setenv("PYTHONPATH", "/else")
    assert devices.why_not("gpu", 2) is None
    path = path_of("2.30.7")
    told = nccls.variables_for(nccls.sharing_library())
    repository = str(Path(__file__).parents[2])
    assert told == {"TRITONDT_NCCL_SO": path, "PYTHONPATH": f"/nccl/2.30.7:{repository}:/else"}
    with pytest.raises(
        ValueError, match=r"^the NCCL at /lib/libnccl\.so\.2 was asked for; torch finds one in FOLDER/nv"
    ):
        nccls.variables_for("/lib/libnccl.so.2")


def test_libraries_are_found_without_their_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "2.30.7" / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    path.parent.mkdir(parents=True)
    shutil.copyfile(build(), path)  # not a link: a library that is loaded is known by the name it was loaded by
    monkeypatch.setenv("NCCL_LIBRARIES", str(tmp_path))
    nccls.libraries.cache_clear()
    try:
        assert str(path) in [found.path for found in nccls.libraries()]
    finally:
        nccls.libraries.cache_clear()


def test_torch_and_we_are_asked_for_the_version_of_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = NcclLibrary(str(build()))
    monkeypatch.setattr(nccls, "torchs_version", lambda: ours.version_code)
    monkeypatch.setattr(nccls, "mapped", lambda: [ours.path])
    nccls.check_shared(ours)
    monkeypatch.setattr(nccls, "torchs_version", lambda: 22809)
    with pytest.raises(
        RuntimeError, match=rf"^torch uses NCCL 22809 and we use {ours.version_code} \(.*they must share"
    ):
        nccls.check_shared(ours)
    monkeypatch.setattr(nccls, "torchs_version", lambda: ours.version_code)
    monkeypatch.setattr(nccls, "mapped", lambda: [ours.path, "/other/libnccl.so.2"])
    with pytest.raises(RuntimeError, match=r"loaded are \[.*'/other/libnccl.so.2'\]; they must share one$"):
        nccls.check_shared(ours)


def what_a_rank_has(rank: int) -> tuple[str | None, float]:
    total = torch.ones(1)
    dist.all_reduce(total)
    return os.environ.get("CHOSEN"), float(total)


@pytest.mark.extended
def test_fresh_ranks_are_processes_of_their_own() -> None:
    """Those of a GPU are."""
    with GlooRanks(1, {"CHOSEN": "here"}, fresh=True) as ranks:
        assert ranks.run(what_a_rank_has) == [("here", 1.0)]
        programs = [Path(f"/proc/{pid}/cmdline").read_text().split("\0")[2] for pid in ranks.pids]
    assert programs == [
        "import json, sys; from tests.harness import gloo_ranks; gloo_ranks.serve(*json.loads(sys.argv[1]))"
    ]


class Started(dict[str, object]):
    """What would be started."""

    def __init__(self, size: int, variables: dict[str, str], **options: object) -> None:
        super().__init__(options, size=size, variables=variables)


@pytest.mark.parametrize("path", [None, path_of("2.32.3")])
def test_ranks_on_a_gpu_are_told_what_they_need(monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    libraries(monkeypatch, ("2.28.9", 22809), ("2.30.7", 23007))
    monkeypatch.setattr(devices, "GlooRanks", Started)
    monkeypatch.setattr(environment, "nccl_path", lambda: path)
    one, two = (devices.start("gpu", size, NCCL_MAX_CTAS="") for size in (1, 2))
    assert isinstance(one, Started)
    assert isinstance(two, Started)
    alone = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_MAX_CTAS": ""}
    named = {} if path is None else nccls.variables_for(path)
    assert one["variables"] == {**alone, **named}
    assert two["variables"] == {**devices.SHARED, **alone, **nccls.variables_for(path_of("2.30.7"))}
    assert (two["size"], two["fresh"], two["backend"]) == (2, True, "tritondt")


class Driver:
    """Stands for libcuda."""

    def __init__(self, status: int) -> None:
        self.status, self.mode = status, -1

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        self.mode = mode._obj.value
        return self.status


def test_a_thread_that_ignores_captures_is_relaxed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(0)
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    streams = CudaStreams(torch.device("cuda", 0))
    streams.ignore_captures()
    assert driver.mode == 2
    driver.status = 999
    with pytest.raises(T.TransportError, match=r"^cuThreadExchangeStreamCaptureMode was called and returned 999; it"):
        streams.ignore_captures()


def wait_for_what_is_held_up(rank: int) -> bool:
    device = devices.device_of("host")
    stream = device.streams.make()
    device.hold_up(stream, 0.3)
    event = stream.record_event()
    assert not event.query()
    device.synchronize()
    return event.query()


def test_nothing_is_left_to_run_on_the_double_once_it_is_synchronized(setting_of: SettingOf) -> None:
    """A benchmark frees what its last calls write; a stream that still wrote it ended a later test's process."""
    assert setting_of("host", 2).ranks.run(wait_for_what_is_held_up) == [True, True]


def test_a_missing_driver_and_a_missing_function_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = r"cuInit of CUDA's driver was asked for, and libnone.so cannot be loaded \(libnone.so: .*\); a transport"
    with pytest.raises(T.TransportError, match=asked):
        driver_function("cuInit", "libnone.so")
    with pytest.raises(T.TransportError, match=r"cuNone was asked for, and the driver libc.so.6 lacks it; a transport"):
        driver_function("cuNone", "libc.so.6")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(T.TransportError, match=r"\(this torch is built for ROCm 6.4, and AMD's GPUs have no libnone"):
        driver_function("cuInit", "libnone.so")
    found = machine._gpus()
    assert [(each.value, each.level) for each in found] == [
        ("torch is built for ROCm 6.4, which is not supported", "problem")
    ]
