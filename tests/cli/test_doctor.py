"""`python -m tritondt doctor`: what it finds, what it says to do, and how it ends."""

import json
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections import namedtuple

import pytest
import torch
from click.testing import CliRunner

import tritondt as T
from tritondt.cli import doctor, machine, smoke
from tritondt.cli.launch import RankFailedError
from tritondt.cli.machine import Finding
from tritondt.cli.main import main
from tritondt.cli.smoke import Clock, Host, Passed, Ranks, Smoke, smoke_test
from tritondt.debug.tracing.clock import Offset

PASSED = [Passed(name, 16, 1e-4, 2e-3) for name in ("sockets", "gloo")]


HERE = Host("a", 0, (Finding("torch", "2.13.0"),))


def run_doctor(monkeypatch, *arguments, passed=PASSED, failed=None, clocks=(), hosts=(HERE,)):
    found = Smoke(passed, failed, Ranks(2 * len(hosts), tuple(hosts), tuple(clocks)))
    monkeypatch.setattr(doctor, "smoke_test", lambda seconds: found)
    return CliRunner().invoke(main, ["doctor", *arguments])


def test_every_transport_passes_here():
    found = smoke_test(0.0)
    assert found.failed is None
    assert [each.transport for each in found.passed] == ["shared-memory", "sockets", "gloo"]
    assert not any(each.is_elsewhere for each in found.passed)
    assert all(each.num_exchanges == 16 for each in found.passed)
    assert found.ranks is not None
    assert (found.ranks.num_ranks, [host.name for host in found.ranks.hosts]) == (2, [socket.gethostname()])
    ((rank, _, offset),) = ((clock.rank, clock.host, clock.offset) for clock in found.ranks.clocks)
    assert rank == 1
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
    assert re.search("! shared-memory test +not reached", ended.output)


def test_ranks_that_share_no_memory_are_noted(monkeypatch):
    ended = run_doctor(monkeypatch, passed=[*PASSED, Passed("shared-memory", 16, 1e-4, 2e-3, is_elsewhere=True)])
    assert ended.exit_code == 0
    assert re.search("! shared-memory test +no memory is shared, sockets carried it: 16 exchanges", ended.output)
    assert "-> run the ranks of a host as one user in one container" in ended.output


def test_the_transport_that_was_under_way_is_the_one_that_failed(monkeypatch):
    def fail(num_ranks, body, *arguments, on_message):
        on_message(smoke.Began("sockets"))
        on_message(PASSED[0])
        on_message(smoke.Began("gloo"))
        raise RankFailedError("rank 0 of 2 failed")

    monkeypatch.setattr(smoke, "run_on_ranks", fail)
    assert smoke_test(1.0) == Smoke(PASSED[:1], ("gloo", "rank 0 of 2 failed"))


def finding(name):
    (found,) = (each for each in machine.machine_findings() if each.name == name)
    return found


def test_a_clock_that_is_off_is_noted(monkeypatch):
    clocks = [Clock(4, "b", Offset(0, nanoseconds, 1000)) for nanoseconds in (9_000_000, 900_000)]
    output = run_doctor(monkeypatch, clocks=clocks).output
    assert re.search("! clock skew +9,000 us from rank 0 to rank 4 on b, off by 1 us at most", output)
    assert re.search("  clock skew +900 us from rank 0 to rank 4 on b", output)
    assert "run chrony or ntpd on all hosts" in output


def test_other_hosts_are_told_where_they_differ_or_are_not_well(monkeypatch):
    there = Host("b", 2, (Finding("torch", "2.12.0"), Finding("open files", "at most 64", "note", "ulimit -n 4096")))
    ended = run_doctor(monkeypatch, hosts=[HERE, there])
    assert ended.exit_code == 1
    assert re.search(r"  hosts +4 ranks on 2: a \(from rank 0 on\), b \(from rank 2 on\)", ended.output)
    assert re.search(r"X torch of b +2\.12\.0; 2\.13\.0 on a\n +-> install one version on all hosts", ended.output)
    assert re.search(r"! open files of b +at most 64\n +-> ulimit", ended.output)
    assert not re.search(r"^. hosts +", run_doctor(monkeypatch).output, re.MULTILINE)


@pytest.mark.extended
def test_the_ranks_of_a_launcher_are_tested_together():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command += ["-m", "tritondt", "doctor", "--seconds", "0", "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)  # of rank 0 alone
    assert told["sockets test"].startswith("16 exchanges of 3 ranks were right")
    assert told["gloo test"].startswith("16 exchanges of 3 ranks were right")
    assert told["shared-memory test"].startswith("16 exchanges of 3 ranks were right")
    assert re.match("-?[0-9,]+ us from rank 0 to rank 1 on ", told["clock skew"])


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
