"""`make gpu` runs its parts within a deadline, goes on when one fails, and a second call goes on from there."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness.optional_packages import MissingPackages, missing
from tests.tools import gpu_dry, gpu_progress, on_gpu
from tests.tools.gpu_parts import Part, dry_parts, environment, interpreting, parts
from tests.tools.on_gpu import CUT, FAILED, PASSED, REPOSITORY, SKIPPED, Outcome, Runner, summary

OK = Part("good", ("true",), 20)
BAD = Part("bad", ("sh", "-c", "exit 3"), 20)
Made = list[Outcome]
_OF_TRANSFORMERS = {"transformers", "safetensors", "accelerate", "peft"}
_OPTIONAL = {"click", "rich", "matplotlib", "expecttest", "hypothesis", "numpy"} | _OF_TRANSFORMERS


@pytest.fixture(autouse=True)
def sources_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "sources_digest", lambda: "the same")


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path / "results", time.monotonic() + 300, os.environ)


def states(outcomes: Made) -> list[str]:
    return [outcome.state for outcome in outcomes]


def test_a_part_that_fails_does_not_keep_the_next_from_running(runner: Runner) -> None:
    outcomes = runner.run_all([BAD, OK])
    assert states(outcomes) == [FAILED, PASSED]
    assert outcomes[0].why == f"exit status 3, see {runner.folder / 'bad'}.log"


def test_nothing_is_run_without_what_is_essential(runner: Runner) -> None:
    outcomes = runner.run_all([BAD._replace(essential=True), OK])
    assert states(outcomes) == [FAILED]
    assert summary(outcomes, 2).splitlines()[-1] == "all 2 parts: 1 FAILED, 1 not run"


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def assert_ends(pid: int) -> None:
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(pid)


def test_a_part_is_killed_at_its_limit_with_all_that_it_started(tmp_path: Path, runner: Runner) -> None:
    note = tmp_path / "pid"
    # On a busy machine a second may end before the shell has begun.
    limit = 1
    while not note.exists() or not note.read_text():
        outcome = runner.run_part(Part("long", ("sh", "-c", f"sleep 600 & echo $! > {note}; wait"), limit))
        assert (outcome.state, outcome.why) == (FAILED, f"killed after {limit} s, its limit")
        limit *= 2
    assert_ends(int(note.read_text()))


def test_one_deadline_ends_all_and_results_are_kept_as_they_come(tmp_path: Path) -> None:
    runner = Runner(tmp_path, time.monotonic() + 60, os.environ)
    outcomes = runner.run_all([OK])
    runner.deadline = time.monotonic() + 3
    outcomes += runner.run_all([OK._replace(name="long", command=("sleep", "600"), limit_s=900), BAD])
    assert states(outcomes) == [PASSED, CUT, CUT]
    assert [outcome.why for outcome in outcomes] == ["", "killed at the deadline", "not begun"]
    written = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert {name: found["state"] for name, found in written.items()} == {"good": PASSED, "long": CUT}


@pytest.mark.extended
def test_a_second_call_goes_on_where_the_first_was_cut_off(tmp_path: Path) -> None:
    note = tmp_path / "ran"
    counted = OK._replace(command=("sh", "-c", f"echo ran >> {note}"))
    late = OK._replace(name="late", command=("sleep", "600"), limit_s=900)
    first = Runner(tmp_path, time.monotonic() + 60, os.environ)
    first.run_all([counted])
    first.deadline = time.monotonic() + 3
    first.run_all([late])
    second = Runner(tmp_path, time.monotonic() + 60, os.environ)
    outcomes = second.run_all([counted, late._replace(command=("true",))])
    assert [(found.state, found.why) for found in outcomes] == [(PASSED, "before"), (PASSED, "")]
    assert note.read_text() == "ran\n"
    second.run_all([counted], again=True)
    assert note.read_text() == "ran\nran\n"


def test_what_has_run_with_other_sources_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(tmp_path, time.monotonic() + 60, os.environ)
    runner.run_all([OK])
    gpu_progress.note(tmp_path / "tests.jsonl", test="a", outcome="passed")
    monkeypatch.setattr(on_gpu, "sources_digest", lambda: "others")
    second = Runner(tmp_path, time.monotonic() + 60, os.environ)
    second.begin_anew_where_sources_changed()
    assert not list(tmp_path.glob("*.jsonl"))
    assert second.run_all([OK])[0].why == ""


TESTS = """
import os, pytest
@pytest.mark.parametrize("number", range(4))
def test_of(number):
    if number == 1:
        os._exit(139)
    assert number != 2
