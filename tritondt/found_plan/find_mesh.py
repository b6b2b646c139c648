"""find_mesh: plans of one model over meshes of so many ranks, the best first, and what slower links cost it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from tritondt.errors import ArgumentError, ParallelizeError
from tritondt.errors.arguments import checked
from tritondt.found_plan.find import OPTIMIZER_TENSORS, Objective, arguments, find_plan
from tritondt.found_plan.found_plan import FoundPlan
from tritondt.found_plan.predict import predicted_step
from tritondt.found_plan.prices import built_in_prices
from tritondt.found_plan.step_cost import StepCost
from tritondt.planning.cost import CostTable, Link

_MOST_SHOWN = 5


@dataclass(frozen=True, slots=True)
class FoundMesh:
    """Plans by `find_mesh`, the best first; meshes without one, and why; the best with a link of half the bandwidth."""

    objective: str
    plans: tuple[FoundPlan, ...]
    refused: tuple[tuple[str, str], ...]
    slower: tuple[tuple[str, StepCost], ...]

    @property
    def best(self) -> FoundPlan:
        """The best plan of all."""
        return self.plans[0]

    def rows(self) -> list[tuple[str, ...]]:
        """Head and rows of the table of the five best meshes, and of the best with slower links."""
        head = ("mesh", "predicted", "computing", "moving", "hidden", "bytes in", "of other hosts", "memory")
        rows: list[tuple[str, ...]] = [head]
        rows += [_cells(str(plan.mesh), plan.step) for plan in self.plans[:_MOST_SHOWN]]
        return rows + [_cells(f"{self.best.mesh}, {link} half as fast", step) for link, step in self.slower]

    def explain(self) -> str:
        """Lines with the five best meshes, and with what slower links make of the best."""
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(
            [f"least {self.objective} of a rank", *lines, *(f"{mesh}: {why}" for mesh, why in self.refused)]
        )

    def __str__(self) -> str:
        return f"{self.explain()}\n\n{self.best}"

    def to_json(self) -> str:
        """All plans, the refused meshes and the best under slower links as a JSON object."""
        found = {
            "objective": self.objective,
            "plans": [json.loads(plan.to_json()) for plan in self.plans],
            "refused": self.refused,
            "slower": {link: asdict(step) for link, step in self.slower},
        }
        return json.dumps(found)


def _cells(name: str, step: StepCost) -> tuple[str, ...]:
    times = (step.seconds, step.compute_seconds, step.traffic.seconds, step.hidden_seconds)
    counts = (step.traffic.received_bytes, step.traffic.far_bytes, step.memory.most)
    return (name, *(f"{it * 1e3:,.3f} ms" for it in times), *(f"{it:,}" for it in counts))


@checked
def find_mesh(
    model: nn.Module,
    ranks: int,
    example_inputs: Any,
    *,
    hosts: int = 1,
    memory_bytes: int | None = None,
    objective: Objective = "step time",
    train: bool = True,
    optimizer: str = "adamw",
    costs: CostTable | None = None,
    device_type: str = "cpu",
    module_results: Mapping[str, Any] | None = None,
) -> FoundMesh:
    """Plans of `model` over all meshes of a data axis and a tensor axis that `ranks` ranks on `hosts` hosts make.

    Over several hosts there are those, too, whose data axis lies inside of a host, beside one of hosts that replicates.
    `example_inputs` are those of all ranks together: the data axes cut dim 0 of each tensor, and the first rank's part
    is the longest. Ranks of the tensor axis are neighbours. Other arguments are those of `find_plan`; no world is
    needed. Raises ParallelizeError where no mesh has a plan, and ArgumentError for hosts of different numbers of ranks.

    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    >>> found = find_mesh(model, 4, torch.zeros(4, 8), objective="memory")
    >>> [str(plan.mesh) for plan in found.plans]
    ['dp=1,tp=4', 'dp=2,tp=2', 'dp=4,tp=1']
    """
    if ranks < 1 or hosts < 1 or ranks % hosts:
        raise ArgumentError(f"find_mesh got ranks={ranks} on hosts={hosts}; allowed are as many ranks on each host")
    prices = built_in_prices(device_type, ranks, ranks // hosts, costs)
    options: dict[str, Any] = {
        "memory_bytes": memory_bytes,
        "objective": objective,
        "train": train,
        "optimizer": optimizer,
        "device_type": device_type,
        "costs": prices.costs,
    }
    plans, refused = list[FoundPlan](), list[tuple[str, str]]()
    for mesh in _meshes(ranks, hosts):
        num_parts = ranks // mesh["tp"]
        try:
            inputs, results = (_part(given, num_parts) for given in (example_inputs, module_results))
            plans.append(find_plan(model, mesh, inputs, module_results=results, **options))
        except ParallelizeError as error:
            refused.append((",".join(f"{name}={size}" for name, size in mesh.items()), str(error)))
    if not plans:
        raise ParallelizeError(f"no mesh of {ranks} ranks has a plan: " + "; ".join(map(": ".join, refused)))
    plans.sort(key=lambda plan: plan.step.key(objective))
    best, given = plans[0], arguments(_part(example_inputs, plans[0].mesh.num_parts))
    slower = [
        (
            name,
            predicted_step(
                *(model, given, best.mesh, best.laid_out, prices._replace(costs=costs), best.rank),
                train=train,
                optimizer_tensors=OPTIMIZER_TENSORS[optimizer],
            ),
        )
        for name, costs in _slower(prices.costs, hosts)
    ]
    return FoundMesh(objective, tuple(plans), tuple(refused), tuple(slower))


def _meshes(ranks: int, hosts: int) -> list[dict[str, int]]:
    """Meshes of so many ranks: of two axes, and with copies on every host where shards can lie inside of it.

    >>> _meshes(4, 2)
    [{'dp': 4, 'tp': 1}, {'replicate': 2, 'dp': 2, 'tp': 1}, {'dp': 2, 'tp': 2}, {'dp': 1, 'tp': 4}]
    """
    found = []
    for tensor in (it for it in range(1, ranks + 1) if ranks % it == 0):
        found.append({"dp": ranks // tensor, "tp": tensor})
        inside = ranks // hosts // tensor
        if hosts > 1 and inside > 1 and inside * tensor * hosts == ranks:
            found.append({"replicate": hosts, "dp": inside, "tp": tensor})
    return found


def _slower(costs: CostTable, hosts: int) -> list[tuple[str, CostTable]]:
    """Cost tables in which one of the links that messages take has half the bandwidth."""
    found = [("host", replace(costs, host=_half(costs.host)))]
    return [*found, ("network", replace(costs, network=_half(costs.network)))] if hosts > 1 else found


def _half(link: Link) -> Link:
    return replace(link, bandwidth=link.bandwidth / 2)


def _part(inputs: Any, num_parts: int) -> Any:
    """The first and longest of so many parts of each tensor along dim 0; ParallelizeError where one is too short."""
    plain = dict(inputs) if isinstance(inputs, Mapping) else inputs
    lengths = {leaf.shape[0] for leaf in tree_leaves(plain) if isinstance(leaf, torch.Tensor) and leaf.ndim}
    if num_parts > 1 and lengths and min(lengths) < num_parts:
        raise ParallelizeError(f"example_inputs of length {min(lengths)} on dim 0 are no parts for {num_parts} ranks")

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        return value[: -(-value.shape[0] // num_parts)]

    return tree_map(cut, plain)
