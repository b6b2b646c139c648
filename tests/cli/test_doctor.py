"""`python -m tritondt doctor`: the self-test says OK, or what failed."""

import json

import torch
from click.testing import CliRunner

import tritondt as T
from tritondt.cli import doctor
from tritondt.cli.launch import RankFailedError
from tritondt.cli.main import main


def test_the_exchange_is_ok_here():
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["exchange"] == "OK"
    assert found["tritondt"] == T.__version__
    assert found["torch"] == torch.__version__
    assert "_C" in found["extension"]


def test_a_failing_exchange_is_told_and_ends_with_status_1(monkeypatch):
    def fail(*_, **__):
        raise RankFailedError("rank 1 of 2 failed:\nno route to host")

    monkeypatch.setattr(doctor, "run_on_ranks", fail)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "no route to host" in result.output
