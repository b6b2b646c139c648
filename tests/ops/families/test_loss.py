"""Cross entropy over sharded rows and sharded classes, and losses that compare element by element."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tritondt as T
from tests.ops.sharded import Case, check, distribute
from tritondt import events
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharding.placement import parse_placements

GENERATOR = torch.Generator().manual_seed(11)


def randn(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=GENERATOR, dtype=dtype)


ROWS, CLASSES = 7, 9
LOGITS = 3 * randn(ROWS, CLASSES)
TARGET = torch.tensor([0, 8, 3, -100, 5, 8, 2])
WEIGHT = randn(CLASSES).abs()

LAYOUTS = [
    ((3,), "S0", "S0"),
    ((3,), "S0(sizes=0/6/1)", "S0(sizes=0/6/1)"),
    ((3,), "S0", "R"),
    ((3,), "S1", "R"),
    ((2,), "S1(sizes=9/0)", "R"),
    ((2,), "S1(unit=3)", "R"),
    ((3,), "S1(repeats=3)", "R"),
    ((3,), "S1", "S0"),
    ((2, 2), "S0, S1", "S0, R"),
    ((2, 2), "S1, S1", "R, R"),
    ((2, 2), "S0, S0", "S0, S0"),
    ((2, 2, 2), "S1, S0, S1", "R, S0, R"),
    ((2,), "P", "R"),
]


@pytest.mark.parametrize(("mesh_shape", "of_logits", "of_target"), LAYOUTS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(mesh_shape, of_logits, of_target, reduction):
    whole = ", ".join("R" for _ in mesh_shape)
    case = Case(mesh_shape, (LOGITS, TARGET), (of_logits, of_target))
    weighted = Case(mesh_shape, (LOGITS, TARGET, WEIGHT), (of_logits, of_target, whole))

    def ignoring(x, t):
        return F.cross_entropy(x, t.abs() % CLASSES, ignore_index=8, reduction=reduction)

    check(lambda x, t: F.cross_entropy(x, t, reduction=reduction), case, gradients=True)
    check(lambda x, t, w: F.cross_entropy(x, t, w.detach(), reduction=reduction), weighted, gradients=True)
    check(ignoring, case, gradients=True)


@pytest.mark.parametrize(
    ("of_logits", "of_target", "reduction", "expect"),
    [
        ("S0, R", "S0, R", "mean", "P, R"),
        ("R, S1", "R, R", "mean", "R, R"),
        ("S0, S1", "S0, R", "sum", "P, R"),
        ("S0, S1", "S0, R", "none", "S0, R"),
        ("S0(sizes=2/5), R", "S0(sizes=2/5), R", "none", "S0(sizes=2/5), R"),
        ("R, R", "R, R", "mean", "R, R"),
    ],
)
def test_layout_of_the_loss_and_of_the_gradient(of_logits, of_target, reduction, expect):
    def body(rank):
        mesh = T.Mesh((2, 2))
        logits, target = distribute(LOGITS, mesh, of_logits), distribute(TARGET, mesh, of_target)
        logits.requires_grad_()
        loss: Any = F.cross_entropy(logits, target, reduction=reduction)
        assert loss.placements == parse_placements(expect)
        loss.sum().backward()
        gradient: Any = logits.grad
        assert gradient.placements == logits.placements

    run_ranks(4, body)


@pytest.mark.parametrize(("mesh_shape", "of_logits", "of_target"), LAYOUTS[:9])
def test_label_smoothing_and_probabilities_as_targets(mesh_shape, of_logits, of_target):
    case = Case(mesh_shape, (LOGITS, TARGET), (of_logits, of_target))
    check(lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), case, gradients=True)
    case = Case(mesh_shape, (LOGITS, F.softmax(randn(ROWS, CLASSES), 1)), (of_logits, of_logits))
    check(lambda x, t: F.cross_entropy(x, t), case, gradients=True)


@pytest.mark.parametrize(
    ("mesh_shape", "of_logits", "of_target"),
    [((2,), "S0", "S0"), ((2,), "S1", "R"), ((3,), "S2", "S1"), ((2, 2), "S1, S3", "R, S2")],
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_images(mesh_shape, of_logits, of_target, reduction):
    logits, target = randn(3, 5, 4, 2), torch.randint(5, (3, 4, 2), generator=GENERATOR)
    target[0, 0, 0] = -100
    case = Case(mesh_shape, (logits, target), (of_logits, of_target))
    check(lambda x, t: F.cross_entropy(x, t, reduction=reduction), case, gradients=True)


def test_one_sample_and_no_sample():
    check(F.cross_entropy, Case((2,), (LOGITS[0], TARGET[1]), ("S0", "R")), gradients=True)
    check(F.cross_entropy, Case((2,), (LOGITS[0], TARGET[1]), ("R", "R")), gradients=True)
    ignored = torch.full((ROWS,), -100)

    def body(rank):
        mesh = T.Mesh((2,))
        for of_logits, of_target in (("S0", "S0"), ("S1", "R")):
            x, t = distribute(LOGITS, mesh, of_logits), distribute(ignored, mesh, of_target)
            mean: Any = F.cross_entropy(x, t)
            assert mean.full_tensor().isnan().item()
            total: Any = F.cross_entropy(x, t, reduction="sum")
            assert total.full_tensor().item() == 0

    run_ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits(dtype):
    # 4,096 ones add up to 256 in bfloat16 and to 2,048 in float16: rows are counted in float32.
    logits, target = randn(4096, 4, dtype=torch.float32), torch.randint(4, (4096,), generator=GENERATOR)
    expected = F.cross_entropy(logits.to(dtype).float(), target)

    def body(rank):
        mesh = T.Mesh((2,))
        for of_logits, of_target in (("S0", "S0"), ("S1", "R")):
            loss: Any = F.cross_entropy(
                distribute(logits.to(dtype), mesh, of_logits), distribute(target, mesh, of_target)
            )
            torch.testing.assert_close(loss.full_tensor().float(), expected, rtol=0.01, atol=0.01)

    run_ranks(2, body)


def test_a_class_that_does_not_exist_is_refused():
    target = TARGET.clone()
    target[0] = CLASSES

    def body(rank):
        mesh = T.Mesh((2,))
        logits = distribute(LOGITS, mesh, "S1")
        with pytest.raises(IndexError, match=r"target class 9 is out of range: allowed are 0..8$"):
            F.cross_entropy(logits, distribute(target, mesh, "R"))

    run_ranks(2, body)


def test_sharded_classes_move_numbers_a_row_and_never_the_logits():
    moved = []
    logits, target = randn(16, 10_000, dtype=torch.float32), torch.randint(10_000, (16,), generator=GENERATOR)

    def body(rank):
        mesh = T.Mesh((4,))
        x = distribute(logits, mesh, "S1").requires_grad_()
        loss: Any = F.cross_entropy(x, distribute(target, mesh, "R"))
        loss.full_tensor().backward()

    unsubscribe = events.subscribe(lambda event: moved.append(event.received_bytes))
    try:
        run_ranks(4, body)
    finally:
        unsubscribe()
    # Per rank: 2 numbers a row from 3 others; backward one number a row, reduced and spread; the loss itself.
    per_rank = 4 * (16 * 2 * 3 + 16 * 2 * 3 / 4 + 3)
    assert 0 < sum(moved) <= 4 * per_rank
    assert sum(moved) < logits.numel() * 4 / 100


X, Y, P = randn(6, 5), randn(6, 5), torch.rand(6, 5, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [((3,), "S0"), ((3,), "S1(sizes=4/0/1)"), ((2, 2), "S0, S1"), ((2, 2), "S1, S1"), ((2,), "R"), ((2,), "P")],
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_of_pairs_of_elements(mesh_shape, placements, reduction):
    case = Case(mesh_shape, (X, Y), (placements, placements))
    check(lambda x, y: F.mse_loss(x, y, reduction=reduction), case, gradients=True)
    check(lambda x, y: F.l1_loss(x, y, reduction=reduction), case, gradients=True)
    check(lambda x, y: F.smooth_l1_loss(x, y, reduction=reduction, beta=0.5), case, gradients=True)
    check(lambda x, y: F.huber_loss(x, y, reduction=reduction, delta=0.5), case, gradients=True)
    check(lambda x, y: F.soft_margin_loss(x, y.sign().detach(), reduction=reduction), case, gradients=True)


@pytest.mark.parametrize(
    ("mesh_shape", "placements"), [((3,), "S0"), ((3,), "S1(sizes=4/0/1)"), ((2, 2), "S0, S1"), ((2,), "R")]
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_binary_cross_entropy(mesh_shape, placements, reduction):
    case = Case(mesh_shape, (X, P), (placements, placements))
    check(lambda x, p: F.binary_cross_entropy_with_logits(x, p.detach(), reduction=reduction), case, gradients=True)
    check(lambda x, p: F.binary_cross_entropy(x.sigmoid(), p.detach(), reduction=reduction), case, gradients=True)
    case = Case(mesh_shape, (X, P, Y.abs()), (placements,) * 3)
    check(
        lambda x, p, w: F.binary_cross_entropy_with_logits(x, p.detach(), w.detach(), reduction=reduction),
        case,
        gradients=True,
    )
    check(
        lambda x, p, w: F.binary_cross_entropy(x.sigmoid(), p.detach(), w.detach(), reduction=reduction),
        case,
        gradients=True,
    )


@pytest.mark.parametrize("loss", [F.huber_loss, F.soft_margin_loss, F.mse_loss, F.smooth_l1_loss])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_target_of_another_dtype_gives_the_dtype_that_one_device_gives(loss, reduction):
    x, number = torch.tensor([1.0, 2.0, -5.0, 0.5]).half(), torch.tensor(1.5)
    for case in (
        Case((2,), (x, number), ("S0", "R")),
        Case((2,), (x, number.expand(4).clone()), ("S0", "S0")),
        Case((2,), (x.float(), number.half()), ("S0", "R")),
    ):
        check(lambda x, y: loss(x, y, reduction=reduction), case, strides=False)


@pytest.mark.parametrize("loss", [F.soft_margin_loss, F.mse_loss, F.smooth_l1_loss])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_gradient_has_the_dtype_of_what_it_belongs_to(loss, reduction):
    x, y = torch.tensor([1.0, 2.0, -5.0, 0.5]).half(), torch.tensor([1.5, -1.0, 1.0, 2.0])
    case = Case((2,), (x, y), ("S0", "S0"))
    check(lambda x, y: loss(x, y.detach(), reduction=reduction), case, gradients=True)


def test_a_mean_divides_by_the_global_count_where_shards_are_uneven():
    case = Case((3,), (X, Y), ("S0(sizes=1/5/0)", "S0(sizes=1/5/0)"))
    check(F.mse_loss, case, gradients=True, expect="P")
    check(torch.ops.aten.mse_loss, Case((2,), (X, Y[:1]), ("S0", "R")), expect="P")


@pytest.mark.parametrize("placements", ["S0(sizes=0/2/1)", "S1"])
def test_gradcheck(placements):
    logits, target, weight = randn(3, 4), torch.tensor([3, -100, 0]), torch.tensor([0.5, 1, 2, 3], dtype=torch.float64)

    def body(rank):
        mesh = T.Mesh((3,))
        other = distribute(logits, mesh, "S1").exp()
        rows, weights = distribute(target, mesh, "R"), distribute(weight, mesh, "R")

        def function(local):
            full = T.DTensor.from_local(local, mesh, [T.Replicate()])
            x = full.redistribute(placements=parse_placements(placements))
            results: list[Any] = [
                F.cross_entropy(x, rows, weights),
                F.cross_entropy(x, rows, reduction="none"),
                F.mse_loss(x, other),
            ]
            return tuple(result.full_tensor() for result in results)

        assert torch.autograd.gradcheck(function, (logits.clone().requires_grad_(),))

    run_ranks(3, body)


@pytest.mark.parametrize("of_scores", ["S0", "S1", "P", "S0(sizes=5/0)"])
@pytest.mark.parametrize("of_target", ["R", "S0"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_margin_losses(of_scores, of_target, reduction):
    scores = torch.linspace(-2, 2, 20, dtype=torch.float64).reshape(5, 4).sin()
    classes, several = torch.tensor([0, 3, 1, 2, 2]), torch.tensor([[1, 3, -1, 0]] * 5)
    weight = torch.tensor([1.0, 0.5, 2.0, 0.25], dtype=torch.float64)
    check(
        lambda x, y: F.multi_margin_loss(x, y, reduction=reduction),
        Case((2,), (scores, classes), (of_scores, of_target)),
        gradients=True,
    )
    check(
        lambda x, y, w: F.multi_margin_loss(x, y, p=2, margin=0.5, weight=w, reduction=reduction),
        Case((2,), (scores, classes, weight), (of_scores, of_target, "R")),
    )
    check(
        lambda x, y: F.multilabel_margin_loss(x, y, reduction=reduction),
        Case((2,), (scores, several), (of_scores, of_target)),
        gradients=True,
    )


def test_margin_losses_of_one_row():
    row, several = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64), torch.tensor([1, -1, 0])
    check(lambda x, y: F.multilabel_margin_loss(x, y), Case((2,), (row, several), ("S0", "S0")), gradients=True)
