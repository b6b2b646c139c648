"""examples/own_fused_kernel.py: interpreted on ranks over the double, compiled for GPUs, and timed by its benchmark."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from examples.own_fused_kernel import gathered_product
from tests.conftest import REPOSITORY
from tests.doubles.fake_nccl.library import build
from tests.harness.ports import free_port
from tests.kernels.compiled import _resource_usage

TYPES = {"rows_at": "*i64", "words_at": "*i64", "weight": "*fp32", "product": "*fp32", "asked": "*i32"}
CONSTANTS = {"NUM_RANKS": 6, "RANKS": 8, "ROWS": 64, "COLUMNS": 64, "INNER": 32}


def test_it_gives_the_gathered_product_on_four_ranks() -> None:
    variables = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "examples/own_fused_kernel.py", "--double", str(build())]
    ranks = [
        subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **variables, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        outcomes = [rank.communicate(timeout=250) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * 4, outcomes
    for number, (printed, _) in enumerate(outcomes):
        assert f"rank {number}: (20, 40), as gathered and multiplied apart" in printed


@pytest.mark.in_core(1)
@pytest.mark.parametrize("architecture", [90, 80, 100, 120])
def test_it_compiles_without_spills_and_reads_behind_its_wait(architecture: int) -> None:
    names = gathered_product.arg_names
    signature = {name: "constexpr" if name in CONSTANTS else TYPES.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in CONSTANTS.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in TYPES if name != "asked"}
    source = ASTSource(gathered_product, signature, places, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 4})
    usage = _resource_usage(compiled.asm["cubin"])
    assert usage["STACK"] == usage["LOCAL"] == 0
    ptx = compiled.asm["ptx"]
    order = [
        found.lastgroup
        for found in re.finditer(
            r"(?P<barrier>\bbar\.sync)|(?P<release>\batom\S*\.release\S*\.exch)|(?P<acquire>\b(?:atom|ld)\S*\.acquire)"
            r"|(?P<product>\b(?:fma|mma|wgmma)\b)",
            ptx,
        )
    ]
    release, acquire, product = (order.index(name) for name in ("release", "acquire", "product"))
    assert "barrier" in order[:release]  # what other threads wrote is before the word
    assert release < acquire < product
    assert "barrier" in order[acquire:product]  # what one thread has acquired the others read


def test_the_benchmark_checks_times_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "own_kernel.json"
    options = ["--double", "--rows", "33", "--inner", "20", "--columns", "70", "--rounds", "2", "--json", str(path)]
    command = [sys.executable, "-m", "benchmarks.nccl.own_kernel", *options]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=250)
    assert ran.returncode == 0, ran.stderr
    assert re.search(
        r"^2 ranks of 33 x 20: one kernel [\d.]+ us, gather, then product [\d.]+ us; ratio", ran.stdout, re.M
    )
    found = json.loads(path.read_text())
    assert found["case"] == {"rows": 33, "inner": 20, "columns": 70, "tile": [64, 64, 32]}
    assert {side: len(each) for side, each in found["rounds"].items()} == {"one kernel": 2, "gather, then product": 2}
