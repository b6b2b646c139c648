"""The programs of examples/ run as ranks, and what README.md and docs/ show: their Python, their links, README's size.

A block of Python in README.md or docs/guide.md is lines of a file of examples/, or else part of its page's program: the
other blocks of the page, in order, which two ranks run.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
EXAMPLES = REPOSITORY / "examples"
MAX_README_BYTES = 8192
PAGES = (REPOSITORY / "README.md", REPOSITORY / "docs" / "guide.md")

# Each example with its number of ranks, None for a program without any, and what the first rank prints.
PRINTED = {
    "asynchronous": (2, r"whole \(512, 512\), largest rounding 0\.0[01]"),
    "dtensor": (2, r"torch\.Size\(\[4, 1001\]\) \(S0,\)"),
    "explain": (None, r"\(S0, S1\) -> \(S1, R\) of \(8192, 8190\) at \(511, 7\)\n[\s\S]*228,928 bytes come in"),
    "redistribute": (4, r"exchange +\(S0, S0\) +\(R, S1\)[\s\S]*\(256, 1000\) -> \(1023, 500\).*\(256, 1000\)"),
    "tensor_parallel": (4, r"Attention\.out +\(P\(sum\)\) -> \(R\)[\s\S]*DTensor\(\(S0\(unit=16\)\) of \(96, 96\)"),
    "torch_backend": (2, r"backend tritondt, mean loss 0\.0"),
}

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_BEFORE = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
_AFTER = "dist.destroy_process_group()\n"


def documents():
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def shown_in(page):
    """Each block of Python of a page, with the number of its first line."""
    text = page.read_text()
    return [(text.count("\n", 0, found.start()) + 2, found[1]) for found in _BLOCK.finditer(text)]


def is_of_an_example(block):
    return any(block in path.read_text() for path in EXAMPLES.glob("*.py"))


def run(program, num_ranks, folder):
    """What the first rank prints; every rank must end with status 0. The variables are those that torchrun sets."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"WORLD_SIZE": num_ranks or 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared = {**os.environ, **{name: str(value) for name, value in variables.items()}, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num_ranks or 1)
    ]
    try:
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(outputs)
    return outputs[0]


def test_every_example_is_run():
    assert set(PRINTED) == {path.stem for path in EXAMPLES.glob("*.py")}


@pytest.mark.alone
@pytest.mark.parametrize("name", PRINTED)
def test_example(name, tmp_path):
    num_ranks, printed = PRINTED[name]
    found = run(EXAMPLES / f"{name}.py", num_ranks, tmp_path)
    assert re.search(printed, found), found


@pytest.mark.alone
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_that_a_page_shows_runs(page, tmp_path):
    program = [(line, block) for line, block in shown_in(page) if not is_of_an_example(block)]
    if not program:
        return
    path = tmp_path / f"{page.stem}.py"
    parts = [f"# {page.name}, line {line}\n{block}" for line, block in program]
    path.write_text("\n".join([_BEFORE, *parts, _AFTER]))
    run(path, 2, tmp_path)


def test_pages_show_python():
    assert all(shown_in(page) for page in PAGES)


def test_readme_is_short():
    assert (REPOSITORY / "README.md").stat().st_size <= MAX_README_BYTES


@pytest.mark.parametrize("page", documents(), ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_relative_links_lead_to_files(page):
    targets = [target for target in _LINK.findall(page.read_text()) if not re.match(r"[a-z]+:|#", target)]
    missing = [target for target in targets if not (page.parent / target.partition("#")[0]).is_file()]
    assert not missing, f"{page.relative_to(REPOSITORY)} links to {missing}"
