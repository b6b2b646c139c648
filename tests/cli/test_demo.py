"""The demo end to end on small models: the same losses, every byte counted, and failures that are seen."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result
from rich.console import Console

import tritondt as T
from benchmarks.parallel.split_gpt import make_split_gpt
from tritondt.cli.demo import command, data, model
from tritondt.cli.demo.experiment import (
    STYLES,
    DTensorStyle,
    Experiment,
    Flow,
    Kind,
    LocalStyle,
    RanksRun,
    Step,
    merge_ranks,
    train,
)
from tritondt.cli.demo.laid_out import cut_of
from tritondt.cli.demo.model import GPT, make_gpt, make_plan
from tritondt.cli.demo.report import Comparison, RunProgress, shares, summarise
from tritondt.cli.main import main
from tritondt.parallel import ParallelStyle

TINY = ("--layers", "2", "--heads", "3", "--width", "24", "--seq", "17", "--batch", "3", "--steps", "4")


def run_demo(out: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["demo", "--out", str(out), *TINY, *arguments])


def expected_bytes(summary):
    """Four boundaries a layer, there and back, and the replicated gradients and the loss summed on all ranks.

    So is the square of the sharded gradients' norm, or with modules the norm of each, in float64. A sum that is short
    goes whole to all of the ranks, which share memory, in one exchange, where two would move it twice.
    """
    others = summary["ranks"] - 1
    activation = summary["batch"] * summary["sequence"] * summary["width"]
    sizes = model.Model(*(summary[name] for name in ("heads", "layers", "width", "sequence")))
    weights = GPT(sizes).named_parameters()
    replicated = sum(weight.numel() for name, weight in weights if cut_of(sizes, name).is_replicate())
    single = 2 if summary["style"] == "local" else 1 + 2 * 6 * summary["layers"]
    return 4 * others * (8 * summary["layers"] * activation + summary["ranks"] * (replicated + single))


ALL_HAVE_HEADS = (3, 3, 17, {"heads": (1, 1, 1), "hidden": (33, 33, 32), "positions": (6, 6, 5)})
# A rank without heads and without a part of the sequence.
ONE_HAS_NONE = (3, 2, 4, {"heads": (1, 1, 0), "hidden": (33, 33, 32), "positions": (2, 2, 0)})
ONE_RANK = (1, 3, 17, {"heads": (3,), "hidden": (98,), "positions": (17,)})


@pytest.mark.parametrize(
    ("num_ranks", "heads", "sequence", "expected_shares", "style"),
    [
        pytest.param(*sizes, style, marks=marks)
        for marks, cases in (
            (pytest.mark.extended, [(ALL_HAVE_HEADS, STYLES["local"]), (ONE_HAS_NONE, STYLES["dtensor"])]),
            (pytest.mark.soak, [(ALL_HAVE_HEADS, STYLES["dtensor"]), (ONE_HAS_NONE, STYLES["local"])]),
            (pytest.mark.soak, [(ONE_RANK, style) for style in STYLES.values()]),
        )
        for sizes, style in cases
    ],
)
def test_ranks_and_one_process_have_the_same_losses(num_ranks, heads, sequence, expected_shares, style):
    sizes = model.Model(heads=heads, layers=2, width=24, sequence=sequence)
    experiment = Experiment(sizes, steps=4, batch=3, seed=0)
    assert shares(sizes, num_ranks) == expected_shares
    on_ranks = command.train_on_new_processes(experiment, style, num_ranks, Console(quiet=True))
    single = train(experiment, style.on_one_process(experiment))
    comparison = Comparison(experiment, style.name, num_ranks, on_ranks, single)
    assert comparison.agrees
    assert comparison.loss_max_abs_diff <= 1e-5
    summary = summarise(comparison)
    assert summary["comm_bytes_per_step"] == expected_bytes(summary)


@pytest.mark.parametrize("style", [pytest.param("dtensor", marks=pytest.mark.soak), "local"])
def test_a_run_prints_and_writes_its_summary(tmp_path, style):
    # The first style is the default.
    result = run_demo(tmp_path, "--ranks", "2", "--json", *(() if style == "dtensor" else ("--style", style)))
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary["style"] == style
    assert summary["steps"] == len(summary["losses"]) == len(summary["losses_single"]) == 4
    assert summary["loss_max_abs_diff"] <= 1e-5
    torch.testing.assert_close(summary["final_loss"], summary["final_loss_single"], rtol=0, atol=1e-5)
    assert summary["tokens_per_s"] > 0
    assert summary["tokens_per_s_single"] > 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    kinds = [(row["phase"], row["source"], row["target"]) for row in summary["redistributions"]]
    for phase in ("forward", "backward"):
        assert (phase, "(S1)", "(R)") in kinds
        assert (phase, "(P(sum))", "(S1)") in kinds
    assert all(f"{source} -> {target}" in result.stderr for _, source, target in kinds)
    sums = ("(P(sum))", "(R)")
    by_boundary = [
        row
        for row in summary["redistributions"]
        if row["phase"] == "backward" and (row["source"], row["target"]) != sums
    ]
    assert [(row["calls_per_step"], row["messages_per_step"]) for row in by_boundary] == [(4, 8), (4, 8)]


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(each, marks=pytest.mark.extended if each == "fsdp+tp" else pytest.mark.soak)
        for each in ("fsdp", "fsdp+tp", "hsdp+tp", "ddp+tp")
    ],
)
def test_every_grid_of_ranks_has_the_losses_of_one_process(parallel):
    # Heads, batch and positions that do not divide.
    experiment = Experiment(model.Model(heads=3, layers=2, width=24, sequence=17), steps=4, batch=5, seed=0)
    style = DTensorStyle(parallel=parallel)
    on_ranks = command.train_on_new_processes(experiment, style, 4, Console(quiet=True))
    single = train(experiment, style.on_one_process(experiment))
    comparison = Comparison(experiment, style.name, 4, on_ranks, single, parallel, style.num_tensor_ranks(4))
    assert comparison.loss_max_abs_diff <= 1e-5
    assert summarise(comparison)["parallel"] == parallel


# 6 experts, 5 sequences or 17 positions on 4 ranks, and on 8, of which some have no experts.
@pytest.mark.parametrize(
    ("parallel", "num_ranks", "expected"),
    [
        pytest.param("ep", 4, {"experts": (2, 2, 1, 1), "positions": (17,)}, marks=pytest.mark.extended),
        pytest.param("cp", 4, {"positions": (5, 4, 4, 4), "heads": (3,)}, marks=pytest.mark.soak),
        pytest.param("ep", 8, {"experts": (1, 1, 1, 1, 1, 1, 0, 0)}, marks=pytest.mark.soak),
        pytest.param("cp", 8, {"positions": (3, 2, 2, 2, 2, 2, 2, 2)}, marks=pytest.mark.soak),
    ],
)
def test_ranks_with_tokens_of_their_own_have_the_losses_of_one_process(parallel, num_ranks, expected):
    batch = 9 if num_ranks == 8 else 5
    sizes = model.Model(heads=3, layers=2, width=24, sequence=17, experts=6 if parallel == "ep" else 0)
    experiment = Experiment(sizes, steps=3, batch=batch, seed=0)
    style = DTensorStyle(parallel=parallel)
    on_ranks = command.train_on_new_processes(experiment, style, num_ranks, Console(quiet=True))
    single = train(experiment, style.on_one_process(experiment))
    comparison = Comparison(experiment, style.name, num_ranks, on_ranks, single, parallel)
    assert comparison.loss_max_abs_diff <= 1e-5
    summary = summarise(comparison)
    assert expected.items() <= summary["shares"].items()
    rows = [row for row in summary["redistributions"] if row["source"] == "rows by source"]
    # Tokens go to their experts and come back, in both layers.
    assert [row["calls_per_step"] for row in rows] == ([4, 4] if parallel == "ep" else [])


def one_sum_is_wrong(local, source, target, *, grad_placements=None):
    """`T.redistribute`, but the sums that rank 1 gets after a matmul are 1 % too large."""
    moved = T.redistribute(local, source, target, grad_placements=grad_placements)
    is_wrong = source.placements[0].is_partial() and target.placements[0].is_shard() and dist.get_rank() == 1
    return moved * 1.01 if is_wrong else moved


class TooLarge(ParallelStyle):
    """What rank 1 gets of the module's output is 1 % too large."""

    def _apply(self, module, device_mesh):
        module.register_forward_hook(lambda _module, _args, output: output * (1 + 0.01 * dist.get_rank()))
        return module


