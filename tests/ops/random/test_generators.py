"""Generators that random operators draw from: used, advanced, rewound, and compared among ranks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tritondt as T
from tests.ops.sharded import distribute, whole
from tritondt.comm.transports.threads import run_ranks
from tritondt.ops.random.generator import shard_index
from tritondt.sharding.placement import parse_placements


def ones(mesh_shape, text, shape=(64, 32)) -> Any:
    return distribute(torch.ones(shape), T.Mesh(mesh_shape), text)


def test_a_given_generator_is_used_and_advanced():
    def body(rank):
        generator = torch.Generator().manual_seed(9)
        x = ones((2, 2), "S0, R")
        first = x.normal_(generator=generator).to_local().clone()
        assert not torch.equal(first, x.normal_(generator=generator).to_local())
        again = x.normal_(generator=generator.manual_seed(9)).to_local()
        torch.testing.assert_close(first, again, rtol=0, atol=0)
        return first

    parts = run_ranks(4, body)
    torch.testing.assert_close(parts[0], parts[1], rtol=0, atol=0)
    assert not torch.equal(parts[0], parts[2])


def test_ranks_that_are_threads_have_default_generators_of_their_own():
    """Which one rank seeds anew, with the same number too, draws and rewinds without any other's."""

    def body(rank):
        x = ones((2,), "S0")

        def drawn():
            return whole(torch.rand_like(x))

        torch.manual_seed(7)
        first, second = drawn(), drawn()
        torch.manual_seed(7)
        torch.testing.assert_close(drawn(), first, rtol=0, atol=0)
        state = torch.get_rng_state()
        torch.testing.assert_close(drawn(), second, rtol=0, atol=0)
        torch.set_rng_state(state)
        torch.testing.assert_close(drawn(), second, rtol=0, atol=0)
        y: Any = checkpoint(lambda x: F.dropout(x * 1, 0.5), x.requires_grad_(), use_reentrant=False)
        drawn()
        y.sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(whole(x.grad), whole(y), rtol=0, atol=0)
        return torch.rand(2).tolist()

    torch.manual_seed(11)
    before = torch.get_rng_state()
    left, right = run_ranks(2, body)
    assert left == right
    torch.testing.assert_close(torch.get_rng_state(), before, rtol=0, atol=0)


def test_random_operators_leave_the_default_generator_one_number_further():
    def body(rank):
        torch.rand_like(ones((1,), "S0"))

    run_ranks(1, body)
    first = torch.rand(3)
    torch.manual_seed(0)
    run_ranks(1, body)
    torch.testing.assert_close(first, torch.rand(3), rtol=0, atol=0)


def test_a_checkpoint_draws_its_masks_again(processes):
    for output, grad in processes.run(drop_within_a_checkpoint):
        assert 0.3 < (output == 0).float().mean() < 0.7
        torch.testing.assert_close(grad, output, rtol=0, atol=0)


def drop_within_a_checkpoint(rank):
    torch.manual_seed(1)
    x = ones((4,), "S0").requires_grad_()
    y: Any = checkpoint(lambda x: F.dropout(x * 1, 0.5), x, use_reentrant=False)
    torch.rand_like(x)
    y.sum().backward()
    return y.detach().full_tensor(), x.grad.full_tensor()


def test_ranks_seeded_differently_are_named(processes):
    sentence = (
        "random numbers on Mesh(4 over ranks 0..3, cpu) need generators in step, so that replicas draw the same: "
    )
    fix = "; call torch.manual_seed(...) with one number on all ranks"
    seeds, drift, given = (set(found) for found in zip(*processes.run(draw_out_of_step), strict=True))
    assert seeds == {f"{sentence}rank 0 has seed 7, rank 2 has seed 9{fix}"}
    assert drift == {f"{sentence}ranks 0 and 3 have seed 6, but drew differently often from it{fix}"}
    assert given == {f"{sentence}rank 0 has seed 0, rank 1 has seed 1{fix}"}


def draw_out_of_step(rank):
    x = ones((4,), "S0")
    torch.manual_seed(1)
    x.uniform_()
    torch.manual_seed(7 if rank < 2 else 9)
    with pytest.raises(T.MismatchError) as seeds:
        x.uniform_()
    torch.manual_seed(6)
    if rank == 3:
        torch.rand(1)
    with pytest.raises(T.MismatchError) as drift:
        x.uniform_()
    with pytest.raises(T.MismatchError) as given:
        x.uniform_(generator=torch.Generator().manual_seed(rank))
    texts = [str(error.value) for error in (seeds, drift, given)]
    torch.manual_seed(6)
    x.uniform_()
    return texts


def test_ranks_that_hold_one_part_have_one_index():
    def body(rank):
        mesh = T.Mesh((2, 2))
        meta = T.TensorMeta.contiguous((8, 8))
        return [shard_index(T.DTensorSpec(mesh, parse_placements(text), meta)) for text in ("S0, R", "P, S1", "S1, S0")]

    assert run_ranks(4, body) == [[0, 0, 0], [0, 1, 1], [1, 0, 2], [1, 1, 3]]
