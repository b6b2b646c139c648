"""Recording libraries, built once a session: a second each."""

import pytest

from tests.csrc.nccl.recording import NEWEST, Recording, build


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """Recording libraries by version, each built when it is first asked for."""
    folder = tmp_path_factory.mktemp("recording")
    made = {}

    def library(version=NEWEST):
        if version not in made:
            made[version] = Recording(build(folder, version))
        made[version].reset()
        return made[version]

    return library


@pytest.fixture
def recording(libraries):
    return libraries()
