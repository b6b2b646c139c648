"""`bench calibrate`: prices that are measured where it runs, in the form that TRITONDT_COSTS takes."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from tests.harness.nccl_on_host import backend_ranks
from tritondt.cli.bench.calibrate import Asked, Figures, group_prices, measure, prices_of
from tritondt.cli.launch import num_cores
from tritondt.cli.main import main
from tritondt.comm.process_world import default_costs
from tritondt.found_plan import find_plan
from tritondt.planning.collectives import collective_between
from tritondt.planning.cost import Link, step_cost
from tritondt.planning.plan import Step
from tritondt.planning.prices import CUDA, with_prices
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import Replicate, Shard

OPERATORS = 62
RATES = ("float64", "float32", "bfloat16", "float16")
PRICES = replace(CUDA, collective_launch_s=7e-6, collective_speedup=1.5)


def test_prices_of_figures():
    asked = Asked("cuda", 9, 1)
    found = prices_of(Figures(3e-6, 3e-6 + 1e-4, 5e-6, 5e-6 + 1e-4, 2e-3), asked)
    assert found["host"] == {"latency_s": 3e-6, "bandwidth": pytest.approx(((1 << 24) - 1024) / 1e-4)}
    assert found["copy_bandwidth"] == pytest.approx((1 << 26) / 1e-4)
    assert found["flop_rate"] == pytest.approx(2 * 8192**3 / 2e-3)
    assert found["launch_s"] == 5e-6
    assert prices_of(Figures(1.0, 1.0, 1.0, 1.0, 1.0), asked)["host"]["bandwidth"] > 0  # no line is none upwards


def test_rates_of_figures():
    asked, side = Asked("cpu", 9, 1), 1024
    rates = dict(zip(RATES, (5e10, 1e11, 4e11, 2e9), strict=True))
    times = {f"{name}_s": 2 * ((side // 2) ** 3 - (side // 8) ** 3) / rate for name, rate in rates.items()}
    times |= {"step_s": OPERATORS * 8e-6, "operators_s": 8 * (1 << 20) / 3e10, "exchange_s": 7e-5, "group_s": 2e-4}
    times["group_parameter_s"] = 3e-5
    figures = Figures(2e-5, 1e-3, 8e-6, 5e-3, 2e-2, **times)
    found = prices_of(figures, asked)
    assert found["host"]["latency_s"] == pytest.approx(1.2e-5)
    assert found["flop_rates"] == pytest.approx(rates, rel=1e-6)
    # A training step of the small model has so many operators.
    assert found["operator_s"] == pytest.approx(8e-6)
    assert found["operator_bandwidth"] == pytest.approx(3e10)
    of_exchanges = tuple(found[name] for name in ("exchange_s", "group_s", "group_parameter_s"))
    assert (*of_exchanges, found["is_measured"]) == (7e-5, 2e-4, 3e-5, True)
    # A step with one group takes no less for its parameters than noise lets it seem.
    assert group_prices((12 * 3e-4, 12), (2 * 2e-4, 2), 6) == (3e-4, 0.0)


def test_prices_of_collectives_are_those_that_a_plan_gets_back():
    """An all_gather that takes what the built-in prices predict for it is given these prices."""
    asked = Asked("cuda", 9, 1, 8, collectives=True)
    gathers = [
        step_cost(Step("exchange", rows, whole, collective=collective_between(rows, whole)), 1, PRICES).seconds
        for length in (8 * 1024, 1 << 24)
        for rows, whole in [[Layout((8,), (each,), (length,)) for each in (Shard(0), Replicate())]]
    ]
    small = PRICES.host.latency_s
    large = small + ((1 << 24) - 1024) / PRICES.host.bandwidth
    found = prices_of(Figures(small, large, 5e-6, 1e-3, 1e-2, *gathers), asked)
    # Where noise has a link look endless, the price is still one that is taken.
    noisy = prices_of(Figures(1e-3, 1e-3, 5e-6, 1e-3, 1e-2, 1e-3, 1.0), asked)
    assert with_prices({"cuda": PRICES}, json.dumps({"cuda": noisy}))["cuda"].collective_speedup == 1e-3
    assert found["collective_launch_s"] == pytest.approx(PRICES.collective_launch_s, abs=1e-8)
    assert found["collective_speedup"] == pytest.approx(PRICES.collective_speedup, rel=1e-3)
    table = with_prices({"cuda": PRICES}, json.dumps({"cuda": found}))["cuda"]
    assert table.collective_speedup == found["collective_speedup"]


def figures(rank):
    return measure(Asked("cpu", 2, 64, 2, collectives=True))


def test_collectives_are_measured_on_the_backend_that_the_group_has():
    with backend_ranks("nccl", 2) as started:
        for found in started.run(figures):
            assert min(found[:7]) > 0
            prices = prices_of(found, Asked("cuda", 2, 64, 2, collectives=True))
            assert prices["collective_launch_s"] >= 0
            assert prices["collective_speedup"] > 0


@pytest.mark.extended
def test_what_is_printed_is_what_the_environment_takes(monkeypatch, tmp_path):
    path = tmp_path / "prices.json"
    ended = CliRunner().invoke(main, ["bench", "calibrate", "-n", "2", "--shrink", "64", "--json", str(path)])
    assert ended.exit_code == 0, ended.output
    printed = ended.output.strip().splitlines()[-1]
    assert printed.startswith('export TRITONDT_COSTS=\'{"cpu": ')
    text = printed.partition("'")[2].removesuffix("'")
    assert json.loads(path.read_text())["prices"] == json.loads(text)
    before = default_costs(4)
    monkeypatch.setenv("TRITONDT_COSTS", text)
    found = default_costs(4)
    assert found["cuda"] == before["cuda"]
    prices = json.loads(text)["cpu"]
    assert found["cpu"].host == Link(**prices["host"], busy_share=1.0)
    for name in (
        "copy_bandwidth",
        "flop_rate",
        "launch_s",
        "operator_s",
        "operator_bandwidth",
        "exchange_s",
        "group_s",
        "group_parameter_s",
    ):
        assert getattr(found["cpu"], name) == prices[name] >= 0
    assert found["cpu"].rate("float64") == prices["flop_rates"]["float64"] > 0
    assert found["cpu"].cores_per_host == num_cores()
    # Plans without a world are made by them as well, and say so.
    plan = find_plan(torch.nn.Linear(4, 4), {"dp": 3 * num_cores()}, torch.ones(2, 4), ranks_per_host=3 * num_cores())
    assert plan.step.rates.startswith("rates measured: matmuls ")
    assert plan.step.rates.endswith("; 3 ranks take turns on a core")


def test_a_device_that_is_not_there_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    ended = CliRunner().invoke(main, ["bench", "calibrate", "--device", "cuda"])
    assert ended.exit_code == 1
    assert "prices on cuda were asked for" in ended.output
    assert "sees no CUDA device" in ended.output
