"""The mask is one interval of keys per query, the same thing said as an interval, as a predicate and as an area."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringflash.mask import Mask, area

sides = st.none() | st.integers(0, 12)
masks = st.builds(Mask, left=sides, right=sides)
lengths = st.integers(0, 10)


def seen_from_formula(mask: Mask, query: int, key: int) -> bool:
    return (mask.left is None or query - key <= mask.left) and (mask.right is None or key - query <= mask.right)


@given(masks, st.integers(-5, 20), st.integers(-5, 20))
def test_interval_and_predicate_agree(mask, query, key):
    first, last = mask.first(query), mask.last(query)
    in_interval = (first is None or key >= first) and (last is None or key < last)
    assert in_interval == seen_from_formula(mask, query, key)
    assert mask.visible(torch.tensor(query), torch.tensor(key)).item() == in_interval


@given(masks, st.integers(0, 20))
def test_both_ends_of_the_interval_only_move_forward(mask, query):
    for end in (mask.first, mask.last):
        here, there = end(query), end(query + 1)
        assert (here is None) == (there is None) and (here is None or there >= here)


@given(masks, st.integers(0, 20), st.integers(0, 20))
def test_transposed_swaps_queries_and_keys(mask, query, key):
    assert seen_from_formula(mask.transposed, key, query) == seen_from_formula(mask, query, key)
    assert mask.transposed.transposed == mask


@given(masks, lengths, lengths)
def test_visible_broadcasts_and_area_counts_it(mask, query_len, key_len):
    queries, keys = torch.arange(query_len) + key_len - query_len, torch.arange(key_len)  # bottom-right
    seen = mask.visible(queries[:, None], keys[None, :])
    assert seen.shape == (query_len, key_len) and seen.dtype == torch.bool
    assert area(mask, query_len, key_len) == seen.sum().item()


def test_ends_of_a_tensor_of_positions_are_tensors():
    mask, positions = Mask(left=2, right=1), torch.arange(3)
    first, last = mask.first(positions), mask.last(positions)
    assert first is not None and torch.equal(first, torch.tensor([-2, -1, 0]))
    assert last is not None and torch.equal(last, torch.tensor([2, 3, 4]))


@pytest.mark.parametrize("mask,pairs", [(Mask(), 16), (Mask(right=0), 10), (Mask(left=1, right=0), 7)])
def test_full_causal_and_window_areas(mask, pairs):
    assert area(mask, 4, 4) == pairs
