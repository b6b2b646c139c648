"""The watchdog: exchanges that take too long end and leave a file, also while Python is stuck."""

import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import datetime

import pytest

from tritondt._C import STATES, FlightRecorder, SocketGroup, Watchdog

EXCHANGING = STATES.index("exchanging")


@pytest.fixture
def watchdog():
    made = Watchdog()
    yield made
    made.close()


@pytest.fixture
def pair():
    """The groups of two ranks, and their sockets."""
    sockets = socket.socketpair()
    for one in sockets:
        one.setblocking(False)
    yield SocketGroup([-1, sockets[0].fileno()]), SocketGroup([sockets[1].fileno(), -1]), sockets
    for one in sockets:
        one.close()


def finish(group):
    outcome = group.finish()
    while outcome[0] == "pending":
        outcome = group.finish()
    return outcome


def buffer(num_bytes=100):
    made = ctypes.create_string_buffer(num_bytes)
    return made, ctypes.addressof(made)


def exchange(group, peer, num_bytes=100):
    """Starts to receive and to send; the buffers have to be kept."""
    (out, sent), (into, received) = buffer(num_bytes), buffer(num_bytes)
    group.start([(peer, sent, num_bytes)], [(peer, received, num_bytes)], 7)
    return out, into


def recorded(rank=0):
    recorder = FlightRecorder(rank, 2)
    record = recorder.begin(recorder.label("world"), 1, recorder.label("S0 -> R"), 9, -1)
    recorder.state(record, EXCHANGING, 1 - rank)
    return recorder, record


def written(path, within_s=60.0):
    """The file's content, once it is there."""
    end = time.monotonic() + within_s
    while not path.exists():
        assert time.monotonic() < end, f"{path} was not written within {within_s} s"
        time.sleep(0.01)
    return json.loads(path.read_text())


def test_an_exchange_that_takes_too_long_expires_and_leaves_a_file(watchdog, pair, tmp_path):
    group, _, _ = pair
    recorder, record = recorded()
    watchdog.watch(group, 0.3, recorder, str(tmp_path / "rank-0.json"))
    started = time.monotonic()
    kept = exchange(group, 1)
    assert finish(group) == ("expired", 1)
    waited = time.monotonic() - started
    recorder.end(record, STATES.index("failed"))
    assert waited >= 0.29  # right to a tick of the kernel
    found = written(tmp_path / "rank-0.json")
    assert found["reason"] == "timeout"
    # As it was before the waiting thread woke.
    assert (found["entries"][0]["state"], found["entries"][0]["peer"]) == ("exchanging", 1)
    # The group stays expired.
    assert finish(group)[0] == "expired"
    del kept
    kept = exchange(group, 1)
    assert finish(group) == ("expired", -1)
    del kept


def test_exchanges_in_time_do_not_expire(watchdog, pair):
    first, second, _ = pair
    watchdog.watch(first, 0.1, None, "")
    watchdog.watch(second, 0.1, None, "")
    for _ in range(4):
        kept = exchange(first, 1), exchange(second, 0)
        time.sleep(0.05)
        assert (finish(first), finish(second)) == (("done", -1), ("done", -1))
        time.sleep(0.12)  # between exchanges, time does not count
        del kept


def test_the_timeout_can_be_changed_while_an_exchange_is_under_way(watchdog, pair):
    group, _, _ = pair
    watchdog.watch(group, 300.0, None, "")
    kept = exchange(group, 1)
    assert group.finish() == ("pending", 1)
    group.set_timeout(0.01)
    assert finish(group) == ("expired", 1)  # long before its first timeout, which outlives the test's
    del kept


def test_an_unwatched_group_does_not_expire(watchdog, pair):
    group, _, _ = pair
    watchdog.watch(group, 0.05, None, "")
    watchdog.unwatch(group)
    kept = exchange(group, 1)
    assert group.finish() == ("pending", 1)
    group.interrupt()
    assert finish(group) == ("interrupted", 1)
    del kept


def test_it_works_while_python_is_stuck(watchdog, pair, tmp_path):
    group, _, _ = pair
    recorder, _ = recorded()
    path = tmp_path / "rank-0.json"
    watchdog.watch(group, 0.5, recorder, str(path))
    kept = exchange(group, 1)
    ctypes.PyDLL(None).usleep(2_000_000)  # PyDLL keeps the GIL
    released = time.time()
    found = written(path, within_s=0.0)
    assert path.stat().st_mtime < released
    assert datetime.fromisoformat(found["written_at"]).timestamp() < released
    assert finish(group) == ("expired", 1)
    del kept


def test_a_thread_that_waits_is_ended_while_another_holds_the_gil(watchdog, pair, tmp_path):
    group, _, _ = pair
    recorder, _ = recorded()
    path = tmp_path / "rank-0.json"
    watchdog.watch(group, 0.5, recorder, str(path))
    outcomes = []

    def wait():
        kept = exchange(group, 1)
        outcomes.append(finish(group))
        del kept

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    ctypes.PyDLL(None).usleep(1_500_000)
    released = time.time()
    assert path.stat().st_mtime < released
    waiting.join()
    assert outcomes == [("expired", 1)]


