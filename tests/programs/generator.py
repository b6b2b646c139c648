"""Random programs: a mesh, then statements that are drawn one by one and tried on one device at once.

What one device refuses stays in a program now and then, as a statement that distributed tensors must refuse, too.
Values that grow too large, and those that rounding decides, are left out (one_device.py).
"""

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from tests.harness.oracle.random_layouts import MESH_SHAPES, random_placements
from tests.programs.draw import Draw, NoFitError
from tests.programs.one_device import OneDeviceRun, is_expanded, versions
from tests.programs.operators import PURE, WRITING
from tests.programs.soundness import (
    is_extremum,
    is_of_detached_base,
    is_of_replaced_memory,
    reads_own_elements,
    shares_memory,
)
from tests.programs.statements import Call, Make, Move, Program, Statement

DTYPES = ("float32", "float32", "float64", "float64", "int64", "int8", "bool", "complex64", "bfloat16")
# How often statements of a kind are drawn.
WEIGHTS: Mapping[str, float] = {
    "make": 8, "redistribute": 10, "async": 4, "prefetch": 2, "pointwise": 10, "compare": 3, "smooth": 4, "cast": 4,
    "reduction": 8, "statistics": 3, "matmul": 6, "view": 16, "copy": 5, "index": 6, "dynamic": 1.5, "join": 4,
    "norm": 1, "softmax": 2, "loss": 2, "cumulative": 2, "sort": 3, "conv": 1, "factory": 1, "write": 9,
    "smooth_write": 1, "setitem": 4, "foreach": 3, "out": 3, "shape_out": 0.5, "data": 2, "set_data": 0.7,
    "reshape_in_place": 1.5, "requires_grad": 1, "backward": 3, "grad": 3, "hook": 1, "compile": 2,
    "to_local": 3, "full_tensor": 2, "from_local": 2,
}  # fmt: skip
# Kinds of statements, and blocks dealt in turns, that came later: without them a seed gives the program of before.
LATER = ("to_local", "full_tensor", "from_local", "dealt")
WRITES = frozenset({*WRITING, "backward", "grad", "hook"})
REFUSED_SHARE = 0.05
# So many programs in a row share a mesh, some shapes and some layouts: what was decided for one then serves another.
FAMILY = 32
# Errors of tensors made in inference mode, which distributed ones are not, and those that come a statement late.
_NOT_KEPT = ("nference", "is a view and its base", "its base or another view of its base has been modified")


# Errors that follow from addresses and strides: those of local tensors are their own, those of gradients not promised.
_OF_ADDRESSES = "input tensor and the written-to tensor refer to a single memory location"
_OF_EXPANSION = "more than one element of the written-to tensor"


