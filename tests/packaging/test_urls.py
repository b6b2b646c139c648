"""The metadata names the address that a checkout was cloned from, and none that leads nowhere."""

import email
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.extended


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """All that metadata is made from, in a repository of git without a remote."""
    folder = tmp_path / "checkout"
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "tritondt/__init__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    (folder / "kernels").mkdir()
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    return folder


def urls_of(folder: Path) -> list[str]:
    """The addresses in the metadata that is made there."""
    subprocess.run([sys.executable, "setup.py", "--quiet", "egg_info"], cwd=folder, check=True)
    (path,) = folder.glob("*.egg-info/PKG-INFO")
    return email.message_from_string(path.read_text()).get_all("Project-URL", [])


@pytest.mark.parametrize(
    ("remote", "url"),
    [
        ("https://codeberg.org/some/where.git", "https://codeberg.org/some/where"),
        ("https://me:secret@host.example:8443/some/where/", "https://host.example:8443/some/where"),
        ("git@host.example:some/where.git", "https://host.example/some/where"),
        ("ssh://git@host.example:22/some/where", "https://host.example/some/where"),
        ("/some/where.git", None),
        ("file:///some/where.org/there", None),
        ("http://127.0.0.1:8000/some/where", None),
        ("https://builder/some/where", None),
        ("git@host.internal:some/where.git", None),
        ("git@host.example:/srv/git/where.git", None),
        ("https://host.example/some/where?private_token=secret", None),
    ],
)
def test_an_address_is_that_of_the_remote(checkout: Path, remote: str, url: str | None) -> None:
    subprocess.run(["git", "-C", str(checkout), "remote", "add", "origin", remote], check=True)
    expected = [] if url is None else [f"Repository, {url}", f"Issues, {url}/issues"]
    assert urls_of(checkout) == expected
    # A source distribution has what was noted, and no repository.
    shutil.copy(next(checkout.glob("*.egg-info")) / "PKG-INFO", checkout / "PKG-INFO")
    shutil.rmtree(checkout / ".git")
    assert urls_of(checkout) == expected


def test_without_a_remote_there_is_no_address(checkout: Path) -> None:
    assert urls_of(checkout) == []
    shutil.rmtree(checkout / ".git")
    assert urls_of(checkout) == []
