"""Mutants are made, and a planted function's are found, not found, without an end, or run by no test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import mutation
from tests.tools.mutants import mutants_of

PLANTED = """
def clamp(value, low):
    if value < low:
        return low
    return value

def count_down(count):
    while count > 0:
        count -= 1
    return count

def forgotten(value):
    return value
"""
TESTS = """
from planted import clamp, count_down

def test_clamp():
    assert clamp(5, 1) == 5
    assert clamp(-5, 1) == 1

def test_count_down():
    assert count_down(3) == 0
"""
RUN = """
import json, sys
import pytest
from tests.tools import mutant_runs, mutants
folder = sys.argv[1]
path = folder + "/planted.py"
mutant_runs.LEAST_CPU_S = 0.2
runs = mutant_runs.MutantRuns({path}, 10.0)
found = {}
def run_all():
    for mutant in mutants.mutants_of("planted", open(path).read()):
        control = runs.run(mutant, path, is_changed=False)
        found[mutant.name.removeprefix("planted ")] = runs.run(mutant, path)[0], control[0]
runs.then = run_all
pytest.main(["-qq", "--capture=no", "-p", "no:cacheprovider", "--rootdir", folder, folder], plugins=[runs])
print(json.dumps(found))
"""


def changes(source: str) -> set[str]:
    return {mutant.after for mutant in mutants_of("m.py", source)}


def test_each_kind_of_change_is_made() -> None:
    assert changes("def f(a, b):\n return g(a, b - 1) if a < b and b else 0") == {
        "return None",
        "return g(a, b - 1)",
        "return 0",
        "return g(b - 1, a) if a < b and b else 0",
        "return g(a, b + 1) if a < b and b else 0",
        "return g(a, b - 2) if a < b and b else 0",
        "return g(a, b - 0) if a < b and b else 0",
        "return g(a, b - 1) if a <= b and b else 0",
        "return g(a, b - 1) if a >= b and b else 0",
        "return g(a, b - 1) if a < b or b else 0",
        "return g(a, b - 1) if a < b else 0",
        "return g(a, b - 1) if b else 0",
        "return g(a, b - 1) if not (a < b and b) else 0",
        "return g(a, b - 1) if a < b and b else 1",
        "return g(a, b - 1) if a < b and b else -1",
    }
    assert changes("def f(a):\n a.sort()\n a.length = len(a)\n for b in a[1:]:\n  break") == {
        "pass",
        "for b in a[2:]:",
        "for b in a[0:]:",
        "for b in a[:]:",
        "continue",
    }


def test_assertions_and_the_words_of_errors_stay() -> None:
    assert changes('def f(a: "int"):\n "Docstring."\n assert a > 1\n raise ValueError(f"{a + 1} is wrong")') == {"pass"}
    assert changes("def f(a, b):\n return zip(a, b, strict=True)") == {"return None", "return zip(b, a, strict=True)"}


def test_a_change_is_taken_back_and_code_is_that_of_the_function() -> None:
    source = "class A:\n @property\n def f(self):\n  return 1 + 1\ndef f():\n return 3"
    mutants = mutants_of("m.py", source)
    assert {mutant.function for mutant in mutants} == {("A.f", 2), ("f", 5)}
    for mutant in mutants:
        assert mutant.code("m.py").co_firstlineno == mutant.function[1]
        # Small numbers are no constants of the code from Python 3.14 on, but in its instructions.
        assert mutant.code("m.py") != mutant.code("m.py", is_changed=False)
    assert [mutant.name for mutant in mutants] == [mutant.name for mutant in mutants_of("m.py", source)]
    assert len({mutant.name for mutant in mutants}) == len(mutants)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 writes targets of loops in parentheses")
def test_mutants_that_are_said_to_be_equivalent_are_there() -> None:
    """What no longer is a mutant needs no reason."""
    known = mutation.read_equivalent()
    there = {mutant.name for module in mutation.MODULES for mutant in mutation.mutants_in(module)}
    assert sorted(set(known) - there) == []


def test_a_result_of_an_earlier_source_or_of_an_equivalent_mutant_counts_for_none(tmp_path: Path) -> None:
    keys = list(mutation.keys_of("planning/flat_pieces", mutation.mutants_in("planning/flat_pieces")))
    lines = [mutation.Result(keys[0], "survived", "", 1.0), mutation.Result(keys[1], "timed out", "", 1.0)]
    lines += [mutation.Result("another " + keys[2], "found", "", 1.0), mutation.Result(keys[0], "found", "test", 1.0)]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(line._asdict()) + "\n" for line in lines))
    row = mutation.report(["planning/flat_pieces"], tmp_path).splitlines()[2]
    assert row == f"| `planning/flat_pieces` | {len(keys)} | 2 | 2 | 1 | 0 | 0 | 100.0 % |"


@pytest.mark.extended
def test_planted_mutants_come_to_what_the_tests_tell(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "test_planted.py").write_text(TESTS)
    done = subprocess.run([sys.executable, "-c", RUN, str(tmp_path)], capture_output=True, text=True, timeout=200)
    found = json.loads(done.stdout.splitlines()[-1])
    outcomes = {change: outcome for change, (outcome, _) in found.items()}
    assert outcomes == {
        "clamp: if value < low: => if value <= low:": "survived",  # both values are the bound then
        "clamp: if value < low: => if value >= low:": "found",
        "clamp: return low => return None": "found",
        "clamp: return value => return None": "found",
        "count_down: while count > 0: => while count >= 0:": "found",
        "count_down: while count > 0: => while count <= 0:": "found",
        "count_down: while count > 0: => while count > 1:": "found",
        "count_down: while count > 0: => while count > -1:": "found",
        "count_down: count -= 1 => pass": "timed out",
        "count_down: count -= 1 => count -= 2": "found",
        "count_down: count -= 1 => count -= 0": "timed out",
        "count_down: return count => return None": "found",
        "forgotten: return value => return None": "not run",
    }
    assert {control for _, control in found.values()} <= {"survived", "not run"}