def one_layer_is_wrong(sizes):
    return {**make_plan(sizes), "blocks.*.mlp": TooLarge()}


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(LocalStyle(redistribute=one_sum_is_wrong), marks=pytest.mark.extended),
        pytest.param(DTensorStyle(make_plan=one_layer_is_wrong), marks=pytest.mark.soak),
    ],
)
def test_one_wrong_collective_fails_the_check(tmp_path, monkeypatch, wrong):
    monkeypatch.setitem(STYLES, wrong.name, wrong)
    result = run_demo(tmp_path, "--ranks", "2", "--steps", "12", "--style", wrong.name)
    assert result.exit_code == 1
    assert "2 ranks and one process give different losses: at step" in result.output
    assert "allowed is 1e-04" in result.output
    assert json.loads((tmp_path / "summary.json").read_text())["loss_max_abs_diff"] > 1e-4


def test_both_styles_start_from_the_same_weights_and_take_the_same_first_step():
    sizes = model.Model(heads=3, layers=2, width=24, sequence=17)
    experiment = Experiment(sizes, steps=1, batch=3, seed=1)
    first = [train(experiment, style.on_one_process(experiment))[0].loss for style in STYLES.values()]
    torch.testing.assert_close(first[0], first[1])
    weights = make_gpt(sizes, seed=1).get_parameter("blocks.1.attention.qkv.weight").detach()
    found = make_split_gpt(sizes, seed=1).get_parameter("blocks.1.attention.wk.weight").detach()
    torch.testing.assert_close(found, weights.unflatten(0, (3, -1))[1], rtol=0, atol=0)


