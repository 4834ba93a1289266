"""From products to weights, beside the mask: scale, softcap, ALiBi and dropout.

    score = softcap * tanh(scale * q.k / softcap) - slope * |query position - key position|
    weight = exp(score - lse) * kept / (1 - dropout_p)

Note [Which weights are dropped]. A weight is kept or not by a hash of its head's word and of its query's and its key's
position alone, so every world size, layout and backend drops the same ones, and the backward pass the ones that the
forward pass dropped, with no more stored than the words. Each head of each batch draws an odd word of 32 bits, and each
query and each key position has one, no two the same. A weight is kept where

    head's word * query's word * key's word    (32 bits, signed)

is no less than a threshold. That is one multiplication a weight: the head's comes to the side that is made more rarely.
Multiplied by an odd word, odd words are permuted, so of every query and of every key the expected share is dropped, and
no head's pattern says anything of another's. A hash is odd, so probabilities are multiples of 2^-31: the one asked for
is rounded (`round_dropout`) before anything is made of it, and 1 minus that is the share that is kept, exactly.
`local_kernel.py`, `hopper_forward.py` and `hopper_backward.py` say the same.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

WORD = 2**32 - 1


class Scoring(NamedTuple):
    """What a backend needs to know of scores. Slopes and words are those of the batches and heads that q has."""

    scale: float
    softcap: float | None = None
    slopes: Tensor | None = None  # ALiBi: fp32 or fp64 (b, h)
    dropout_p: float = 0.0
    head_words: Tensor | None = None  # where weights are dropped: int32 (b, h), see `draw_head_words`
    sinks: Tensor | None = None  # fp32 or fp64 (h,), contiguous: one more key's score, for the first visit alone

    @property
    def is_plain(self) -> bool:
        """A scale and nothing else? Sinks are no matter: a visit sees them when its sums are done."""
        return self.softcap is None and self.slopes is None and self.head_words is None

    @property
    def options(self) -> int:
        """How many of softcap, ALiBi and dropout there are."""
        return sum(x is not None for x in (self.softcap, self.slopes, self.head_words))

    def of(self, batches: slice) -> "Scoring":
        slopes, words = (None if x is None else x[batches] for x in (self.slopes, self.head_words))
        return self._replace(slopes=slopes, head_words=words)

    @property
    def drop_below(self) -> int:
        return threshold(self.dropout_p)


def round_dropout(dropout_p: float) -> float:
    """The nearest probability that can be had, below 1: see Note [Which weights are dropped]."""
    return min(round(dropout_p * 2**31), 2**31 - 1) / 2**31


def threshold(dropout_p: float) -> int:
    """A weight is dropped where its hash, 32 bits with a sign, is below this."""
    return round(round_dropout(dropout_p) * 2**32) - 2**31


def draw_head_words(batch: int, heads: int, generator: torch.Generator | None = None) -> Tensor:
    """The word of each head, int32 `(batch, heads)` on the CPU, odd; by default from PyTorch's generator there."""
    # None is not given: beside it compilers take no size that they leave open
    given: dict[str, Any] = {} if generator is None else {"generator": generator}
    half = torch.randint(-(2**30), 2**30, (batch, heads), dtype=torch.int32, device="cpu", **given)
    return half * 2 + 1


def make_words(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The words of query and key positions: int32, odd, and no two the same of positions less than 2^31 apart."""
    return _odd_word(query, 0x2545F491), _odd_word(key, 0x1B873593)


def kept(head_words: Tensor, query_words: Tensor, key_words: Tensor, drop_below: int) -> Tensor:
    """Boolean `(..., queries, keys)`: which weights are kept. See Note [Which weights are dropped].

    Args:
        head_words: int32, of `draw_head_words`.
        query_words, key_words: int32 `(queries,)` and `(keys,)`, of `make_words`.
        drop_below: see `threshold`.
    """
    return head_words[..., None, None] * query_words[:, None] * key_words >= drop_below


def _odd_word(position: Tensor, salt: int) -> Tensor:
    """31 bits, each of which depends on every bit of the position (by the finisher of MurmurHash3), and a one."""
    half = WORD >> 1
    x = (position.long() ^ salt) & half
    x = (x ^ x >> 16) * 0x85EBCA6B & half
    x = (x ^ x >> 13) * 0xC2B2AE35 & half
    x = (x ^ x >> 16) * 2 + 1
    return (x - (x >> 31 << 32)).to(torch.int32)  # the same 32 bits as a number with a sign