"""


@pytest.mark.extended
def test_a_test_that_takes_its_process_with_it_is_told_and_the_others_run(tmp_path: Path, runner: Runner) -> None:
    (tmp_path / "test_these.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "tests.tools.gpu_progress")
    part = Part(
        "tests", (*command, "-c", str(tmp_path / "pytest.ini"), str(tmp_path / "test_these.py")), 200, tests=True
    )
    outcome = runner.run_part(part)
    assert (outcome.state, outcome.why) == (FAILED, "2 passed, 1 died, 1 failed")
    found = gpu_progress.read(runner.folder / "tests.jsonl")
    assert [found.outcomes[name] for name in sorted(found.outcomes)] == ["passed", "died", "failed", "passed"]
    before = (runner.folder / "tests.jsonl").read_text()
    assert runner.run_part(part).why == outcome.why  # what has run is left out
    assert (runner.folder / "tests.jsonl").read_text().removeprefix(before).count("begun") == 0


@pytest.mark.extended
def test_a_call_that_is_ended_ends_what_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = (
        "import os, sys, time; from pathlib import Path; from tests.tools.on_gpu import Runner, Part;"
        f"Runner(Path('{tmp_path}'), time.monotonic() + 600, os.environ).run_all("
        f"[Part('long', ('sh', '-c', 'echo $$ > {note}; sleep 600'), 600)])"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY)
    try:
        while not note.exists() or not note.read_text():
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert_ends(int(note.read_text()))


def test_what_cannot_run_is_skipped_with_its_reason(runner: Runner) -> None:
    part = OK._replace(can_run=(sys.executable, "-c", "import sys; sys.exit('there is no GPU')"))
    outcome = runner.run_part(part)
    assert (outcome.state, outcome.why) == (SKIPPED, "there is no GPU")
    assert runner.run_part(OK._replace(can_run=("true",))).state == PASSED


@pytest.mark.parametrize("found", [parts("python"), dry_parts("python", short=False)], ids=["gpu", "dry"])
def test_the_parts_run_what_there_is(found: tuple[Part, ...]) -> None:
    for part in found:
        for given in part.command:
            word = given.removeprefix("--ignore=")
            if word in ("tests.nccl.libraries", "tests.tools.gpu_kernels"):
                word = word.replace(".", "/") + ".py"
            if (word.startswith("tests") and "gpu_progress" not in word) or word.endswith(".py"):
                assert (REPOSITORY / word).exists(), part
            if word.startswith("benchmarks."):
                path = REPOSITORY / word.replace(".", "/")
                assert (path / "__main__.py").exists() or path.with_suffix(".py").exists(), part
    assert len({part.name for part in found}) == len(found)
    assert found[0].essential


def test_what_takes_tables_of_triton_interprets_without_a_gpu() -> None:
    asking = [part for part in dry_parts("python", short=False) if part.tests and "gpu" in part.command]
    assert [part.name for part in asking] == ["tests-kernels", "tests-engine"]
    assert all(part.interprets for part in asking)


def test_a_dry_run_lasts_beyond_a_build_that_takes_its_limit() -> None:
    built, *_, longest = sorted(dry_parts("python", short=False), key=lambda part: (not part.essential, part.limit_s))
    assert built.name == "build"
    assert built.limit_s + longest.limit_s < gpu_dry.DEADLINE_S


def test_figures_come_first_and_each_sanitizer_is_a_part() -> None:
    names = [part.name for part in parts("python")]
    assert names[:5] == ["build", "kernels", "tests-simulate", "bench-rows", "bench-host"]
    assert names[5:7] == ["bench-slots", "tests-slots"]
    assert names[-2:] == ["memcheck", "racecheck"]


def test_the_documentation_lists_the_parts_in_order() -> None:
    text = (REPOSITORY / "docs" / "performance.md").read_text().partition("## Parts of make gpu, in order")[2]
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (\d+) s \|", text.partition("\n## ")[0], re.MULTILINE)
    assert rows == [(part.name, f"{part.limit_s:g}") for part in parts("python")]


def test_what_interprets_is_skipped_by_name_without_numpy() -> None:
    """Triton's interpreter imports NumPy, which a machine with a GPU need not have."""
    asking = [part for part in dry_parts("python", short=False) if part.interprets]
    assert [part.name for part in asking] == [
        *("bench-rows", "bench-slots", "bench-own-kernel", "bench-window-sum", "tests-kernels", "tests-engine")
    ]
    assert all(part.can_run == ("python", "-c", "import numpy") for part in asking)


