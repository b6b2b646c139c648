"""Results of every name of tensor.parallel, and of every functional loss, are placed as torch places them."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.tensor as torch_tensor
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import parallel as torch_parallel

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tritondt import parallel

LOSSES: dict[str, Callable[..., Any]] = {
    "binary_cross_entropy": lambda x, y, **to: F.binary_cross_entropy(x, y, **to),
    "binary_cross_entropy_with_logits": lambda x, y, **to: F.binary_cross_entropy_with_logits(x, y, **to),
    "cosine_embedding_loss": lambda x, y, **to: F.cosine_embedding_loss(x, y, y[:, 0].detach(), **to),
    "cross_entropy": lambda x, y, **to: F.cross_entropy(x, y[:, 0].detach().long(), **to),
    "gaussian_nll_loss": lambda x, y, **to: F.gaussian_nll_loss(x, y, y.detach(), **to),
    "hinge_embedding_loss": lambda x, y, **to: F.hinge_embedding_loss(x, y, **to),
    "huber_loss": lambda x, y, **to: F.huber_loss(x, y, **to),
    "kl_div": lambda x, y, **to: F.kl_div(x, y, **to),
    "l1_loss": lambda x, y, **to: F.l1_loss(x, y, **to),
    "margin_ranking_loss": lambda x, y, **to: F.margin_ranking_loss(x, y, y, **to),
    "mse_loss": lambda x, y, **to: F.mse_loss(x, y, **to),
    "multi_margin_loss": lambda x, y, **to: F.multi_margin_loss(x, y[:, 0].detach().long(), **to),
    "multilabel_margin_loss": lambda x, y, **to: F.multilabel_margin_loss(x, y.detach().long(), **to),
    "multilabel_soft_margin_loss": lambda x, y, **to: F.multilabel_soft_margin_loss(x, y, **to),
    "nll_loss": lambda x, y, **to: F.nll_loss(x, y[:, 0].detach().long(), **to),
    "poisson_nll_loss": lambda x, y, **to: F.poisson_nll_loss(x, y, **to),
    "smooth_l1_loss": lambda x, y, **to: F.smooth_l1_loss(x, y, **to),
    "soft_margin_loss": lambda x, y, **to: F.soft_margin_loss(x, y, **to),
    "triplet_margin_loss": lambda x, y, **to: F.triplet_margin_loss(x, y, x * y, **to),
    "triplet_margin_with_distance_loss": lambda x, y, **to: F.triplet_margin_with_distance_loss(x, y, x * y, **to),
}
REDUCTIONS = ("mean", "none")
LAYOUTS = ("S0", "S1")


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    """Two processes with a Gloo group."""
    with GlooRanks(2) as started:
        yield started


def _placed(result: Any) -> str:
    if not hasattr(result, "placements"):
        return "plain"
    return ", ".join(
        f"P({p.reduce_op})" if p.is_partial() else f"S{p.dim}" if p.is_shard() else "R" for p in result.placements
    )


def _tried(body: Callable[[], Any]) -> Any:
    try:
        return body()
    except Exception as error:  # noqa: BLE001
        return f"raises {type(error).__name__}"


def _loss(of: Any, mesh: Any, name: str, reduction: str, layout: str) -> list[str]:
    x = torch.arange(24.0).view(4, 6) / 30
    y = (x * 7 % 1).round()
    placement = of.Shard(int(layout[1]))
    cut = of.distribute_tensor(x, mesh, [placement]).requires_grad_()
    loss = LOSSES[name](cut, of.distribute_tensor(y, mesh, [placement]), reduction=reduction)
    loss.backward(torch.ones_like(loss))
    return [_placed(loss), _placed(cut.grad)]


def losses(rank: int) -> dict[tuple[str, str, str], tuple[Any, Any]]:
    """Placements of the loss and of the gradient, by torch and by us."""
    warnings.simplefilter("ignore")
    mesh = T.init_device_mesh("cpu", (2,))
    found = {}
    for name in LOSSES:
        for reduction in REDUCTIONS:
            for layout in LAYOUTS:
                case = name, reduction, layout
                found[case] = tuple(_tried(partial(_loss, of, mesh, *case)) for of in (torch_tensor, T))
    return found


def _agrees(name: str, theirs: Any, ours: Any) -> bool:
    """Whether placements are torch's, but for two differences that are meant.

    A mean over cut rows is a sum of terms here and a mean of means there, which uneven rows and ignored targets have
    not; and logits that are cut along their classes stay so, as their gradient does.
    """
    if isinstance(theirs, str) and theirs.startswith("raises"):
        return not (isinstance(ours, str) and ours.startswith("raises"))
    if theirs == ours:
        return True
    if ours[0] == "P(sum)" and theirs[0] == "P(avg)":
        return bool(theirs[1:] == ours[1:])
    return name in ("cross_entropy", "nll_loss") and theirs == ["R", "R"] and ours == ["R", "S1"]


@pytest.mark.extended
def test_losses(ranks: GlooRanks) -> None:
    differing = {
        case: pair for found in ranks.run(losses) for case, pair in found.items() if not _agrees(case[0], *pair)
    }
    assert differing == {}


class Pair(nn.Module):
    """Two linear layers of sizes 8 to 4 to 8."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 8)

    def forward(self, x: Any) -> Any:
        return self.down(self.norm(self.up(x)))


