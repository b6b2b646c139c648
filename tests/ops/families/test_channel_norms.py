"""Batch norm with statistics of all ranks, and group norm: results, running statistics, gradients."""

import pytest
import torch
import torch.nn.functional as F

from tests.harness.torch_versions import needs_torch_before
from tests.ops.sharded import Case, check

GENERATOR = torch.Generator().manual_seed(8)


def randn(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


IMAGES, SCALE, SHIFT = randn(7, 4, 3, 2), randn(4), randn(4)
LAYOUTS = [
    ((2,), "S0", "R"),
    ((3,), "S0(sizes=5/0/2)", "R"),
    ((2,), "S1", "S0"),
    ((3,), "S1", "R"),
    ((2,), "S2", "R"),
    ((2,), "P", "R"),
    ((2, 2), "S0, S1", "R, S0"),
    ((2, 2), "S0, S3", "R, R"),
]


@pytest.mark.parametrize(("mesh", "of_image", "of_others"), LAYOUTS)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(mesh, of_image, of_others, training):
    def function(x, scale, shift):
        # Written to, and given with the result so that they are compared as well.
        mean, var = scale.detach().clone() * 2, shift.detach().clone().square() + 1
        return F.batch_norm(x, mean, var, scale, shift, training, 0.3), mean, var

    case = Case(mesh, (IMAGES, SCALE, SHIFT), (of_image, of_others, of_others))
    check(function, case, gradients=True)


def test_batch_norm_stays_cut_and_needs_no_parameters():
    check(
        lambda x: F.batch_norm(x, None, None, training=True),
        Case((2,), (IMAGES,), ("S0",)),
        gradients=True,
        expect="S0",
    )
    check(F.instance_norm, Case((3,), (IMAGES,), ("S0",)), gradients=True)


@pytest.mark.parametrize(("mesh", "of_image", "of_others"), LAYOUTS)
def test_group_norm(mesh, of_image, of_others):
    case = Case(mesh, (IMAGES, SCALE, SHIFT), (of_image, of_others, of_others))
    check(lambda x, scale, shift: F.group_norm(x, 2, scale, shift), case, gradients=True)
    check(lambda x, scale, shift: F.group_norm(x, 2), case, gradients=False)


@pytest.mark.parametrize(
    "shape",
    [
        (0, 4, 3, 3),
        pytest.param((2, 4, 0, 3), marks=needs_torch_before("2.14", "its group_norm refuses images without elements")),
    ],
)
def test_gradients_of_images_without_elements(shape):
    def gradients(x, weight, bias):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        F.group_norm(leaves[0], 2, *leaves[1:]).sum().backward()
        # nan is compared as the number that it is not.
        return [leaf.grad.nan_to_num(7) for leaf in leaves]

    case = Case((2,), (torch.ones(shape), torch.ones(4), torch.ones(4)), ("S0", "R", "R"))
    check(gradients, case, exact=True)
