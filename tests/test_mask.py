"""The mask is one interval of keys per query, the same thing said as an interval, as a predicate and as an area."""

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringflash import Mask
from ringflash.mask import area, by_value, decode

sides = st.none() | st.integers(0, 12)


@st.composite
def mask_options(draw: st.DrawFn, seq_len: int | None = None) -> dict[str, Any]:
    """Arguments of `Mask`; documents only for a known length."""
    options: dict[str, Any] = {"left": draw(sides), "right": draw(sides), "causal": draw(st.booleans())}
    options["chunk"] = draw(st.none() | st.integers(1, 12))
    prefix = st.integers(0, 12)
    if seq_len is not None and draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, seq_len), max_size=5)))
        options["cu_seqlens"] = [0, *cuts, seq_len]
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, seq_len], strict=True)]
        prefix = st.tuples(*(st.integers(0, length) for length in lengths))
    if options["causal"]:
        options["prefix"] = draw(st.none() | prefix)
    return options


@st.composite
def masks_of_length(draw: st.DrawFn, longest: int = 24) -> tuple[int, dict[str, Any]]:
    seq_len = draw(st.integers(0, longest))
    return seq_len, draw(mask_options(seq_len))


def seen_from_words(options: dict[str, Any], query: int, key: int) -> bool:
    """What the docstring of `Mask` says, one pair at a time."""
    left, right, chunk = options["left"], options["right"], options.get("chunk")
    boundaries = options.get("cu_seqlens") or [0, 2**40]
    of_query, of_key = (max(i for i, b in enumerate(boundaries[:-1]) if b <= max(p, 0)) for p in (query, key))
    start = boundaries[of_key]
    prefix = options.get("prefix") or 0
    in_prefix = 0 <= key - start < (prefix if isinstance(prefix, int) else prefix[of_key])
    allowed = of_query == of_key and (left is None or query - key <= left)
    allowed = allowed and (right is None or options["causal"] or key - query <= right)
    allowed = allowed and (not options["causal"] or key <= query or in_prefix)
    return allowed and (chunk is None or (query - start) // chunk == (key - start) // chunk)


@given(masks_of_length())
def test_interval_and_predicate_are_what_the_options_say(drawn):
    seq_len, options = drawn
    mask, position = Mask(**options), torch.arange(seq_len)
    expected = [[seen_from_words(options, query, key) for key in range(seq_len)] for query in range(seq_len)]
    expected = torch.tensor(expected, dtype=torch.bool).view(seq_len, seq_len)
    assert torch.equal(mask.visible(position[:, None], position[None, :]), expected)
    first, last = mask.first(position)[:, None], mask.last(position)[:, None]
    assert torch.equal((position >= first) & (position < last), expected)
    assert area(mask, seq_len, seq_len) == expected.sum().item()


@given(mask_options(), st.integers(0, 10), st.integers(0, 10))
def test_queries_before_the_first_key_see_what_the_options_say(options, query_len, key_len):
    mask, queries, keys = Mask(**options), torch.arange(query_len) + key_len - query_len, torch.arange(key_len)
    expected = [[seen_from_words(options, query, key) for key in keys.tolist()] for query in queries.tolist()]
    expected = torch.tensor(expected, dtype=torch.bool).view(query_len, key_len)
    assert torch.equal(mask.visible(queries[:, None], keys[None, :]), expected)
    assert torch.equal((keys >= mask.first(queries)[:, None]) & (keys < mask.last(queries)[:, None]), expected)
    assert area(mask, query_len, key_len) == expected.sum().item()


@given(masks_of_length())
def test_both_ends_of_the_interval_only_move_forward(drawn):
    seq_len, options = drawn
    mask, position = Mask(**options), torch.arange(-3 if options.get("cu_seqlens") is None else 0, seq_len)
    assert (mask.first(position).diff() >= 0).all() and (mask.last(position).diff() >= 0).all()


@given(masks_of_length(), masks_of_length())
def test_masks_are_equal_when_their_options_are_and_travel_by_value(drawn, other):
    mask, again, another = Mask(**drawn[1]), Mask(**drawn[1]), Mask(**other[1])
    assert mask == again and hash(mask) == hash(again) and mask.digest == again.digest
    assert (mask == another) == (mask.digest == another.digest) == (repr(mask) == repr(another))
    assert decode(mask.numbers, by_value(mask.documents)) == mask == pickle.loads(pickle.dumps(mask))


def test_a_mask_decoded_twice_is_one_object():
    mask = Mask(causal=True, cu_seqlens=[0, 5, 9])
    again = by_value(Mask(cu_seqlens=[0, 5, 9]).documents)
    assert decode(mask.numbers, by_value(mask.documents)) is decode(mask.numbers, again)


def test_what_changes_nothing_makes_no_other_mask():
    assert Mask(-1, -1) == Mask() and Mask().is_full and not Mask(causal=True).is_full
    assert Mask(right=0) == Mask(causal=True) == Mask(right=7, causal=True) == Mask(causal=True, prefix=0)
    assert Mask(cu_seqlens=[0, 0, 3, 3, 5]) == Mask(cu_seqlens=torch.tensor([0, 3, 5])) != Mask(cu_seqlens=[0, 5])
    with_empty = Mask(causal=True, cu_seqlens=[0, 0, 3, 5], prefix=[0, 1, 2])
    assert with_empty == Mask(causal=True, cu_seqlens=[0, 3, 5], prefix=[1, 2])
    assert Mask(cu_seqlens=[0, 3, 5], cu_seqlens_q=[0, 3, 5]) == Mask(cu_seqlens=[0, 3, 5])


def test_masks_do_not_change():
    with pytest.raises(AttributeError):
        Mask().left = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_long_documents_are_not_printed_whole():
    assert repr(Mask(4, 0, chunk=3)) == "Mask(left=4, right=0, chunk=3)"
    assert len(repr(Mask(cu_seqlens=range(1000)))) < 100


def test_examples_of_the_docstring():
    def seen(**options: Any) -> list[int]:
        return Mask(**options).visible(torch.tensor(2), torch.arange(4)).nonzero()[:, 0].tolist()

    assert seen(causal=True) == [0, 1, 2]
    assert seen(causal=True, cu_seqlens=[0, 2, 4]) == [2]
    assert seen(left=1, causal=True) == [1, 2]
    assert seen(causal=True, prefix=4) == [0, 1, 2, 3]
    assert seen(chunk=2) == [2, 3]
    assert Mask(2).first(torch.tensor(5)) == 3 and Mask(causal=True).last(torch.tensor(5)) == 6


@pytest.mark.parametrize("mask,pairs", [(Mask(), 16), (Mask(causal=True), 10), (Mask(left=1, right=0), 7)])
def test_full_causal_and_window_areas(mask, pairs):
    assert area(mask, 4, 4) == pairs


@pytest.mark.parametrize(
    "options,message",
    [
        ({"left": -2}, "left must be an integer >= 0.*-2"),
        ({"right": 1.5}, "right must be an integer.*1.5"),
        ({"chunk": 0}, "chunk must be an integer >= 1, got 0"),
        ({"chunk": 2.5}, "chunk must be an integer >= 1, got 2.5"),
        ({"cu_seqlens": []}, r"cu_seqlens must start at 0, got \(\)"),
        ({"cu_seqlens": [1, 4]}, "cu_seqlens must start at 0"),
        ({"cu_seqlens": [0, 4, 3]}, "cu_seqlens must ascend, got 4 before 3 at index 1"),
        ({"cu_seqlens": [0, 2.5]}, "cu_seqlens must be integers"),
        ({"cu_seqlens": torch.zeros(1, 2).int()}, r"cu_seqlens must be int32 or int64 of one dimension.*\(1, 2\)"),
        ({"cu_seqlens": torch.zeros(2)}, "cu_seqlens must be int32 or int64.*float32"),
        ({"prefix": 3}, "prefix wants causal"),
        ({"causal": True, "prefix": -1}, "prefix must be an integer >= 0.*-1"),
        ({"causal": True, "prefix": [3]}, "prefix must be an integer >= 0 where there is no cu_seqlens"),
        ({"causal": True, "cu_seqlens": [0, 3], "prefix": 2}, "prefix must be one number for each of 1 documents"),
        ({"causal": True, "cu_seqlens": [0, 3], "prefix": [2, 1]}, "one number for each of 1 documents, got 2"),
        ({"causal": True, "cu_seqlens": [0, 3, 5], "prefix": [2, 3]}, r"in \[0, 2\] for document 1, got 3"),
        ({"cu_seqlens_q": [0, 3]}, "cu_seqlens_q wants cu_seqlens"),
        ({"cu_seqlens": [0, 3], "cu_seqlens_q": [0, 1, 3]}, "the same number of documents"),
        ({"cu_seqlens": [0, 3], "cu_seqlens_q": [0, 2], "chunk": 2}, "can't be used with prefix or chunk"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Mask(**options)
