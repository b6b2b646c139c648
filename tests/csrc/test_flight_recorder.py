"""The flight recorder: what is kept, what is overwritten, where calls came from, and the file."""

import json
import os
import socket
import stat
import threading
import timeit

import pytest

from tritondt._C import STATES, STEPS, FlightRecorder, StepTimes

ISSUED, PACKING, EXCHANGING, UNPACKING, DONE, FAILED = range(len(STATES))
PACK, SEND, KEEP, WAIT, UNPACK = range(len(STEPS))


def begin(recorder, sequence, fingerprint=7, site=-1):
    return recorder.begin(recorder.label("ranks/a"), sequence, recorder.label("S0 -> R"), fingerprint, site)


def test_an_operation_from_issue_to_end():
    recorder = FlightRecorder(2, 4)
    record = begin(recorder, 5, fingerprint=2**64 - 1)
    (issued,) = recorder.entries()
    assert (issued["state"], issued["peer"], issued["started_at"], issued["ended_at"]) == ("issued", -1, None, None)
    recorder.state(record, PACKING)
    recorder.state(record, EXCHANGING, 3)
    recorder.state(record, UNPACKING)
    recorder.end(record, FAILED, recorder.label("rank 3 left"), 10, 20)
    (entry,) = recorder.entries()
    assert issued["issued_at"] == entry["issued_at"] <= entry["started_at"] <= entry["ended_at"]
    assert entry["issued_at"] <= entry["steps"]["wait"] <= entry["ended_at"], "since when it has waited for rank 3"
    assert {key: value for key, value in entry.items() if not key.endswith("_at")} == {
        "steps": {"wait": entry["steps"]["wait"]},
        "number": 0,
        "communicator": "ranks/a",
        "sequence": 5,
        "operation": "S0 -> R",
        "fingerprint": 2**64 - 1,
        "state": "failed",
        "site": None,
        "peer": 3,
        "error": "rank 3 left",
        "sent_bytes": 10,
        "received_bytes": 20,
    }


def test_the_ring_keeps_the_last_and_ignores_what_is_overwritten():
    recorder = FlightRecorder(0, 1, capacity=3)
    records = [begin(recorder, sequence) for sequence in range(8)]
    assert records == list(range(8))
    recorder.state(4, EXCHANGING, 9)
    recorder.end(1, DONE)
    recorder.state(-1, DONE)
    recorder.end(1000, DONE)
    assert [(entry["sequence"], entry["state"]) for entry in recorder.entries()] == [
        (5, "issued"),
        (6, "issued"),
        (7, "issued"),
    ]
    assert [entry["number"] for entry in recorder.last(2)] == [6, 7]
    assert recorder.last(0) == recorder.last(-1) == []


def test_what_begins_further_on_has_started():
    recorder = FlightRecorder(0, 1)
    for arguments in ((), (0,), (EXCHANGING,)):
        recorder.begin(0, 1, 0, 5, -1, *arguments)
    found = [(entry["state"], entry["started_at"] is not None) for entry in recorder.entries()]
    assert found == [("issued", False), ("issued", False), ("exchanging", True)]
    with pytest.raises(ValueError, match=r"^argument 6 is 6; it must be a position in STATES$"):
        recorder.begin(0, 1, 0, 5, -1, 6)


def test_labels_are_numbered_once():
    recorder = FlightRecorder(0, 1)
    numbers = [recorder.label(f"text {index % 500}") for index in range(1000)]
    assert numbers == [*range(500), *range(500)]
    assert all(recorder.label_text(number) == f"text {number}" for number in range(500))
    for wrong in (500, -1):
        with pytest.raises(IndexError, match=f"text {wrong} was asked for; this recorder never gave that number"):
            recorder.label_text(wrong)


def external(source, name):
    found: dict = {}
    exec(compile(source, name, "exec"), found)
    return found["call"]


