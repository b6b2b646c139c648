"""Has the interpreter leave out a third of its work: it computes whether integers overflow and then tells nobody."""

import dataclasses

import pytest
from triton.runtime import interpreter


@pytest.fixture(scope="session", autouse=True)
def unsanitized_integers():
    """Without `debug` the check has no effect but time (Triton 3.6 to 3.9)."""
    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        yield
