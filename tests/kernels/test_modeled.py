"""Budgets of packs and unpacks without a GPU: bytes of memory by the model of a cache, instructions by count."""

import re

import pytest
from click.testing import CliRunner

from tests.kernels.compiled import compile_kernel
from tritondt.cli.main import tune
from tritondt.kernels.gpu.box_table import mode
from tritondt.kernels.gpu.cache_model import Cache, traffic
from tritondt.kernels.gpu.copy_boxes import copies
from tritondt.kernels.gpu.instructions import count
from tritondt.kernels.gpu.modeled import Columns, cases, modeled_traffic, pieces_of
from tritondt.kernels.gpu.pieces import Kind

MOST_OVER_LEAST = 1.15
MOST_INSTRUCTIONS = {4: 6.0, 2: 9.0}
SCALE = 128


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: f"{case.itemsize}-{case.run_bytes}-{case.packs}")
def test_memory_moves_little_more_than_every_byte_once(case):
    found = modeled_traffic(case, SCALE)
    assert found.over_least <= MOST_OVER_LEAST


def test_without_bands_the_model_finds_lines_moved_twice():
    """As an H200's counters did: 1.24 times the least of a pack of rows of 64 bytes, box after box."""
    pieces = pieces_of(Columns(4, 64, packs=True).boxes(1 << 19))
    found = traffic(pieces, 64, Cache(1 << 18), num_bands=1)
    assert 1.2 < found.over_least < 1.3


@pytest.mark.extended
def test_tune_prints_both():
    run = CliRunner().invoke(tune, ["--model"])
    assert run.exit_code == 0, run.output
    lines = run.output.splitlines()
    assert len(lines) == 20 + 6
    assert re.fullmatch(r"pack, units of 4 bytes, rows of 16: 1\.\d\d of the least bytes", lines[0])
    told = r"joined rows, units of 1 bytes, sm_90: \d+\.\d instructions a byte, \d+ a tile"
    assert re.fullmatch(told, lines[-1])


@pytest.mark.parametrize("unit", MOST_INSTRUCTIONS)
@pytest.mark.parametrize("kind", [Kind.GATHERED, Kind.JOINED])
def test_instructions_a_byte(kind, unit):
    compiled = compile_kernel(copies(), 1 << mode(kind, unit), 4, 90)
    assert count(compiled.sass).per_byte <= MOST_INSTRUCTIONS[unit]
