"""Minimisation: the smallest program that fails in the same way, by dropping statements and simplifying the others."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.programs.one_device import OneDeviceRun
from tests.programs.statements import Call, Make, Move, Program, Statement, kept_numbers

# Whether a program fails in the way that is looked for.
Fails = Callable[[Program], bool]


def minimised(program: Program, fails: Fails, max_runs: int = 1500) -> Program:
    """The smallest program found that still fails; every step is one that `fails` has seen."""
    budget = iter(range(max_runs))
    before = None
    while before != program:
        before = program
        for simpler in (_with_fewer_statements, _with_results_made, _on_simpler_meshes, _with_simpler_statements):
            program = _taken(program, simpler, lambda it: next(budget, None) is not None and fails(it))
    return program


def _taken(program: Program, simpler: Callable[[Program], Iterator[Program]], fails: Fails) -> Program:
    """The program after all steps of a kind that can be taken, one after another."""
    candidates, place = list(simpler(program)), 0
    while place < len(candidates):
        if fails(candidates[place]):
            program = candidates[place]
            candidates = list(simpler(program))
        else:
            place += 1
    return program


def dropping(program: Program, dropped: set[int]) -> Program:
    """The program without some statements, and without those that need what these set."""
    kept = list(kept_numbers(program.statements, dropped))
    refused = frozenset(place for place, number in enumerate(kept) if number in program.refused_by_one_device)
    statements = tuple(program.statements[number] for number in kept)
    return replace(program, statements=statements, refused_by_one_device=refused)


def _with_fewer_statements(program: Program) -> Iterator[Program]:
    count = len(program.statements)
    size = count // 2
    while size:
        for start in range(count - size, -1, -size):
            fewer = dropping(program, set(range(start, start + size)))
            if fewer.statements:
                yield fewer
        size //= 2


def _with_results_made(program: Program) -> Iterator[Program]:
    """A new tensor in place of a statement's result, whole or cut along a dim."""
    run = OneDeviceRun(program.seed, program.mesh_shape)
    for number, statement in enumerate(program.statements):
        if number in program.refused_by_one_device:
            continue
        try:
            run.run(statement)
        except Exception:  # noqa: BLE001  the program fails by that
            return
        if isinstance(statement, Make) or len(statement.makes) != 1 or run.plain[statement.makes[0]] is None:
            continue
        made = run.plain[statement.makes[0]]
        dtype = str(made.dtype).removeprefix("torch.")
        replicated = ("R",) * len(program.mesh_shape)
        for placements in (replicated, *((f"S{dim}", *replicated[1:]) for dim in range(made.ndim))):
            new = Make(statement.makes[0], number, tuple(made.shape), dtype, placements, None, made.requires_grad)
            yield replace(program, statements=(*program.statements[:number], new, *program.statements[number + 1 :]))


def _on_simpler_meshes(program: Program) -> Iterator[Program]:
    size = len(program.ranks)
    if program.ranks != tuple(range(size)):
        yield replace(program, ranks=tuple(range(size)))
    if program.world_size > size:
        yield replace(program, world_size=size, ranks=tuple(range(size)))
    for axis in range(len(program.mesh_shape)) if len(program.mesh_shape) > 1 else ():
        yield _without_axis(program, axis)
    for axis, length in enumerate(program.mesh_shape):
        if length > 2:
            yield _on_mesh(program, (*program.mesh_shape[:axis], length - 1, *program.mesh_shape[axis + 1 :]))


def _on_mesh(program: Program, mesh_shape: tuple[int, ...]) -> Program:
    size = 1
    for length in mesh_shape:
        size *= length
    outside = program.world_size - len(program.ranks)
    return replace(program, mesh_shape=mesh_shape, world_size=size + outside, ranks=tuple(range(size)))


def _without_axis(program: Program, axis: int) -> Program:
    found = _on_mesh(program, tuple(length for at, length in enumerate(program.mesh_shape) if at != axis))
    statements = [
        statement
        if isinstance(statement, Call)
        else replace(statement, placements=_without(statement.placements, axis), order=_order_without(statement, axis))
        for statement in program.statements
    ]
    return replace(found, statements=tuple(statements))


def _order_without(statement: Make | Move, axis: int) -> tuple[int, ...] | None:
    if statement.order is None:
        return None
    return tuple(other - (other > axis) for other in statement.order if other != axis)


def _without(values: tuple[str, ...], at: int) -> tuple[str, ...]:
    return tuple(value for place, value in enumerate(values) if place != at)


def _with_simpler_statements(program: Program) -> Iterator[Program]:
    for number, statement in enumerate(program.statements):
        for simpler in _simpler_statements(statement):
            statements = (*program.statements[:number], simpler, *program.statements[number + 1 :])
            yield replace(program, statements=statements)
    lengths = {length for statement in program.statements if isinstance(statement, Make) for length in statement.shape}
    for length in sorted(lengths, reverse=True):
        for shorter in sorted({2, length // 2, length - 1}):
            if 0 < shorter < length:
                yield _with_lengths(program, length, shorter)


def _with_lengths(program: Program, length: int, shorter: int) -> Program:
    """The program with another length of every dim of this one."""
    statements = [
        replace(statement, shape=tuple(shorter if it == length else it for it in statement.shape))
        if isinstance(statement, Make)
        else statement
        for statement in program.statements
    ]
    return replace(program, statements=tuple(statements))


def _simpler_statements(statement: Statement) -> Iterator[Statement]:
    if isinstance(statement, Call):
        if statement.mode:
            yield replace(statement, mode="")
        return
    yield from _simpler_layouts(statement)
    if isinstance(statement, Move):
        if statement.async_op:
            yield replace(statement, async_op=False)
        return
    if statement.requires_grad:
        yield replace(statement, requires_grad=False)
    if statement.dtype not in ("float32", "int64"):
        yield replace(statement, dtype="float32")
    for dim, length in enumerate(statement.shape):
        for shorter in sorted({2, length // 2, length - 1}):
            if 0 < shorter < length:
                yield replace(statement, shape=(*statement.shape[:dim], shorter, *statement.shape[dim + 1 :]))


def _simpler_layouts(statement: Make | Move) -> Iterator[Statement]:
    for axis, placement in enumerate(statement.placements):
        simpler = ["R"] if placement != "R" else []
        simpler += [placement.partition("(")[0]] if placement.startswith("S") and "(" in placement else []
        for text in simpler:
            placements = (*statement.placements[:axis], text, *statement.placements[axis + 1 :])
            yield replace(statement, placements=placements)
    plain_order = tuple(range(len(statement.placements)))
    if statement.order not in (None, plain_order):
        yield replace(statement, order=plain_order)
