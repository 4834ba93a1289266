"""The mask: one interval of keys per query.

A query at position `p` sees the keys at positions `[first(p), last(p))`. Both ends never decrease with `p`, so what a
block of ascending queries sees in any ascending list of keys is one contiguous range of rows (`plan.py` relies on it).
"""

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

FAR = 2**62  # beyond every position: an end without bound
Integers = Tensor | Sequence[int]


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Mask:
    """Who sees whom in a sequence of documents: everything that is given must allow it.

    Host-side integers, hashable, made once and good for every layer and both passes: plans and tables are computed once
    for a mask and a shape, and kept. A mask made of tensors waits for their copies to the host; passing it to
    `flash_attention` or `ring_attention` waits for nothing. Make it outside of what `torch.compile` traces; new masks
    don't make a compiled function compile again unless their options or number of documents change its kind.

    Args:
        left, right: the window. A query at position `p` sees keys at `p - left` to `p + right`; `None` or -1 leaves a
            side open.
        causal: no key after its query: `right` counts as 0.
        cu_seqlens: boundaries of packed documents, integers `(documents + 1,)`, a tensor or a sequence: 0, ascending,
            the length of the (global) sequence. No query sees a key of another document. Empty documents are fine.
        prefix: prefix-LM. The first `prefix` keys of a document are seen by all of its queries, and the others
            causally; wants `causal`. One number, or with `cu_seqlens` integers `(documents,)`, none longer than its
            document. `left` bounds the prefix too.
        chunk: chunked attention. Documents are cut in chunks of so many tokens, and no query sees another chunk.
        cu_seqlens_q: boundaries of the queries of the same documents, where there are not as many as keys; default
            `cu_seqlens`, which it needs. The last query of a document is aligned with its last key (bottom-right). For
            `flash_attention` alone, and neither with `prefix` nor `chunk`.

    Raises:
        ValueError: names the argument, what was seen and what is wanted.

    Example: `Mask(causal=True)`, 4 tokens: query 2 sees the keys 0 1 2. `Mask(causal=True, cu_seqlens=[0, 2, 4])`: it
    sees 2. `Mask(1, causal=True)`: 1 2. `Mask(causal=True, prefix=4)`: 0 1 2 3. `Mask(chunk=2)`: 2 3.
    """

    left: int | None
    right: int | None
    chunk: int | None
    prefix: tuple[int, ...] | None  # of each document
    cu_seqlens: tuple[int, ...] | None
    cu_seqlens_q: tuple[int, ...] | None  # None where they are cu_seqlens
    numbers: tuple[int, int, int, int]  # left, right, chunk and a prefix without documents: see `decode`
    documents: Tensor | None
    _key: tuple[int | tuple[int, ...] | None, ...]
    _hash: int

    def __init__(
        self,
        left: int | None = None,
        right: int | None = None,
        *,
        causal: bool = False,
        cu_seqlens: Integers | None = None,
        prefix: int | Integers | None = None,
        chunk: int | None = None,
        cu_seqlens_q: Integers | None = None,
    ):
        sides = [_check_side(name, side) for name, side in (("left", left), ("right", right))]
        if chunk is not None and (not isinstance(chunk, Integral) or chunk < 1):
            raise ValueError(f"chunk must be an integer >= 1, got {chunk!r}")
        documents = None if cu_seqlens is None else _check_boundaries("cu_seqlens", cu_seqlens)
        queries = None if cu_seqlens_q is None else _check_boundaries("cu_seqlens_q", cu_seqlens_q)
        prefixes = None if prefix is None else _check_prefix(prefix, documents, causal or sides[1] == 0)
        if queries is not None:
            if documents is None or len(queries) != len(documents):
                raise ValueError("cu_seqlens_q wants cu_seqlens of the same number of documents")
            if prefixes is not None or chunk is not None:
                raise ValueError("cu_seqlens_q can't be used with prefix or chunk")
            queries = None if queries == documents else queries
        if documents is not None and queries is None:  # empty documents change nothing
            if prefixes is not None:
                prefixes = tuple(n for n, a, b in zip(prefixes, documents, documents[1:], strict=False) if a < b)
            documents = (0, *(b for a, b in pairwise(documents) if a < b))
        self._set(
            left=sides[0],
            right=0 if causal else sides[1],
            chunk=None if chunk is None else int(chunk),
            prefix=prefixes if prefixes and any(prefixes) else None,
            cu_seqlens=documents,
            cu_seqlens_q=queries,
        )

    def _set(self, **fields: int | tuple[int, ...] | None) -> None:
        vars(self).update(fields)
        key = tuple(fields.values())
        vars(self).update(_key=key, _hash=hash(key), numbers=_numbers(self), documents=_documents(self))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        return self is other or (self._hash == other._hash and self._key == other._key)

    def __hash__(self) -> int:  # once: there may be thousands of documents, and many tables are kept by mask
        return self._hash

    def __reduce__(self):
        return decode, (self.numbers, by_value(self.documents))

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in ("left", "right", "chunk", "prefix", "cu_seqlens")}
        fields["cu_seqlens_q"] = self.cu_seqlens_q
        return f"Mask({', '.join(f'{name}={_short(value)}' for name, value in fields.items() if value is not None)})"

    @cached_property
    def documents_digest(self) -> str:
        """How many documents, and which in a few letters, the same in every process: ranks compare it."""
        if self.cu_seqlens is None:
            return "none"
        text = repr((self.prefix, self.cu_seqlens, self.cu_seqlens_q)).encode()
        return f"{len(self.cu_seqlens) - 1}:{hashlib.blake2b(text, digest_size=6).hexdigest()}"

    @property
    def digest(self) -> str:
        """The mask in a few letters, the same in every process."""
        return f"{','.join(map(str, self.numbers))}:{self.documents_digest}"

    def check_fits(self, query_len: int, key_len: int) -> None:
        """Raise `ValueError` unless the documents, if any, end where so many queries and keys do."""
        if self.cu_seqlens is not None and self.cu_seqlens[-1] != key_len:
            raise ValueError(f"cu_seqlens must end at the sequence length {key_len}, got {self.cu_seqlens[-1]}")
        name = "cu_seqlens_q" if self.cu_seqlens_q else "cu_seqlens"
        queries = self.cu_seqlens_q or self.cu_seqlens
        if queries is not None and queries[-1] != query_len:
            raise ValueError(f"{name} must end at the number of queries {query_len}, got {queries[-1]}")

    @cached_property
    def is_full(self) -> bool:
        """Does every query see every key?"""
        return not any(field is not None for field in self._key)

    @cached_property
    def _bounds(self) -> Tensor:
        """Of each document: start, end of its prefix, end. int64 `(3, documents)`."""
        if self.cu_seqlens is None:
            return torch.tensor([[0], [0 if self.prefix is None else self.prefix[0]], [FAR]], device="cpu")
        start, end = torch.tensor([self.cu_seqlens[:-1], self.cu_seqlens[1:]], dtype=torch.int64, device="cpu")
        prefix = 0 if self.prefix is None else torch.tensor(self.prefix, device="cpu")
        return torch.stack([start, start + prefix, end])

    def _document(self, position: Tensor) -> Tensor:
        """Which document each position belongs to, the last for positions past the end."""
        starts = self._bounds[0].to(position.device)
        return torch.searchsorted(starts[1:].contiguous(), position.contiguous(), right=True)

    def first(self, position: Tensor) -> Tensor:
        """Position of the first key that a query at each position sees: int64, like `position`; far below 0 for none.

        `Mask(2).first(5) -> 3`. It never decreases.
        """
        first = position - (FAR if self.left is None else self.left)
        if self.cu_seqlens is None and self.chunk is None:
            return first
        start = self._bounds[0].to(position.device)[self._document(position)]
        if self.chunk is not None:
            start = start + (position - start).div(self.chunk, rounding_mode="floor") * self.chunk
        return torch.maximum(first, start)

    def last(self, position: Tensor) -> Tensor:
        """One past the position of the last key that a query at each position sees: int64; far above all for no bound.

        `Mask(causal=True).last(5) -> 6`. It never decreases.
        """
        last = position + (FAR if self.right is None else self.right + 1)
        if self.cu_seqlens is None and self.chunk is None and self.prefix is None:
            return last
        start, prefix_end, end = self._bounds.to(position.device)[:, self._document(position)]
        if self.prefix is not None:
            last = torch.maximum(last, prefix_end)
        if self.chunk is not None:
            chunk_end = start + ((position - start).div(self.chunk, rounding_mode="floor") + 1) * self.chunk
            end = torch.minimum(end, chunk_end)
        return torch.minimum(last, end)

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Boolean tensor: may a query at position `query` see a key at position `key`? The arguments broadcast.

        Said once more as a predicate, with nothing of `first` and `last`: the oracle asks it.
        """
        seen = (query == query) & (key == key)
        if self.left is not None:
            seen = seen & (key >= query - self.left)
        start, prefix_end, _ = self._bounds.to(key.device)[:, self._document(key)]
        if self.right is not None:
            seen = seen & ((key <= query + self.right) | (key < prefix_end))
        if self.cu_seqlens is not None:
            seen = seen & (self._document(query) == self._document(key))
        if self.chunk is not None:
            chunk_of_query, chunk_of_key = ((x - start).div(self.chunk, rounding_mode="floor") for x in (query, key))
            seen = seen & (chunk_of_query == chunk_of_key)
        return seen


def count_seen(mask: Mask, position: Tensor, key_len: int) -> Tensor:
    """How many of the keys at positions `0 ... key_len - 1` a query at each position sees."""
    return (mask.last(position).clamp(0, key_len) - mask.first(position).clamp(0, key_len)).clamp(min=0)


def area(mask: Mask, query_len: int, key_len: int) -> int:
    """Number of visible (query, key) pairs when queries and keys both start at position 0 with bottom-right alignment.

    `area(Mask(causal=True), 4, 4) -> 10`; the benchmarks count FLOPs from it.
    """
    return int(count_seen(mask, torch.arange(query_len, device="cpu") + (key_len - query_len), key_len).sum())


# How a mask travels through an operator: by value, as `mask.numbers` and `mask.documents` -----------------------------

OPEN = -1  # a side without bound, as an integer


def _numbers(mask: Mask) -> tuple[int, int, int, int]:
    left, right = (OPEN if side is None else side for side in (mask.left, mask.right))
    prefix = mask.prefix[0] if mask.prefix and mask.cu_seqlens is None else 0
    return left, right, mask.chunk or 0, prefix


def _documents(mask: Mask) -> Tensor | None:
    """int64 on the CPU, `(rows, documents + 1)`: cu_seqlens; where needed prefix and a 0; where needed cu_seqlens_q."""
    if mask.cu_seqlens is None:
        return None
    prefix = (*(mask.prefix or (0,) * (len(mask.cu_seqlens) - 1)), 0)
    rows = [mask.cu_seqlens, prefix, mask.cu_seqlens_q or ()]
    return torch.tensor(rows[: 3 if mask.cu_seqlens_q else 2 if mask.prefix else 1], device="cpu")


Documents = tuple[int, bytes]  # rows of a mask's `documents`, and what they hold


def by_value(documents: Tensor | None) -> Documents | None:
    if documents is None:
        return None
    documents = documents.contiguous()
    return documents.shape[0], ctypes.string_at(documents.data_ptr(), documents.nbytes)


def decode(numbers: Sequence[int], documents: Documents | None, longest: int = FAR) -> Mask:
    """The mask that `numbers` and `documents` say; a window side of `longest` or more is open.

    The last 256 are kept: the same object comes back for each layer, and for the backward pass.
    """
    left, right, chunk, prefix = numbers
    sides = (OPEN if side >= max(longest, 1) else side for side in (left, right))
    return _decode(*sides, chunk, prefix, *(documents or (0, b"")))


@lru_cache(maxsize=256)
def _decode(left: int, right: int, chunk: int, prefix: int, rows: int, table: bytes) -> Mask:
    options: dict[str, Any] = {"left": left, "right": right, "chunk": chunk or None, "prefix": prefix or None}
    if rows:
        documents = torch.frombuffer(bytearray(table), dtype=torch.int64).view(rows, -1).tolist()
        options |= dict(zip(("cu_seqlens", "prefix", "cu_seqlens_q"), documents, strict=False))
        options["prefix"] = options["prefix"][:-1] if rows == 2 else None
    return Mask(**options)


# Checks -------------------------------------------------------------------------------------------------------------


def _check_side(name: str, side: int | None) -> int | None:
    if side is not None and (not isinstance(side, Integral) or side < OPEN):
        raise ValueError(f"{name} must be an integer >= 0, or None or -1 for no bound, got {side!r}")
    return None if side is None or side == OPEN else min(int(side), FAR)  # operators take 64 bits


def _integers(name: str, values: Integers) -> tuple[int, ...]:
    """One dimension of them, from wherever they are."""
    if isinstance(values, Tensor):
        check_integer_tensor(name, values)
        return tuple(values.tolist())
    if not isinstance(values, Sequence) or not all(isinstance(value, Integral) for value in values):
        raise ValueError(f"{name} must be integers, got {_short(values)}")
    return tuple(int(value) for value in values)


def check_integer_tensor(name: str, values: Tensor) -> None:
    if values.ndim != 1 or values.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64 of one dimension, got {values.dtype} {tuple(values.shape)}")


def _check_boundaries(name: str, values: Integers) -> tuple[int, ...]:
    boundaries = _integers(name, values)
    if not boundaries or boundaries[0] != 0:
        raise ValueError(f"{name} must start at 0, got {_short(boundaries)}")
    for index, (here, there) in enumerate(pairwise(boundaries)):
        if there < here:
            raise ValueError(f"{name} must ascend, got {here} before {there} at index {index}")
    return boundaries


def _check_prefix(prefix: int | Integers, documents: tuple[int, ...] | None, causal: bool) -> tuple[int, ...]:
    if not causal:
        raise ValueError("prefix wants causal: without it a query sees the keys after it anyway")
    if documents is None:
        if not isinstance(prefix, Integral) or prefix < 0:
            raise ValueError(f"prefix must be an integer >= 0 where there is no cu_seqlens, got {_short(prefix)}")
        return (min(int(prefix), FAR),)
    if isinstance(prefix, (int, Integral)):
        raise ValueError(f"prefix must be one number for each of {len(documents) - 1} documents, got {prefix}")
    prefixes = _integers("prefix", prefix)
    if len(prefixes) != len(documents) - 1:
        raise ValueError(f"prefix must be one number for each of {len(documents) - 1} documents, got {len(prefixes)}")
    for index, (length, start, end) in enumerate(zip(prefixes, documents, documents[1:], strict=False)):
        if not 0 <= length <= end - start:
            raise ValueError(f"prefix must be in [0, {end - start}] for document {index}, got {length}")
    return prefixes


def _short(values: object) -> str:
    """A long sequence by its first numbers."""
    if isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 8:
        return f"[{', '.join(map(str, values[:8]))}, ... {len(values)} numbers]"
    return repr(values)