def test_the_site_is_the_innermost_line_outside():
    recorder = FlightRecorder(0, 1)
    recorder.set_internal(["/inside/", __file__])
    inner = external("def call(site):\n    return site()\n", "/inside/deep.py")
    train = external("def call(inner, site):\n    pass\n    return inner(site), inner(site)\n", "train.py")
    first, second = train(inner, recorder.site)
    assert recorder.site_text(first) == recorder.site_text(second) == "train.py:3 (call)"
    assert first == second
    two = external("def call(inner, site):\n    a = inner(site)\n    return a, inner(site)\n", "train.py")
    assert [recorder.site_text(number) for number in two(inner, recorder.site)] == [
        "train.py:2 (call)",
        "train.py:3 (call)",
    ]


def test_there_is_no_site_where_all_frames_are_internal():
    recorder = FlightRecorder(0, 1)
    recorder.set_internal([""])
    assert recorder.site() == -1
    recorder.set_internal([])
    assert recorder.site_text(recorder.site()).startswith(f"{__file__}:")


def test_code_made_at_run_time_does_not_pile_up():
    recorder = FlightRecorder(0, 1)
    for index in range(5000):
        number = external("def call(site):\n    return site()\n", f"made_{index}.py")(recorder.site)
        assert recorder.site_text(number) == f"made_{index}.py:2 (call)"


def test_the_file_is_whole_and_its_texts_come_back(tmp_path):
    recorder = FlightRecorder(1, 4, capacity=10)
    texts = ['quote " backslash \\ slash /', "line\nfeed\ttab \x01", "Grüße 模型 🚀"]
    for sequence, text in enumerate(texts):
        recorder.begin(recorder.label("world"), sequence, recorder.label(text), 2**63, recorder.site())
    recorder.end(0, DONE, -1, 1, 2)
    path = tmp_path / "rank-1.json"
    path.write_text("old")
    recorder.dump(str(path), reason="a test")
    found = json.loads(path.read_text())
    assert [entry["operation"] for entry in found["entries"]] == texts
    assert (found["version"], found["rank"], found["world_size"], found["reason"]) == (1, 1, 4, "a test")
    assert found["host"] == socket.gethostname()
    for written, entry in zip(found["entries"], recorder.entries(), strict=True):
        assert written.keys() == entry.keys()
        for key, value in written.items():
            assert value == (pytest.approx(entry[key], abs=2e-6) if key.endswith("_at") and value else entry[key])
    assert list(tmp_path.iterdir()) == [path]  # no draft stays behind


