"""`bench calibrate`: prices that are measured where it runs, in the form that TRITONDT_COSTS takes."""

import json

import pytest
import torch
from click.testing import CliRunner

from tritondt.cli.bench.calibrate import Asked, Figures, prices_of
from tritondt.cli.main import main
from tritondt.comm.process_world import default_costs
from tritondt.planning.cost import Link


def test_prices_of_figures():
    asked = Asked("cuda", 9, 1)
    found = prices_of(Figures(3e-6, 3e-6 + 1e-4, 5e-6, 5e-6 + 1e-4, 2e-3), asked)
    assert found["host"] == {"latency_s": 3e-6, "bandwidth": pytest.approx(((1 << 24) - 1024) / 1e-4)}
    assert found["copy_bandwidth"] == pytest.approx((1 << 26) / 1e-4)
    assert found["flop_rate"] == pytest.approx(2 * 8192**3 / 2e-3)
    assert found["launch_s"] == 5e-6
    assert prices_of(Figures(1.0, 1.0, 1.0, 1.0, 1.0), asked)["host"]["bandwidth"] > 0  # no line is none upwards


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
    assert (found["cpu"].copy_bandwidth, found["cpu"].flop_rate) == (prices["copy_bandwidth"], prices["flop_rate"])


def test_a_device_that_is_not_there_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    ended = CliRunner().invoke(main, ["bench", "calibrate", "--device", "cuda"])
    assert ended.exit_code == 1
    assert "prices on cuda were asked for" in ended.output
    assert "sees no CUDA device" in ended.output
