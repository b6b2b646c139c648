"""The double of libcuda, built once, and the driver over it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.fake_cuda.library import FakeCuda, build, header_folder
from tests.harness.descriptors import open_targets
from tritondt.comm.device_memory.driver import CudaDriver


@pytest.fixture(scope="session")
def double() -> Path:
    if header_folder() is None or shutil.which("g++") is None:
        pytest.skip("the double of libcuda needs g++ and the cuda.h of the triton package")
    return build()


@pytest.fixture
def cuda(double: Path) -> Iterator[FakeCuda]:
    """The double with three devices; a test must leave nothing behind, neither in it nor open or mapped."""
    library = FakeCuda(double)
    library.set_devices(3)
    before = left(library)
    yield library
    library.reset()
    assert left(library) == before, "objects, descriptors, mappings"


@pytest.fixture
def driver(cuda: FakeCuda) -> CudaDriver:
    return CudaDriver(str(cuda.path))


def left(cuda: FakeCuda) -> tuple[int, int, int]:
    """What there is in the double, and of its memory open and mapped in this process."""
    maps = Path("/proc/self/maps").read_text().count("memfd:fake_cuda")
    return cuda.live(), sum("memfd:fake_cuda" in target for target in open_targets()), maps
