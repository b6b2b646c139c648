"""Mutants of functions: small changes of the source, each of which some test should notice.

Comparisons, arithmetic, conditions, constants, returned values, arguments in another order and statements left out, in
the functions and methods of a module. Left as they are: assertions, `strict=True` and the words of errors, by which the
code checks and explains itself; annotations, decorators, defaults, and what a module runs when it is imported.
"""

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import CodeType
from typing import TypeGuard

_CO_OPTIMIZED = 1  # set for the code of functions, not for that of classes and modules

_COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_CALLED = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "bisect_left": "bisect_right",
    "bisect_right": "bisect_left",
    "sorted": "list",
    "reversed": "iter",
}
_ANY_ORDER = {"min", "max", "gcd", "lcm", "cast", "isinstance"}


@dataclass
class Mutant:
    """One change in one function: `node.field`, or what stands at `index` there, becomes `new`."""

    module: str
    function: tuple[str, int]
    lines: range
    before: str
    _tree: ast.Module = field(repr=False)
    _node: ast.AST
    _field: str
    _index: int | None
    _new: object
    after: str = ""
    number: int = 1

    @property
    def name(self) -> str:
        """The change in words that stay while other functions, and lines above, change."""
        again = f" (number {self.number})" if self.number > 1 else ""
        return f"{self.module} {self.function[0]}: {self.before} => {self.after}{again}"

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Makes the change in the tree, for as long as the context is open."""
        values = getattr(self._node, self._field)
        if self._index is None:
            setattr(self._node, self._field, self._new)
        else:
            setattr(self._node, self._field, [*values[: self._index], self._new, *values[self._index + 1 :]])
        try:
            yield
        finally:
            setattr(self._node, self._field, values)

    def code(self, path: str, *, is_changed: bool = True) -> CodeType:
        """Code of the changed function, or of the function as it was."""
        with self.planted() if is_changed else nullcontext():
            return functions_in(compile(ast.fix_missing_locations(self._tree), path, "exec"))[self.function]


def functions_in(code: CodeType, prefix: str = "") -> dict[tuple[str, int], CodeType]:
    """Code of each function of a module and method of its classes, by qualified name and first line."""
    found: dict[tuple[str, int], CodeType] = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            name = prefix + inner.co_name
            if inner.co_flags & _CO_OPTIMIZED:
                found[name, inner.co_firstlineno] = inner
            else:
                found.update(functions_in(inner, f"{name}."))
    return found


def mutants_of(module: str, source: str) -> list[Mutant]:
    """All mutants of a module's functions, in the order of the source.

    >>> [mutant.name for mutant in mutants_of("m.py", "def f(a): return a < 1")][:2]
    ['m.py f: return a < 1 => return None', 'm.py f: return a < 1 => return a <= 1']
    """
    tree = ast.parse(source)
    found: list[Mutant] = []
    names: Counter[str] = Counter()
    for function, qualname in _functions(tree, ""):
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        for statement, node, name, index, new in _sites(function):
            end = statement.body[0].lineno - 1 if isinstance(statement, _COMPOUND) else statement.end_lineno
            assert end is not None, f"{module} was not parsed from text: line {statement.lineno} has no end"
            lines = range(statement.lineno, max(end, statement.lineno) + 1)
            mutant = Mutant(module, (qualname, first), lines, _head(statement), tree, node, name, index, new)
            with mutant.planted():
                mutant.after = _head(new if node is not statement and isinstance(new, ast.stmt) else statement)
            if mutant.after != mutant.before:
                names[mutant.name] += 1
                mutant.number = names[mutant.name]
                found.append(mutant)
    return found


_COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.FunctionDef)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _head(node: object) -> str:
    """A statement on one line: the first, for those that have more statements within."""
    assert isinstance(node, ast.AST)
    return ast.unparse(node).splitlines()[0]


def _functions(tree: ast.AST, prefix: str) -> Iterator[tuple[_Function, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Function):
            yield node, prefix + node.name
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


# The statement that is changed; node, field and index of the change; what stands there then.
_Site = tuple[ast.stmt, ast.AST, str, int | None, object]


def _sites(function: ast.AST) -> Iterator[_Site]:
    """All places in the statements below a node, and what may stand there."""
    for name in ("body", "orelse", "finalbody", "handlers"):
        for index, statement in enumerate(getattr(function, name, ())):
            if isinstance(statement, ast.ExceptHandler):
                yield from _sites(statement)
                continue
            if _is_left_alone(statement):
                continue
            for new in _in_place_of_statement(statement):
                yield statement, function, name, index, new
            if not isinstance(statement, ast.Raise | ast.FunctionDef):
                yield from _expressions(statement, statement)
            yield from _sites(statement)


def _is_left_alone(statement: ast.stmt) -> bool:
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_docstring or isinstance(statement, ast.Assert)


def _in_place_of_statement(statement: ast.stmt) -> Iterator[ast.stmt]:
    is_store = isinstance(statement, ast.Assign) and not isinstance(statement.targets[0], ast.Name | ast.Tuple)
    if is_store or isinstance(statement, ast.Expr | ast.Raise | ast.AugAssign | ast.Continue | ast.Break):
        yield ast.Pass()
    if isinstance(statement, ast.Continue):
        yield ast.Break()
    if isinstance(statement, ast.Break):
        yield ast.Continue()
    if isinstance(statement, ast.Return) and statement.value is not None and not _is_none(statement.value):
        yield ast.Return(ast.Constant(None))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _expressions(statement: ast.stmt, node: ast.AST) -> Iterator[_Site]:
    """Places in the expressions of a statement, without the statements within it."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "format_spec", "type"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not _is_expression(child, node):
                continue
            if isinstance(child, ast.expr):
                for new in _in_place_of(child):
                    yield statement, node, name, index, new
                if isinstance(node, ast.If | ast.While | ast.IfExp) and name == "test":
                    yield from ((statement, node, name, index, new) for new in _negated(child))
            for part, shorter in _without_parts(child):
                yield statement, child, part, None, shorter
            yield from _expressions(statement, child)