class Generator:
    """The generator of one program, which `program` gives; the same for the same arguments."""

    def __init__(self, seed: int, leave_out: Collection[str] = (), max_statements: int = 40) -> None:
        self._seed, self._chosen, self._leave_out = seed, random.Random(seed), frozenset(leave_out)
        self._statements: list[Statement] = []
        self._refused: set[int] = set()
        # Variables whose lengths ranks outside the mesh cannot know: nothing else is made of them.
        self._unknown_outside: set[str] = set()
        self._num_names = 0
        self._max_statements = max_statements
        self._family = seed // FAMILY
        shared = random.Random(f"family {self._family}")
        self.world_size = size = shared.choice((2, 2, 2, 3, 3, 4))
        if shared.random() < 0.2 and "outside" not in self._leave_out:
            size = shared.randint(1, self.world_size)
        self.mesh_shape = shared.choice(MESH_SHAPES[size])
        self._run = OneDeviceRun(seed, self.mesh_shape)
        self.ranks = tuple(range(size))
        if shared.random() < 0.3 and "outside" not in self._leave_out:
            self.ranks = tuple(shared.sample(range(self.world_size), size))
        self._shapes = [_random_shape(shared) for _ in range(5)]
        self._dtypes = shared.sample(DTYPES, 4)

    def program(self) -> Program:
        """The program of the seed."""
        weights = {kind: weight for kind, weight in WEIGHTS.items() if kind not in self._leave_out}
        wanted = self._chosen.randint(5, self._chosen.choice((12, 25, self._max_statements)))
        self._fresh(self._random_shape(), self._random_dtype())
        for _ in range(wanted * 20):
            if len(self._statements) >= wanted:
                break
            (kind,) = self._chosen.choices(list(weights), list(weights.values()))
            try:
                for statement in self._drawn(kind):
                    self._try(statement)
            except NoFitError:
                continue
        return Program(
            self._seed, self.world_size, self.mesh_shape, self.ranks, tuple(self._statements), frozenset(self._refused)
        )

    def _name(self) -> str:
        self._num_names += 1
        return f"v{self._num_names - 1}"

    def _random_shape(self) -> tuple[int, ...]:
        return self._chosen.choice(self._shapes) if self._chosen.random() < 0.8 else _random_shape(self._chosen)

    def _random_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(
            torch, self._chosen.choice(self._dtypes if self._chosen.random() < 0.8 else DTYPES)
        )
        return found

    def _layout(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
        if self._chosen.random() < 0.2:
            return ("R",) * len(self.mesh_shape), None
        chosen = self._chosen
        if chosen.random() < 0.8:
            chosen = random.Random(f"family {self._family}, {shape}, {dtype}, {chosen.randrange(4)}")
        while True:
            is_dealt = "dealt" not in self._leave_out
            placements, order = random_placements(chosen, self.mesh_shape, tuple(shape), dtype, is_dealt=is_dealt)
            if "partial" not in self._leave_out or not any(placement.is_partial() for placement in placements):
                return tuple(map(repr, placements)), order

    def _fresh(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Makes a new tensor at once."""
        needs_grad = dtype.is_floating_point and self._chosen.random() < 0.4 and "backward" not in self._leave_out
        placements, order = self._layout(shape, dtype)
        name, text = self._name(), str(dtype).removeprefix("torch.")
        seed = self._chosen.randrange(1000)
        self._try(Make(name, seed, tuple(shape), text, placements, order, needs_grad))
        return name

    def _drawn(self, kind: str) -> list[Statement]:
        """Statements of a kind, drawn from what there is."""
        tensors = {
            name: tensor
            for name, tensor in self._run.plain.tensors().items()
            if not name.endswith(".grad") and name not in self._unknown_outside
        }
        draw = self._draw(tensors)
        if kind == "make":
            self._fresh(self._random_shape(), self._random_dtype())
            return []
        if kind in ("redistribute", "async", "prefetch"):
            return self._moves(draw, kind)
        if kind in ("backward", "grad", "hook"):
            return [self._of_autograd(draw, kind)]
        if kind == "compile":
            return [self._compiled(tensors)]
        templates = (PURE if kind in PURE else WRITING)[kind]
        return [self._call(draw, kind, self._chosen.choice(templates))]

    def _draw(self, tensors: dict[str, torch.Tensor]) -> Draw:
        draw = Draw(self._chosen, tensors, lambda shape, dtype: self._fresh_for(draw, shape, dtype))
        return draw

    def _fresh_for(self, draw: Draw, shape: Sequence[int], dtype: torch.dtype) -> str:
        name = self._fresh(shape, dtype)
        if name not in self._run.plain.variables:
            raise NoFitError
        draw.tensors[name] = self._run.plain[name]
        return name

    def _call(self, draw: Draw, kind: str, template: str) -> Call:
        expression, _, num_results = template.partition(" -> ")
        code = draw.fill(expression)
        makes: tuple[str, ...] = ()
        if kind in PURE:
            makes = tuple(self._name() for _ in range(int(num_results or 1)))
            code = f"{', '.join(makes)} = {code}"
        return Call(kind, code, tuple(draw.reads), makes, self._mode(draw, kind))

    def _mode(self, draw: Draw, kind: str) -> str:
        """A mode of autograd around a statement; most writes to leaves need one."""
        is_inference = any(draw.tensors[name].is_inference() for name in draw.reads)
        if kind in ("set_data", "requires_grad"):  # the tensor would become one of inference mode, or one of none
            if is_inference:
                raise NoFitError
            return ""
        if is_inference:
            return "inference_mode"
        if kind in WRITING and draw.reads:
            written = [draw.tensors[name] for name in draw.reads]
            if any(item.requires_grad and item.is_leaf for item in written) and self._chosen.random() < 0.9:
                return "no_grad"
        found = self._chosen.choices(("", "no_grad", "enable_grad", "inference_mode"), (94, 3, 1, 2))[0]
        return "" if found in self._leave_out else found

    def _moves(self, draw: Draw, kind: str) -> list[Statement]:
        name = draw.pick(lambda tensor: not tensor.is_inference())
        placements, order = self._layout(draw.tensors[name].shape, draw.tensors[name].dtype)
        # Left out, it would be that of the tensor.
        order = tuple(range(len(placements))) if order is None else order
        if kind == "prefetch":
            found: list[Statement] = [Move(None, name, placements, order)]
            if self._chosen.random() < 0.7:
                found.append(Move(self._name(), name, placements, order))
            return found
        made = Move(self._name(), name, placements, order, kind == "async")
        waits = kind == "async" and self._chosen.random() < 0.2
        return [made, Call("wait", f"place.wait({made.name})", made.makes)] if waits else [made]

    def _of_autograd(self, draw: Draw, kind: str) -> Call:
        root = draw.pick(lambda it: it.requires_grad and (kind != "hook" or it.is_floating_point()))
        if kind == "hook":
            # Without the look at grad_fn torch (2.13) crashes on a view that was written to within no_grad.
            hook = f"{root}.register_hook(lambda grad: grad * {draw.field_n()})"
            return Call(kind, f"({root}.grad_fn, {hook}) and None", (root,))
        total = f"torch.view_as_real({root}).sum()" if draw.tensors[root].is_complex() else f"{root}.sum()"
        if draw.tensors[root].dtype in (torch.float32, torch.float64) and self._chosen.random() < 0.4:
            total = f"({root} * {root}).sum()"
        keep = f"retain_graph={self._chosen.random() < 0.7}"
        if kind == "backward":
            return Call(kind, f"{total}.backward({keep})", (root,))
        leaf = draw.pick(lambda it: it.requires_grad and it.is_leaf)
        create = ", create_graph=True" if self._chosen.random() < 0.2 else ""
        made = self._name()
        code = f"({made},) = torch.autograd.grad({total}, [{leaf}], allow_unused=True, {keep}{create})"
        return Call(kind, code, tuple(draw.reads), (made,))

    def _compiled(self, tensors: Mapping[str, torch.Tensor]) -> Call:
        """A function of some operators, through torch.compile."""
        lines: list[str] = []
        known = dict(tensors)
        reads: list[str] = []
        made: list[str] = []
        for _ in range(self._chosen.randint(1, 4)):
            draw = self._draw(known)
            kind = self._chosen.choice(("pointwise", "reduction", "view", "matmul", "smooth"))
            call = self._call(draw, kind, self._chosen.choice([it for it in PURE[kind] if "->" not in it]))
            environment: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, **known}
            try:
                exec(call.code, environment)
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                raise NoFitError from error
            known[call.makes[0]] = environment[call.makes[0]]
            lines.append(f"    {call.code}")
            reads.extend(name for name in call.reads if name not in reads and name not in made)
            made.extend(call.makes)
        function, results = f"f{made[0]}", ", ".join(made)
        code = "\n".join([f"def {function}({', '.join(reads)}):", *lines, f"    return ({results},)"])
        backend = self._chosen.choice(("eager", "aot_eager"))
        code += f"\n({results},) = place.compiled({function}, {backend!r})({', '.join(reads)})"
        return Call("compile", code, tuple(reads), tuple(made))

    def _try(self, statement: Statement) -> None:
        """Runs a statement on one device, and takes it into the program if it can be compared."""
        tensors = self._run.plain.tensors()
        before, shapes = versions(tensors), {name: tensor.shape for name, tensor in tensors.items()}
        try:
            self._run.run(statement)
        except Exception as error:  # noqa: BLE001  whatever torch raises
            self._run.plain.forget(statement)
            self._run.twin.forget(statement)
            if self._is_kept_refused(statement, error):
                self._refused.add(len(self._statements))
                self._statements.append(statement)
            if statement.kind in WRITES:
                self._replay()
            return
        if self._is_sound(statement, before, shapes):
            self._statements.append(statement)
            if statement.kind == "dynamic" and len(self.ranks) < self.world_size:
                self._unknown_outside.update(statement.makes)
            return
        self._run.plain.forget(statement)
        self._run.twin.forget(statement)
        if statement.kind in WRITES:
            self._replay()

    def _is_sound(self, statement: Statement, before: dict[str, int | None], shapes: Mapping[str, torch.Size]) -> bool:
        try:
            changed = self._run.changed(statement, before)
            tensors = self._run.plain.tensors()
            # Torch gives some whole numbers gradients that it then cannot have, as by x[...] = number.
            if any(it.requires_grad and not (it.is_floating_point() or it.is_complex()) for it in tensors.values()):
                return False
            if any(is_of_detached_base(it) or is_of_replaced_memory(it) for it in tensors.values()):
                return False
            if statement.kind in ("data", "set_data") and any(is_expanded(tensors[name]) for name in statement.reads):
                return False
            if reads_own_elements(statement, tensors):
                return False
            if statement.kind == "data" and is_extremum(tensors[statement.reads[0]], tensors):
                return False
            # By their shapes: of what is made under inference_mode no write is counted.
            resized = [name for name, shape in shapes.items() if name in tensors and tensors[name].shape != shape]
            if statement.kind in ("out", "shape_out") and shares_memory(resized, tensors):
                return False
            if self._run.is_decided_by_rounding(statement):
                return False
            if any(name in before and is_expanded(tensors[name]) for name in changed):
                return False
            return self._run.is_sound(changed)
        except RuntimeError:  # of views of which torch tells only now that they must not be written to
            return False

    def _is_kept_refused(self, statement: Statement, error: Exception) -> bool:
        if statement.kind in ("make", "compile") or any(text in str(error) for text in _NOT_KEPT):
            return False
        # What values decide, ranks outside the mesh do not know.
        masked = any(
            self._run.plain[name].dtype is torch.bool for name in statement.reads if name in self._run.plain.variables
        )
        if masked and len(self.ranks) < self.world_size:
            return False
        # The draw comes first, so that other programs stay what they were.
        is_drawn = "refused" not in self._leave_out and self._chosen.random() < REFUSED_SHARE
        of_strides = _OF_EXPANSION in str(error) and self._reads_gradient(statement)
        return is_drawn and _OF_ADDRESSES not in str(error) and not of_strides

    def _reads_gradient(self, statement: Statement) -> bool:
        """Whether a statement reads a gradient, or a view of one."""
        made = {name for it in self._statements if it.kind == "grad" for name in it.makes}
        variables = set(self._run.plain.variables)  # what a statement made may be None, as a gradient that is not there
        held = {self._run.plain[name].untyped_storage().data_ptr() for name in made & variables}
        read = variables.intersection(statement.reads)
        return any(self._run.plain[name].untyped_storage().data_ptr() in held for name in read)

    def _replay(self) -> None:
        """Runs the program again, without what was last."""
        self._run = OneDeviceRun(self._seed, self.mesh_shape)
        for number, statement in enumerate(self._statements):
            if number not in self._refused:
                self._run.run(statement)


def _random_shape(chosen: random.Random) -> tuple[int, ...]:
    """A shape of 0 to 3 dims of lengths 0 to 7."""
    lengths = (0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7) if chosen.random() < 0.15 else (1, 2, 3, 4, 5, 6, 7)
    return tuple(chosen.choice(lengths) for _ in range(chosen.choice((0, 1, 1, 2, 2, 2, 3, 3))))


def random_program(seed: int, leave_out: Collection[str] = (), max_statements: int = 40) -> Program:
    """The program of a seed, without statements of the kinds to leave out."""
    return Generator(seed, leave_out, max_statements).program()
