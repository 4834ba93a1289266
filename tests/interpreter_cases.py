"""The Triton kernels against the fp64 oracle, on a CPU, in Triton's interpreter. Run by test_local_kernel.py.

The interpreter multiplies bf16 wrongly, so these cases are fp16 and fp32. What is compared is the kernels' masks,
ranges, positions and sums; tiles here are those of small GPUs.
"""

import math
import os

import pytest
import torch
from emulate import emulate_ring

from ringflash import flash_attention, launch, local_kernel, plan, reference
from ringflash.layout import Run
from ringflash.local_kernel import choose_tiles
from ringflash.mask import Mask
from ringflash.merge import Sums
from ringflash.ring import Backend
from ringflash.score import Scoring, draw_head_words
from ringflash.testing import Inputs, random_inputs, relative_error

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("run with TRITON_INTERPRET=1")

BACKEND = Backend(
    local_kernel.forward, local_kernel.start_backward, local_kernel.backward, local_kernel.finish_backward
)
MASKS = {"full": Mask(), "causal": Mask(right=0), "window": Mask(left=29, right=5)}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}


def dense(inputs: Inputs, mask: Mask, *, sinks: torch.Tensor | None = None, **options):
    """`(out, lse, dq, dk, dv)`, and `dsinks` of sinks, by the oracle, for a loss that uses out and the lse of rows that
    see a key."""
    given = inputs[:3] if sinks is None else (*inputs[:3], sinks)
    leaves = [x.detach().double().requires_grad_() for x in given]
    out, lse = reference.dense_attention(*leaves[:3], mask=mask, sinks=None if sinks is None else leaves[3], **options)
    finite = lse.masked_fill(lse.isinf(), 0.0)
    loss = (out * inputs.dout).sum() + (finite * inputs.dlse).sum()
    return out, lse, *torch.autograd.grad(loss, leaves)


def check(results, expected, tolerance: float) -> None:
    assert len(results) == len(expected)
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), results, expected, strict=False):
        assert relative_error(got, want) <= tolerance, name


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_kernels_match_dense_attention_in_every_layout(layout, mask):
    inputs = random_inputs(1, 203, 2, 16, kv_heads=1)
    check(emulate_ring(BACKEND, inputs, MASKS[mask], layout, 2), dense(inputs, MASKS[mask]), TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "v_dim"),
    [
        (torch.float16, 2, 2, 64, 64),
        (torch.float16, 3, 1, 128, 128),
        (torch.float16, 4, 2, 40, 24),
        (torch.float16, 7, 1, 80, 80),
        (torch.float16, 5, 1, 96, 96),
        (torch.float16, 2, 2, 192, 128),
        (torch.float16, 1, 1, 200, 256),
        (torch.float32, 2, 1, 256, 16),
    ],
)
def test_kernels_match_dense_attention_for_dtypes_heads_and_dims(dtype, heads, kv_heads, dim, v_dim):
    inputs = random_inputs(1, 101, heads, dim, kv_heads=kv_heads, v_head_dim=v_dim, dtype=dtype)
    check(emulate_ring(BACKEND, inputs, Mask(right=0), "zigzag", 2), dense(inputs, Mask(right=0)), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("layout", "mask", "dim", "v_dim"),
    [("zigzag", "causal", 64, 64), ("striped", "window", 40, 24), ("contiguous", "full", 64, 128)],
)
def test_a_hopper_gpus_tiles_come_by_descriptor(monkeypatch, layout, mask, dim, v_dim):
    monkeypatch.setattr(local_kernel, "choose_tiles", lambda d, dv, dtype, *_: choose_tiles(d, dv, dtype, (9, 0)))
    inputs = random_inputs(2, 203, 2, dim, kv_heads=1, v_head_dim=v_dim, dtype=torch.float16)
    results = emulate_ring(BACKEND, inputs, MASKS[mask], layout, 2)
    check(results, dense(inputs, MASKS[mask]), TOLERANCE[torch.float16])


CU_SEQLENS = [0, 1, 38, 40, 129, 203]


@pytest.mark.parametrize(
    ("layout", "mask"),
    [
        ("contiguous", Mask(chunk=37)),
        ("zigzag", Mask(causal=True, cu_seqlens=CU_SEQLENS)),
        ("striped", Mask(causal=True, cu_seqlens=CU_SEQLENS, prefix=[1, 5, 0, 70, 2])),
        ("balanced", Mask(20, 3, cu_seqlens=CU_SEQLENS)),
    ],
    ids=repr,
)
def test_kernels_take_any_mask_of_one_interval_per_query(layout, mask):
    inputs = random_inputs(1, 203, 2, 16, kv_heads=1)
    check(emulate_ring(BACKEND, inputs, mask, layout, 2), dense(inputs, mask), 2e-6)


