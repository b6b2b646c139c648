"""`python -m tritondt plan`: what it says, and what it refuses."""

import json
import re

import pytest
from click.testing import CliRunner, Result

from tritondt.cli.main import main


def run_plan(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def test_rows_to_columns_of_four_ranks():
    result = run_plan("--mesh", "4", "--shape", "8,4", "--from", "S0", "--to", "S1")
    assert result.exit_code == 0, result.output
    title, header, step, _ = result.output.splitlines()
    assert title == "(S0) -> (S1) of (8, 4) at (0,)"
    assert header.split()[0] == "step"
    # Of the 2 x 4 elements that the rank holds, it sends 2 to each of the 3 others.
    assert step.split()[:5] == ["exchange", "(S0)", "(S1)", "3", "24"]


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2), ("complex128", 16), ("bool", 1)])
def test_bytes_follow_the_dtype(dtype, itemsize):
    result = run_plan("--mesh", "2", "--shape", "5,3", "--from", "S0", "--to", "R", "--dtype", dtype, "--json")
    explanation = json.loads(result.stdout)
    # Rank 0 holds 3 of the 5 rows.
    assert explanation["sent_bytes"] == 9 * itemsize
    assert explanation["received_bytes"] == 6 * itemsize
    assert explanation["messages"] == 1


@pytest.mark.parametrize(("coordinate", "received"), [("0,0", 0), ("1,0", 12), ("1,1", 0)])
def test_each_coordinate_sees_its_own_part(coordinate, received):
    # Rows in halves, then halves of halves by the later axis; columns of the axes exchanged.
    arguments = ("--mesh", "2,2", "--shape", "4,3", "--from", "S0,S0", "--to", "S0,S0", "--to-order", "1,0")
    explanation = json.loads(run_plan(*arguments, "--coordinate", coordinate, "--json").stdout)
    assert explanation["coordinate"] == [int(index) for index in coordinate.split(",")]
    assert explanation["received_bytes"] == received


def test_a_unit_with_commas_inside_is_one_placement():
    arguments = ("--mesh", "4", "--shape", "192,5", "--from", "S0(unit=32)", "--to", "R", "--json")
    explanation = json.loads(run_plan(*arguments, "--coordinate", "3").stdout)
    assert explanation["sent_bytes"] == 0
    assert explanation["received_bytes"] == 192 * 5 * 4


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--mesh", "4", "--shape", "7,3", "--from", "P", "--to", "S5"), 1, "axis 0 shards dim 5, .* has dims 0..1"),
        (("--mesh", "4", "--shape", "7,3", "--from", "X", "--to", "R"), 1, "cannot read the placement 'X'"),
        (("--mesh", "2,2", "--shape", "7", "--from", "R", "--to", "R,R"), 1, "takes 2 placements, one per axis; got 1"),
        (("--mesh", "4x", "--shape", "7", "--from", "R", "--to", "R"), 2, "'4x' is not a list of whole numbers"),
        (("--mesh", "4", "--shape", "7", "--from", "R", "--to", "R", "--coordinate", "4"), 2, r"allowed are \(0..3\)"),
        (("--mesh", "4", "--shape", "7", "--from", "R"), 2, "Missing option '--to'"),
    ],
)
def test_bad_input_ends_with_a_sentence(arguments, status, message):
    result = run_plan(*arguments)
    assert result.exit_code == status
    assert "Traceback" not in result.output
    assert re.search(message, result.output), result.output