@pytest.mark.extended
def test_groups_and_recorders_may_go_at_any_time(watchdog, tmp_path):
    for index in range(20):
        sockets = socket.socketpair()
        group = SocketGroup([-1, sockets[0].fileno()])
        watchdog.watch(group, 0.001, recorded()[0], str(tmp_path / f"rank-{index}.json"))
        kept = exchange(group, 1)
        time.sleep(0.002 * (index % 3))
        del group, kept
        gc.collect()
        for one in sockets:
            one.close()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("path", "why"),
    [("missing/rank-3.json", "missing/rank-3.json: No such file or directory"), ("", "no folder for it")],
)
def test_a_file_that_cannot_be_written_is_said_and_the_exchange_ends(tmp_path, path, why):
    program = f"""
import ctypes, socket
from tritondt._C import FlightRecorder, SocketGroup, Watchdog
sockets = socket.socketpair()
sockets[0].setblocking(False)
group, watchdog = SocketGroup([-1, sockets[0].fileno()]), Watchdog()
watchdog.watch(group, 0.1, FlightRecorder(3, 4), {path!r})
kept = ctypes.create_string_buffer(8)
group.start([], [(1, ctypes.addressof(kept), 8)], 1)
assert group.finish() in (("pending", 1), ("expired", 1))
watchdog.close()
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    assert f"tritondt: rank 3 could not write its flight recorder: {why}" in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_signal_writes_the_recorder(watchdog, tmp_path):
    recorder, _ = recorded()
    path = tmp_path / "rank-0.json"
    assert watchdog.dump_on_signal(signal.SIGUSR1, recorder, str(path))
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert written(path)["reason"] == "signal"
        path.unlink()
    watchdog.close()
    probe = Watchdog()  # the signal is free again
    assert probe.dump_on_signal(signal.SIGUSR1, recorder, str(path))
    probe.close()


def test_a_signal_is_served_while_python_is_stuck(watchdog, tmp_path):
    recorder, _ = recorded()
    path = tmp_path / "rank-0.json"
    assert watchdog.dump_on_signal(signal.SIGUSR1, recorder, str(path))
    sender = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -USR1 {os.getpid()}"])
    usleep, end = ctypes.PyDLL(None).usleep, time.monotonic() + 1.5
    while time.monotonic() < end:
        usleep(100_000)  # the signal cuts one of them short
    released = time.time()
    assert path.stat().st_mtime < released
    sender.wait()


def test_a_signal_in_use_is_left_alone(watchdog, tmp_path):
    recorder, _ = recorded()
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        assert not watchdog.dump_on_signal(signal.SIGUSR1, recorder, str(tmp_path / "rank-0.json"))
        signal.raise_signal(signal.SIGUSR1)
        assert seen == [1]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert watchdog.dump_on_signal(signal.SIGUSR1, recorder, str(tmp_path / "rank-0.json"))
    assert not watchdog.dump_on_signal(signal.SIGUSR1, recorder, str(tmp_path / "rank-0.json"))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # installed later, so it stays at close
    try:
        watchdog.close()
        signal.raise_signal(signal.SIGUSR1)  # would end the process by default
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that threads run is what is tested
def test_a_forked_child_neither_hangs_nor_crashes(watchdog, pair, tmp_path):
    group, _, _ = pair
    recorder, _ = recorded()
    watchdog.watch(group, 300.0, recorder, str(tmp_path / "rank-0.json"))
    assert watchdog.dump_on_signal(signal.SIGUSR1, recorder, str(tmp_path / "signal.json"))
    child = os.fork()
    if child == 0:
        try:
            watchdog.unwatch(group)
            watchdog.close()
            refused = False
            try:
                watchdog.watch(group, 1.0, None, "")
            except RuntimeError as error:
                refused = "a forked process makes its own" in str(error)
            recorder.begin(0, 0, recorder.label("after the fork"), 0, -1)
            own = Watchdog()
            own.watch(group, 0.05, recorder, str(tmp_path / "child.json"))
            kept = exchange(group, 1)
            expired = finish(group)[0] == "expired"
            own.close()
            del kept
            os._exit(0 if refused and expired else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert written(tmp_path / "child.json")["pid"] == child
    child = os.fork()
    if child == 0:  # the child has no thread to serve the signal, which does what it does by default
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(10)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR1
    assert not (tmp_path / "signal.json").exists()


@pytest.mark.extended
def test_a_process_may_exit_without_closing_it():
    program = """
import socket
from tritondt._C import SocketGroup, Watchdog
sockets = socket.socketpair()
group, watchdog = SocketGroup([-1, sockets[0].fileno()]), Watchdog()
watchdog.watch(group, 0.001, None, "")
import builtins
builtins.kept = watchdog, group
"""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", program], timeout=150, check=True)


def test_wrong_calls_are_refused(watchdog, pair):
    group, _, _ = pair
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"a timeout of .* s was asked for; it must be more than 0"):
            watchdog.watch(group, wrong, None, "")
        with pytest.raises(ValueError, match="must be more than 0"):
            group.set_timeout(wrong)
    group.set_timeout(float("inf"))
    for signum in (0, 65, signal.SIGKILL):
        with pytest.raises(ValueError, match=f"signal {int(signum)} was asked to write .* it cannot be handled"):
            watchdog.dump_on_signal(signum, FlightRecorder(0, 1), "")
    watchdog.close()
    watchdog.close()
    with pytest.raises(RuntimeError, match="this watchdog is closed"):
        watchdog.watch(group, 1.0, None, "")
    watchdog.unwatch(group)
