"""Embedding with its table cut by vocabulary and by feature, gather, index_select, x[index] and what they need back."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tritondt as T
from tests.ops.sharded import Case, check, compare, distribute, whole
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharding.placement import parse_placements

GENERATOR = torch.Generator().manual_seed(9)


def randn(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=GENERATOR, dtype=dtype)


def randint(high, *shape):
    return torch.randint(high, shape, generator=GENERATOR)


VOCABULARY, FEATURES = 12, 6
TABLE = randn(VOCABULARY, FEATURES)
TOKENS = randint(VOCABULARY, 5, 3)


@pytest.mark.parametrize(
    ("mesh_shape", "of_table", "of_tokens", "expect"),
    [
        ((3,), "R", "R", "R"),
        ((3,), "R", "S0", "S0"),
        ((3,), "R", "S1(sizes=2/0/1)", "S1(sizes=2/0/1)"),
        ((4,), "S1", "R", "S2"),
        ((2,), "S1(unit=3)", "R", "S2(unit=3)"),
        ((3,), "S0", "R", "P"),
        ((5,), "S0", "R", "P"),
        ((3,), "S0(sizes=7/0/5)", "R", "P"),
        ((2,), "S0(unit=4)", "R", "P"),
        ((2,), "S0(repeats=3)", "R", "P"),
        ((2, 2), "S0, S0", "R, R", "P, P"),
        ((2, 3), "S0(repeats=2), S0", "R, R", "P, P"),
        ((2, 2), "S0, R", "R, S0", "P, S0"),
        ((2, 2), "S0, S1", "R, R", "P, S2"),
        ((2, 2), "R, R", "S0, S1", "S0, S1"),
        ((2, 2), "R, R", "S0, S0", "S0, S0"),
        ((2,), "P", "R", "P"),
        ((2,), "S0", "S0", "P"),
    ],
)
def test_embedding(mesh_shape, of_table, of_tokens, expect):
    case = Case(mesh_shape, (TABLE, TOKENS), (of_table, of_tokens))
    check(lambda table, tokens: F.embedding(tokens, table), case, gradients=True, exact=of_table != "P", expect=expect)
    check(lambda table, tokens: F.embedding(tokens, table, padding_idx=2), case, gradients=True)


def test_embedding_where_a_later_axis_cuts_the_vocabulary_first():
    case = Case((2, 3), (TABLE, TOKENS), ("S0, S0", "R, R"), (1, 0))
    check(lambda table, tokens: F.embedding(tokens, table), case, gradients=True, exact=True, expect="P, P")


@pytest.mark.parametrize(("of_table", "of_tokens"), [("R", "S0"), ("S1", "R"), ("S0", "R")])
def test_frequencies_are_counted_over_all_positions(of_table, of_tokens):
    case = Case((2,), (TABLE, TOKENS % 3), (of_table, of_tokens))
    check(lambda table, tokens: F.embedding(tokens, table, scale_grad_by_freq=True), case, gradients=True)


@pytest.mark.parametrize(
    ("of_grad", "of_tokens", "expect"),
    [("S0", "S0", "P"), ("S1", "S1", "P"), ("S2", "R", "S1"), ("P", "R", "P"), ("R", "R", "R"), ("S0", "R", "P")],
)
def test_layout_of_a_tables_gradient(of_grad, of_tokens, expect):
    case = Case((2,), (randn(5, 3, FEATURES), TOKENS), (of_grad, of_tokens))
    backward = torch.ops.aten.embedding_dense_backward
    check(lambda grad, tokens: backward(grad, tokens, VOCABULARY, -1, False), case, expect=expect)


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_token_outside_the_vocabulary_is_refused_on_every_rank(token):
    tokens = TOKENS.clone()
    tokens[0, 0] = token

    def body(rank):
        mesh = T.Mesh((2,))
        table, mine = distribute(TABLE, mesh, "S0"), distribute(tokens, mesh, "R")
        with pytest.raises(IndexError, match=rf"embedding index {token} is out of range: allowed are 0..11"):
            F.embedding(mine, table)

    run_ranks(2, body)


X = randn(6, 5, 4)
ROWS = randint(6, 7)


@pytest.mark.parametrize(
    ("mesh_shape", "of_x", "of_index", "expect"),
    [
        ((3,), "S0", "S0", "S0"),
        ((3,), "S0(sizes=0/4/2)", "R", "S0(sizes=0/4/2)"),
        ((2,), "R", "S1", "S1"),
        ((2,), "S1", "R", "R"),
        ((2, 2), "S0, S2", "S0, S2", "S0, S2"),
        ((2, 2), "S0, R", "S0, S1", "S0, S1"),
        ((2,), "P", "R", "P"),
    ],
)
def test_gather(mesh_shape, of_x, of_index, expect):
    index = randint(5, 6, 3, 4)
    case = Case(mesh_shape, (X, index), (of_x, of_index))
    check(lambda x, index: x.gather(1, index), case, gradients=True, expect=expect)
    check(lambda x, index: x.gather(-2, index), case, gradients=True, expect=expect)


def test_gather_of_fewer_elements_than_the_source_has():
    # Row i of the result is from row i of the source: shards of 6 rows and of 4 do not meet.
    check(lambda x, i: x.gather(1, i), Case((2,), (X, randint(5, 4, 3, 2)), ("S0", "S0")), gradients=True)


@pytest.mark.parametrize(
    ("mesh_shape", "of_x", "of_index", "expect"),
    [
        ((2,), "S1", "R", "S1"),
        ((2,), "R", "S0", "S0"),
        ((2, 2), "S2(unit=2), R", "R, S0", "S2(unit=2), S0"),
        ((2,), "S0", "R", "R"),
        ((2,), "P", "R", "P"),
    ],
)
def test_index_select_and_index(mesh_shape, of_x, of_index, expect):
    case = Case(mesh_shape, (X, ROWS), (of_x, of_index))
    check(lambda x, rows: x.index_select(0, rows), case, gradients=True, expect=expect)
    check(lambda x, rows: x[rows], case, gradients=True, expect=expect)


def test_advanced_indexing_places_the_picked_dims_as_torch_does():
    columns, deep = randint(5, 7), randint(4, 3, 1)
    check(lambda x, i: x[:, i], Case((2,), (X, columns), ("S0", "R")), gradients=True, expect="S0")
    check(lambda x, i: x[:, i], Case((2,), (X, columns), ("S2", "R")), gradients=True, expect="S2")
    check(lambda x, i: x[:, i], Case((2, 2), (X, columns), ("R, S2", "S0, R")), gradients=True, expect="S1, S2")
    check(lambda x, i, j: x[i, j], Case((2,), (X, ROWS, columns), ("S2", "R", "R")), gradients=True, expect="S1")
    check(lambda x, i, j: x[i, j], Case((2,), (X, ROWS, columns), ("R", "S0", "R")), gradients=True, expect="S0")
    # Apart: picked dims come first. The indices broadcast to (3, 7).
    case = Case((2, 2), (X, ROWS, deep), ("S1, R", "R, S0", "R, R"))
    check(lambda x, i, j: x[i, :, j], case, gradients=True, expect="S2, S1")
    case = Case((3,), (X, ROWS, deep), ("R", "R", "S0(sizes=0/2/1)"))
    check(lambda x, i, j: x[i, :, j], case, gradients=True, expect="S0(sizes=0/2/1)")


@pytest.mark.parametrize(
    ("mesh_shape", "into", "of_index", "values", "expect"),
    [
        ((2,), "S1", "R", "S1", "S1"),
        ((2,), "R", "S0", "S0", "P"),
        ((2,), "S0", "R", "R", "R"),
        ((2, 2), "R, S2", "S0, R", "S0, S2", "P, S2"),
        ((2,), "R", "R", "P", "P"),
    ],
)
def test_adding_at_indices(mesh_shape, into, of_index, values, expect):
    case = Case(mesh_shape, (X, ROWS, randn(7, 5, 4)), (into, of_index, values))
    check(lambda x, i, v: x.index_add(0, i, v), case, gradients=True, expect=expect)
    check(lambda x, i, v: x.index_put((i,), v, accumulate=True), case, gradients=True, expect=expect)
    index = ROWS[:, None, None].expand(7, 5, 4).contiguous()
    alike = values.replace("P", "R")
    case = Case(mesh_shape, (X, index, randn(7, 5, 4)), (into, alike, values))
    check(lambda x, i, v: x.scatter_add(0, i, v), case, gradients=True, expect=expect)


def test_writing_at_indices():
    order = torch.randperm(6, generator=GENERATOR)
    values = randn(6, 5, 4)
    index = order[:, None, None].expand(6, 5, 4).contiguous()
    for layout in ("S1", "S2", "R"):
        check(lambda x, i, v: x.scatter(0, i, v), Case((2,), (X, index, values), (layout,) * 3), expect=layout)
        check(lambda x, i: x.scatter(0, i, 2.0), Case((2,), (X, index), (layout,) * 2), expect=layout)
        case = Case((2,), (X, order, values), (layout, "R", layout))
        check(lambda x, i, v: x.index_put((i,), v), case, expect=layout)
        check(lambda x, i, v: x.clone().index_put_((i,), v), case, expect=layout)
    check(lambda x, i, v: x.scatter(0, i, v), Case((2,), (X, index, values), ("S0", "S0", "S0")), expect="R")
    check(lambda x, i: x.index_put((i,), x[:1, :1, :1]), Case((2,), (X, order), ("S1", "R")), expect="S1")
    case = Case((2,), (X, order, randn(5, 1)), ("S1", "R", "S0"))
    check(lambda x, i, v: x.index_put((i,), v), case, expect="S1", gradients=True)
    check(lambda x, i, v: x.index_put((i,), v, accumulate=True), case, expect="S1")


def test_filling_terms():
    mask = X > 0
    case = Case((2,), (X, mask), ("P", "R"))
    check(lambda x, m: x.masked_fill(m, 0), case, expect="P")
    check(lambda x, m: x.clone().masked_fill_(m, 0.0), case, expect="P")
    check(lambda x, m: x.masked_fill(m, 2.0), case, expect="R")
    check(lambda x, m: x.masked_fill(m, 2.0), Case((2,), (X, mask), ("P(avg)", "R")), expect="P(avg)")
    check(lambda x, m: x.clone().masked_fill_(m, 3), Case((2,), (X, mask), ("S1", "R")), expect="S1")
    check(lambda x, m: x.clone().masked_fill_(m, 2.0), case, expect="P")


def test_a_mask_of_the_lowest_float_is_no_mean_of_terms():
    lowest = torch.finfo(torch.float32).min
    case = Case((2,), (X.float(), X > 0), ("P(avg)", "R"))
    check(lambda x, m: x.masked_fill(m, lowest), case, expect="R")
    check(lambda x, m: x.masked_fill(m, float("-inf")), case, expect="P(avg)")


@pytest.mark.parametrize("texts", [("R", "S0", "S0"), ("S0", "R", "R"), ("S0", "S0", "S0"), ("P(max)", "S0", "S0")])
def test_bools_are_added_though_they_have_no_sum(texts):
    into, index = torch.tensor([True, False, False, False]), torch.tensor([0, 2, 2, 1])
    values = torch.tensor([False, True, False, False])

    def distributed(tensor, mesh, text):
        # Every term of an or is the whole.
        if text.startswith("P"):
            return T.DTensor.from_local(tensor.clone(), mesh, parse_placements(text))
        return distribute(tensor, mesh, text)

    def body(rank):
        mesh = T.Mesh((2,))
        layouts = zip((into, index, values), texts, strict=True)
        tensors = [distributed(tensor, mesh, text) for tensor, text in layouts]
        for function in (
            lambda x, i, v: x.index_add(0, i, v),
            lambda x, i, v: x.scatter_add(0, i, v),
            lambda x, i, v: x.index_put((i,), v, accumulate=True),
            lambda x, i, v: x.clone().index_add_(0, i, v),
            lambda x, i, v: x.clone().scatter_add_(0, i, v),
        ):
            assert torch.equal(whole(function(*tensors)), function(into, index, values))

    run_ranks(2, body)


def test_gradient_of_the_largest_along_a_dim():
    for layout in ("S0", "S1", "S2(sizes=1/3)"):
        check(lambda x: x.max(1)[0], Case((2,), (X,), (layout,)), gradients=True)
        check(lambda x: x.min(-1, keepdim=True).values, Case((2,), (X,), (layout,)), gradients=True)


def test_gradcheck():
    tokens, table = randint(4, 5), randn(4, 3)

    def body(rank):
        mesh = T.Mesh((3,))
        whole, mine = [T.Replicate()], distribute(tokens, mesh, "R")
        rows = distribute(tokens, mesh, "S0(sizes=0/1/4)")

        def function(local):
            full = T.DTensor.from_local(local, mesh, whole)
            results: list[Any] = [
                F.embedding(mine, full.redistribute(placements=parse_placements("S0(sizes=3/0/1)"))),
                F.embedding(rows, full),
                full.redistribute(placements=[T.Shard(1)]).index_select(0, mine),
                full[rows],
            ]
            return tuple(result.full_tensor() for result in results)

        assert torch.autograd.gradcheck(function, (table.clone().requires_grad_(),))

    run_ranks(3, body)


@pytest.mark.parametrize("text", ["S0", "S1", "S1(sizes=0/4)", "P"])
def test_lists_as_indices(text):
    x = torch.arange(24.0, dtype=torch.float64).reshape(6, 4)
    for index in ([1, 5, 0], ([2, 3], slice(1, 3)), (slice(None), [[0, 3], [1, 1]]), ([0, 5], [1, 2]), [], [True] * 6):
        check(lambda x, index=index: x[index] * 1, Case((2,), (x,), (text,)), gradients=True, exact=True)

    def write(x):
        y = x * 1
        y[[0, 4]] = -1.0
        y[1:3, [0, 2]] = y[3, [1, 1]]
        return y

    check(write, Case((2,), (x,), (text,)), gradients=True, exact=True)


@pytest.mark.parametrize("text", ["S0", "S1", "R", "P"])
@pytest.mark.parametrize("value", [True, False])
def test_masks_without_dims_give_the_tensor_a_dim(text, value):
    whole = torch.arange(6.0).view(3, 2)
    for mask in (torch.tensor(value), value):
        check(lambda x, mask=mask: x[mask], Case((2,), (whole,), (text,)), exact=True, gradients=True)
        check(lambda x, mask=mask: x[mask, 1], Case((2,), (whole,), (text,)), exact=True)
        check(lambda x, mask=mask: x[:, mask, [1]], Case((2,), (whole,), (text,)), exact=True)
    check(lambda x, mask: x[mask], Case((2,), (whole, torch.tensor(value)), (text, "R")), exact=True)

    def written(x, mask, new):
        y = x * 1
        y[mask] = 7.0
        y[mask, 1] = new[0]
        return y

    check(written, Case((2,), (whole, torch.tensor(value), whole + 9), (text, "R", "S0")), exact=True)


def test_indices_that_the_user_brings_are_refused_but_where_any_other_picks_the_same():
    def body(rank):
        x = T.DTensor.from_local(torch.ones(1 - rank, 2), T.Mesh((2,), ranks=(0, 1)), [T.Shard(0, sizes=(1, 0))])
        compare(x[torch.tensor([0])], torch.ones(1, 2), exact=True)
        for index in (torch.tensor([0, 0]), torch.tensor([0], dtype=torch.int32), torch.tensor([[0]])):
            with pytest.raises(T.MixedTensorsError, match="got a distributed tensor"):
                x[index]
        with pytest.raises(T.MixedTensorsError, match="got a distributed tensor"):
            x[:, torch.tensor([0])]

    run_ranks(2, body)


@pytest.mark.parametrize("text", ["S0", "S1(sizes=0/2)", "R", "P"])
@pytest.mark.parametrize("value", [True, False])
def test_masks_without_dims_choose_everywhere(value, text):
    full, mask = torch.arange(6.0).view(3, 2), torch.tensor(value)
    functions = (
        lambda x, m: x.masked_fill(m, 2.0),
        lambda x, m: (x * 1).masked_fill_(m, 2.0),
        lambda x, m: torch.where(m, x, -x),
        lambda x, m: torch.where(m, x, 5.0),
    )
    for function in functions:
        check(function, Case((2,), (full, mask), (text, "R")), exact=True, gradients=True)
        check(lambda x, function=function: function(x, mask), Case((2,), (full,), (text,)), exact=True, gradients=True)
