"""Equations: which cuts they offer, what results then, and what is no equation."""

import pytest
import torch

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.ops import OpSchema
from tritondt.ops.propagation.homomorphisms import LINEAR
from tritondt.ops.rules.equations import equation_strategies, equation_terms, parse_equation
from tritondt.sharding.placement import parse_placements


def offered(equation, shapes, placements=None, op=None, passing=()):
    """What an equation offers for tensors of these shapes, as text; None for a tensor that was not given.

    With `op`, what lets terms pass through a call of it.
    """

    def body(rank):
        mesh = T.Mesh((1,))
        texts = placements or ["R"] * len(shapes)
        specs = [
            None if shape is None else T.DTensorSpec(mesh, parse_placements(text), T.TensorMeta.contiguous(shape))
            for shape, text in zip(shapes, texts, strict=True)
        ]
        if op is None:
            found = equation_strategies(equation, specs)
        else:
            found = equation_terms(OpSchema(op, tuple(specs)), equation, passing)
        return [f"{', '.join(map(str, inputs))} -> {', '.join(map(str, outputs))}" for inputs, outputs, _ in found]

    return run_ranks(1, body)[0]


def test_a_letter_is_cut_in_all_that_have_it_and_leaves_terms_where_it_is_missing():
    assert offered("mk,kn->mn", [(2, 3), (3, 4)]) == [
        "S0, R -> S0",
        "S1, S0 -> P(sum)",
        "R, S1 -> S1",
        "R, R -> R",
    ]


def test_what_is_added_is_a_term_where_the_result_is_terms():
    assert offered("nk,ok,+o->no", [(2, 3), (4, 3), (4,)])[1] == "S1, S1, P(sum) -> P(sum)"
    assert offered("nk,ok,+o->no", [(2, 3), (4, 3), None])[1] == "S1, S1 -> P(sum)"


def test_leading_dims_broadcast_and_dots_are_whole():
    assert offered("*..,*.->*.,-", [(5, 2, 3, 3), (2, 3)]) == ["S0, R -> S0, R", "S1, S0 -> S1, R", "R, R -> R, R"]
    # One element serves all pieces; without elements nothing does.
    assert offered("*,*->*", [(1, 4), (3, 4)])[0] == "R, S0 -> S0"
    assert offered("*,*->*", [(1, 4), (0, 4)])[0] == "R, S0 -> S0"
    assert offered("*..->", [(5, 2, 2)])[0] == "S0 -> P(sum)"


def test_terms_pass_where_the_operator_commutes_with_their_reduction():
    op, shapes = torch.ops.aten.mul.Tensor, [(2, 3, 4), (4,)]
    assert offered("nc.,.->nc.", shapes, ["P", "R"], op, [LINEAR.at(0)]) == ["P(sum), R -> P(sum)"]
    assert offered("nc.,+.->nc.", shapes, ["P", "R"], op, [LINEAR.at(0)]) == ["P(sum), P(sum) -> P(sum)"]
    assert offered("nc.,.->nc.", shapes, ["P(max)", "R"], op, [LINEAR.at(0)]) == []
    assert offered("nc.,.->nc.", shapes, ["R", "R"], op, [LINEAR.at(0)]) == []


@pytest.mark.parametrize(
    ("equation", "sentence"),
    [("mk,kn", "'->' is missing"), ("mm->m", "the term 'mm' is not understood"), ("m3->m", "no letter twice")],
)
def test_what_is_no_equation_is_refused(equation, sentence):
    with pytest.raises(T.PropagationError, match=sentence):
        parse_equation(equation)