def steps_of(*losses: float) -> tuple[Step, ...]:
    return tuple(Step(index, loss, 0.5) for index, loss in enumerate(losses))


@pytest.mark.parametrize(("loss", "agrees"), [(2.0, True), (2.0002, False), (math.nan, False), (math.inf, False)])
def test_a_loss_that_is_no_number_does_not_agree(loss, agrees):
    experiment = Experiment(model.Model(heads=1, layers=1, width=8, sequence=3), steps=2, batch=1, seed=0)
    on_ranks = RanksRun(steps_of(3.0, loss), (), 0.0, 0.0)
    comparison = Comparison(experiment, "local", 2, on_ranks, steps_of(3.0, 2.0))
    assert comparison.agrees is agrees
    if not agrees:
        assert "at step 1" in comparison.disagreement()


def test_losses_fall():
    experiment = Experiment(model.Model(heads=2, layers=1, width=32, sequence=31), steps=30, batch=8, seed=0)
    losses = [step.loss for step in train(experiment, LocalStyle().on_one_process(experiment))]
    assert losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert losses[-1] < losses[0] - 1


def test_batches_are_the_text_and_what_follows():
    text = data.corpus()
    starts = data.batch_starts(len(text), steps=2, batch=3, sequence=5, seed=0)
    tokens, following = data.read_batch(text, starts[1], slice(0, 5))
    torch.testing.assert_close(tokens[:, 1:], following[:, :-1], rtol=0, atol=0)
    part, _ = data.read_batch(text, starts[1], slice(2, 5))
    torch.testing.assert_close(part, tokens[:, 2:], rtol=0, atol=0)
    nothing, _ = data.read_batch(text, starts[1], slice(5, 5))
    assert nothing.shape == (3, 0)
    whole, last = data.read_batch(
        text, data.batch_starts(len(text), steps=1, batch=1, sequence=len(text) - 1, seed=0)[0], slice(0, len(text) - 1)
    )
    assert (whole[0, 0], last[0, -1]) == (text[0], text[-1])


