"""Whatever the shape, mask, layout, world size and options: a ring gives what dense attention gives.

The ring is emulated in one process, in fp64, so that what differs is a mistake and no rounding. A run tries 500 random
problems; `./scripts/test.sh tests/test_properties.py --examples 20000` as many as it says.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from emulate import emulate_ring
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import small_blocks
from torch import Tensor

from ringflash import Mask, reference
from ringflash.ring import Backend
from ringflash.score import Scoring, draw_head_words
from ringflash.testing import Inputs, random_inputs

BACKEND = Backend(reference.forward, reference.start_backward, reference.backward, reference.finish_backward)
TOLERANCE = 1e-11  # of the largest element
LAYOUTS = ["contiguous", "zigzag", "striped", "balanced"]


@st.composite
def masks(draw: st.DrawFn, seq_len: int) -> Mask:
    """Any window, documents, prefix and chunk together, small enough to cut the sequence."""
    sides = st.none() | st.integers(0, seq_len)
    causal = draw(st.booleans())
    cuts = draw(st.none() | st.lists(st.integers(0, seq_len), max_size=5))
    documents = None if cuts is None else [0, *sorted(cuts), seq_len]
    prefix: Any = None
    if causal and documents is None:
        prefix = draw(st.none() | st.integers(0, seq_len))
    elif causal and documents is not None and draw(st.booleans()):
        prefix = [draw(st.integers(0, end - start)) for start, end in pairwise(documents)]
    chunk = draw(st.none() | st.integers(1, seq_len + 1))
    return Mask(draw(sides), draw(sides), causal=causal, cu_seqlens=documents, prefix=prefix, chunk=chunk)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    seq_len = draw(st.integers(1, 26))
    kv_heads, queries_a_key = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]))
    return {
        "seq_len": seq_len,
        "batch": draw(st.integers(1, 2)),
        "heads": kv_heads * queries_a_key,
        "kv_heads": kv_heads,
        "v_head_dim": draw(st.sampled_from([16, 24])),
        "mask": draw(masks(seq_len)),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "world_size": draw(st.integers(1, 5)),
        "block": draw(st.sampled_from([1, 4, 7, 32])),
        "softcap": draw(st.none() | st.floats(0.3, 20)),
        "with_slopes": draw(st.booleans()),
        "with_sinks": draw(st.booleans()),
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.25, 0.875])),
        "seed": draw(st.integers(0, 2**62)),
    }


def check_problem(
    seq_len: int, batch: int, heads: int, kv_heads: int, v_head_dim: int, mask: Mask, layout: str, world_size: int,
    block: int, softcap: float | None, with_slopes: bool, with_sinks: bool, dropout_p: float, seed: int,
) -> None:  # fmt: skip
    inputs = random_inputs(
        batch, seq_len, heads, 16, kv_heads=kv_heads, v_head_dim=v_head_dim, dtype=torch.float64, seed=seed % 1000
    )
    generator = torch.Generator().manual_seed(seed % 1000)
    slopes = torch.rand(batch, heads, generator=generator, dtype=torch.float64) if with_slopes else None
    sinks = torch.randn(heads, generator=generator, dtype=torch.float64) if with_sinks else None
    words = draw_head_words(batch, heads, generator) if dropout_p else None
    scoring = Scoring(0.3, softcap, slopes, dropout_p, words, sinks)
    with small_blocks(block):
        actual = emulate_ring(BACKEND, inputs, mask, layout, world_size, scoring)
    options = {"softcap": softcap, "alibi_slopes": slopes, "dropout_p": dropout_p, "head_words": words}
    expected = dense(inputs, sinks, mask=mask, scale=0.3, **options)
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), actual, expected, strict=False):
        finite = want.isfinite()
        assert torch.equal(got[~finite], want[~finite]), name
        error, size = (got - want)[finite].abs(), want[finite].abs()
        assert error.numel() == 0 or error.max() <= TOLERANCE * (1 + size.max()), f"{name}: {error.max()}"
    assert len(actual) == len(expected)


def dense(inputs: Inputs, sinks: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (*inputs[:3], *([] if sinks is None else [sinks]))]
    out, lse = reference.dense_attention(*leaves[:3], sinks=leaves[3] if sinks is not None else None, **options)
    loss = (out * inputs.dout).sum() + (lse.masked_fill(lse.isinf(), 0.0) * inputs.dlse).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)


def test_a_ring_gives_what_dense_attention_gives(pytestconfig: pytest.Config):
    @settings(max_examples=int(pytestconfig.getoption("examples") or 0))
    @given(problems())
    def search(problem: dict[str, Any]) -> None:
        check_problem(**problem)

    search()
