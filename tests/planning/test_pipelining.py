"""In which pieces rows travel, and which of them a product takes: decided alike on all ranks, and never much worse."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from tritondt.planning.cost import CostTable, Link
from tritondt.planning.pipelining import Pace, Rows, best_shares, merged, pace_of

NETWORK = CostTable(ranks_per_host=1)
ROWS = Rows(num_rows=1024, num_features=1024, itemsize=4, num_ranks=2)


def finished_s(num_peers: int, shares: Sequence[int], pace: Pace, before_s: float, products: Sequence[int]) -> float:
    """When the last of such products is done."""
    pieces = [share / sum(shares) for share in shares] * num_peers
    done_s, arrived_s = before_s, 0.0
    for taken in products:
        arrived_s += sum(pace.message_s + piece * pace.travel_s for piece in pieces[:taken])
        done_s = max(done_s, arrived_s) + pace.product_s + sum(pieces[:taken]) * pace.part_s
        pieces = pieces[taken:]
    assert not pieces
    return done_s


def random_case(seed: int) -> tuple[int, tuple[int, ...], Pace, float]:
    chosen = random.Random(seed)
    shares = (*(2**left for left in reversed(range(chosen.randint(0, 5)))), 1)
    pace = Pace(*(10 ** chosen.uniform(low, low + 2) for low in (0, -3, 0, -2)))
    return chosen.randint(1, 4), shares, pace, pace.part_s * chosen.choice((1, 1, 3))


def test_products_take_all_pieces_of_one_peer_at_a_time():
    for seed in range(300):
        num_peers, shares, pace, before_s = random_case(seed)
        products, start = merged(num_peers, shares, pace, before_s), 0
        assert sum(products) == num_peers * len(shares)
        for taken in products:
            assert taken >= 1
            assert start // len(shares) == (start + taken - 1) // len(shares)
            start += taken


def test_products_end_about_as_early_as_they_can():
    """Nothing ends before all is there and the last piece is multiplied, nor before all is multiplied."""
    for seed in range(300):
        num_peers, shares, pace, before_s = random_case(seed)
        products = merged(num_peers, shares, pace, before_s)
        found = finished_s(num_peers, shares, pace, before_s, products)
        assert found <= finished_s(num_peers, shares, pace, before_s, [1] * (num_peers * len(shares))) + 1e-9
        travels = num_peers * (pace.travel_s + len(shares) * pace.message_s) + pace.part_s / sum(shares)
        computes = before_s + num_peers * pace.part_s
        assert found >= max(travels, computes) + pace.product_s - 1e-9
        if num_peers == 1:
            # The first half of a part is waited for before there is anything to do, and each product reads the matrix.
            first_s = pace.travel_s / 2 + pace.message_s
            assert found <= max(travels, computes) + len(products) * pace.product_s + first_s + 1e-9


def test_where_all_is_there_one_product_takes_it():
    assert merged(3, (4, 2, 1, 1), Pace(1.0, 0.0, 9.0, 0.1), before_s=9.0) == (4, 4, 4)
    assert merged(1, (4, 2, 1, 1), Pace(9.0, 0.0, 1.0, 0.1), before_s=1.0) == (1, 1, 1, 1)


def test_more_is_cut_finer_and_a_slow_link_does_not_cut_beyond_what_a_product_costs():
    pieces = [len(best_shares(ROWS._replace(num_rows=rows), rows, NETWORK)) for rows in (1, 8, 64, 512, 4096, 32768)]
    assert pieces == sorted(pieces)
    assert pieces[0] == 0
    assert pieces[-1] > pieces[2] > 1
    slow = replace(NETWORK, network=Link(60e-6, 1e6))
    assert len(best_shares(ROWS, 1024, slow)) == len(best_shares(ROWS, 1024, NETWORK)) == 6
    assert best_shares(ROWS, 5, slow) == (2, 1, 1)


def test_what_is_not_worth_a_message_or_keeps_the_processor_busy_does_not_overlap():
    for rows in (ROWS._replace(num_rows=1), ROWS._replace(num_ranks=1)):
        assert best_shares(rows, 1024, NETWORK) == ()
    for busy_share, expected in ((1.0, 0), (0.98, 1), (0.5, 6)):
        costs = replace(NETWORK, network=Link(60e-6, 1e9, busy_share))
        assert len(best_shares(ROWS, 1024, costs)) == expected
    assert best_shares(ROWS, 1024, CostTable(ranks_per_host=2)) == ()


def test_pieces_do_not_depend_on_a_ranks_own_features():
    """What decides is the pace of a product beside what it costs besides: in both the matrix falls out."""
    for num_others, num_threads in product((1, 7, 4096), (1,)):
        pace = pace_of(ROWS, num_others, num_threads, NETWORK)
        assert pace.part_s / pace.product_s == pytest.approx(2 * 1024 * 2 * 5e9 / 1e11 / 4)
