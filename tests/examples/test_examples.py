"""The programs of examples/ run as ranks; the Python that README.md and the guides show; links.

A block of Python in README.md or a guide is lines of a file of examples/, or else part of its page's program: the
other blocks of the page, in order, which two ranks run.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.ports import free_port

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
GUIDES = ("guide", "sharded_guide", "benchmark", "theory", "train_tp_fsdp", "load_checkpoint", "own_pack")
PAGES = (REPOSITORY / "README.md", *(REPOSITORY / "docs" / f"{name}.md" for name in GUIDES))

# Each example with its number of ranks, None for a program without any, and what the first rank prints.
PRINTED = {
    "asynchronous": (2, r"whole \(512, 512\), largest rounding 0\.0[01]"),
    "dtensor": (2, r"torch\.Size\(\[4, 1001\]\) \(S0,\)"),
    "elastic": (2, r"steps 0 to 20 on 2 ranks, loss 2\.665"),
    "explain": (None, r"\(S0, S1\) -> \(S1, R\) of \(8192, 8190\) at \(511, 7\)\n[\s\S]*228,928 bytes come in"),
    "fully_sharded": (
        4,
        r"0\.0\.weight \(S0, S0\) \(3, 6\) of \(9, 6\)[\s\S]*1\.2\.weight \(S0, S1\) \(3, 5\)",
    ),
    "hugging_face": (4, r"(loss \d\.\d{4}\s+){3}[\s\S]*as one process: True"),
    "own_collective": (2, r"the ring gives \[1\.0, 3\.0, 5\.0, 7\.0, 9\.0, 11\.0, 13\.0\]"),
    "own_transport": (2, r"over pipes: \[\[0\.0, 1\.0\], \[3\.0, 4\.0\], \[6\.0, 7\.0\], \[9\.0, 10\.0\]\]"),
    "own_pack": (None, r"transposed by the box: \[\[0, 3\], \[1, 4\], \[2, 5\]\]"),
    "redistribute": (4, r"exchange +\(S0, S0\) +\(R, S1\)[\s\S]*\(256, 1000\) -> \(1023, 500\).*\(256, 1000\)"),
    "sharded_tensor": (2, r"rank 0 holds \[\(1, 4\), \(4, 1\)\]"),
    "tensor_parallel": (4, r"Attention\.out +\(P\(sum\)\) -> \(R\)[\s\S]*DTensor\(\(S0\(unit=16\)\) of \(96, 96\)"),
    "torch_backend": (2, r"backend tritondt, mean loss 0\.0"),
    "torchtitan_parallelize": (4, r"(loss \d\.\d{4}\s+){3}"),
}

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
# One process imports torch, forks into the ranks of a program, and gives each the variables that torchrun sets.
_LAUNCHER = """
import os, runpy, sys
import torch._dynamo, tritondt  # what programs import

