"""Operators on a rank outside the mesh: placeholders of the kind that the others get, and no error there alone."""

import importlib.util
import math
import warnings

import pytest
import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharding.placement import parse_placements

# What goes another way there, because torch itself branches on a value.
BRANCHES = {"cov": "torch looks whether the sum of the weights is above 0", "tensor_split": "lengths are values"}


def on_outside(body, inside=lambda mesh: None):
    """What `body(mesh)` gives on rank 2 of three, which is outside the mesh of the others."""

    def run(rank):
        mesh = T.Mesh((2,), ranks=(0, 1))
        return body(mesh) if mesh.coordinate is None else inside(mesh)

    return run_ranks(3, run)[2]


def outside(full, mesh, text="S0"):
    """This rank's nothing of a whole tensor."""
    return T.DTensor.from_local(full.new_empty(0), mesh, parse_placements(text), shape=full.shape)


REDUCED = {
    "norm": lambda x: x.norm(),
    "amax": lambda x: x.amax(0),
    "max": lambda x: x.max(),
    "aminmax": lambda x: tuple(x.aminmax(dim=1)),
    "cosine_similarity": lambda x: functional.cosine_similarity(x, x, dim=0),
    "var_mean": lambda x: torch.var_mean(x, 0),
    "softmax": lambda x: x.softmax(0),
    "cross_entropy": lambda x: functional.cross_entropy(x, x.argmax(1)),
    "nll_loss": lambda x: functional.nll_loss(x.log_softmax(1), x.argmax(1), reduction="none"),
    "nonzero": lambda x: x.nonzero(),
    "masked": lambda x: x[x > 0] * 2,
    "nanmean": lambda x: x.nanmean(),
}

if torch.__version__ >= "2.12":  # fake tensors before have indices and counts of the input's dtype
    REDUCED["unique"] = lambda x: torch.unique(x, return_inverse=True, return_counts=True)


def test_results_have_the_kind_of_those_on_one_device():
    full = torch.arange(12.0).reshape(4, 3)

    def body(mesh):
        for name, function in REDUCED.items():
            for text in ("S0", "S1", "P", "R"):
                wanted = tree_leaves(function(full.clone()))
                found = tree_leaves(function(outside(full, mesh, text)))
                for item, of in zip(found, wanted, strict=True):
                    assert isinstance(item, T.DTensor), (name, text)
                    assert (item.dtype, item.ndim) == (of.dtype, of.ndim), (name, text)
                    assert item.to_local().shape == (0,), (name, text)

    on_outside(body)


def test_numbers_are_nan_or_zero_and_tensors_of_nothing_are_equal():
    def body(mesh):
        loss, count = outside(torch.tensor(2.5), mesh, "R"), outside(torch.tensor(3), mesh, "P")
        assert math.isnan(loss.item())
        assert math.isnan(float(loss.sqrt()))
        assert count.item() == 0
        assert outside(torch.tensor(True), mesh, "R").item() is False
        number = outside(torch.tensor(1j), mesh, "R").item()
        assert math.isnan(number.real)
        assert math.isnan(number.imag)
        x = outside(torch.ones(4), mesh)
        assert torch.equal(x, x + 1)
        assert (x + 0).allclose(outside(torch.ones(4), mesh, "R"))
        assert [piece.shape for piece in x.tensor_split(outside(torch.tensor([1, 3]), mesh, "R"))] == [(1,), (0,), (3,)]

    on_outside(body)


def test_gradients_pass_through_what_was_picked_by_values():
    def body(mesh):
        x = outside(torch.ones(4, 3), mesh).requires_grad_()
        (x[x > 0] * 3).sum().backward()
        assert isinstance(x.grad, T.DTensor)
        assert x.grad.shape == (4, 3)

    on_outside(body)


def test_what_moves_is_refused_there_as_in_the_mesh():
    def body(mesh):
        x = T.ones(4, 4, device_mesh=mesh, placements=[T.Shard(0)])
        y = T.ones(4, 4, device_mesh=mesh, placements=[T.Shard(1)])
        with T.explicit_redistribution(), pytest.raises(T.ImplicitRedistributionError, match="moves up to 16 bytes"):
            x + y

    on_outside(body, body)


@pytest.mark.filterwarnings("ignore:.*which are lost")
def test_tensors_become_ones_without_dims():
    def body(mesh):
        x = outside(torch.ones(1, 1), mesh, "R")
        out = outside(torch.ones(1, 1), mesh, "R")
        assert torch.neg(x.sum(), out=out).shape == ()
        assert x.new_empty_strided((), ()).shape == ()
        assert torch.rand_like(x.sum()).shape == ()

    on_outside(body)


_HAS_DATABASE = importlib.util.find_spec("expecttest") is not None


_PARTS = 5


@pytest.mark.extended
@pytest.mark.in_ci(1)
@pytest.mark.skipif(not _HAS_DATABASE, reason="torch's operator database needs expecttest")
@pytest.mark.parametrize("part", range(_PARTS))
def test_no_operator_of_the_database_raises_there_alone(part):
    """The first sample of every fifth operator; what one device or propagation refuses, all ranks refuse."""
    from benchmarks.ops.op_coverage.operators import operators  # noqa: PLC0415  loads the database: 4 s
    from benchmarks.ops.op_coverage.trial import NotMeasuredError, call, made_case  # noqa: PLC0415

    failed: dict[str, str] = {}

    def of_sample(operator, sample, mesh):
        case = made_case(operator, sample)
        mine = [
            outside(tensor, mesh, "S0" if tensor.ndim and tensor.shape[0] > 1 else "R").requires_grad_(of.requires_grad)
            for tensor, of in zip(case.tensors, case.expected.tensors, strict=True)
        ]
        results = call(operator, sample, mine)
        wanted, found = case.expected.results, tree_leaves(results)
        assert [type(of) is torch.Tensor for of in wanted] == [isinstance(item, T.DTensor) for item in found]
        pairs = [pair for pair in zip(wanted, found, strict=True) if isinstance(pair[0], torch.Tensor)]
        assert [(of.dtype, of.ndim) for of, _ in pairs] == [(item.dtype, item.ndim) for _, item in pairs]
        chosen = sample.output_process_fn_grad(results) if operator.is_differentiable else ()
        seeded = [item for item in tree_leaves(chosen) if isinstance(item, torch.Tensor) and item.requires_grad]
        torch.autograd.backward(seeded, [torch.ones_like(item) for item in seeded])

    def body(mesh):
        for name, operator in list(operators().items())[part::_PARTS]:
            sample = next(iter(operator.samples()), None)
            if sample is None or name in BRANCHES:
                continue
            try:
                of_sample(operator, sample, mesh)
            except (NotMeasuredError, T.PropagationError, T.ImplicitRedistributionError):
                continue
            except Exception as error:  # noqa: BLE001  all of them are told together
                failed[name] = f"{type(error).__name__}: {error}"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_outside(body)
    assert not failed