def test_a_file_that_cannot_be_written_is_an_oserror(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing/rank-0\.json"):
        FlightRecorder(0, 1).dump(str(tmp_path / "missing" / "rank-0.json"))


def test_it_is_read_while_it_is_written():
    recorder = FlightRecorder(0, 1, capacity=8)
    stop = threading.Event()

    def write():
        sequence = 0
        while not stop.is_set():
            record = begin(recorder, sequence, fingerprint=3 * sequence)
            recorder.end(record, DONE, -1, sequence, 2 * sequence)
            sequence += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            for entry in recorder.entries():
                assert entry["fingerprint"] == 3 * entry["sequence"]
                assert entry["received_bytes"] in (0, 2 * entry["sequence"])
    finally:
        stop.set()
        writer.join()


def exchange(recorder, name):
    """An exchange that is packed and sent, while an operation before it, which is no exchange, ends."""
    before = begin(recorder, 4)
    record = recorder.begin(0, 5, 0, 7, -1, ISSUED, name)
    recorder.step(record, PACK)
    recorder.end(before, DONE)
    recorder.step(record, SEND)
    recorder.leave(record)
    recorder.end(record, DONE)


def heard(times):
    told = times.exchanges()
    return [(told[number][-1], kind) for number, kind, *_ in times.steps()]


def test_steps_are_heard_of_while_somebody_listens():
    recorder = FlightRecorder(2, 4)
    exchange(recorder, "before")
    outer = StepTimes(100)
    exchange(recorder, "one")
    inner = StepTimes(100)
    other = threading.Thread(target=exchange, args=(recorder, "of a thread"))
    other.start()
    other.join()
    inner.close()
    with pytest.raises(RuntimeError, match=r"^steps are still noted; close StepTimes before it is asked$"):
        outer.steps()
    outer.close()
    outer.close()
    exchange(recorder, "after")
    kinds = "pack", "send", "exchange"
    assert heard(inner) == [("of a thread", kind) for kind in kinds]
    assert heard(outer) == [(name, kind) for name in ("one", "of a thread") for kind in kinds]
    threads = [thread for *_, thread in outer.steps()]
    assert threads == [threading.get_ident()] * 3 + [threads[-1]] * 3
    assert {told[:-1] for told in outer.exchanges().values()} == {(2, 5, None, False)}
    (pack, send, whole) = [times for _, _, *times, _ in outer.steps()[:3]]
    assert whole[0] <= pack[0] <= pack[1] == send[0] <= send[1] == whole[1]


def test_steps_for_which_there_is_no_room_are_counted():
    recorder, times = FlightRecorder(0, 1), StepTimes(4)
    for number in range(3):
        exchange(recorder, f"{number}")
    times.close()
    assert heard(times) == [("0", "pack"), ("0", "send"), ("0", "exchange"), ("1", "pack")]
    assert times.num_dropped == 3  # two steps of the second exchange, and the third


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda r: r.begin(0, 0, 0, 0), TypeError, "begin takes 5 to 7 arguments, but 4 were given"),
        (lambda r: r.begin(0, 0, 0, -1, 0), OverflowError, "negative"),
        (lambda r: r.begin(2**31, 0, 0, 0, 0), ValueError, r"argument 1 is 2147483648; it must be from -1 to 2\^31"),
        (lambda r: r.state(0, 6), ValueError, "argument 2 is 6; it must be a position in STATES"),
        (lambda r: r.state(0, "done"), TypeError, "int"),
        (lambda r: r.step(0, 5), ValueError, "argument 2 is 5; it must be a position in STEPS"),
        (lambda r: r.step(0), TypeError, "step takes 2 to 2 arguments, but 1 were given"),
        (lambda r: r.leave(None), TypeError, "int"),
        (lambda r: r.end(0), TypeError, "end takes 2 to 5 arguments, but 1 were given"),
        (lambda r: r.label(3), TypeError, "bad argument|must be str"),
    ],
)
def test_wrong_calls_are_refused(call, error, text):
    recorder = FlightRecorder(0, 1)
    with pytest.raises(error, match=text):
        call(recorder)
    assert recorder.entries() == []


def test_a_recorder_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="with rank 4 of 4; ranks go from 0 to the world's size - 1"):
        FlightRecorder(4, 4)
    with pytest.raises(ValueError, match="with a capacity of 0; it must be 1 or more"):
        FlightRecorder(0, 1, 0)


def test_recording_an_operation_costs_less_than_a_microsecond():
    recorder = FlightRecorder(0, 1)
    communicator, operation, site = recorder.label("world"), recorder.label("S0 -> R"), recorder.site()

    def record():
        number = recorder.begin(communicator, 5, operation, 2**60, site)
        recorder.state(number, PACKING)
        recorder.state(number, EXCHANGING, 3)
        recorder.end(number, DONE, -1, 100, 100)

    # 0.24 us here alone; the fastest of many rounds, so that a busy machine does not fail it.
    assert min(timeit.repeat(record, number=2000, repeat=50)) / 2000 < 0.8e-6


@pytest.mark.parametrize("what", ["a link", "a broken link", "a FIFO", "a folder", "a device"])
def test_a_record_takes_the_place_of_a_file_alone(tmp_path, what):
    path, elsewhere = tmp_path / "rank-0.json", tmp_path / "elsewhere"
    elsewhere.write_text("kept")
    if what.endswith("link"):
        path.symlink_to(elsewhere if what == "a link" else tmp_path / "nowhere")
    elif what == "a FIFO":
        os.mkfifo(path)
    elif what == "a folder":
        path.mkdir()
    else:
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")
    kind = stat.S_IFMT(path.lstat().st_mode)
    with pytest.raises(FileExistsError, match=f"is {what.replace('broken ', '')}, not a file to replace: File exists"):
        FlightRecorder(0, 1).dump(str(path))
    assert stat.S_IFMT(path.lstat().st_mode) == kind
    assert elsewhere.read_text() == "kept"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["elsewhere", "rank-0.json"]
