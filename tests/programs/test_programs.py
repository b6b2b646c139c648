"""Random programs against one device, and their generator: seeds, printing, and what it finds of planted faults."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import tritondt as T
from tests.programs import jobs
from tests.programs.campaign import Campaign, Tally
from tests.programs.generator import FAMILY, LATER, WEIGHTS, random_program
from tests.programs.minimise import minimised
from tests.programs.one_device import OneDeviceRun, difference
from tests.programs.operators import PURE, WRITING
from tests.programs.printing import listing, printed
from tests.programs.ranks import quieten
from tests.programs.statements import Call, Make, Move, Program
from tritondt.ops import AxisStrategy, propagator, register_op_strategy
from tritondt.sharding.placement import Replicate, Shard

# What needs processes: torch.compile holds a lock while it compiles.
WITHOUT = ("compile",)
PROGRAMS = 12
SUM = torch.ops.aten.sum.dim_IntList


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quieten()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.in_ci(8)
@pytest.mark.parametrize("family", range(160))
def test_programs_give_what_one_device_gives(family):
    tally = Campaign(WITHOUT).run(range(family * FAMILY, family * FAMILY + PROGRAMS))
    assert tally.programs == PROGRAMS
    told = "\n\n".join(f"{listing(it.minimal)}\n  {it.failure.kind}: {it.failure.text}" for it in tally.findings)
    assert not tally.findings, told
    # A program that is refused is not compared.
    assert tally.refused.total() <= tally.statements / 20, tally.refused


@pytest.mark.filterwarnings("ignore")
def test_a_seed_gives_one_program():
    assert random_program(7) == random_program(7)
    assert random_program(7) != random_program(8)
    programs = [random_program(seed, ("view",)) for seed in range(32)]
    kinds = {statement.kind for program in programs for statement in program.statements}
    assert "view" not in kinds
    assert len(kinds) > 20
    assert set(PURE) | set(WRITING) <= set(WEIGHTS)
    assert any(program.refused_by_one_device for program in programs)
    assert not any(random_program(seed, ("refused",)).refused_by_one_device for seed in range(30))


def test_a_gradient_that_is_not_there_is_read_by_no_refused_statement():
    assert random_program(401644, WITHOUT).statements


def test_a_seed_gives_the_program_of_before_without_the_kinds_that_came_later():
    # Of seed 122390, as tests/README.md had it.
    first = random_program(122390, (*WITHOUT, *LATER)).statements[0]
    assert first == Make("v0", 353, (6, 7, 5), "bool", ("S0(repeats=2)", "R", "S0"))
    assert random_program(122390, (*WITHOUT, *LATER)).statements[6].source.endswith("v2.mul_(v3)")
    kinds = {it.kind for seed in range(20) for it in random_program(seed, WITHOUT).statements}
    assert kinds.issuperset({*LATER} & {*WEIGHTS})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("placements", ["S0, P(avg)", "P, S0(sizes=4/0)", "R, S1", "P(max), R", "P(avg), P(avg)"])
@pytest.mark.parametrize("name", ["through_local", "through_whole", "through_columns"])
def test_gradients_go_out_of_distributed_tensors_and_back(placements, name):
    statements = (
        Make("v0", 5, (4, 3), "float64", tuple(placements.split(", ")), None, True),
        Call("to_local", f"v1 = place.{name}(v0)", ("v0",), ("v1",)),
        Call("backward", "(v1 * v1).sum().backward()", ("v1",)),
    )
    assert not Campaign().check(Program(0, 5, (2, 2), (4, 0, 3, 1), statements)).failures


@pytest.mark.filterwarnings("ignore")
def test_what_a_gradient_compares_with_is_not_overwritten_without_its_knowledge():
    statements = random_program(124300, (*WITHOUT, *LATER)).statements
    assert any(".max()" in statement.source for statement in statements)
    assert not any(statement.kind == "data" for statement in statements)
    x = torch.ones(3, requires_grad=True)
    for of, expected in ((x.max(), 0), (x.amax(), torch.nan)):  # torch itself has two answers
        of.data.fill_(5)
        (grad,) = torch.autograd.grad(of, x)
        torch.testing.assert_close(grad, torch.full((3,), float(expected)), rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [300484, 300627, 300784, 406466, 504131])
def test_seeds_of_which_one_device_has_no_one_answer(seed):
    """The sign of a zero sum of terms; writes from what they write to; strides of a gradient; a view detached from."""
    assert not Campaign(WITHOUT).run([seed]).findings


def test_whole_numbers_that_are_gradients_of_what_was_rounded_are_not_exact():
    run = OneDeviceRun(0, (1,))
    run.run(Make("v0", 196, (1, 2, 4), "float32", ("R",), None, True))
    run.run(Call("norm", "v1 = F.instance_norm(v0)", ("v0",), ("v1",)))
    run.run(Call("pointwise", "v2 = v0 * 3", ("v0",), ("v2",)))
    for name, is_exact in (("v1", False), ("v2", True)):
        made = f"grad_{name}"
        call = f"({made},) = torch.autograd.grad({name}.sum(), [v0], retain_graph=True)"
        run.run(Call("grad", call, (name, "v0"), (made,)))
        assert bool((run.plain[made] == run.plain[made].round()).all())
        assert (run.tolerance(made) == 0) is is_exact
        assert run.tolerance(made) < 1e-3
    assert not Campaign(WITHOUT).run([402114]).findings


@pytest.mark.filterwarnings("ignore")
def test_what_is_printed_runs_by_itself_to_the_same_values(tmp_path, capsys):
    program = random_program(3, WITHOUT)
    run = OneDeviceRun(program.seed, program.mesh_shape)
    for number, statement in enumerate(program.statements):
        if number not in program.refused_by_one_device:
            run.run(statement)
    path = tmp_path / "program.py"
    path.write_text(printed(program, "no failure", {name: run.tolerance(name) for name in run.plain.tensors()}))
    names = runpy.run_path(str(path))
    assert capsys.readouterr().out == "as on one device\n"
    assert "tests" not in names["program"].__code__.co_names
    values = names["program"](names["OneDevice"]())
    for name in run.plain.variables:
        torch.testing.assert_close(values[name], run.plain[name], rtol=0, atol=0, equal_nan=True)
    # It can fail: one device with other values.
    other = "lambda place: {name: it * 0 + 5 for name, it in program(place).items()}"
    path.write_text(path.read_text().replace("tensors(program(OneDevice()))", f"tensors(({other})(OneDevice()))"))
    with pytest.raises(AssertionError, match="expected"):
        runpy.run_path(str(path))


@pytest.mark.parametrize(("mesh_shape", "is_exact"), [((2,), True), ((3,), False), ((3, 2), False), ((1, 4), True)])
def test_terms_of_a_mean_round_where_their_number_is_no_power_of_two(mesh_shape, is_exact):
    run = OneDeviceRun(0, mesh_shape)
    placements = ("P(avg)", "R")[: len(mesh_shape)] if mesh_shape[0] > 1 else ("R", "P(avg)")
    run.run(Make("v0", 5, (4, 4), "float32", ("R",) * len(mesh_shape)))
    run.run(Move("v1", "v0", placements))
    assert run.tolerance("v0") == 0
    assert (run.tolerance("v1") == 0) is is_exact


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("size", "is_exact"), [(3, False), (2, True)])
def test_terms_of_a_mean_round_where_an_operator_left_them(size, is_exact):
    statements = (
        Call("factory", "v0 = place.make(0, (1,), 'float32', 'R, R', None, False) * 0 + 1", (), ("v0",)),
        Move("v1", "v0", ("P(avg)", "R")),
        Call("copy", "v2 = v1.roll(2, 0)", ("v1",), ("v2",)),
        Call("copy", "v3 = v2.flip(0)", ("v2",), ("v3",)),
    )
    report = Campaign().check(Program(0, size, (size, 1), tuple(range(size)), statements))
    assert not report.failures
    assert {name for name, of in report.tolerances.items() if of == 0} == {"v0"} | (
        {"v1", "v2", "v3"} if is_exact else set()
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_rows", [0, 1])
@pytest.mark.parametrize("create_graph", [True, False])
def test_graphs_of_gradients_are_those_of_views_that_are_replayed(num_rows, create_graph):
    made = [Make("v0", 3, (num_rows, 1), "float32", ("R",)), Make("v1", 4, (1, 1), "float32", ("R",), None, True)]
    calls = [
        Call("matmul", "v2 = F.linear(v0, v1)", ("v0", "v1"), ("v2",)),
        Call("view", "v3 = v2.movedim(1, -2)", ("v2",), ("v3",)),
        Call("foreach", "torch._foreach_add_([v2, v3], -2)", ("v2", "v3")),
        Call("grad", f"(v4,) = torch.autograd.grad((v3 * v3).sum(), [v1], {create_graph=})", ("v1", "v3"), ("v4",)),
        Call("view", "v5 = v4.mT", ("v4",), ("v5",)),
    ]
    program = Program(0, 2, (2,), (0, 1), (*made, *calls))
    assert not Campaign().check(program).failures


def test_one_number_is_given_a_rounding_error_whatever_is_drawn():
    run = OneDeviceRun(0, (2,))
    run.run(Make("v0", 5, (7,), "float32", ("R",)))
    for number in range(1, 400):
        run.run(Call("statistics", f"v{number} = v0.var()", ("v0",), (f"v{number}",)))
        assert run.tolerance(f"v{number}") > 4 * torch.finfo(torch.float32).eps * float(run.plain[f"v{number}"])


def test_what_is_no_number_twice_is_no_difference():
    nan, inf = float("nan"), float("inf")
    assert difference(torch.tensor([nan, inf, 1]), torch.tensor([nan, inf, 3])) == 2
    assert difference(torch.tensor([nan, 1.0]), torch.tensor([1.0, 1.0])) == inf


def test_what_rounding_decides_is_told_from_what_it_does_not():
    run = OneDeviceRun(0, (2,))
    run.run(Make("v0", 5, (1, 6), "float32", ("R",)))
    run.run(Call("join", "v1 = torch.cat([v0, v0, v0])", ("v0",), ("v1",)))
    run.run(Call("smooth", "v2 = v1.sin()", ("v1",), ("v2",)))
    run.run(Call("pointwise", "v3 = v2 + torch.arange(3.)[:, None]", ("v2",), ("v3",)))
    for source, is_decided in (("v1", False), ("v2", True), ("v3", False)):
        statement = Call("reduction", f"w, {source}_at = {source}.min(0)", (source,), ("w", f"{source}_at"))
        run.plain.run(statement)
        assert run.is_decided_by_rounding(statement) is is_decided, source


def test_a_rounding_beside_a_whole_number_decides_what_equals_it():
    run = OneDeviceRun(0, (2,))
    run.run(Make("v0", 5, (3,), "float64", ("R",)))
    run.run(Call("smooth", "v1 = v0 * 0 + 1e-17", ("v0",), ("v1",)))
    for added, is_decided in ((0, True), (0.5, False)):
        statement = Call("compare", f"w = torch.isin(v1 + {added}, torch.zeros(1).double())", ("v1",), ("w",))
        run.plain.run(statement)
        assert run.is_decided_by_rounding(statement) is is_decided


@pytest.fixture
def _sum_is_wrong() -> Iterator[None]:
    """A sum over a cut dim that claims to be whole on every rank."""

    def wrong(schema):
        cut = [AxisStrategy((Shard(dim),), (Replicate(),)) for dim in range(schema.args_spec[0].ndim)]
        return [AxisStrategy((Replicate(),), (Replicate(),)), *cut]

    register_op_strategy(SUM, wrong)
    yield
    propagator.forget(SUM)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.extended
@pytest.mark.usefixtures("_sum_is_wrong")
def test_a_planted_wrong_strategy_is_found_and_minimised():
    campaign = Campaign(WITHOUT)
    with_sum = (random_program(seed, WITHOUT) for seed in range(1000))
    programs = (it for it in with_sum if any(".sum(" in statement.source for statement in it.statements))
    reports = ((program, campaign.check(program)) for program, _ in zip(programs, range(20), strict=False))
    program, report = next((program, report) for program, report in reports if report.failures)
    finding = campaign.finding(program, report)
    assert len(finding.minimal.statements) <= 3, listing(finding.minimal)
    assert "sum(" in finding.minimal.statements[-1].source
    assert len(program.statements) > 3
    propagator.forget(SUM)
    assert not campaign.check(finding.minimal).failures


@pytest.mark.filterwarnings("ignore")
def test_minimisation_keeps_only_what_fails():
    programs = (random_program(seed, WITHOUT) for seed in range(11, 100))
    program = next(it for it in programs if it.statements[-1].makes and len(it.ranks) > 1)
    wanted = program.statements[-1]

    def fails(it: Program) -> bool:
        return bool(it.statements) and it.statements[-1].makes == wanted.makes

    smallest = minimised(program, fails)
    assert len(smallest.statements) <= 2
    assert (smallest.mesh_shape, smallest.world_size, smallest.ranks) == ((1,), 1, (0,))


def raised_on_one(rank: int) -> None:
    if rank == 1:
        raise T.LayoutError("planted")


@pytest.mark.filterwarnings("ignore")
def test_a_refusal_of_one_rank_alone_is_a_failure(monkeypatch):
    program = next(it for it in map(random_program, range(100)) if it.world_size > 1 and len(it.ranks) > 1)
    assert not Campaign().check(Program(program.seed, 2, (2,), (0, 1), program.statements[:0])).failures
    first = program.statements[0]
    make = "tests.programs.places.OnMesh.make"

    def refuse(self, *arguments):
        raised_on_one(int(self.mesh.coordinate is not None and sum(self.mesh.coordinate)))

    monkeypatch.setattr(make, refuse)
    small = Program(program.seed, program.world_size, program.mesh_shape, program.ranks, (first,))
    assert {failure.kind for failure in Campaign().check(small).failures} == {"ranks"}


@pytest.mark.extended
def test_the_command_line_tells_and_counts(tmp_path):
    command = [sys.executable, "-m", "tests.programs", "--count", "5", "--jobs", "2", "--json", tmp_path / "found.json"]
    found = subprocess.run([*command, "--without", ",".join(WITHOUT)], capture_output=True, text=True, timeout=250)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.startswith("5 programs, ")
    assert json.loads((tmp_path / "found.json").read_text())["programs"] == 5
    found = subprocess.run([*command, "--without", "nothing"], capture_output=True, text=True, timeout=250)
    assert found.returncode == 1
    assert "--without got nothing; allowed are make, " in found.stderr


def ended_by_seed_3(pipe, leave_out, minimise):
    """A worker that stands for one whose program crashes."""
    while True:
        seeds = pipe.recv()
        if 3 in seeds:
            os._exit(7)
        pipe.send(Tally(len(seeds)))


@pytest.mark.extended
def test_a_program_that_ends_its_process_is_named(monkeypatch):
    monkeypatch.setattr(jobs, "_serve", ended_by_seed_3)
    tallies = list(jobs.run_families(range(5), 2, minimise=False))
    (finding,) = [finding for tally in tallies for finding in tally.findings]
    assert finding.program.seed == 3
    assert (finding.failure.kind, finding.failure.text) == ("crash", "the process ended with status 7")
    assert sum(tally.programs for tally in tallies) == 5
