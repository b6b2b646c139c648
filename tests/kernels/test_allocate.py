"""Memory for results is as torch.empty gives it, whichever of torch's functions makes it."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tritondt.kernels import memory

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (3, 0, 4), (1, 7, 1), [2, 3], torch.Size((2, 5))], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_a_tensor_is_laid_out_as_torch_does(shape: Any, dtype: torch.dtype):
    made, expected = memory.allocate(shape, dtype, CPU), torch.empty(shape, dtype=dtype)
    for name in ("shape", "dtype", "device", "layout", "requires_grad", "_version"):
        assert getattr(made, name) == getattr(expected, name)
    assert made.stride() == expected.stride()
    assert made.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
    assert made.untyped_storage().resizable()
    assert made.data_ptr() % 64 == 0


def test_a_mode_that_watches_operators_sees_it():
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching():
        memory.allocate((2, 3), torch.float32, CPU)
    assert seen == [torch.ops.aten.empty.memory_format]


def test_nothing_goes_by_the_dispatcher_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    memory._dense_strides((2, 3))  # kept from now on
    monkeypatch.delattr(torch, "empty")
    assert memory.allocate((2, 3), torch.float32, CPU).stride() == (3, 1)


def test_a_torch_without_the_function_has_torch_empty(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "_guards", object())
    monkeypatch.setattr(memory, "makers", memory._Makers())
    assert memory.allocate((2, 3), torch.float32, CPU).shape == (2, 3)
    assert memory.makers == {CPU: None}


def test_it_is_fake_where_tensors_are():
    with FakeTensorMode():
        made = memory.allocate((2, 3), torch.float32, CPU)
    assert isinstance(made, FakeTensor)
    assert made.shape == (2, 3)


@pytest.mark.parametrize("current", [0, 1])
def test_a_tensor_on_a_gpu_is_on_the_one_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, current: int):
    """Torch's functions are doubles, as no GPU is needed: what is held is which of them is called, and with what."""
    calls = list[object]()
    memory._dense_strides((2, 3))  # kept from now on

    def strided(*given: object) -> torch.Tensor:
        calls.append(given)
        return torch.zeros(0)

    def empty(shape: object, **given: object) -> torch.Tensor:
        calls.append((shape, given))
        return torch.zeros(0)

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    monkeypatch.setattr(memory._guards, "_empty_strided_cuda", strided)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(memory, "makers", memory._Makers())
    device = torch.device("cuda", 1)
    memory.allocate((2, 3), torch.float16, device)
    elsewhere = ((2, 3), {"dtype": torch.float16, "device": device})
    assert calls == [((2, 3), (3, 1), torch.float16) if current == 1 else elsewhere]


def test_other_devices_are_torch_empty_s():
    made = memory.allocate((2, 3), torch.float32, torch.device("meta"))
    assert made.is_meta
    assert memory.makers[torch.device("meta")] is None