def _styles(of: Any, made: Any) -> dict[str, tuple[nn.Module, Any, Any]]:
    """For each case a module, its plan and how its input is laid out: a plain tensor, or a placement."""
    whole, rows, columns = of.Replicate(), of.Shard(0), of.Shard(-1)
    found: dict[str, tuple[nn.Module, Any, Any]] = {}
    for local in (True, False):
        to = {"use_local_output": local}
        kind = "plain" if local else "kept"
        found |= {
            f"ColwiseParallel {kind}": (nn.Linear(8, 4), made.ColwiseParallel(**to), None),
            f"ColwiseParallel whole {kind}": (nn.Linear(8, 4), made.ColwiseParallel(output_layouts=whole, **to), None),
            f"ColwiseParallel rows {kind}": (nn.Linear(8, 4), made.ColwiseParallel(input_layouts=rows, **to), None),
            f"ColwiseParallel of S0 {kind}": (nn.Linear(8, 4), made.ColwiseParallel(**to), rows),
            f"ColwiseParallel embedding {kind}": (nn.Embedding(8, 4), made.ColwiseParallel(**to), None),
            f"RowwiseParallel {kind}": (nn.Linear(8, 6), made.RowwiseParallel(input_layouts=whole, **to), None),
            f"RowwiseParallel rows {kind}": (
                nn.Linear(8, 6),
                made.RowwiseParallel(input_layouts=whole, output_layouts=rows, **to),
                None,
            ),
            f"RowwiseParallel of S1 {kind}": (nn.Linear(8, 6), made.RowwiseParallel(**to), columns),
            f"RowwiseParallel embedding {kind}": (
                nn.Embedding(8, 4),
                made.RowwiseParallel(input_layouts=whole, **to),
                None,
            ),
            f"SequenceParallel {kind}": (nn.LayerNorm(8), made.SequenceParallel(sequence_dim=0, **to), None),
            f"SequenceParallel of R {kind}": (nn.LayerNorm(8), made.SequenceParallel(sequence_dim=0, **to), whole),
            f"PrepareModuleOutput {kind}": (
                nn.Identity(),
                made.PrepareModuleOutput(output_layouts=rows, desired_output_layouts=whole, **to),
                None,
            ),
            f"PrepareModuleInputOutput {kind}": (
                nn.Identity(),
                made.PrepareModuleInputOutput(
                    input_layouts=rows,
                    desired_input_layouts=whole,
                    output_layouts=whole,
                    desired_output_layouts=rows,
                    use_local_output=local,
                ),
                None,
            ),
            f"PrepareModuleInput {kind}": (
                nn.Identity(),
                made.PrepareModuleInput(input_layouts=rows, desired_input_layouts=whole, use_local_output=local),
                None,
            ),
        }
    found["parallelize_module"] = (
        Pair(),
        {"up": made.ColwiseParallel(output_layouts=whole), "down": made.RowwiseParallel(input_layouts=whole)},
        None,
    )
    return found


