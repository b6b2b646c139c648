"""`python -m tritondt plan-model`: plans of factories and of configurations, and what it refuses."""

import json
import re
from html import escape
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from tritondt.cli.main import main
from tritondt.cli.plan_check import Moved, Phase, differences
from tritondt.found_plan import FoundPlan

HERE = "tests.cli.test_plan_model"


def make() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    assert all(parameter.is_meta for parameter in model.parameters())
    return model, torch.zeros(4, 8)


def make_checked() -> tuple[nn.Module, torch.Tensor]:
    """Three layers whose features no two ranks share evenly, on whichever device is asked for."""
    return nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.Linear(33, 7)), torch.ones(3, 7)


def make_huge() -> tuple[nn.Module, torch.Tensor]:
    """A layer of 4 TB."""
    return nn.Linear(1000, 10**9), torch.zeros(1, 1000)


def make_nothing() -> None:
    """A factory that has forgotten to return."""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan-model", *arguments])


def test_a_plan_is_printed_as_code_and_table_and_as_json_that_reads_back():
    arguments = (f"{HERE}:make", "--mesh", "dp=2,tp=2", "--objective", "memory")
    text, plain = run(*arguments), run(*arguments, "--json")
    assert text.exit_code == plain.exit_code == 0, text.output + plain.output
    plan = FoundPlan.from_json(plain.stdout)
    assert text.stdout == f"{plan}\n"
    assert "'0': ColwiseParallel(balanced=True),\n    '2': RowwiseParallel(balanced=True),\n" in text.stdout
    assert 'fully_shard(model, mesh=mesh["dp"])' in text.stdout


def test_all_meshes_of_so_many_ranks_are_compared():
    found = run(f"{HERE}:make", "--ranks", "4", "--ranks-per-host", "2", "--objective", "bytes")
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert lines[0] == "least bytes of a rank"
    assert [line.split()[0] for line in lines[2:6]] == ["dp=1,tp=4", "dp=2,tp=2", "replicate=2,dp=2,tp=1", "dp=4,tp=1"]
    assert [line.split("  ")[0] for line in lines[6:8]] == [
        "dp=1,tp=4, host half as fast",
        "dp=1,tp=4, network half as fast",
    ]


def test_the_page_has_the_program_and_the_tables_of_a_plan_and_of_all_meshes(tmp_path: Path):
    path, arguments = tmp_path / "plan.html", (f"{HERE}:make", "--objective", "memory", "--html")
    text = run(*arguments, str(path), "--mesh", "dp=2,tp=2")
    assert text.exit_code == 0, text.output
    written = path.read_text()
    assert "<h1>a step of rank 0 of dp=2,tp=2</h1>" in written
    assert escape(text.stdout.partition("\n\n")[0]) in written
    cells = re.findall("<td>(.*?)</td>", written)
    assert cells[:3] == ["0", "cut 32 features", "1"]
    assert escape(text.stdout.splitlines()[-1]) in written
    assert "http" not in written
    assert run(*arguments, str(path), "--ranks", "4").exit_code == 0
    cells = re.findall("<td>(.*?)</td>", path.read_text())
    assert {"dp=1,tp=4", "dp=2,tp=2", "dp=4,tp=1", "dp=1,tp=4, host half as fast"} <= set(cells)
    refused = run(*arguments, str(tmp_path / "none" / "plan.html"), "--mesh", "tp=2")
    assert refused.exit_code == 2
    assert "plan.html cannot be written: No such file or directory" in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--mesh", "tp=2"), "give MODULE:FACTORY or --config FILE, one of them"),
        ((f"{HERE}:make",), "give --mesh or --ranks, one of them"),
        ((f"{HERE}:make", "--mesh", "tp"), "'tp' is no list of axes such as dp=4,tp=8"),
        ((f"{HERE}:made", "--mesh", "tp=2"), f"module '{HERE}' has no attribute 'made'"),
        ((f"{HERE}:make", "--mesh", "tp=2,tp=4"), "'tp=2,tp=4' has two axes of one name; allowed is a list of axes"),
        ((f"{HERE}:HERE", "--mesh", "tp=2"), f"'{HERE}:HERE' is a str; allowed is a function without arguments"),
        (("make", "--mesh", "tp=2"), "'make' is no MODULE:FACTORY, as mymodels.llama:make"),
        ((f"{HERE}:make_nothing", "--mesh", "tp=2"), "returned a NoneType; allowed is a pair: a model, example inputs"),
        ((f"{HERE}:make", "--mesh", "pp=2"), "nothing can use the axis 'pp' of 2 ranks"),
        (
            (f"{HERE}:make", "--mesh", "tp=2", "--memory", "1K"),
            "no plan over tp=2 keeps a rank within memory_bytes=1,024",
        ),
        ((f"{HERE}:make", "--ranks", "9", "--memory", "1"), "no mesh of 9 ranks has a plan: dp=9,tp=1: example_inputs"),
        ((f"{HERE}:make", "--mesh", "dp=4096", "--check"), "--ranks 4096: at most"),
        (
            (f"{HERE}:make_huge", "--mesh", "dp=2", "--check"),
            "each of which needs 4,004.0 GB for the whole model, before it is laid out, and",
        ),
        ((f"{HERE}:make", "--ranks", "9"), "find_mesh got ranks=9 on hosts=2; allowed are as many ranks on each host"),
    ],
)
def test_refusals(arguments: tuple[str, ...], sentence: str):
    per_host = ("--ranks-per-host", "9") if "1" in arguments else ()
    found = run(*arguments, *per_host)
    assert found.exit_code != 0
    assert sentence in " ".join(found.output.replace("│", " ").split()), found.output


