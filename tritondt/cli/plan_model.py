"""`plan-model`: the layout of a model over a mesh, found and priced without memory or other processes."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from html import escape
from math import prod
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from tritondt.cli.html_page import page, table
from tritondt.cli.outputs import ProgressLine, is_first
from tritondt.cli.plan_check import check, check_text, differences, refuse_unheld, refuse_unrunnable
from tritondt.errors import ParallelizeError
from tritondt.found_plan import FoundMesh, FoundPlan, find_mesh, find_plan
from tritondt.found_plan.step_cost import closing_lines, part_rows, recomputed_rows, traffic_rows


def plan_model(
    factory: str | None,
    config: Path | None,
    mesh: dict[str, int] | None,
    ranks: int | None,
    memory: int | None,
    device: str,
    ranks_per_host: int,
    objective: str,
    optimizer: str,
    batch: int,
    sequence: int,
    dtype: str,
    html: str | None,
    is_checked: bool,
    steps: int,
    seconds: float,
    as_json: bool,
) -> None:
    """Prints the layout that is found for a model, and writes the page and runs the steps that were asked for."""
    if (factory is None) == (config is None):
        raise click.UsageError("give MODULE:FACTORY or --config FILE, one of them")
    if (mesh is None) == (ranks is None):
        raise click.UsageError("give --mesh or --ranks, one of them")
    if is_checked:
        refuse_unrunnable(prod(mesh.values()) if mesh is not None else ranks or 0, device)
    with ProgressLine() as progress:
        progress.tell("making the model")
        source = Source(factory, config, batch, sequence, dtype)
        model, inputs = source("meta")
        if is_checked:
            num_ranks = prod(mesh.values()) if mesh is not None else ranks or 0
            whole = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
            refuse_unheld(num_ranks, whole, "the whole model, before it is laid out", device)
        progress.tell("recording the model, and trying its parts")
        found: FoundPlan | FoundMesh
        options: dict[str, Any] = {"memory_bytes": memory, "objective": objective, "optimizer": optimizer}
        options["device_type"] = device
        if mesh is not None:
            found = find_plan(model, mesh, inputs, ranks_per_host=ranks_per_host, **options)
        else:
            assert ranks is not None, "one of both was given"
            hosts = -(-ranks // ranks_per_host)
            found = find_mesh(model, ranks, inputs, hosts=hosts, **options)
    if html is not None and is_first():
        write_page(Path(html), found)
    if is_checked:
        plan = found if isinstance(found, FoundPlan) else found.best
        refuse_unheld(plan.mesh.num_ranks, plan.step.memory.most, "a step", device)
        _check(plan, source, device, optimizer, steps, seconds, as_json)
    elif is_first():
        click.echo(found.to_json() if as_json else str(found))


def _check(
    plan: FoundPlan, source: Source, device: str, optimizer: str, num_steps: int, budget_s: float, as_json: bool
) -> None:
    """Runs steps of a plan, and prints it with what they took; ClickException for bytes that were not predicted."""
    found = check(source, plan, device, optimizer, num_steps, budget_s)
    if found is None:
        return
    of_all, num_steps = found.of_all, found.num_steps
    if as_json:
        ranks = [{name: asdict(phase) for name, phase in phases.items()} for phases in of_all]
        click.echo(json.dumps({"plan": json.loads(plan.to_json()), "steps": num_steps, "ranks": ranks}))
    else:
        click.echo(f"{plan}\n\n{check_text(of_all, num_steps)}")
    if others := differences(of_all):
        raise click.ClickException("; ".join(others))


@dataclass(frozen=True)
class Source:
    """Where a model and its example inputs come from, which it makes on a device."""

    factory: str | None
    config: Path | None
    batch: int
    sequence: int
    dtype: str

    def __call__(self, device: str) -> tuple[nn.Module, Any]:
        """The model and its example inputs."""
        if self.factory is not None:
            return _of_factory(self.factory, device)
        return _of_config(self.config, self.batch, self.sequence, self.dtype, device)


def _of_factory(name: str, device: str) -> tuple[nn.Module, Any]:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise click.BadParameter(f"{name!r} is no MODULE:FACTORY, as mymodels.llama:make")
    # As `python -m` has it: programs beside the caller are found.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise click.BadParameter(f"{name!r} was not found: {error}") from error
    if not callable(made):
        raise click.BadParameter(f"{name!r} is a {type(made).__name__}; allowed is a function without arguments")
    with torch.device(device):
        found = made()
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], torch.nn.Module)):
        raise ParallelizeError(f"{name} returned a {type(found).__name__}; allowed is a pair: a model, example inputs")
    return found


def _of_config(path: Path | None, batch: int, sequence: int, dtype: str, device: str) -> tuple[nn.Module, Any]:
    assert path is not None, "a file was given where no factory was"
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise click.UsageError("--config needs transformers: pip install transformers") from error
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise click.BadParameter(f"{path} is no JSON ({error}); allowed is a config.json of a model") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise click.BadParameter(f"{path} has no model_type; allowed is a config.json of a model of transformers")
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise click.BadParameter(f"{dtype!r} is no dtype of torch, as bfloat16")
    names = fields.get("architectures") or []
    try:
        configuration = transformers.AutoConfig.for_model(**fields)
        with torch.device(device):
            if names and hasattr(transformers, names[0]):
                model = getattr(transformers, names[0])(configuration)
            else:
                model = transformers.AutoModelForCausalLM.from_config(configuration)
    except _refusals_of_fields() as error:
        told = str(error.__cause__ or error).splitlines()[0].partition(" Should contain")[0]
        raise click.BadParameter(
            f"transformers {transformers.__version__} makes no model of {path}: {told} Allowed is a config.json with a "
            "model_type that it knows, and a class of it in architectures"
        ) from error
    inputs: dict[str, Any] = {"input_ids": torch.zeros(batch, sequence, dtype=torch.long, device=device)}
    if getattr(configuration, "use_cache", False):
        inputs["use_cache"] = False
    return model.to(getattr(torch, dtype)), inputs


def _refusals_of_fields() -> tuple[type[Exception], ...]:
    """Errors of configurations whose fields are no numbers, or do not fit each other; the last from transformers 5."""
    found = getattr(importlib.import_module("huggingface_hub.errors"), "StrictDataclassError", ValueError)
    return ValueError, TypeError, found


def write_page(path: Path, found: FoundPlan | FoundMesh) -> None:
    """Writes a page that asks no network."""
    if isinstance(found, FoundPlan):
        path.write_text(page(f"a step of rank {found.rank} of {found.mesh}", _of_plan(found)), encoding="utf-8")
        return
    head, *rows = found.rows()
    body = [table(head, rows), *_paragraphs(f"{mesh}: {why}" for mesh, why in found.refused)]
    body += [f"<h2>{escape(str(found.best.mesh))}</h2>", *_of_plan(found.best)]
    path.write_text(page(f"least {found.objective} of a rank", body), encoding="utf-8")


def _of_plan(plan: FoundPlan) -> list[str]:
    body = [f"<pre>{escape(plan.code)}</pre>"]
    if plan.parts:
        head, *rows = part_rows(plan.parts)
        body.append(table(head, rows))
    if plan.recomputed:
        head, *rows = recomputed_rows(plan.recomputed)
        body.append(table(head, rows))
    head, *rows = traffic_rows(plan.step)
    closing = closing_lines(plan.step, plan.notes, is_exact=plan.is_exact)
    return [*body, "<h3>whole step</h3>", table(head, rows), *_paragraphs(closing)]


def _paragraphs(lines: Iterable[str]) -> list[str]:
    return [f"<p>{escape(line)}</p>" for line in lines]
