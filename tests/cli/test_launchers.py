"""The guide's commands for mpirun, mpiexec and srun, and a benchmark under each, where these programs are installed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.ports import free_port
from tritondt import environment

REPOSITORY = Path(__file__).parents[2]
RANKS = ["-n", "2"]
# Programs that Debian calls so beside the other one's, and what they ask of a test: Open MPI refuses root and more
# ranks than cores, which a container may have.
OPEN_MPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]
LAUNCHERS = {
    "OMPI_COMM_WORLD_RANK": [*OPEN_MPI, *RANKS],
    "PMI_RANK": ["mpiexec.hydra", *RANKS],
    "SLURM_PROCID": ["srun", *RANKS],
}
TRAIN = """
import torch
import torch.distributed as dist

import tritondt as T

dist.init_process_group("gloo")
mesh = T.init_device_mesh("cpu", (dist.get_world_size(),))
whole = torch.arange(28.0).reshape(7, 4)
moved = T.distribute_tensor(whole, mesh, [T.Shard(0)]).redistribute(placements=[T.Shard(1)])
torch.testing.assert_close(moved.full_tensor(), whole, rtol=0, atol=0)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} has {tuple(moved.to_local().shape)}.", flush=True)
dist.destroy_process_group()
"""
each_launcher = pytest.mark.parametrize(
    "variable", [pytest.param(name, marks=() if name == "PMI_RANK" else pytest.mark.soak) for name in LAUNCHERS]
)


def start(variable: str, more: list[str], folder: Path) -> str:
    """What a launcher prints that starts a command on two ranks; skipped where there is none, or no cluster for it."""
    command = LAUNCHERS[variable]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    if command[0] == "srun" and subprocess.run(["sinfo"], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("srun has no cluster here: sinfo fails")
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    found = subprocess.run(
        [*command, *more],
        cwd=folder,
        env=kept | {"PATH": path, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.extended
@each_launcher
def test_the_command_of_the_guide_starts_a_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str):
    for name in ("RANK", *LAUNCHERS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "0")
    told = environment.launch_command()
    monkeypatch.delenv(variable)
    assert told is not None
    options, _, script = told.partition(" bash -c ")
    script = script.strip("'").replace("python train.py", f"{sys.executable} train.py")
    options = options.replace("HOST", "127.0.0.1").replace("29500", str(free_port()))
    (tmp_path / "train.py").write_text(TRAIN)
    printed = start(variable, [*options.split()[1:], "bash", "-c", script], tmp_path)
    assert sorted(re.findall(r"rank [^.]*\.", printed)) == [f"rank {rank} of 2 has (7, 2)." for rank in range(2)]


@pytest.mark.soak
@each_launcher
def test_a_benchmark_runs_on_the_ranks_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str):
    for name in ("RANK", *LAUNCHERS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    bench = ["bench", "all_gather", "--impl", "gloo", "-b", "4K", "-n", "2", "--json", "found.json"]
    printed = start(variable, [sys.executable, "-m", "tritondt", *bench], tmp_path)
    assert printed.count("# Collective test concluded: all_gather") == 1
    assert json.loads((tmp_path / "found.json").read_text())["config"]["ranks"] == 2
