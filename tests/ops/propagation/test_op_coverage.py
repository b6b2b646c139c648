"""The benchmark of operators: what it counts as right, as wrong and as sent, on a few of torch's operators."""

import json

import pytest
import torch
from click.testing import CliRunner

from tests.harness.optional_packages import missing
from tritondt.ops import AxisStrategy, propagator, register_op_strategy
from tritondt.sharding.placement import Replicate, Shard

aten = torch.ops.aten

pytestmark = pytest.mark.skipif(
    bool(missing()),
    reason="torch's operator database needs expecttest, the report the extra `cli`",
)


def measured(name, num_trials):
    from benchmarks.ops.op_coverage.measuring import measure  # noqa: PLC0415  loads the database: 4 s
    from benchmarks.ops.op_coverage.operators import operators  # noqa: PLC0415

    return measure(operators()[name], num_trials)


def test_an_operator_that_sends_nothing_is_right_in_every_trial():
    found = measured("exp", 6)
    assert (found.verdict, found.counts["right"], found.sends_nothing) == ("right always", 6, True)


def test_a_wrong_strategy_is_found_and_told():
    known = propagator.op_strategy_funcs.get(aten.exp.default)

    def first_dim_forgotten(schema):
        return [AxisStrategy((Shard(0),), (Replicate(),)), AxisStrategy((Replicate(),), (Replicate(),))]

    # A local function of its own is believed: without one the decision itself would be refused.
    register_op_strategy(aten.exp.default, first_dim_forgotten, localize=lambda schema, outputs: torch.exp)
    try:
        found = measured("exp", 6)
    finally:
        propagator.forget(aten.exp.default)
    assert known is None
    assert found.verdict == "wrong"
    assert any("a local tensor of shape" in text for text in found.texts.values())


@pytest.mark.extended
def test_the_last_line_holds_the_counts():
    from benchmarks.ops.op_coverage.__main__ import main  # noqa: PLC0415

    result = CliRunner().invoke(main, ["--ops", "c?s", "--trials", "2", "--processes", "1", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["counts"]["operators"] == found["counts"]["right always"] == 1
    assert [case["name"] for case in found["cases"]] == ["cos"]
    assert found["complete"]


def test_a_pattern_without_operators_is_refused():
    from benchmarks.ops.op_coverage.__main__ import main  # noqa: PLC0415

    result = CliRunner().invoke(main, ["--ops", "nothing*"])
    assert result.exit_code == 2
    assert "--ops 'nothing*' names no operator" in result.output


def test_a_run_that_is_broken_off_has_written_what_it_measured(tmp_path, monkeypatch):
    from benchmarks.ops.op_coverage import __main__ as program  # noqa: PLC0415  loads the database: 4 s
    from benchmarks.ops.op_coverage.measuring import Measured  # noqa: PLC0415

    def measure_one(names, *arguments, on_measured, **options):
        on_measured(Measured(names[0]))
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "measure_all", measure_one)
    file = tmp_path / "found.json"
    ended = [CliRunner().invoke(program.main, ["--ops", "cos,sin", "--json", to]) for to in (str(file), "-")]
    assert [each.exit_code for each in ended] == [1, 1]
    assert ended[1].stdout == ""
    found = json.loads(file.read_text())
    assert ([case["name"] for case in found["cases"]], found["complete"]) == (["cos"], False)


@pytest.mark.extended
def test_what_only_gathers_is_told_with_its_reason():
    from benchmarks.ops.op_coverage.__main__ import main  # noqa: PLC0415

    result = CliRunner().invoke(main, ["--ops", "masked_select", "--trials", "2", "--processes", "1", "--json"])
    assert result.exit_code == 0, result.output
    reason = "how many elements there are is known when all have been seen"
    assert json.loads(result.stdout.splitlines()[-1])["gathering"] == {"masked_select": reason}
    assert f"masked_select gathers: {reason}" in result.stderr


def test_bytes_are_compared_until_no_result_is_terms():
    """A library that leaves terms has sent nothing yet; another that adds them up has sent all, or half for pieces."""
    from benchmarks.ops.op_coverage.measuring import Measured  # noqa: PLC0415  loads the database: 4 s
    from benchmarks.ops.op_coverage.trial import RIGHT, Outcome  # noqa: PLC0415

    found = Measured("norm")
    adds, leaves = Outcome(RIGHT, "", 8, 0, (0,), (False,)), Outcome(RIGHT, "", 0, 0, (8,), (False,))
    more, pieces = Outcome(RIGHT, "", 8, 0, (4,), (False,)), Outcome(RIGHT, "", 4, 0, (0,), (True,))
    pairs = [(adds, leaves), (leaves, adds), (more, leaves), (leaves, pieces), (pieces, leaves), (more, pieces)]
    for number, pair in enumerate(pairs):
        found.compare(*pair, f"trial {number}", has_terms=False)
    assert (found.num_compared, found.more_bytes) == (6, {"trial 2": (12, 8), "trial 5": (10, 4)})


def test_every_operator_that_sends_more_is_one_of_the_database():
    from benchmarks.ops.op_coverage.operators import operators  # noqa: PLC0415  loads the database: 4 s
    from benchmarks.ops.op_coverage.sent_bytes import MORE_BYTES  # noqa: PLC0415

    assert MORE_BYTES.keys() <= operators().keys()