SLOPES = torch.tensor([[0.5, 0.03], [0.1, 0.0]])  # (b, h)
WORDS = draw_head_words(2, 2, torch.Generator().manual_seed(7))
OPTIONS = {
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "dropout": {"dropout_p": 0.3, "head_words": WORDS},
    "sinks": {"sinks": torch.tensor([0.7, 3.0])},
}


def scoring_of(softcap=None, alibi_slopes=None, dropout_p=0.0, head_words=None, sinks=None) -> Scoring:
    return Scoring(0.25, softcap, alibi_slopes, dropout_p, head_words, sinks)


@pytest.mark.parametrize(
    ("layout", "mask", "tiles_of", "options"),
    [*(("zigzag", "causal", (8, 0), [name]) for name in OPTIONS), ("striped", "window", (9, 0), list(OPTIONS))],
)
def test_kernels_cap_scores_and_drop_weights_as_dense_attention_does(monkeypatch, layout, mask, tiles_of, options):
    monkeypatch.setattr(local_kernel, "choose_tiles", lambda d, dv, dtype, *_: choose_tiles(d, dv, dtype, tiles_of))
    chosen = {name: value for option in options for name, value in OPTIONS[option].items()}
    inputs = random_inputs(2, 149, 2, 16, kv_heads=1, dtype=torch.float16 if tiles_of == (9, 0) else torch.float32)
    results = emulate_ring(BACKEND, inputs, MASKS[mask], layout, 2, scoring_of(**chosen))
    check(results, dense(inputs, MASKS[mask], **chosen), TOLERANCE[inputs.q.dtype])


@pytest.mark.parametrize(
    ("layout", "mask", "world_size"), [("contiguous", "causal", 1), ("zigzag", "full", 2), ("striped", "window", 3)]
)
def test_a_ring_of_kernels_sees_the_sinks_once(layout, mask, world_size):
    inputs, sinks = random_inputs(1, 101, 3, 16, kv_heads=1), torch.tensor([0.3, 20.0, -math.inf])
    results = emulate_ring(BACKEND, inputs, MASKS[mask], layout, world_size, Scoring(0.25, sinks=sinks))
    check(results, dense(inputs, MASKS[mask], sinks=sinks), TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("query_len", "key_len"), [(70, 1), (101, 70)])
def test_sinks_of_any_dtype_and_queries_that_see_no_key(query_len, key_len, dtype):
    q, k, v, *_ = inputs = random_inputs(2, query_len, 3, 16, kv_heads=1, key_len=key_len, dtype=torch.float16)
    sinks = torch.tensor([[0.3, 9.0], [20.0, 9.0], [-math.inf, 9.0]], dtype=dtype)[:, 0]  # not contiguous
    out, lse = flash_attention(q, k, v, causal=True, sinks=sinks, return_lse=True, backend="triton")
    expected, expected_lse, *_ = dense(inputs, Mask(right=0), sinks=sinks)
    unseen = query_len - key_len
    assert not out[:, :unseen].any() and (lse[:, 2, :unseen] == -math.inf).all()
    assert out.dtype == torch.float16 and relative_error(out, expected) <= TOLERANCE[torch.float16]
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_long_sums_are_made_in_several_launches(monkeypatch, layout):
    monkeypatch.setattr(launch, "LONGEST_SUM", 50)
    inputs = random_inputs(1, 203, 4, 16, kv_heads=2)
    check(emulate_ring(BACKEND, inputs, MASKS["window"], layout, 2), dense(inputs, MASKS["window"]), 2e-6)


@pytest.mark.parametrize(("query_len", "key_len"), [(1, 1), (1, 70), (70, 1), (70, 101), (101, 70)])
@pytest.mark.parametrize("mask", MASKS)
def test_unequal_lengths_align_at_the_end_and_empty_rows_are_exact(mask, query_len, key_len):
    inputs = random_inputs(1, query_len, 1, 16, key_len=key_len)
    q, k, v, dout, dlse = inputs
    visit = plan.plan_one(MASKS[mask], query_len, key_len).visits[0]
    assert visit is not None
    nan = float("nan")
    total = local_kernel.Partial(torch.full_like(dout, nan), torch.full_like(dlse, nan))
    BACKEND.forward(q, k, v, visit, Scoring(0.25), into=total, before=None)
    empty = total.lse.isinf()
    dlse = dlse.masked_fill(empty, 0.0)
    dk, dv = (torch.full_like(x, nan) for x in (k, v))
    state = BACKEND.start_backward(q, total, dout, dlse, Scoring(0.25), q.dtype)
    BACKEND.backward(q, k, v, dout, state, visit, Scoring(0.25), take_dkv=lambda: Sums(dk, dv, True), first=True)
    dq = BACKEND.finish_backward(state)
    expected = dense(inputs, MASKS[mask])
    assert torch.equal(empty, expected[1].isinf())
    assert not dq[empty.transpose(1, 2)].any() and not total.out[empty.transpose(1, 2)].any()
    for got, want in zip((*total, dq, dk, dv), expected, strict=True):
        # a row that sees one key has dq = dk = 0 but for rounding: compare with the size of the inputs too
        assert (got.double() - want)[want.isfinite()].norm() <= 2e-6 * (want[want.isfinite()].norm() + 1)


