"""What is said where ranks on a GPU cannot be started, and how they are told which library is theirs."""

from types import SimpleNamespace

import pytest
import torch

from tests.nccl import devices


def libraries(monkeypatch: pytest.MonkeyPatch, *found: tuple[str, int]) -> None:
    made = [SimpleNamespace(version=version, version_code=code, path=f"/nccl/{version}") for version, code in found]
    monkeypatch.setattr(devices, "_libraries", lambda: made)
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
        "2 ranks on one GPU need NCCL 2.30.7 or later, and found is 2.28.9 (/nccl/2.28.9); name one with "
        "TRITONDT_NCCL_SO, or put it into a folder of NCCL_LIBRARIES"
    )
    libraries(monkeypatch)
    assert "and found is none; name one" in (devices.why_not("gpu", 2) or "")


def test_torch_uses_the_library_that_we_use(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries(monkeypatch, ("2.28.9", 22809), ("2.30.7", 23007))
    assert devices.why_not("gpu", 2) is None
    path = "/nccl/2.30.7"
    assert devices.preloaded(devices.sharing_library()) == {"TRITONDT_NCCL_SO": path, "LD_PRELOAD": path}
