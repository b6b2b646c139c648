"""`bench redistribute --against MODULE:FUNCTION`: a pack kernel of one's own is checked, timed and told apart."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from click.testing import CliRunner

import tritondt as T
from examples.own_pack import make
from tritondt.cli.bench import own_pack
from tritondt.cli.launch import run_on_ranks
from tritondt.cli.main import main
from tritondt.kernels.boxes import CopyBox
from tritondt.kernels.reference import copy_boxes
from tritondt.sharding.placement import parse_placements

OWN = "examples.own_pack:make"
COMMAND = ["bench", "redistribute", "--ranks", "2", "--sizes", "5x7", "-n", "3"]


def forgetful(boxes: Sequence[CopyBox]) -> Callable[[Sequence[int], Sequence[int]], None]:
    """A pack kernel that copies nothing."""
    return lambda sources, targets: None


def compare_on_rank(send: Callable[[object], None], pairs: tuple[str, ...]) -> None:
    """Redistributes by the engine and by an own kernel, twice, and compares; a rank of a process of its own."""
    for pair in pairs:
        before, after = (parse_placements(text) for text in pair.split("->"))
        meta = T.TensorMeta.contiguous((5, 7))
        source, target = (T.DTensorSpec(T.Mesh((3,)), found, meta) for found in (before, after))
        local = torch.randint(-9, 9, source.local_shape).float()
        run = own_pack.bind(OWN, local, source, target)
        for _ in range(2):
            torch.testing.assert_close(run(), T.redistribute(local, source, target), rtol=0, atol=0)
        send(pair)


@pytest.mark.extended
def test_copies_by_an_own_kernel_give_the_same_elements():
    pairs, done = ("S0->S1", "S1->R", "P->R", "R->S1", "P->S0"), list[object]()
    run_on_ranks(3, compare_on_rank, pairs, on_message=done.append)
    assert sorted(map(str, done)) == sorted(3 * pairs)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_the_kernel_of_the_example_copies_as_the_reference(itemsize):
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]
    source = torch.arange(60).to(dtype)
    boxes = [
        CopyBox(0, 0, 3, 1, itemsize, (4, 3), (12, 2), (1, 5)),
        CopyBox(0, 0, 7, 30, itemsize, (0, 3), (1, 1), (1, 1)),
        CopyBox(0, 0, 0, 40, itemsize, (5,), (0,), (2,)),
    ]
    found, expected = torch.zeros(60, dtype=dtype), torch.zeros(60, dtype=dtype)
    make(boxes)([source.data_ptr()], [found.data_ptr()])
    copy_boxes([source], [expected], boxes)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found.any()


@pytest.mark.extended
def test_an_own_kernel_is_a_side_of_the_report():
    ended = CliRunner().invoke(main, [*COMMAND, "--pairs", "S0->S1; P->R", "--impl", f"tritondt,{OWN}", "--json"])
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    assert found["against"] == OWN
    assert all(len(case["others"][OWN]["seconds"]) == 3 and case["ratio_median"] > 0 for case in found["cases"])
    assert f"time / {OWN}'s, geometric mean of 2 cases" in ended.stderr


@pytest.mark.extended
def test_an_own_kernel_that_is_wrong_is_found():
    ended = CliRunner().invoke(main, [*COMMAND, "--pairs", "S0->S1", "--against", f"{__name__}:forgetful"])
    assert ended.exit_code == 1
    assert f"{__name__}:forgetful moved" in ended.stderr
    assert "Error: partial, 0 of 1 cases were measured" in ended.stderr


def broken(boxes: Sequence[CopyBox]) -> Callable[[Sequence[int], Sequence[int]], None]:
    """A pack kernel that raises."""

    def copy(sources: Sequence[int], targets: Sequence[int]) -> None:
        raise ValueError("no such box")

    return copy


@pytest.mark.extended
def test_an_own_kernel_that_raises_is_shown_by_its_own_error_and_line():
    ended = CliRunner().invoke(main, [*COMMAND, "--pairs", "S0->S1", "--against", f"{__name__}:broken"])
    assert ended.exit_code == 1
    assert re.search(
        rf"failed: {__name__}:broken raised ValueError at {__file__}:\d+ \(copy\): no such box\n"
        r"on rank [01] of 2, in .*\n  File ",
        ended.stderr,
    ), ended.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--against", "ring"],
            "'ring' cannot be timed beside tritondt; allowed are torch, gloo, shared-memory, nccl and MODULE:FUNCTION",
        ),
        (["--impl", "tritondt,engine"], "'engine' cannot be timed beside tritondt"),
        (["--impl", "torch"], "--impl 'torch': allowed are tritondt and others, joined by commas, each once"),
        (["--impl", "tritondt,torch,torch"], "--impl 'tritondt,torch,torch': allowed are tritondt and others"),
        (["--impl", "tritondt", "--against", "torch"], "--impl tritondt and --against torch: only one can be"),
        (["--impl", "tritondt,torch,nowhere:make"], "the implementation 'nowhere:make' cannot be imported"),
        (["--against", "nowhere:make"], "the implementation 'nowhere:make' cannot be imported: No module named"),
        (["--against", "math:pi"], "the implementation 'math:pi' is 3.14"),
    ],
)
def test_what_is_no_side_is_refused(options, sentence):
    ended = CliRunner().invoke(main, ["bench", "redistribute", *options])
    assert ended.exit_code in (1, 2)
    assert sentence in " ".join(ended.output.split())


@pytest.mark.parametrize(
    ("options", "has_gpu", "sentence"),
    [
        (["--against", OWN], False, "--device cuda was asked for; torch"),
        (["--against", "torch"], True, "'torch' cannot be timed beside tritondt on GPUs; allowed is MODULE:FUNCTION"),
        (["--against", OWN, "--breakdown"], True, "--breakdown measures the sockets; allowed are tensors of the CPU"),
        (["--against", OWN, "--loopback"], True, "--loopback measures the sockets; allowed are tensors of the CPU"),
        (["--against", "nowhere:make"], True, "the implementation 'nowhere:make' cannot be imported"),
    ],
)
def test_what_is_not_measured_on_gpus_is_refused(monkeypatch, options, has_gpu, sentence):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    ended = CliRunner().invoke(main, ["bench", "redistribute", "--device", "cuda", *options])
    assert ended.exit_code in (1, 2)
    assert sentence in " ".join(ended.output.split())


@pytest.mark.extended
def test_a_triton_kernel_is_checked_and_timed_interpreted(tmp_path):
    """The command on the CPU, over the sockets; tests/nccl/test_own_pack.py has the kernel over NCCL."""
    pytest.importorskip("triton")
    path = tmp_path / "found.json"
    own = ["--against", "examples.own_triton_pack:make", "--json", str(path)]
    subprocess.run(
        [sys.executable, "-m", "tritondt", *COMMAND, "--pairs", "S0->S1; P->R; R->S1", *own],
        check=True,
        timeout=250,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    cases = json.loads(path.read_text())["cases"]
    assert [len(case["others"][own[1]]["seconds"]) for case in cases] == [3, 3, 3]


def test_a_transport_that_copies_by_itself_takes_no_kernel(monkeypatch):
    monkeypatch.setenv("TRITONDT_TRANSPORT", "shared-memory")
    ended = CliRunner().invoke(main, ["bench", "redistribute", "--against", OWN])
    assert ended.exit_code == 2
    assert "measures the sockets; TRITONDT_TRANSPORT=shared-memory is set, allowed is sockets" in ended.output