@pytest.mark.parametrize(
    ("batch", "query_len", "key_len", "heads"), [(0, 5, 5, 2), (1, 0, 5, 2), (1, 5, 0, 2), (1, 0, 0, 2), (1, 5, 5, 0)]
)
def test_empty_tensors_launch_nothing_and_leave_nothing_unwritten(batch, query_len, key_len, heads, monkeypatch):
    inputs = random_inputs(batch, query_len, heads, 16, kv_heads=1, key_len=key_len)
    q, k, v, dout, dlse = inputs
    visit = plan.plan_one(Mask(right=0), query_len, key_len).visits[0]
    assert visit is not None
    for kernel in ("_forward_kernel", "_dq_kernel", "_dkv_kernel"):
        monkeypatch.setattr(local_kernel, kernel, None)
    sink = torch.arange(heads) + 0.5
    for sinks, lse in ((sink, sink[:, None]), (None, -math.inf)):
        total = local_kernel.Partial(torch.full_like(dout, math.nan), torch.full_like(dlse, math.nan))
        BACKEND.forward(q, k, v, visit, Scoring(0.25, sinks=sinks), into=total, before=None)
        assert not total.out.any() and (total.lse == lse).all()
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    state = local_kernel.Started(torch.stack((total.lse, dlse), 3), dq, q.dtype)
    BACKEND.backward(q, k, v, dout, state, visit, Scoring(0.25), take_dkv=lambda: Sums(dk, dv, True), first=True)
    assert BACKEND.finish_backward(state) is dq and not any(x.any() for x in (dq, dk, dv))


def test_more_batches_than_a_grid_takes_are_several_launches(monkeypatch):
    inputs = random_inputs(5, 20, 2, 16, kv_heads=1)
    scoring = Scoring(0.25, None, torch.rand(5, 2), 0.2, draw_head_words(5, 2), torch.ones(2))
    whole = emulate_ring(BACKEND, inputs, Mask(right=0), "zigzag", 2, scoring)
    monkeypatch.setattr(launch, "MOST_BATCHES", 2)
    batches, strides = [], local_kernel._strides
    monkeypatch.setattr(local_kernel, "_strides", lambda **x: batches.extend(map(len, x.values())) or strides(**x))
    assert all(map(torch.equal, emulate_ring(BACKEND, inputs, Mask(right=0), "zigzag", 2, scoring), whole))
    assert set(batches) == {1, 2}


@pytest.mark.parametrize("size", [2**31 - 1, 2**63 - 1])
def test_positions_and_windows_of_any_size_do_not_overflow(size):
    q, k, v, *_ = random_inputs(1, 80, 1, 16, key_len=70)
    for window, seen in (((0, size), (0, None)), ((size, None), (None, None))):
        wide, open_side = (flash_attention(q, k, v, window=w, backend="triton") for w in (window, seen))
        assert torch.equal(wide, open_side)


def test_a_later_visit_leaves_rows_alone_that_see_nothing():
    inputs = random_inputs(1, 96, 1, 16)
    visit = plan.plan_ring(Mask(right=0), "contiguous", 192, 0, 2).visits[0]
    assert visit is not None
    later = plan.Visit(visit.queries, (Run(96, 1, 96),), Mask(right=0))  # keys after every query
    total = local_kernel.Partial(torch.randn_like(inputs.dout), torch.randn_like(inputs.dlse))
    before = [x.clone() for x in total]
    BACKEND.forward(*inputs[:3], later, Scoring(0.25), into=total, before=total.out)
    assert all(torch.equal(a, b) for a, b in zip(total, before, strict=True))
    last = local_kernel.Partial(torch.full_like(total.out, math.nan, dtype=torch.float16), total.lse)
    BACKEND.forward(*inputs[:3], later, Scoring(0.25), into=last, before=total.out)
    assert torch.equal(last.out, before[0].half()) and torch.allclose(last.lse, before[1])
