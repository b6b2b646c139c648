"""The benchmark against torch's styles on a tiny model: same losses, and a report that can be read."""

import importlib
import json

import pytest
import torch
from click.testing import CliRunner

TINY = ("--ranks", "2", "--heads", "2", "--layers", "1", "--width", "8", "--seq", "8", "--batch", "2")


def run(*arguments: str):
    from benchmarks.parallel.tensor_parallel import tensor_parallel  # noqa: PLC0415  imports the extra `cli`

    return CliRunner().invoke(tensor_parallel, [*TINY, *arguments])


@pytest.mark.extended
def test_a_tiny_run_has_equal_losses_and_counts():
    from benchmarks.parallel.traffic import can_count_theirs  # noqa: PLC0415  imports the extra `cli`

    if not can_count_theirs():
        pytest.skip(f"the profiler of torch {torch.__version__} does not tell the dtypes of inputs; 2.12 does")
    result = run("--rounds", "2", "--seconds", "0", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["loss_max_abs_diff"] <= 1e-4
    assert found["time_ratio"] > 0
    # Three gathers and sums each way through the block, the table, positions, scores; ours adds gradients in one go.
    calls = found["torch"]["calls_per_step"]
    assert calls["all_gather_into_tensor"] == 2 + 2 + 2 + 2
    assert calls["reduce_scatter_tensor"] == 2 + 2 + 2 + 1
    assert found["tritondt"]["calls_per_step"]["(S1) -> (R)"] == 6
    assert found["bytes_ratio"] <= 1.05


@pytest.mark.parametrize("command", ["tensor_parallel", "fully_sharded"])
def test_the_loopback_counter_is_read_where_messages_cross_it(command, monkeypatch):
    module = importlib.import_module(f"benchmarks.parallel.{command}")
    monkeypatch.setenv("TRITONDT_TRANSPORT", "shared-memory")
    result = CliRunner().invoke(getattr(module, command), ["--loopback"])
    assert result.exit_code == 2
    assert (
        "--loopback measures the sockets; TRITONDT_TRANSPORT=shared-memory is set, allowed is sockets" in result.output
    )


def test_sizes_must_divide():
    result = run("--heads", "3")
    assert result.exit_code == 2
    assert "--heads 3 and --seq 8 must be multiples of --ranks 2" in result.output


@pytest.mark.extended
def test_found_plans_and_plans_by_hand_have_equal_losses():
    from benchmarks.parallel.found_plans import found_plans, kendall  # noqa: PLC0415  imports the extra `cli`

    sizes = ("--ranks", "4", "--heads", "3", "--layers", "2", "--width", "12", "--seq", "6", "--batch", "4")
    result = CliRunner().invoke(found_plans, [*sizes, "--rounds", "2", "--seconds", "0", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    names = [plan["name"] for plan in found["plans"]]
    assert names[0] == "found"
    assert {"Megatron", "Megatron, sequences cut", "fully_shard of blocks", "DistributedDataParallel"} < set(names)
    assert found["loss_max_abs_diff"] <= 1e-4
    assert all(plan["counted_bytes"] == plan["received_bytes"] for plan in found["plans"])
    assert found["plans"][0]["predicted_s"] <= 1.001 * min(plan["predicted_s"] for plan in found["plans"][:-1])
    assert kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(2 / 3)


@pytest.mark.extended
def test_fully_sharded_over_tensor_parallel_trains_as_torch_does():
    from benchmarks.parallel.fully_sharded import fully_sharded  # noqa: PLC0415  imports the extra `cli`

    sizes = ("--ranks", "4", "--tensor", "2", "--heads", "2", "--layers", "1", "--width", "8", "--seq", "8")
    result = CliRunner().invoke(fully_sharded, [*sizes, "--batch", "4", "--rounds", "2", "--seconds", "0", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert (found["tensor"], found["loopback"]) == (2, [])
    assert found["loss_max_abs_diff"] <= 1e-4
    assert found["tritondt"]["sent_bytes_per_step"] > 0


def test_ranks_must_be_multiples_of_those_that_share_tensors():
    from benchmarks.parallel.fully_sharded import fully_sharded  # noqa: PLC0415  imports the extra `cli`

    result = CliRunner().invoke(fully_sharded, ["--ranks", "4", "--tensor", "3"])
    assert result.exit_code == 2
    assert "--ranks 4 and --heads 8 must be multiples of --tensor 3" in result.output
