"""einop_rule and pointwise_rule: placements from an equation in which every letter is one index of the computation."""

from collections.abc import Mapping, Sequence

from tritondt.errors import PropagationError
from tritondt.ops.propagation.homomorphisms import ADDITIVE, term_strategies
from tritondt.ops.propagation.pointwise import elementwise_passing, elementwise_strategies
from tritondt.ops.propagation.schema import AxisStrategy, OpSchema, OutputSharding
from tritondt.ops.propagation.selection import decide
from tritondt.sharding.placement import Partial, Placement, Replicate, Shard

_PENDING = Partial("sum")


def einop_strategies(equation: str, *, linearity: bool = False) -> list[AxisStrategy]:
    """Strategies of an equation: one per letter, the replicated one, then with `linearity` that of pending sums.

    A letter that an output lacks is summed away, which leaves a Partial; "1" is a dim that broadcasts. A letter that
    stands twice in a term, as in "ii->i", is not cut: its dims are one index, and a rank's part of both is no block.

    >>> einop_strategies("mk,kn->mn")[1]
    AxisStrategy(inputs=(S1, S0), outputs=(P(sum),), exact=False)
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    inputs, outputs = left.split(","), right.split(",")
    letters = dict.fromkeys("".join(inputs).replace("1", ""))
    if not arrow or not {*"".join(outputs)} <= {*letters, "1"} or not all(map(str.isalpha, letters)):
        raise PropagationError(
            f"the equation {equation!r} is not understood; allowed are terms like 'mk,kn->mn' or 'ij,ij->ij,i', with "
            "letters of the inputs alone in the outputs"
        )
    found = [
        _of_letter(letter, inputs, outputs)
        for letter in letters
        if all(term.count(letter) < 2 for term in (*inputs, *outputs))
    ]
    found.append(AxisStrategy((Replicate(),) * len(inputs), (Replicate(),) * len(outputs)))
    if linearity:
        found.append(AxisStrategy((_PENDING,) * len(inputs), (_PENDING,) * len(outputs)))
    return found


def _of_letter(letter: str, inputs: Sequence[str], outputs: Sequence[str]) -> AxisStrategy:
    def placed(term: str, otherwise: Placement) -> Placement:
        return Shard(term.index(letter)) if letter in term else otherwise

    return AxisStrategy(
        tuple(placed(term, Replicate()) for term in inputs), tuple(placed(term, _PENDING) for term in outputs)
    )


def einop_rule(
    equation: str,
    op_schema: OpSchema,
    *,
    linearity: bool = False,
    enforce_sharding: Mapping[str, int] | None = None,
) -> OutputSharding:
    """Decides about an operator that is an einsum of its tensors, given by `equation`.

    One letter is sharded per mesh axis: the one whose arguments take the fewest bytes to move. Arguments that are
    sharded otherwise move. With `linearity`, pending sums of all arguments pass through. `enforce_sharding` gives
    letters the axis that must shard them, or -1 for none, for operators that write into a tensor. Pure: nothing is
    sent. Raises PropagationError where the equation cannot be read or nothing fits.

    >>> import torch, tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def product(rank):
    ...     x = T.ones(4, 6, device_mesh=T.Mesh((2,)), placements=[T.Shard(1)])
    ...     schema = OpSchema(torch.ops.aten.mm.default, (x._spec, T.ones(6, 2, device_mesh=T.Mesh((2,)))._spec))
    ...     decision = einop_rule("mk,kn->mn", schema)
    ...     return str(decision.output_spec.placements), decision.needs_redistribute
    >>> run_ranks(2, product)[0]
    ('(P(sum),)', True)
    """
    offered = einop_strategies(equation, linearity=linearity)
    lengths = [len(term) for term in equation.replace(" ", "").partition("->")[0].split(",")]
    if lengths != [spec.ndim for spec in op_schema.args_spec]:
        raise PropagationError(
            f"the equation {equation!r} was given for {op_schema}; its terms must be the tensors of the call, a letter "
            "or 1 for each dim"
        )
    terms = equation.replace("->", ",").split(",")
    letters = [letter for letter in dict.fromkeys(equation.partition("->")[0]) if letter.isalpha()]
    cut = [letter for letter in letters if all(term.count(letter) < 2 for term in terms)]
    by_letter = dict(zip(cut, offered, strict=False))
    enforced = enforce_sharding or {}
    per_axis = []
    for axis in range(op_schema.mesh.ndim):
        pinned = [letter for letter, wanted in enforced.items() if wanted == axis]
        barred = [by_letter[letter] for letter in enforced if letter in by_letter and letter not in pinned]
        per_axis.append(
            [by_letter[letter] for letter in pinned if letter in by_letter]
            or [strategy for strategy in offered if strategy not in barred]
        )
    return decide(per_axis, op_schema)


def pointwise_rule(op_schema: OpSchema, linearity: bool = False) -> OutputSharding:
    """Decides about an elementwise operator with broadcasting; with `linearity`, pending sums pass through together.

    Pure: nothing is sent. PropagationError where nothing fits.

    >>> import torch, tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def sine(rank):
    ...     x = T.ones(4, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)])
    ...     return str(pointwise_rule(OpSchema(torch.ops.aten.sin.default, (x._spec,))).output_spec.placements)
    >>> run_ranks(2, sine)
    ['(S0,)', '(S0,)']
    """
    op_schema = op_schema.with_specs_alone()
    specs = op_schema.args_spec
    passing = [ADDITIVE.at(*range(len(specs)))] if linearity else elementwise_passing(op_schema)
    num_results = len(op_schema.op._schema.returns) or 1
    offered = [*elementwise_strategies(specs, num_results), *term_strategies(op_schema, passing)]
    return decide([offered] * op_schema.mesh.ndim, op_schema)
