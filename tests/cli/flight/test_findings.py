"""What is found in constructed files, and the sentence that comes first."""

import dataclasses

from tests.cli.flight.recorded import done, failed, flight, waiting
from tritondt.cli.flight import examine, fields_of, tell, verdict


def test_nothing_is_wrong():
    findings = examine([flight(rank, done(1), done(2)) for rank in range(4)])
    assert findings.is_clean
    assert verdict(findings) == "nothing is wrong: 4 ranks ended all of 8 recorded operations"
    assert list(tell(findings)) == [verdict(findings)]
    assert fields_of(findings)["ok"] is True


def test_a_rank_that_never_issued_what_the_others_wait_for():
    flights = [flight(rank, done(16), waiting(17, peer=2)) for rank in (0, 1, 3)]
    findings = examine([*flights, flight(2, done(16))])
    assert verdict(findings) == (
        "rank 2 never issued exchange 17 of world that ranks 0, 1, 3 wait for; its last was exchange 16 of world, "
        "S0 -> R at train.py:41 (step)"
    )
    assert [(wait.rank, wait.peer, wait.seconds) for wait in findings.waits] == [(0, 2, 83), (1, 2, 83), (3, 2, 83)]
    assert "  rank 0 waits for rank 2 in exchange 17 of world, S0 -> R at train.py:41 (step), since 83.0 s" in tell(
        findings
    )
    assert findings.cycles == ()


def test_it_is_found_as_well_once_the_others_have_given_up():
    text = "rank 0 waited 30 s for rank 2"
    flights = [flight(rank, done(16), failed(17, text, peer=2)) for rank in (0, 1, 3)]
    findings = examine([*flights, flight(2, done(16))])
    assert verdict(findings).startswith("rank 2 never issued exchange 17 of world that ranks 0, 1, 3 wait for")
    assert [failure.rank for failure in findings.failures] == [0, 1, 3]


def test_a_rank_that_issued_nothing_on_a_communicator_is_known_by_who_waits_for_it():
    others = [flight(rank, waiting(1, peer=2, communicator="tp")) for rank in (0, 1)]
    findings = examine([*others, flight(2), flight(3, done(1))])
    assert [(found.rank, found.waiting) for found in findings.behind] == [(2, (0, 1))]
    assert verdict(findings) == "rank 2 never issued exchange 1 of tp that ranks 0, 1 wait for; it issued nothing"


def test_a_file_written_before_the_others_came_says_nothing():
    findings = examine(
        [flight(0, waiting(17, peer=1), world_size=2), flight(1, done(16), world_size=2, written_at=1016.5)]
    )
    assert findings.behind == ()
    assert verdict(findings).startswith("rank 0 waits for rank 1 in exchange 17")


def test_the_first_exchange_at_which_ranks_diverge():
    other = dataclasses.replace(done(2), fingerprint=99, operation="S1 -> R", site="train.py:50 (step)")
    later = dataclasses.replace(done(3), fingerprint=98)
    flights = [flight(rank, done(1), done(2), done(3)) for rank in (0, 2, 3)]
    findings = examine([*flights, flight(1, done(1), other, later)])
    assert verdict(findings) == (
        "ranks diverge at exchange 2 of world: ranks 0, 2, 3 issued S0 -> R at train.py:41 (step), "
        "rank 1 S1 -> R at train.py:50 (step)"
    )
    assert "  rank 1: S1 -> R at train.py:50 (step)" in tell(findings)
    sides = fields_of(findings)["divergence"]["sides"]
    assert [side["ranks"] for side in sides] == [[0, 2, 3], [1]]


def test_divergence_is_judged_within_a_communicator_and_where_both_are_recorded():
    findings = examine(
        [
            flight(0, done(1, communicator="dp"), done(5), world_size=2),
            flight(1, dataclasses.replace(done(1), fingerprint=77), done(5), world_size=2),
        ]
    )
    assert findings.divergence is None


def test_a_rank_without_a_file_that_others_wait_for():
    findings = examine([flight(rank, waiting(3, peer=1)) for rank in (0, 2, 3)])
    assert findings.missing == (1,)
    assert verdict(findings) == (
        "rank 1 left no file, and ranks 0, 2, 3 wait for it in exchange 3 of world, S0 -> R at train.py:41 (step)"
    )


def test_ranks_without_a_file_that_nobody_waits_for():
    findings = examine([flight(3, done(1), world_size=9)])
    assert verdict(findings) == "ranks 0, 1, 2, 4-8 left no file; the others ended all they began"
    assert not findings.is_clean


def test_the_failure_that_waited_for_nobody_is_the_cause():
    suffering = failed(7, "rank 1 failed while rank 0 waited", peer=1)
    cause = failed(7, "LocalTensorError: shape (3,)")
    findings = examine([flight(0, suffering, world_size=2), flight(1, cause, world_size=2)])
    assert verdict(findings) == (
        "rank 1 failed in exchange 7 of world, S0 -> R at train.py:41 (step): LocalTensorError: shape (3,)"
    )


def test_ranks_that_wait_for_each_other_in_different_exchanges():
    findings = examine(
        [
            flight(0, waiting(4, peer=1, communicator="a"), done(4, communicator="b"), world_size=3),
            flight(1, waiting(4, peer=2, communicator="b"), done(4, communicator="a"), world_size=3),
            flight(2, waiting(4, peer=0, communicator="c"), done(4, communicator="b"), world_size=3),
        ]
    )
    (circle,) = findings.cycles
    assert [wait.rank for wait in circle] == [0, 1, 2]
    assert fields_of(findings)["cycles"] == [[0, 1, 2]]
    told = [line for line in tell(findings) if "in a circle" in line]
    assert told == [
        "  ranks 0, 1, 2 wait for each other in a circle: "
        "rank 0 for rank 1 in exchange 4 of a, S0 -> R at train.py:41 (step), "
        "rank 1 for rank 2 in exchange 4 of b, S0 -> R at train.py:41 (step), "
        "rank 2 for rank 0 in exchange 4 of c, S0 -> R at train.py:41 (step)"
    ]


def test_ranks_that_name_each_other_in_one_exchange_are_no_circle():
    findings = examine([flight(rank, waiting(4, peer=1 - rank), world_size=2) for rank in range(2)])
    assert findings.cycles == ()


def test_waits_shorter_than_the_patience_are_no_findings():
    flights = [flight(rank, waiting(4, peer=1 - rank), world_size=2, written_at=1004.5) for rank in range(2)]
    assert examine(flights).is_clean
    assert len(examine(flights, patience_s=0.5).waits) == 2


def test_only_the_first_unfinished_operation_of_a_communicator_waits():
    queued = waiting(6, peer=-1, state="issued")
    findings = examine([flight(0, waiting(5, peer=-1, state="packing"), queued, world_size=1)])
    assert [wait.entry.sequence for wait in findings.waits] == [5]
    assert verdict(findings) == (
        "rank 0 is packing in exchange 5 of world, S0 -> R at train.py:41 (step), since 95.0 s"
    )
