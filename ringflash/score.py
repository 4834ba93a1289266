"""From products to weights, beside the mask: scale, softcap, ALiBi and dropout.

    score = softcap * tanh(scale * q.k / softcap) - slope * |query position - key position|
    weight = exp(score - lse) * kept / (1 - dropout_p)

Note [Which weights are dropped]. A weight is kept or not by a hash of (seed, batch, head, query position, key position)
alone, so every world size, layout and backend drops the same ones, and the backward pass the ones that the forward pass
dropped, with nothing stored. Of the seed and the head come two words, of those and the query two more; they enter at
two places between the multiplications that mix the key in, so no two queries have the same sequence of keys, shifted
or not. Words have 32 bits; `local_kernel.py` says the same in Triton.
"""

from typing import NamedTuple

import torch
from torch import Tensor

WORD = 2**32 - 1
KEEP_BITS = 31  # of a word decide: its top ones


class Scoring(NamedTuple):
    """What a backend needs to know of scores. Slopes and words are those of the batches and heads that q has."""

    scale: float
    softcap: float | None = None
    slopes: Tensor | None = None  # ALiBi: fp32 or fp64 (b, h)
    dropout_p: float = 0.0
    head_words: Tensor | None = None  # where weights are dropped: int32 (b, h, 2), see `make_head_words`
    sinks: Tensor | None = None  # fp32 or fp64 (h,), contiguous: one more key's score, for the first visit alone

    @property
    def is_plain(self) -> bool:
        """A scale and nothing else? Sinks are no matter: a visit sees them when its sums are done."""
        return self.softcap is None and self.slopes is None and self.head_words is None

    def of(self, batches: slice) -> "Scoring":
        slopes, words = (None if x is None else x[batches] for x in (self.slopes, self.head_words))
        return self._replace(slopes=slopes, head_words=words)

    @property
    def drop_below(self) -> int:
        """A weight is dropped where the top bits of its word are below this."""
        return round(self.dropout_p * 2**KEEP_BITS)


def make_head_words(seed: Tensor, batch: int, heads: int) -> Tensor:
    """Two words of each head, int32 `(batch, heads, 2)`, from a seed, int64 `(1,)`, on its device."""
    head = torch.arange(batch * heads, device=seed.device)
    low = _mix(_mix(seed & WORD) ^ head)
    high = _mix(_mix((seed >> 32 & WORD) ^ 0x9E3779B9) + low & WORD)
    words = torch.stack([low, _mix(high ^ _mix(head))], dim=1).reshape(batch, heads, 2)
    return (words - (words >> 31 << 32)).to(torch.int32)  # the same bits


def kept(head_words: Tensor, query: Tensor, key: Tensor, drop_below: int) -> Tensor:
    """Boolean `(..., queries, keys)`: which weights are kept. See Note [Which weights are dropped].

    Args:
        head_words: int32 `(..., 2)`.
        query, key: positions, integers `(queries,)` and `(keys,)`.
    """
    word_a, word_b = (head_words.long() & WORD)[..., None, :].unbind(-1)  # (..., 1)
    query, key = query.long() & WORD, key.long() & WORD
    row_a = _mix(word_a ^ _mix(query))
    row_b = _mix(word_b + query * 0x9E3779B1 & WORD)
    x = key * 0x9E3779B1 & WORD ^ row_a[..., None]
    x = (x ^ x >> 16) * 0x85EBCA6B & WORD
    x = (x ^ x >> 13) + row_b[..., None] & WORD
    return _mix(x) >> (32 - KEEP_BITS) >= drop_below


def _mix(x: Tensor) -> Tensor:
    """A word whose every bit depends on every bit of `x`: the finisher of MurmurHash3."""
    x = (x ^ x >> 16) * 0x85EBCA6B & WORD
    x = (x ^ x >> 13) * 0xC2B2AE35 & WORD
    return x ^ x >> 16
