"""Composites in which torch puts plain tensors of its own beside distributed ones."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import tritondt as T
from tests.ops.sharded import Case, check, distribute, placements_of
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode

X = torch.linspace(-1, 2, 20, dtype=torch.float64).reshape(5, 4)
HEADS = torch.linspace(-1, 1, 2 * 4 * 5 * 3, dtype=torch.float64).reshape(2, 4, 5, 3)


@pytest.mark.parametrize("text", ["S0", "S1(sizes=3/1)", "R"])
def test_causal_attention_without_a_fused_kernel(text):
    def causal(x):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(x, x * 2, x, is_causal=True)

    check(causal, Case((2,), (HEADS,), (text,)), gradients=True, expect=text)

    def body(rank):
        x = distribute(HEADS, T.Mesh((2,)), text)
        with CommDebugMode() as comm, torch.inference_mode():
            assert placements_of(causal(x)) == T.parse_placements(text)
        assert comm.get_total_counts() == 0

    run_ranks(2, body)


@pytest.mark.parametrize("shape", [(0, 4, 5, 3), (2, 0, 5, 3), (2, 4, 0, 3)])
@pytest.mark.parametrize("text", ["S0", "S1", "R"])
def test_attention_of_an_empty_batch(text, shape):
    for options in ({}, {"is_causal": True}, {"dropout_p": 0.5}):

        def attend(x, options=options):
            return F.scaled_dot_product_attention(x, x * 2, x, **options)

        check(attend, Case((2,), (torch.zeros(shape),), (text,)), gradients=True, exact=True, strides=False)


def test_classes_positions_and_powers():
    indices = torch.tensor([2, 0, 1, 1, 2])
    check(lambda x: F.one_hot(x, 4), Case((2,), (indices,), ("S0(sizes=1/4)",)), exact=True, expect="S0(sizes=1/4)")
    check(F.one_hot, Case((2,), (indices,), ("S0",)), exact=True)
    check(lambda x: torch.quantile(x, 0.3, dim=1), Case((2,), (X,), ("S0",)), gradients=True, expect="S0")
    check(lambda x: x.nanquantile(0.5, keepdim=True), Case((2,), (X,), ("S1",)), gradients=True)
    check(lambda x: torch.combinations(x[:, 0]), Case((2,), (X,), ("S0",)), exact=True)
    square = HEADS[0, :, :3].contiguous()
    check(lambda x: torch.linalg.matrix_power(x, -2), Case((2,), (square + torch.eye(3),), ("S0",)), gradients=True)
    check(torch.linalg.matrix_rank, Case((2,), (square,), ("S0",)), exact=True, expect="S0")
    check(torch.linalg.matrix_rank, Case((2,), (square[:, :0],), ("S0",)), exact=True)


def test_powers_of_elements():
    for text in ("S0", "R", "P"):
        case = Case((2,), (X[:, 0].contiguous(),), (text,))
        check(torch.vander, case, exact=True)
        for count in (0, 1, 3):
            check(lambda x, count=count: torch.vander(x, count, increasing=True), case, exact=True)
    check(torch.vander, Case((2,), (torch.tensor([3, 1, 2], dtype=torch.int8),), ("S0",)), exact=True)

    def body(rank):
        with pytest.raises(RuntimeError, match="vander takes a tensor of one dim and at least 0 powers, got 2 dims"):
            torch.vander(distribute(X, T.Mesh((2,)), "S0"))

    run_ranks(2, body)


def test_places_to_split_at_are_read_where_they_are_distributed():
    for indices in (torch.tensor([1, 3]), torch.tensor(3)):
        case = Case((2,), (X, indices), ("S1", "S0" if indices.ndim else "R"))
        check(lambda x, places: x.tensor_split(places, 0), case, exact=True)


def test_what_the_user_brings_is_refused_all_the_same():
    def body(rank):
        x = distribute(HEADS, T.Mesh((2,)), "S1")
        with pytest.raises(T.MixedTensorsError, match=r"a plain one of shape \(5, 5\)"), sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.float64))

    run_ranks(2, body)


def test_other_tensors_go_the_way_they_went():
    with FakeTensorMode() as mode:
        indices = torch.zeros(3, dtype=torch.int64)
        for is_inference in (False, True):
            with torch.inference_mode(is_inference):
                assert F.one_hot(indices, 4).shape == (3, 4)
                assert torch.linalg.matrix_rank(torch.ones(3, 3)).fake_mode is mode
    found = torch.func.vmap(lambda x: torch.linalg.matrix_power(x, 2))(HEADS[..., :3, :])
    torch.testing.assert_close(found, torch.linalg.matrix_power(HEADS[..., :3, :], 2))


@pytest.mark.parametrize("text", ["S0", "S1(unit=5)", "R", "P"])
def test_max_pool1d_is_no_view_where_no_gradient_is_needed(text):
    expected = F.max_pool1d(X.mT, 2)
    assert not expected._is_view()

    def body(rank):
        x = distribute(X.mT.contiguous(), T.Mesh((2,)), text)
        found: Any = F.max_pool1d(x, 2)
        assert (found.stride(), found._is_view()) == (expected.stride(), False)
        found.detach_()
        torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=0)
        assert F.max_pool1d(x.requires_grad_(), 2).grad_fn is not None

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:A window was not provided")
def test_spectra_keep_the_cut_of_a_batch_and_go_into_graphs_as_they_are_outside():
    """Outside graphs too torch's Python form of stft runs: the C++ form makes a view of memory, which gathers."""
    x, window = torch.linspace(-1, 2, 5 * 24, dtype=torch.float64).view(5, 24) ** 2, torch.hann_window(6).double()

    def spectrum(x, window):
        return torch.stft(x, 8, win_length=6, window=window, return_complex=True)

    def there_and_back(x, window):
        return torch.istft(spectrum(x, window), 8, win_length=6, window=window, length=24)

    def without_a_window(x):
        return torch.stft(x, 8, win_length=6, center=False, return_complex=True)

    check(spectrum, Case((2,), (x, window), ("S0", "R")), gradients=True, expect="S0")
    check(there_and_back, Case((3,), (x, window), ("S0", "S0")), gradients=True)
    check(without_a_window, Case((4,), (x[:2],), ("S0",)), gradients=True, expect="S0")

    def body(rank):
        mesh = T.Mesh((2,))
        rows, whole = distribute(x, mesh, "S0"), distribute(window, mesh, "R")
        with CommDebugMode() as comm:
            spectrum(rows, whole)
        assert comm.get_total_counts() == 0
        for function in (spectrum, there_and_back):
            compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(rows, whole)
            assert placements_of(compiled) == placements_of(function(rows, whole))
            expected = function(x, window)
            torch.testing.assert_close(compiled.full_tensor(), expected, rtol=1e-12, atol=1e-12)

    torch._dynamo.reset()
    run_ranks(2, body)