def test_ranks_are_merged_by_kind():
    gather, scatter = Kind("forward", "(S1)", "(R)"), Kind("backward", "(P(sum))", "(S1)")
    first = (Flow(scatter, calls=2, messages=2, sent_bytes=8, seconds=1.0),)
    second = (Flow(scatter, 2, 1, 4, 3.0), Flow(gather, 2, 1, 4, 1.0))
    assert merge_ranks([first, second]) == (Flow(gather, 2, 1, 4, 0.5), Flow(scatter, 2, 3, 12, 2.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--heads", "5"), "--width 24 is no multiple of --heads 5"),
        (("--seq", "100000000"), "--seq 100000000 is longer than the text"),
        (("--ranks", "0"), "0 is not in the range x>=1"),
        (("--ranks", "100000"), "--ranks 100000: at most"),
        (("--ranks", "3", "--parallel", "fsdp+tp"), "takes a number of ranks that is a multiple of 2, got 3"),
        (("--ranks", "4", "--parallel", "fsdp"), "--batch 3 is less than the 4 ranks that share it"),
        (("--style", "local", "--parallel", "fsdp"), "--parallel fsdp is there with --style dtensor only"),
        (("--ranks", "4", "--parallel", "ep"), "--batch 3 is less than the 4 ranks that share it with --parallel ep"),
        (("--experts", "0", "--parallel", "ep"), "0 is not in the range x>=1"),
        (("--out", "/dev/null/results"), "/dev/null/results cannot be written: /dev/null is no folder"),
        (("--out", "/proc/self/results"), "/proc/self/results cannot be written: /proc/self is read-only to this user"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path, arguments, message):
    result = run_demo(tmp_path, *arguments)
    assert result.exit_code == 2
    assert message in result.output


def start_demo(tmp_path: Path) -> "subprocess.Popen[str]":
    """A demo that would take long, in a process group of its own, once it has done a step."""
    arguments = [*TINY, "--steps", "100000", "--ranks", "2", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tritondt", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell that starts this in the background has it ignored, and Python then leaves it so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "step" in line:
            return process
    raise AssertionError("the demo ended before its first step")


def is_group_empty(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.extended
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_no_process_is_left_behind(tmp_path, number, status):
    process = start_demo(tmp_path)
    process.send_signal(number)
    assert process.wait(timeout=150) == status
    assert process.stdout is not None
    process.stdout.close()
    deadline = time.monotonic() + 60
    while not is_group_empty(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_group_empty(process.pid)


@pytest.mark.extended
@pytest.mark.slow
def test_under_torchrun(tmp_path):
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--standalone",
            "-m",
            "tritondt",
            "demo",
            *TINY,
            "--out",
            str(tmp_path),
        ],
        check=True,
        timeout=250,
        capture_output=True,
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ranks"] == 2
    assert summary["loss_max_abs_diff"] <= 1e-5


def test_progress_is_a_line_every_ten_steps(capsys):
    experiment = Experiment(model.Model(heads=1, layers=1, width=8, sequence=3), steps=12, batch=2, seed=0)
    console = Console(width=100, force_terminal=False)
    with RunProgress(console, "2 ranks", experiment) as show:
        for step in steps_of(*[2.0] * 12):
            show(step)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines] == ["1/12", "10/12", "12/12"]
    assert "loss 2.0000" in lines[-1]
    assert "12 tokens/s" in lines[-1]
