"""`doctor flight` on files: recorders' own, constructed ones, and what is none."""

import json
import os
import time

import pytest
from click.testing import CliRunner

from tests.cli.flight.recorded import as_file, done, flight, waiting
from tritondt._C import STATES, FlightRecorder
from tritondt.cli import flight as flight_files
from tritondt.cli.main import main


def run(*arguments):
    return CliRunner().invoke(main, ["doctor", "flight", *map(str, arguments)])


def issue(recorder, sequence, operation="S0 -> R", fingerprint=None):
    return recorder.begin(
        recorder.label("world"), sequence, recorder.label(operation), fingerprint or sequence, recorder.site()
    )


def write(folder, recorder):
    recorder.dump(str(folder / f"rank-{recorder.rank}.json"), reason="timeout")


def test_the_states_are_those_of_the_extension():
    assert flight_files.STATES == STATES


def test_files_of_recorders_that_ended_well(tmp_path):
    for rank in range(3):
        recorder = FlightRecorder(rank, 3)
        for sequence in range(1, 5):
            recorder.end(issue(recorder, sequence), STATES.index("done"))
        write(tmp_path, recorder)
    result = run(tmp_path)
    assert (result.exit_code, result.output) == (0, "nothing is wrong: 3 ranks ended all of 12 recorded operations\n")


def test_files_of_recorders_of_which_one_is_behind(tmp_path):
    recorders = [FlightRecorder(rank, 3) for rank in range(3)]
    for recorder in recorders:
        recorder.end(issue(recorder, 1), STATES.index("done"))
        if recorder.rank != 2:
            record = issue(recorder, 2, operation='a "quoted" plan')
            recorder.state(record, STATES.index("exchanging"), 2)
    time.sleep(0.05)
    for recorder in recorders:
        write(tmp_path, recorder)
    result = run(tmp_path, "--patience", "0.01")
    assert result.exit_code == 1
    first = result.output.splitlines()[0]
    assert first.startswith(
        "rank 2 never issued exchange 2 of world that ranks 0, 1 wait for; "
        "its last was exchange 1 of world, S0 -> R at "
    )
    assert first.endswith("(issue)")
    assert 'rank 0 waits for rank 2 in exchange 2 of world, a "quoted" plan at ' in result.output
    found = json.loads(run(tmp_path, "--patience", "0.01", "--json").output)
    assert (found["verdict"], found["ok"]) == (first, False)
    assert [behind["rank"] for behind in found["behind"]] == [2]


def test_files_of_recorders_that_diverge(tmp_path):
    for rank, operation in enumerate(("S0 -> R", "S1 -> R")):
        recorder = FlightRecorder(rank, 2)
        recorder.end(issue(recorder, 1, operation, fingerprint=2**63 + rank), STATES.index("done"))
        write(tmp_path, recorder)
    result = run(tmp_path)
    assert result.exit_code == 1
    assert result.output.startswith("ranks diverge at exchange 1 of world: rank 0 issued S0 -> R at ")


def refusal(folder):
    result = run(folder)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def test_a_folder_without_files_is_refused(tmp_path):
    assert "holds no file rank-*.json; flight recorders write one per rank" in refusal(tmp_path)
    assert "does not exist" in refusal(tmp_path / "missing")


GOOD = json.loads(as_file(flight(0, waiting(1, peer=1))))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "it is no JSON: "),
        ("[]", "it is no flight recorder's: it has no version"),
        (json.dumps(GOOD | {"version": 2}), "it has version 2; this program reads version 1"),
        (json.dumps(GOOD | {"rank": "0"}), "the file has rank '0'; it must be int"),
        (json.dumps(GOOD | {"rank": 4}), "its rank is 4 of 4; ranks go from 0 to the world's size - 1"),
        (json.dumps(GOOD | {"world_size": 10**9}), "its world has 1000000000 ranks; at most 1048576 are allowed"),
        ("[" * 100_000, "it is no JSON: "),
        (json.dumps(GOOD | {"rank": 1}), "it is of rank 1, whose file is rank-1.json"),
        (json.dumps(GOOD | {"written_at": "noon"}), "its written_at is no time: "),
        (json.dumps(GOOD | {"entries": [3]}), "entry 0 is 3; it must be an object"),
        (json.dumps(GOOD | {"entries": [{}]}), "entry 0 has no number"),
        (
            json.dumps(GOOD | {"entries": [GOOD["entries"][0] | {"site": 7}]}),
            "entry 0 has site 7; it must be str or null",
        ),
        (
            json.dumps(GOOD | {"entries": [GOOD["entries"][0] | {"state": "lost"}]}),
            "entry 0 has state 'lost'; allowed are issued, packing,",
        ),
    ],
)
def test_foreign_files_are_refused(tmp_path, content, text):
    (tmp_path / "rank-0.json").write_text(content)
    found = refusal(tmp_path)
    assert "rank-0.json is refused: " in found
    assert text in found


def test_files_that_are_no_text_and_files_of_two_worlds_are_refused(tmp_path):
    (tmp_path / "rank-0.json").write_bytes(b"\xff\xfe")
    assert "rank-0.json is refused: it cannot be read: " in refusal(tmp_path)
    (tmp_path / "rank-0.json").write_text(as_file(flight(0, done(1))))
    (tmp_path / "rank-1.json").write_text(as_file(flight(1, done(1), world_size=2)))
    assert "files of different worlds: rank 0 is of 4 ranks, rank 1 of 2" in refusal(tmp_path)


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path):
    """Reading it would wait for whoever writes to it."""
    os.mkfifo(tmp_path / "rank-0.json")
    assert "rank-0.json is refused: it is no regular file but prw" in refusal(tmp_path)


def test_a_file_without_end_is_refused(tmp_path):
    with (tmp_path / "rank-0.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "it has 1099511627776 bytes; allowed are 268435456" in refusal(tmp_path)


def test_help_says_what_it_reads_and_how_it_ends():
    output = CliRunner().invoke(main, ["doctor", "flight", "--help"]).output
    for text in ("rank-0.json", "status 0 if nothing is wrong, 1 if something is, 2 if", "--patience SECONDS"):
        assert text in " ".join(output.split())
    assert "flight" in CliRunner().invoke(main, ["doctor", "--help"]).output


def test_json_before_the_command_is_refused():
    result = CliRunner().invoke(main, ["doctor", "--json", "flight", "."])
    assert result.exit_code == 2
    assert "--json goes behind the command: doctor flight --json" in result.output
