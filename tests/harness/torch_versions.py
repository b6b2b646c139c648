"""Tests that some versions of torch cannot pass, skipped there by name."""

import pytest
import torch

GRAPHS = "graphs of torch.compile that redistribute are claimed from 2.12 on"


def needs_torch(version: str, reason: str) -> pytest.MarkDecorator:
    """A mark that skips a test on versions of torch before `version`."""
    text = f"torch {torch.__version__} is before {version}: {reason}"
    return pytest.mark.skipif(torch.__version__ < version, reason=text)


def needs_torch_before(version: str, reason: str) -> pytest.MarkDecorator:
    """A mark that skips a test on versions of torch from `version` on."""
    return pytest.mark.skipif(torch.__version__ >= version, reason=f"torch {torch.__version__}: {reason}")