def _run_style(of: Any, styles: Any, mesh: Any, name: str) -> list[str]:
    module, plan, placement = _styles(of, styles)[name]
    made = styles.parallelize_module(module, mesh, plan)
    is_lookup = isinstance(module, nn.Embedding)
    x = torch.arange(4) if is_lookup else torch.arange(32.0).view(4, 8) / 32
    x = x if is_lookup else x.requires_grad_()
    given = x if placement is None else of.distribute_tensor(x.detach(), mesh, [placement]).requires_grad_()
    output = made(given)
    output.sum().backward() if not hasattr(output, "full_tensor") else output.full_tensor().sum().backward()
    found = [_placed(output), "none" if given.grad is None else _placed(given.grad)]
    return [
        *found,
        *(f"{key} {_placed(p)} {_placed(p.grad)}" for key, p in made.named_parameters() if p.grad is not None),
    ]


def _loss_parallel(of: Any, styles: Any, mesh: Any, reduction: str) -> list[Any]:
    x = torch.arange(24.0).view(4, 6) / 30
    cut = of.distribute_tensor(x, mesh, [of.Shard(1)]).requires_grad_()
    with styles.loss_parallel():
        loss: Any = F.cross_entropy(cut, torch.tensor([0, 5, 2, 3]), reduction=reduction)
        (loss if reduction != "none" else loss.sum()).backward()
    # What a program logs: every rank has the number, and one rank may ask alone.
    local = loss.to_local().detach()
    alone = loss.item() if mesh.get_rank() == 0 and reduction != "none" else None
    return [_placed(loss), _placed(cut.grad), local, alone]


def parallel_results(rank: int) -> dict[str, tuple[Any, Any]]:
    """Placements of results and gradients under every style, by torch and by us."""
    warnings.simplefilter("ignore")
    mesh = T.init_device_mesh("cpu", (2,))
    both = ((torch_tensor, torch_parallel), (T, parallel))
    found = {name: tuple(_tried(partial(_run_style, *pair, mesh, name)) for pair in both) for name in _styles(*both[0])}
    for reduction in REDUCTIONS:
        found[f"loss_parallel {reduction}"] = tuple(
            _tried(partial(_loss_parallel, *pair, mesh, reduction)) for pair in both
        )
    return found


# All results are placed as torch's. These gradients are not, and why.
OTHER: Mapping[str, str] = {
    **{
        f"SequenceParallel{of} {kind}": "gradients of replicated weights are added up, not left as terms"
        for of in ("", " of R")
        for kind in ("plain", "kept")
    },
    **{
        f"ColwiseParallel of S0 {kind}": "the gradient comes as the input was laid out, added up"
        for kind in ("plain", "kept")
    },
    **{
        f"RowwiseParallel embedding {kind}": "the gradient of a cut weight is cut, not gathered"
        for kind in ("plain", "kept")
    },
}


@pytest.mark.extended
def test_styles(ranks: GlooRanks) -> None:
    for found in ranks.run(parallel_results):
        assert {name.partition(" ")[0] for name in found} >= {
            name for name in torch_parallel.__all__ if name != "ParallelStyle"
        }
        differing = {name: pair for name, pair in found.items() if str(pair[0][:1]) != str(pair[1][:1])}
        assert differing == {}
        assert {
            name
            for name, (theirs, ours) in found.items()
            if str(theirs[:2]) != str(ours[:2]) or (not name.startswith("loss") and theirs != ours)
        } == {*OTHER}
        for name in (f"loss_parallel {reduction}" for reduction in REDUCTIONS):
            theirs, ours = found[name]
            assert ours[:2] == theirs[:2], name
            torch.testing.assert_close(ours[2], theirs[2])
            assert (ours[3] is None) is (theirs[3] is None)
