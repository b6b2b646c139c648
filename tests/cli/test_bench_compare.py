"""`bench compare`: verdicts on made samples, what is paired, and what is left out."""

import json
import random

import pytest
from click.testing import CliRunner

from tritondt.cli.bench import compare as compare_module
from tritondt.cli.bench.harness import ratio_of
from tritondt.cli.main import main


def noisy(mean, count=20, spread=0.05, seed=0):
    chosen = random.Random(seed)
    return [mean * chosen.uniform(1 - spread, 1 + spread) for _ in range(count)]


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        (noisy(0.8), noisy(1.0, seed=1), "faster"),
        (noisy(1.2), noisy(1.0, seed=1), "slower"),
        (noisy(1.0), noisy(1.0, seed=1), "no difference"),
        (noisy(0.9, spread=0.8), noisy(1.0, spread=0.8, seed=1), "no difference"),
        (noisy(0.5, count=4), noisy(1.0, count=4), "too few iterations"),
    ],
)
def test_a_verdict_needs_an_interval_that_leaves_out_one(ours, theirs, verdict):
    assert ratio_of([(ours, theirs)], in_turns=False).verdict == verdict


def test_what_disturbs_both_in_turn_disturbs_no_ratio():
    noise = noisy(1.0, spread=0.9)
    pairs = [([0.97 * each for each in noise], noise)]
    assert ratio_of(pairs, in_turns=True).verdict == "faster"
    assert ratio_of(pairs, in_turns=False).verdict == "no difference"


def test_the_mean_of_cases_is_geometric():
    ratio = ratio_of([([1.0] * 5, [4.0] * 5), ([9.0] * 5, [4.0] * 5)], in_turns=False)
    assert ratio.mean == pytest.approx(0.75)
    assert ratio.interval == pytest.approx((0.75, 0.75))


def result(size, side, times, wrong=0):
    return {
        "size": size,
        "type": "float",
        "redop": "sum",
        "root": -1,
        "parts": [size // 4],
        "implementation": side,
        "out_of_place": {"nwrong": wrong},
        "out_of_place_per_iter": {"times_us": times},
        "in_place": None,
    }


@pytest.fixture
def write(tmp_path):
    def write_one(name, *results, **fields):
        path = tmp_path / name
        common = {"benchmark": "all_reduce", "config": {"ranks": 2}, "versions": {"torch": "2.13"}, "complete": True}
        path.write_text(json.dumps({**common, "results": results, **fields}))
        return str(path)

    return write_one


def compare(*arguments):
    return CliRunner().invoke(main, ["bench", "compare", *arguments])


def test_two_files_are_compared_case_by_case(write):
    before = write("a", *(result(size, "tritondt", noisy(10.0)) for size in (1024, 2048)))
    after = write(
        *("b", result(1024, "tritondt", noisy(5.0, seed=1)), result(2048, "tritondt", noisy(10.0, seed=1))),
        versions={"torch": "2.14"},
    )
    ended = compare(before, after)
    assert ended.exit_code == 0, ended.output
    lines = ended.stdout.splitlines()
    assert lines[0] == "differs: torch: 2.13 and 2.14"
    assert lines[2].split()[4:] == ["faster", "all_reduce", "1024", "float", "sum", "out-of-place", "on", "2"]
    assert "no difference" in lines[3]
    assert lines[4].startswith("geometric mean of time after / before, tritondt: 0.6")
    assert lines[4].endswith("over 2 cases: faster")
    found = json.loads(compare(before, after, "--json").stdout)
    assert [case["verdict"] for case in found["cases"]] == ["faster", "no difference"]
    assert found["geometric_means"]["tritondt"]["ratio"] == pytest.approx(0.5**0.5, rel=0.05)


def test_a_comparison_fits_the_terminal_and_keeps_every_word(write, monkeypatch):
    name = "a_collective_of_ones_own_with_a_name"
    path = write("a", result(1 << 30, f"examples.{name}:bind", noisy(10.0)))
    whole = compare(path, path).stdout
    monkeypatch.setattr(compare_module, "columns", lambda to_stderr: 80)
    fitted = compare(path, path).stdout
    assert fitted.split() == whole.split()
    assert max(map(len, fitted.splitlines())) <= 80 < max(map(len, whole.splitlines()))
    # What comes of a case's name stands below its start.
    head, *cases = fitted.splitlines()
    assert not cases[1][: head.index("case")].strip()


def test_implementations_that_only_one_file_has_are_compared_across(write):
    before, after = write("a", result(1024, "torch", noisy(10.0))), write("b", result(1024, "tritondt", noisy(5.0)))
    assert "faster" in compare(before, after).stdout
    both = write("c", result(1024, "x", noisy(1.0)), result(1024, "y", noisy(1.0)))
    ended = compare(before, both)
    assert (ended.exit_code, "no implementation is in both files: torch and x, y" in ended.stderr) == (1, True)


def test_no_ratio_is_reported_of_a_wrong_result(write):
    right, wrong = result(1024, "tritondt", noisy(10.0)), result(2048, "tritondt", noisy(1.0), wrong=3)
    before, after = write("a", right, {**wrong, "out_of_place": {"nwrong": 0}}), write("b", right, wrong)
    ended = compare(before, after)
    assert ended.exit_code == 0
    assert "left out, wrong or unchecked: all_reduce 2048 float sum out-of-place on 2" in ended.stdout
    assert "over 1 case:" in ended.stdout
    only = compare(write("c", {**wrong, "out_of_place": {"nwrong": None}}), write("d", wrong))
    assert (only.exit_code, "no case has right results in both files" in only.stderr) == (1, True)


def test_partial_results_are_said_to_be(write):
    row = result(1024, "tritondt", noisy(10.0))
    assert "differs: after is partial" in compare(write("a", row), write("b", row, complete=False)).stdout


def test_results_of_redistribute_are_read_too(tmp_path):
    case = {"shape": [4, 4], "source": "(S0)", "target": "(R)", "mesh": [2], "seconds": noisy(1.0)}
    for name, factor in (("a", 1.0), ("b", 0.5)):
        torch_seconds, seconds = noisy(2.0), [factor * each for each in case["seconds"]]
        cases = [{**case, "seconds": seconds, "torch_seconds": torch_seconds}]
        (tmp_path / name).write_text(json.dumps({"benchmark": "redistribute", "dtype": "float32", "cases": cases}))
    ended = compare(str(tmp_path / "a"), str(tmp_path / "b"))
    assert "4x4 (S0) -> (R) on [2], float32 by tritondt" in ended.stdout
    assert "before, tritondt: 0.500" in ended.stdout
    assert "before, torch: 1.000" in ended.stdout


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "cannot read"),
        ("{}", "is no result of `bench COLLECTIVE --json` or `bench redistribute --json`: no results"),
        ('{"cases": [{"shape": [4]}]}', "--json`: KeyError('source')"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path, text, sentence):
    path = tmp_path / "found.json"
    path.write_text(text)
    ended = compare(str(path), str(path))
    assert (ended.exit_code, sentence in ended.stderr) == (1, True), ended.stderr


def test_columns_stand_below_each_other_where_an_interval_is_wide():
    cases = [
        {"ratio": 1.0, "interval": interval, "verdict": "no difference", "case": "all_reduce 4096"}
        for interval in ((0.98, 1.02), (0.022, 45.567), (0.001, 999.999), None)
    ]
    head, *rows = compare_module.lines({"differences": [], "cases": cases, "left_out": [], "only_in_one": 0})
    assert {row.index("no difference") for row in rows} == {head.index("verdict")}
    assert {row.index("all_reduce") for row in rows} == {head.index("case")}
