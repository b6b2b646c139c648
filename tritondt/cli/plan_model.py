"""`plan-model`: the layout of a model over a mesh, found and priced without memory or other processes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tritondt.cli.bench.collective.sizes import parse_bytes
from tritondt.cli.outputs import refuse_unwritable
from tritondt.cli.progress import ProgressLine
from tritondt.errors import ParallelizeError

if TYPE_CHECKING:
    from torch import nn


def _axes(_: click.Context, __: click.Parameter, text: str | None) -> dict[str, int] | None:
    if text is None:
        return None
    try:
        pairs = [(name.strip(), int(size)) for name, size in (item.split("=") for item in text.split(","))]
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of axes such as dp=4,tp=8") from None
    if len(dict(pairs)) < len(pairs):
        raise click.BadParameter(f"{text!r} has two axes of one name; allowed is a list of axes such as dp=4,tp=8")
    return dict(pairs)


def _memory(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


def _writable(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    if path is not None:
        refuse_unwritable(path)
    return path


@click.command("plan-model")
@click.argument("factory", metavar="MODULE:FACTORY", required=False)
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A config.json instead.")
@click.option("--mesh", callback=_axes, metavar="NAME=INT,...", help="Ranks on the axes dp and tp.")
@click.option("--ranks", type=click.IntRange(1), help="Compare all meshes of so many ranks instead.")
@click.option("--memory", callback=_memory, metavar="SIZE", help="Most memory of a rank, as 80G (of 1024 MB).")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Whose prices.")
@click.option(
    "--ranks-per-host", type=click.IntRange(1), default=8, show_default=True, help="Neighbouring ranks on each host."
)
@click.option(
    "--objective",
    type=click.Choice(["step time", "bytes", "memory"]),
    default="step time",
    show_default=True,
    help="What is to be least: predicted, or received or held by a rank.",
)
@click.option("--optimizer", default="adamw", show_default=True, help="adamw, adam, sgd or sgd with momentum.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences, with --config.")
@click.option("--sequence", type=click.IntRange(1), default=2048, show_default=True, help="Tokens, with --config.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of parameters, with --config.")
@click.option("--html", callback=_writable, metavar="FILE", help="Write a page with the program and the tables.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
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
    as_json: bool,
) -> None:
    """Find the layout of a model: styles, bytes, memory, predicted time.

    FACTORY is called without arguments, and returns the model and its example inputs: a tensor, a
    tuple or a dict of named ones. It runs on the device meta, so that nothing takes memory. With
    --mesh inputs are those of one rank of dp, with --ranks those of all. --config is the file of a
    model of Hugging Face transformers, without weights.

    \b
    tritondt plan-model --config config.json --mesh dp=8,tp=8 --device cuda --memory 80G
    """
    if (factory is None) == (config is None):
        raise click.UsageError("give MODULE:FACTORY or --config FILE, one of them")
    if (mesh is None) == (ranks is None):
        raise click.UsageError("give --mesh or --ranks, one of them")
    with ProgressLine() as progress:
        progress.tell("making the model")
        model, inputs = _of_factory(factory) if factory is not None else _of_config(config, batch, sequence, dtype)
        progress.tell("recording the model, and trying its parts")
        found_plan = importlib.import_module("tritondt.found_plan")
        options = {
            "memory_bytes": memory,
            "objective": objective,
            "optimizer": optimizer,
            "device_type": device,
        }
        if mesh is not None:
            found = found_plan.find_plan(model, mesh, inputs, ranks_per_host=ranks_per_host, **options)
        else:
            assert ranks is not None, "one of both was given"
            hosts = -(-ranks // ranks_per_host)
            found = found_plan.find_mesh(model, ranks, inputs, hosts=hosts, **options)
    if html is not None:
        importlib.import_module("tritondt.cli.plan_model_page").write_page(Path(html), found)
    click.echo(found.to_json() if as_json else str(found))


def _of_factory(name: str) -> tuple[nn.Module, Any]:
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
    torch = importlib.import_module("torch")
    with torch.device("meta"):
        found = made()
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], torch.nn.Module)):
        raise ParallelizeError(f"{name} returned a {type(found).__name__}; allowed is a pair: a model, example inputs")
    return found


def _of_config(path: Path | None, batch: int, sequence: int, dtype: str) -> tuple[nn.Module, Any]:
    assert path is not None, "a file was given where no factory was"
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise click.UsageError("--config needs transformers: pip install transformers") from error
    torch = importlib.import_module("torch")
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
        with torch.device("meta"):
            if names and hasattr(transformers, names[0]):
                model = getattr(transformers, names[0])(configuration)
            else:
                model = transformers.AutoModelForCausalLM.from_config(configuration)
    except ValueError as error:
        told = str(error).splitlines()[0].partition(" Should contain")[0]
        raise click.BadParameter(
            f"transformers {transformers.__version__} makes no model of {path}: {told} Allowed is a config.json with a "
            "model_type that it knows, and a class of it in architectures"
        ) from error
    with torch.device("meta"):
        inputs: dict[str, Any] = {"input_ids": torch.empty(batch, sequence, dtype=torch.long)}
    if getattr(configuration, "use_cache", False):
        inputs["use_cache"] = False
    return model.to(getattr(torch, dtype)), inputs
