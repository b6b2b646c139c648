"""Triton decides when a kernel is defined whether it is compiled or interpreted: one process does one of the two."""

import os

import pytest

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# `test_interpreted.py` runs this folder in a process of its own.
collect_ignore = [] if IS_INTERPRETED else ["interpreted"]


@pytest.fixture(scope="session", autouse=True)
def fusion_is_decided():
    """Triton 3.9 warns where nobody has said whether a kernel without the option fuses multiply-adds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
        yield
