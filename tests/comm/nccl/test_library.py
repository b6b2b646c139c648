"""Which NCCL a process is given: told by the environment, or found installed."""

import importlib.metadata

import pytest

from tests.csrc.nccl.recording import build
from tritondt.comm.nccl import library


class Distribution:
    """An installed package, as far as it is asked."""

    def __init__(self, folder):
        self._folder = folder

    def locate_file(self, path):
        return self._folder / path


def install(monkeypatch, **folders):
    """Only these packages are installed, each in its folder."""

    def distribution(name):
        if name not in folders:
            raise importlib.metadata.PackageNotFoundError(name)
        return Distribution(folders[name])

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)


def test_the_environment_names_a_library(monkeypatch):
    path = build()
    monkeypatch.setenv("TRITONDT_NCCL_SO", str(path))
    library.nccl_library.cache_clear()
    try:
        found = library.nccl_library()
        assert (found.origin, found.path) == ("explicit", str(path))
        assert library.nccl_library() is found
    finally:
        library.nccl_library.cache_clear()


@pytest.mark.parametrize("package", ["nvidia-nccl-cu12", "nvidia-nccl-cu13"])
def test_an_installed_package_has_a_path(monkeypatch, tmp_path, package):
    install(monkeypatch, **{package: tmp_path})
    assert library.installed_path() == str(tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2")


def test_no_package_has_none(monkeypatch):
    install(monkeypatch)
    assert library.installed_path() is None
