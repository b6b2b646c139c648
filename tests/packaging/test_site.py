"""`make docs`: the site builds strictly, describes every public name, and needs no other server."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.test_documented import ROOMS

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: any broken link, anchor or name ends it."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=280)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.extended
def test_every_public_name_is_described(site: Path) -> None:
    for room in ROOMS:
        page = (site / "reference" / f"{room.__name__.partition('.')[2] or 'tritondt'}.html").read_text()
        # Of a name that is torch's the anchor is the heading in lower case.
        headings = {anchor.rpartition(".")[2].lower() for anchor in re.findall(r'<h2 id="([^"]+)"', page)}
        missing = [name for name in room.__all__ if name.lower() not in headings]
        assert missing == [], room.__name__


@pytest.mark.extended
def test_examples_of_docstrings_are_code(site: Path) -> None:
    page = (site / "reference" / "tritondt.html").read_text()
    assert page.count('<span class="gp">&gt;&gt;&gt; </span>') > 40
    assert not re.search(r"<p>[^<]*&gt;&gt;&gt; ", page)


@pytest.mark.extended
def test_the_guide_has_a_page_for_each_chapter_and_each_example_has_one(site: Path) -> None:
    chapters = re.findall(r"^## (.+)$", (REPOSITORY / "docs" / "guide.md").read_text(), re.MULTILINE)
    pages = [path.read_text() for path in (site / "guide").glob("*.html")]
    assert len(pages) == len(chapters) + 1
    for path in (REPOSITORY / "examples").glob("*.py"):
        assert (site / "examples" / f"{path.stem}.html").is_file()


@pytest.mark.extended
def test_the_search_knows_the_guide_and_the_reference(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    places = {entry["location"].partition("#")[0] for entry in found}
    assert {"guide/meshes.html", "reference/parallel.html", "decisions/fsdp.html"} <= places


@pytest.mark.extended
def test_pages_ask_no_other_server(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', path.read_text())
        assert loaded == [], path
