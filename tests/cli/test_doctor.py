"""`python -m tritondt doctor`: what it finds, what it says to do, and how it ends."""

import json
import re
import resource
import shutil
import socket
from collections import namedtuple

import pytest
import torch
from click.testing import CliRunner

import tritondt as T
from tritondt.cli import doctor, machine, smoke
from tritondt.cli.launch import RankFailedError
from tritondt.cli.main import main
from tritondt.cli.smoke import Passed, smoke_test
from tritondt.debug.tracing.clock import Offset

PASSED = [Passed(name, 16, 1e-4, 2e-3) for name in ("sockets", "gloo")]


def run_doctor(monkeypatch, *arguments, passed=PASSED, failed=None, offset=None):
    monkeypatch.setattr(doctor, "smoke_test", lambda seconds: (passed, failed, offset))
    return CliRunner().invoke(main, ["doctor", *arguments])


def test_every_transport_passes_here():
    passed, failed, offset = smoke_test(0.0)
    assert failed is None
    assert [each.transport for each in passed] == ["sockets", "gloo"]
    assert all(each.num_exchanges == 16 for each in passed)
    assert offset is not None
    assert abs(offset.offset_ns) <= offset.error_ns  # they read one clock


def test_json_has_values_by_name_and_nothing_else_is_printed(monkeypatch):
    ended = run_doctor(monkeypatch, "--json")
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    assert found["exchange"] == "OK"
    assert found["tritondt"] == T.__version__
    assert found["torch"] == torch.__version__
    assert "_C" in found["extension"]
    assert found["sockets test"].startswith("16 exchanges of 2 ranks were right; 2 of 5x3 took 100 us")
    assert found["problems"] == {}
    assert {"python", "cores", "gpus", "nccl", "interfaces", "gloo", "shared memory", "open files"} <= found.keys()


def test_a_failing_transport_is_told_with_what_to_do_and_ends_with_status_1(monkeypatch):
    ended = run_doctor(monkeypatch, passed=[], failed=("sockets", "rank 1 of 2 failed:\nno route to host"))
    assert ended.exit_code == 1
    assert re.search(r"X exchange +sockets: rank 1 of 2 failed:\n +no route to host\n +-> the traceback", ended.output)
    assert "(passed: none)" in ended.output
    assert re.search("! gloo test +not reached", ended.output)


def test_the_transport_that_was_under_way_is_the_one_that_failed(monkeypatch):
    def fail(num_ranks, body, *arguments, on_message):
        on_message(smoke.Began("sockets"))
        on_message(PASSED[0])
        on_message(smoke.Began("gloo"))
        raise RankFailedError("rank 0 of 2 failed")

    monkeypatch.setattr(smoke, "run_on_ranks", fail)
    assert smoke_test(1.0) == (PASSED[:1], ("gloo", "rank 0 of 2 failed"), None)


def finding(name):
    (found,) = (each for each in machine.machine_findings() if each.name == name)
    return found


def test_a_clock_that_is_off_is_noted(monkeypatch):
    assert "! clock skew" in run_doctor(monkeypatch, offset=Offset(0, 9_000_000, 1000)).output
    assert "! clock skew" not in run_doctor(monkeypatch, offset=Offset(0, 900, 1000)).output


def test_little_shared_memory_and_few_files_are_noted_with_what_to_do(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 26, 0, 1 << 26))
    assert (finding("shared memory").level, finding("shared memory").value) == ("note", "64 MiB free in /dev/shm")
    assert "--shm-size=1g" in finding("shared memory").advice
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 65536))
    assert (finding("open files").level, finding("open files").value) == ("note", "at most 1,024")
    assert "ulimit -n 4096 (or more, up to 65536)" in finding("open files").advice
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert (finding("open files").level, finding("open files").value) == ("ok", "unlimited")


def test_interfaces_that_are_named_and_not_there_are_a_problem(monkeypatch):
    monkeypatch.setenv("TRITONDT_SOCKET_IFNAME", "=nowhere0")
    assert finding("interfaces").level == "problem"
    assert "TRITONDT_SOCKET_IFNAME='=nowhere0'" in finding("interfaces").value
    ended = run_doctor(monkeypatch)
    assert ended.exit_code == 1
    assert "X interfaces" in ended.output


def test_a_host_name_without_an_address_is_noted(monkeypatch):
    def unknown(name):
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert finding("gloo").level == "note"
    assert "/etc/hosts" in finding("gloo").advice


def test_which_nccl_is_told_and_why(monkeypatch):
    class Library:
        version, origin, path = "2.28.9", "installed", "/somewhere/libnccl.so.2"

    monkeypatch.setattr(machine, "nccl_library", Library)
    told = "2.28.9, of an installed nvidia-nccl package; torch has loaded none: /somewhere/libnccl.so.2"
    assert finding("nccl").value == told

    def none():
        raise RuntimeError("there is no libnccl.so.2")

    monkeypatch.setattr(machine, "nccl_library", none)
    monkeypatch.setenv("TRITONDT_NCCL_SO", "/nowhere.so")
    assert finding("nccl").level == "problem"
    assert "there is no libnccl.so.2" in finding("nccl").value


@pytest.mark.parametrize("seconds", ["-1", "soon"])
def test_a_time_that_is_none_is_refused(seconds):
    ended = CliRunner().invoke(main, ["doctor", "--seconds", seconds])
    assert ended.exit_code == 2
    assert seconds in ended.output
