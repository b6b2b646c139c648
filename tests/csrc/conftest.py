"""Libraries that record the calls of NCCL."""

import pytest

from tests.csrc.nccl.recording import NEWEST, Recording, build


@pytest.fixture(scope="session")
def libraries():
    """Recording libraries by version, each loaded when it is first asked for."""
    made: dict[int, Recording] = {}

    def library(version=NEWEST):
        if version not in made:
            made[version] = Recording(build(version))
        made[version].reset()
        return made[version]

    return library


@pytest.fixture
def recording(libraries):
    return libraries()
