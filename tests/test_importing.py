"""Imports: names come when they are asked for, torch is told in any order, commands that plan need no torch."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tritondt
import tritondt as T
from tritondt.cli.main import bench, main

REPOSITORY = Path(__file__).parents[1]
GROUP_OF_ONE = """
import torch, torch.distributed as dist
dist.init_process_group("tritondt", store=dist.HashStore(), rank=0, world_size=1)
x = torch.arange(3)
dist.all_reduce(x)
print(x.tolist(), dist.get_backend())
dist.destroy_process_group()
"""
# Public modules, and those that others import while these are being imported.
FIRST = [
    *("debug", "experimental", "found_plan", "fsdp", "interop.transformers", "interop.with_torch", "nccl", "ops"),
    *("parallel", "random", "sharded", "dtensor.tensor", "dtensor.distribute", "process_group", "comm.world"),
]


def python(program: str, *folders: Path, **environment: str) -> list[str]:
    """The lines that a program prints in a Python of its own."""
    path = os.pathsep.join(map(str, (*folders, REPOSITORY)))
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert told.returncode == 0, told.stderr
    return told.stdout.splitlines()


def test_every_public_name_comes_from_the_module_that_type_checkers_read() -> None:
    tree = ast.parse(Path(tritondt.__file__).read_text(encoding="utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    read = {
        alias.asname or alias.name: str(node.module)
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert read == tritondt._MODULE_OF
    assert set(read) == set(T.__all__)
    for name in T.__all__:
        assert getattr(T, name) is getattr(sys.modules[read[name]], name)
    assert {*T.__all__, "fsdp"} <= set(dir(T))
    with pytest.raises(AttributeError, match="module 'tritondt' has no attribute 'shard'"):
        _ = T.shard  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", [FIRST[0], *(pytest.param(each, marks=pytest.mark.extended) for each in FIRST[1:])])
def test_a_module_may_be_imported_before_all_others(module: str) -> None:
    program = f"import tritondt.{module}; from tritondt import DTensor; print(DTensor.to_torch.__name__)"
    assert python(program)[-1:] == ["_to_torch"]


def test_planning_and_the_commands_of_help_import_no_torch(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    program = f"""
import sys
from click.testing import CliRunner
import tritondt
from tritondt import Layout, LayoutError, Shard, parse_placements
from tritondt.cli.main import main
for words in (
    ["--help"],
    ["bench", "--help"],
    ["plan", "--help"],
    [*"plan --mesh 2,4 --shape 64,64 --from S0,R --to R,S1 --all-ranks --html".split(), {str(page)!r}],
):
    ended = CliRunner().invoke(main, words)
    assert ended.exit_code == 0, ended.output
print("torch" in sys.modules)
"""
    assert python(program) == ["False"]
    assert page.is_file()


@pytest.mark.parametrize(
    "imports", ["import tritondt, torch", "import torch, tritondt", "import torch.distributed, tritondt"]
)
def test_the_backend_is_known_in_any_order_of_imports(imports: str) -> None:
    found = python(f"{imports}\n{GROUP_OF_ONE}", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found == ["[0, 1, 2] tritondt"]


def test_the_backend_is_known_without_an_import(tmp_path: Path) -> None:
    """An entry point of the installed package names it, and imports nothing of the package until a group is made."""
    metadata = tmp_path / "named-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: named\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nnamed = tritondt_autoload:register\n")
    program = """
import torch, sys
print([name for name in sys.modules if name.partition(".")[0] in ("tritondt", "kernels")])
"""
    assert python(program + GROUP_OF_ONE, tmp_path) == ["[]", "[0, 1, 2] tritondt"]


def test_a_group_by_the_name_alone_is_refused_where_torchrun_has_started_again(tmp_path: Path) -> None:
    """The store may have what dead ranks wrote, and only an import before init_process_group gives it other keys."""
    program = """
import os
import torch, torch.distributed as dist, tritondt_autoload
tritondt_autoload.register()
store = dist.TCPStore("127.0.0.1", 0, is_master=True)
os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(store.port), TORCHELASTIC_RESTART_COUNT="1")
try:
    dist.init_process_group("tritondt", store=store, rank=0, world_size=1)
except Exception as error:
    print(type(error).__name__, error)
"""
    (found,) = python(program, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found.startswith("WorldError torchrun has started these ranks again (1), and its store has what those")


def test_each_command_has_one_line_of_help_in_its_list() -> None:
    for group in (main, bench):
        for command in group.commands.values():
            line = command.short_help or ""
            assert line.endswith("."), line
            assert len(line) <= 60, line