@pytest.mark.extended
def test_steps_are_run_on_processes_and_move_what_was_predicted(tmp_path: Path):
    # After the first step no time is left, and no second begins.
    options = ("--mesh", "dp=2,tp=2", "--objective", "memory", "--check", "--seconds", "0", "--json")
    found = run(f"{HERE}:make_checked", *options)
    assert found.exit_code == 0, found.output
    checked = json.loads(found.stdout)
    assert FoundPlan.from_json(json.dumps(checked["plan"])).laid_out.styles
    assert len(checked["ranks"]) == 4
    assert checked["steps"] == 1
    for phases in checked["ranks"]:
        assert list(phases) == ["forward", "backward", "optimizer"]
        for phase in phases.values():
            counts = [
                [phase[side][name] for name in ("sent_bytes", "received_bytes", "messages")]
                for side in ("moved", "predicted")
            ]
            assert counts[0] == counts[1]
            assert phase["seconds"] > 0
        assert phases["forward"]["moved"]["received_bytes"] > 0
        assert phases["backward"]["moved"]["received_bytes"] > 0
        assert all(phase["predicted_seconds"] > 0 for phase in phases.values())


def test_bytes_that_were_not_predicted_are_told_by_rank_and_phase():
    phases = [{"forward": Phase(seconds=2e-3, moved=Moved(8, 8, 1), predicted=Moved(8, 8, 1))} for _ in range(2)]
    phases[1]["forward"].moved = Moved(8, 12, 1)
    assert differences(phases) == [
        "forward of rank 1 moved (sent, received, messages) (8, 12, 1), and (8, 8, 1) were predicted"
    ]


@pytest.mark.extended
def test_a_configuration_of_transformers_takes_no_weights(tmp_path: Path):
    pytest.importorskip("transformers")
    fields = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "vocab_size": 100,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    found = run("--config", str(path), "--mesh", "tp=4", "--sequence", "8", "--objective", "memory", "--json")
    assert found.exit_code == 0, found.output
    styles = dict(FoundPlan.from_json(found.stdout).laid_out.styles)
    assert styles["model.layers.*.self_attn.k_proj"].code() == "KeyValueParallel(unit=16)"
    for text, sentence in [
        ("{}", "has no model_type; allowed is a config.json"),
        ("no JSON", "is no JSON (Expecting value: line 1 column 1 (char 0)); allowed is a config.json of a model"),
        (
            '{"model_type": "nonsense"}',
            "Unrecognized model identifier: nonsense. Allowed is a config.json with a",
        ),
        (
            json.dumps({**fields, "num_attention_heads": 7}),
            "The hidden size (96) is not a multiple of the number of attention heads (7). Allowed is a config.json",
        ),
    ]:
        path.write_text(text)
        refused = run("--config", str(path), "--mesh", "tp=4")
        assert refused.exit_code == 2
        assert sentence in " ".join(refused.output.split())
