"""The mask: one interval of keys per query.

A query at position `p` sees the keys at positions `[first(p), last(p))`. Both ends never decrease with `p`, so what a
block of ascending queries sees in any ascending list of keys is one contiguous range of rows (`plan.py` relies on it).
"""

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

Positions = TypeVar("Positions", int, Tensor)  # a position, or an integer tensor of positions


@dataclass(frozen=True)
class Mask:
    """Keys in `[p - left, p + right]` are visible to a query at position `p`; `None` leaves that side open.

    `Mask()` is full attention, `Mask(right=0)` causal, `Mask(left=w, right=0)` a causal sliding window of `w + 1` keys.
    """

    left: int | None = None
    right: int | None = None

    @property
    def transposed(self) -> "Mask":
        """The same mask seen from the keys: which queries see a key."""
        return Mask(left=self.right, right=self.left)

    def first(self, position: Positions) -> Positions | None:
        """Position of the first visible key; `None` where the left side is open."""
        return None if self.left is None else position - self.left

    def last(self, position: Positions) -> Positions | None:
        """One past the position of the last visible key; `None` where the right side is open."""
        return None if self.right is None else position + self.right + 1

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Boolean tensor: may a query at position `query` see a key at position `key`? The arguments broadcast."""
        seen = (query == query) & (key == key)
        if self.left is not None:
            seen = seen & (key >= query - self.left)
        if self.right is not None:
            seen = seen & (key <= query + self.right)
        return seen


def area(mask: Mask, query_len: int, key_len: int) -> int:
    """Number of visible (query, key) pairs when queries and keys both start at position 0 with bottom-right alignment.

    `area(Mask(right=0), 4, 4) -> 10`; the benchmarks count FLOPs from it.
    """
    offset = key_len - query_len
    total = 0
    for position in range(offset, offset + query_len):
        first = max(mask.first(position) or 0, 0)
        last = mask.last(position)
        total += max(min(key_len, key_len if last is None else last) - first, 0)
    return total