def test_a_question_is_asked_with_the_variables_of_its_part(runner: Runner) -> None:
    asked = "import os, sys; sys.exit(os.environ.get('TRITON_INTERPRET'))"
    part = OK._replace(can_run=(sys.executable, "-c", asked))
    assert runner.run_part(part._replace(interprets=True)).state == SKIPPED
    assert runner.run_part(part).state == PASSED


def test_numpy_is_this_pythons_or_the_checkouts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(gpu_dry, "REPOSITORY", tmp_path)
    assert gpu_dry.numpy_distribution() is None
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    kept = tmp_path / ".venv" / "lib" / version / "site-packages" / "numpy-2.4.0.dist-info"
    kept.mkdir(parents=True)
    (kept / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 2.4.0\n")
    found = gpu_dry.numpy_distribution()
    assert found is not None
    assert found.version == "2.4.0"


def test_old_setuptools_builds_in_place() -> None:
    """The environment of a fresh Python 3.11 has 65.5, which refuses pyproject.toml's license."""
    program = (
        "import sys, setuptools; setuptools.__version__ = '65.5.0'; read = []\n"
        "setuptools.Distribution.parse_config_files = lambda self, names, *_: read.append(names)\n"
        "setuptools.setup = lambda **given: given['distclass']().parse_config_files()\n"
        "sys.argv[1:] = {words}\n"
        "exec(open('setup.py').read(), {{'__file__': 'setup.py', '__name__': '__main__'}})\n"
        "print(read)"
    )
    for words, told in ((["build_ext", "--inplace"], "[[]]"), (["bdist_wheel"], "[None]")):
        run = [sys.executable, "-c", program.format(words=words)]
        found = subprocess.run(run, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == told


def test_tritons_cache_is_kept_unless_another_is_named() -> None:
    assert environment("/kept", {}, dry=False) == {"TRITON_CACHE_DIR": "/kept/triton"}
    assert environment("/kept", {"TRITON_CACHE_DIR": "/own"}, dry=False)["TRITON_CACHE_DIR"] == "/own"
    assert environment("/kept", {}, dry=True)["TRITONDT_GPU_DRY"] == "1"
    found = interpreting("/kept", {"PYTHONPATH": "/else"})
    assert (found["TRITON_INTERPRET"], found["PYTHONPATH"]) == ("1", "/kept/numpy:/else")


def test_a_part_that_there_is_not_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert on_gpu.main(["tests-nccl", "test-nccl"]) == 2
    assert capsys.readouterr().err.startswith(
        "test-nccl is no part of what runs on a GPU; there are build, kernels, tests-simulate, bench-rows, "
    )


def test_a_missing_package_skips_our_files_and_nobody_elses(tmp_path: Path) -> None:
    finder = MissingPackages(["hypothesis_of_nobody"])
    path = REPOSITORY / "tests" / "some_test.py"
    statement = compile("import hypothesis_of_nobody", str(path), "exec")
    sys.meta_path.append(finder)
    try:
        with pytest.raises(pytest.skip.Exception, match=r"^hypothesis_of_nobody is not installed$"):
            exec(statement, {})
        sys.modules["half_a_module"] = ModuleType("half_a_module")  # as pytest leaves it
        with pytest.raises(pytest.skip.Exception):
            exec(statement, vars(sys.modules["half_a_module"]))
        assert "half_a_module" not in sys.modules
        sys.modules["half_a_module"] = ModuleType("half_a_module")  # which imports the one above
        outer = compile("exec(statement, {})", str(path.with_name("another_test.py")), "exec")
        vars(sys.modules["half_a_module"])["statement"] = statement
        with pytest.raises(pytest.skip.Exception):
            exec(outer, vars(sys.modules["half_a_module"]))
        assert "half_a_module" not in sys.modules
        with pytest.raises(ModuleNotFoundError):
            exec(compile("import hypothesis_of_nobody", "/elsewhere/x.py", "exec"), {})
    finally:
        sys.meta_path.remove(finder)
        sys.modules.pop("half_a_module", None)
    assert set(missing()) <= _OPTIONAL


def test_the_dry_environment_has_what_torch_requires_and_no_more(tmp_path: Path) -> None:
    names = set(gpu_dry.required(gpu_dry.WANTED))
    assert {"torch", "triton", "pytest", "sympy", "pluggy"} <= names
    assert not (_OPTIONAL | {"pytest-timeout"}) & names


# The extension is there, of the same sources, so that the build has nothing to do.
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_short_dry_run_without_optional_packages() -> None:
    """`make gpu-dry` runs all of it."""
    completed = subprocess.run(
        [sys.executable, "-m", "tests.tools.gpu_dry", "--short"],
        cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stdout.splitlines()[-1] == "all 3 parts: 3 passed"