def _is_expression(child: object, node: ast.AST) -> TypeGuard[ast.AST]:
    """Whether a child is an expression, or part of one, that may be changed: no text of an f-string, no strict=."""
    if isinstance(child, ast.stmt | ast.ExceptHandler) or not isinstance(child, ast.AST):
        return False
    is_text = isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)
    return not is_text and not (isinstance(child, ast.keyword) and child.arg == "strict")


def _without_parts(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Fields of a comprehension or slice, each with a condition or bound left out."""
    if isinstance(node, ast.comprehension):
        for place in range(len(node.ifs)):
            yield "ifs", [*node.ifs[:place], *node.ifs[place + 1 :]]
    if isinstance(node, ast.Slice):
        yield from ((bound, None) for bound in ("lower", "upper") if getattr(node, bound) is not None)


def _negated(condition: ast.expr) -> Iterator[ast.expr]:
    if not isinstance(condition, ast.Compare) and not _is_negation(condition):
        yield ast.UnaryOp(ast.Not(), condition)


def _is_negation(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _in_place_of(node: ast.expr) -> Iterator[ast.expr]:
    """Expressions that are mutants of one."""
    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            for other in _COMPARED[type(op)]:
                yield _changed(node, ops=[*node.ops[:index], other(), *node.ops[index + 1 :]])
    elif isinstance(node, ast.BinOp):
        known = _COMPUTED.get(type(node.op))
        yield from (node.left, node.right) if known is None else [_changed(node, op=known())]
    elif isinstance(node, ast.BoolOp):
        yield from _other_conditions(node)
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.Constant):
        yield from map(ast.Constant, _other_constants(node.value))
    elif isinstance(node, ast.Call):
        yield from _other_calls(node)


def _other_conditions(node: ast.BoolOp) -> Iterator[ast.expr]:
    yield _changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    for index in range(len(node.values)):
        rest = [*node.values[:index], *node.values[index + 1 :]]
        yield rest[0] if len(rest) == 1 else _changed(node, values=rest)


def _other_constants(value: object) -> Iterator[bool | int | float | str]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value - 1)
    elif isinstance(value, str):
        yield value + "_"


def _other_calls(node: ast.Call) -> Iterator[ast.expr]:
    called = node.func.id if isinstance(node.func, ast.Name) else ""
    if called in _CALLED:
        yield _changed(node, func=ast.Name(_CALLED[called], ast.Load()))
    if called in _ANY_ORDER or any(isinstance(argument, ast.Starred) for argument in node.args):
        return
    for index in range(len(node.args) - 1):
        first, second = node.args[index : index + 2]
        yield _changed(node, args=[*node.args[:index], second, first, *node.args[index + 2 :]])


def _changed(node: ast.expr, **fields: object) -> ast.expr:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