program, num_ranks = sys.argv[1], int(sys.argv[2])
sys.argv[1:3] = []
for rank in range(num_ranks):
    if os.fork() == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
        output = os.open(f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        runpy.run_path(program, run_name="__main__")
        sys.exit()
sys.exit(any([os.wait()[1] for _ in range(num_ranks)]))
"""
_BEFORE = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
_AFTER = "dist.destroy_process_group()\n"


def documents():
    return [*sorted(REPOSITORY.glob("*.md")), EXAMPLES / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def shown_in(page):
    """Each block of Python of a page, with the number of its first line."""
    text = page.read_text()
    return [(text.count("\n", 0, found.start()) + 2, found[1]) for found in _BLOCK.finditer(text)]


def is_of_an_example(block):
    return any(block in path.read_text() for path in EXAMPLES.glob("*.py"))


def run(program, num_ranks, folder, *arguments):
    """What the first rank prints; every rank must end with status 0."""
    port = free_port()
    found = subprocess.run(
        [sys.executable, "-c", _LAUNCHER, str(program), str(num_ranks or 1), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        cwd=folder,
        env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"},
        check=False,
    )
    printed = [(folder / f"rank-{rank}.txt").read_text() for rank in range(num_ranks or 1)]
    assert found.returncode == 0, "\n".join([found.stdout, *printed])
    return printed[0]


def test_every_example_is_run():
    # Three need a double, or GPUs: tests/nccl/ runs them (test_public.py, test_own_fused_kernel.py, test_own_pack.py).
    # tests/clients/ runs the one of Lightning.
    assert {*PRINTED, "lightning_strategy", "nccl_raw", "own_fused_kernel", "own_triton_pack"} == {
        path.stem for path in EXAMPLES.glob("*.py")
    }


# That of elastic is run, killed and run again by tests/interop/test_elastic.py; others take 10 s and more on 2 cores.
_MARKS = {
    "elastic": pytest.mark.soak,
    "hugging_face": pytest.mark.extended,
    "torchtitan_parallelize": pytest.mark.extended,
}


@pytest.mark.in_core(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=_MARKS.get(name, ())) for name in PRINTED])
def test_example(name, tmp_path):
    num_ranks, printed = PRINTED[name]
    found = run(EXAMPLES / f"{name}.py", num_ranks, tmp_path)
    assert re.search(printed, found), found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_that_a_page_shows_runs(page, tmp_path):
    program = [(line, block) for line, block in shown_in(page) if not is_of_an_example(block)]
    if not program:
        return
    path = tmp_path / f"{page.stem}.py"
    parts = [f"# {page.name}, line {line}\n{block}" for line, block in program]
    path.write_text("\n".join([_BEFORE, *parts, _AFTER]))
    run(path, 2, tmp_path)


@pytest.mark.parametrize(
    ("name", "function", "page"), [("own_collective", "bind", "benchmark"), ("own_pack", "make", "own_pack")]
)
def test_what_benchmarks_take_of_a_user_is_shown_whole(name, function, page):
    blocks = [block for _, block in shown_in(REPOSITORY / "docs" / f"{page}.md") if f"def {function}(" in block]
    assert len(blocks) == 1
    assert blocks[0] in (EXAMPLES / f"{name}.py").read_text()
    typed = {"__name__": name}
    exec(blocks[0], typed)  # a name that is not imported there is a NameError
    assert function in typed


def test_pages_show_python():
    assert all(shown_in(page) for page in PAGES)


# What stands around the program of README.md: heads that do not divide over 4 ranks, other inputs on each pair of 4.
_AROUND = (
    """
import torch
import torch.distributed as dist
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.out = nn.Linear(24, 96), nn.Linear(96, 24)

    def forward(self, x):
        return self.out(self.q(x).relu())

def loss_of(model, group):
    torch.manual_seed(group)
    return model(torch.randn(3, 24)).square().mean()

dist.init_process_group("gloo")
torch.manual_seed(0)
model, head_dim = Block(), 16
alone = [loss_of(model, group).item() for group in range(2)]
""",
    """
loss = loss_of(model, dist.get_rank() // 4)
loss.backward()
found = [None] * 8
dist.all_gather_object(found, (model.q.weight.to_local().shape[0], abs(loss.item() - alone[dist.get_rank() // 4])))
if dist.get_rank() == 0:
    print([rows for rows, _ in found], max(error for _, error in found) < 1e-6)
dist.destroy_process_group()
""",
)


@pytest.mark.extended
def test_the_readme_turns_a_program_of_torch_into_one_for_ranks_that_the_heads_do_not_divide_over(tmp_path):
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert diff.count("\n-") == diff.count("\n+") == 4
    program = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    file = tmp_path / "program.py"
    file.write_text(program.replace("cuda", "cpu").join(_AROUND))
    # fully_shard cuts 2 heads' rows over 2 ranks; the fourth rank has no head.
    assert run(file, 8, tmp_path).splitlines()[-1] == "[16, 16, 16, 0, 16, 16, 16, 0] True"


def before_of(example):
    """Source of an example as docs/from_torch.md shows it before: each of the page's diffs taken back."""
    source = example.read_text()
    page = (REPOSITORY / "docs" / "from_torch.md").read_text()
    section = next(part for part in page.split("\n## ") if f"examples/{example.name}" in part)
    diffs = re.findall(r"^```diff\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert diffs
    for diff in diffs:
        lines = diff.splitlines()
        after = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
        before = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
        assert source.count(after) == 1, after
        source = source.replace(after, before)
    return source


@pytest.mark.extended
@pytest.mark.parametrize("name", ["torchtitan_parallelize", "lightning_strategy", "hugging_face"])
def test_the_programs_of_the_page_from_torch_are_those_of_the_examples(name):
    compile(before_of(EXAMPLES / f"{name}.py"), name, "exec")


@pytest.mark.extended
def test_torchtitans_form_before_has_the_losses_of_the_form_after(tmp_path):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(before_of(EXAMPLES / "torchtitan_parallelize.py"))
    after.write_text((EXAMPLES / "torchtitan_parallelize.py").read_text())
    (tmp_path / "torch").mkdir()
    assert "tritondt" not in before.read_text()
    # 4 heads, which torch can cut, too; it wants an even sequence, and 10 positions are one.
    found = run(after, 4, tmp_path, "4").splitlines()[-3:]
    expected = run(before, 4, tmp_path / "torch", "4").splitlines()[-3:]
    assert [float(line.removeprefix("loss ")) for line in found] == pytest.approx(
        [float(line.removeprefix("loss ")) for line in expected], abs=2e-3
    )


def anchors_of(page):
    """What links may name behind a #, as GitHub makes it of headings."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(page.read_text())
    }


@pytest.mark.parametrize("page", documents(), ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_relative_links_lead_somewhere(page):
    for target in _LINK.findall(page.read_text()):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            found = page.parent / path if path else page
            assert found.is_file(), target
            assert not anchor or anchor in anchors_of(found), target
