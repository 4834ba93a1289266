"""What is around the Hopper kernels against the fp64 oracle, on a CPU: the launchers, the state of a backward pass, two
small kernels in Triton's interpreter. Doubles stand in for the Gluon kernels. Run by test_hopper_kernel.py.
"""

import os
from math import inf, log, nan

import hopper_emulation as emulation
import pytest
import torch
from emulate import emulate_ring
from interpreter_cases import BACKEND, MASKS, TOLERANCE, check, dense

from ringflash import flash_attention, hopper_kernel, launch, layout, local_kernel, plan
from ringflash.layout import Run
from ringflash.mask import Mask
from ringflash.merge import Partial, Sums
from ringflash.reference import dense_attention
from ringflash.score import Scoring, draw_head_words
from ringflash.testing import random_inputs, relative_error

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("run with TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def doubles(monkeypatch) -> tuple[emulation.Double, emulation.Double]:
    """A Hopper GPU's choices, and doubles of its kernels."""
    forward, backward = emulation.Double(emulation.forward), emulation.Double(emulation.backward)
    monkeypatch.setattr(hopper_kernel, "forward_kernel", forward)
    monkeypatch.setattr(hopper_kernel, "backward_kernel", backward)
    monkeypatch.setattr(hopper_kernel, "wide_backward_kernel", backward)
    monkeypatch.setattr(local_kernel, "capability_of", lambda device: (9, 0))
    emulation.forget_launches()
    return forward, backward


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_a_ring_of_hopper_kernels_matches_dense_attention(doubles, layout, mask):
    inputs = random_inputs(2, 403, 4, 64, kv_heads=2, dtype=torch.float16)
    check(emulate_ring(BACKEND, inputs, MASKS[mask], layout, 2), dense(inputs, MASKS[mask]), TOLERANCE[torch.float16])
    assert all(double.launches for double in doubles)


@pytest.mark.parametrize("dim", [64, 136])
def test_rows_far_apart_are_in_blocks_of_their_own(monkeypatch, doubles, dim):
    """Documents dealt over ranks: blocks of fewer rows than a tile has, of queries and of keys."""
    monkeypatch.setattr(layout, "MOST_SPARED", 0)  # else ranks see less of each other
    monkeypatch.setattr(hopper_kernel, "JUMP", 3)
    mask, shape = Mask(right=0, cu_seqlens=(0, 90, 97, 210, 403)), (1, 403, 4, dim)
    inputs = random_inputs(*shape, kv_heads=2, dtype=torch.float16)
    check(emulate_ring(BACKEND, inputs, mask, "balanced", 4), dense(inputs, mask), TOLERANCE[torch.float16])
    forward, backward = ([arguments for _, arguments in double.launches] for double in doubles)
    assert any(a["n_blocks"] > -(-a["n_q"] // (a["ROWS"] * a["CONSUMERS"])) for a in forward)
    assert any(a["n_blocks"] > -(-a["n_k"] // a["BLOCK_K"]) for a in backward)
    assert {a["order"] is None for a in backward} == {True, False}  # where a later block takes longer there is one


def test_programs_in_an_order_of_their_own_are_of_all_heads_and_batches(doubles):
    mask = Mask(right=0, cu_seqlens=(0, 128, 403))
    inputs = random_inputs(2, 403, 6, 64, kv_heads=3, dtype=torch.float16)
    check(emulate_ring(BACKEND, inputs, mask, "contiguous", 1), dense(inputs, mask), TOLERANCE[torch.float16])
    ((_, a),) = doubles[1].launches
    table = a["blocks"]
    tiles = (table[:, 3] - table[:, 0]) / a["BLOCK_Q"] * 2  # of two heads
    expected = hopper_kernel.order_programs(tiles, 6, a["kv_together"], launch.count_multiprocessors(table.device))
    assert torch.equal(a["order"], expected)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "v_dim"),
    [
        (4, 4, 128, 128),
        (6, 2, 96, 64),
        (2, 1, 40, 24),
        (2, 2, 64, 128),
        (1, 1, 192, 128),
        (2, 1, 256, 16),
        (1, 1, 72, 136),
        (4, 2, 160, 256),
    ],
)
def test_heads_and_dims_match_dense_attention(doubles, heads, kv_heads, dim, v_dim):
    inputs = random_inputs(1, 203, heads, dim, kv_heads=kv_heads, v_head_dim=v_dim, dtype=torch.float16)
    results = emulate_ring(BACKEND, inputs, Mask(right=0), "zigzag", 2)
    check(results, dense(inputs, Mask(right=0)), TOLERANCE[torch.float16])
    assert all(double.launches for double in doubles)


SINKS = torch.tensor([0.3, -1.0, 20.0, -inf])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("layout", "world_size"), [("contiguous", 1), ("zigzag", 2), ("striped", 3)])
def test_the_first_of_a_rings_visits_sees_the_sinks(doubles, layout, world_size, mask):
    inputs = random_inputs(2, 403, 4, 64, kv_heads=2, dtype=torch.float16)
    results = emulate_ring(BACKEND, inputs, MASKS[mask], layout, world_size, Scoring(0.125, sinks=SINKS))
    check(results, dense(inputs, MASKS[mask], sinks=SINKS), TOLERANCE[torch.float16])
    with_sinks = [arguments["sinks"] is not None for _, arguments in doubles[0].launches]
    assert with_sinks == [arguments["out_before"] is None for _, arguments in doubles[0].launches]
    assert sum(with_sinks) == world_size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("query_len", "key_len"), [(300, 1), (300, 201)])
def test_sinks_of_any_dtype_and_queries_that_see_no_key(doubles, query_len, key_len, dtype):
    q, k, v, *_ = inputs = random_inputs(2, query_len, 4, 64, kv_heads=2, key_len=key_len, dtype=torch.float16)
    sinks = torch.stack([SINKS, SINKS], 1).to(dtype)[:, 0]  # not contiguous
    out, lse = flash_attention(q, k, v, causal=True, sinks=sinks, return_lse=True, backend="triton")
    expected, expected_lse, *_ = dense(inputs, Mask(right=0), sinks=sinks)
    unseen = query_len - key_len
    assert not out[:, :unseen].any() and torch.equal(lse[0, :, 0], sinks.float())
    assert relative_error(out, expected) <= TOLERANCE[torch.float16]
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    ((_, arguments),) = doubles[0].launches
    assert arguments["out"].dtype == torch.float16  # at once: nothing is left to do


def test_a_call_without_sinks_is_another_launch_than_one_with_them(doubles):
    q, k, v, *_ = random_inputs(1, 70, 4, 64, dtype=torch.float16)
    for sinks in (None, SINKS, None):
        flash_attention(q, k, v, sinks=sinks, backend="triton")
    assert hopper_kernel._forward_launch.cache_info().currsize == 2


def test_a_call_under_the_full_mask_is_another_launch_than_one_that_has_a_table(doubles):
    inputs = random_inputs(1, 70, 4, 64, dtype=torch.float16)
    for causal in (True, False, True):
        q, k, v = (x.requires_grad_() for x in inputs[:3])
        torch.autograd.backward(flash_attention(q, k, v, causal=causal, backend="triton"), inputs.dout)
    assert hopper_kernel._forward_launch.cache_info().currsize == 2
    assert hopper_kernel._launches_of_kinds.cache_info().currsize == 2


def test_a_call_whose_programs_are_ordered_is_another_launch(doubles):
    inputs = random_inputs(1, 300, 4, 64, dtype=torch.float16)
    masks = [Mask(right=0, cu_seqlens=cuts) for cuts in ((0, 300), (0, 128, 300), (0, 200, 300))]
    for mask in masks:
        q, k, v = (x.requires_grad_() for x in inputs[:3])
        torch.autograd.backward(flash_attention(q, k, v, mask=mask, backend="triton"), inputs.dout)
    assert [arguments["order"] is not None for _, arguments in doubles[1].launches] == [False, True, False]
    assert hopper_kernel._launches_of_kinds.cache_info().currsize == 2


WORDS = draw_head_words(2, 2, torch.Generator().manual_seed(7))
OPTIONS = {
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout_p": 0.3, "head_words": WORDS},
    "both": {"softcap": 2.0, "dropout_p": 0.6, "head_words": WORDS, "sinks": SINKS[:2]},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("layout", "world_size", "mask", "dim"),
    [("contiguous", 1, "full", 64), ("zigzag", 2, "causal", 128), ("striped", 3, "window", 64)],
)
def test_softcap_and_dropout_match_dense_attention(doubles, layout, world_size, mask, dim, options):
    inputs = random_inputs(2, 203, 2, dim, kv_heads=1, dtype=torch.float16)
    given = dict(OPTIONS[options])
    expected = dense(inputs, MASKS[mask], **given)
    scoring = Scoring(dim**-0.5, **given)
    check(emulate_ring(BACKEND, inputs, MASKS[mask], layout, world_size, scoring), expected, TOLERANCE[torch.float16])
    assert all(double.launches for double in doubles)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("dim", "v_dim"), [(128, 128), (96, 128), (128, 24)])
@pytest.mark.parametrize("limit", [199, 200])
def test_weights_in_bf16_take_blocks_of_192_queries_but_under_a_mask_of_few_keys(
    doubles, monkeypatch, dim, v_dim, mask, dtype, limit
):
    """Forward alone: in bf16 the interpreter makes no right products."""
    monkeypatch.setattr(hopper_kernel, "SHORT_KEYS", limit)
    softcap = 50.0
    q, k, v, *_ = random_inputs(2, 403, 4, dim, kv_heads=2, v_head_dim=v_dim, dtype=dtype)
    scoring, halves = Scoring(dim**-0.5, softcap, sinks=SINKS), (Run(0, 1, 203), Run(203, 1, 200))
    out, lse = torch.full((2, 403, 4, v_dim), nan), torch.full((2, 4, 403), nan)
    total, before = Partial(out, lse), None
    for run in halves:
        visit, rows = plan.Visit((Run(0, 1, 403),), (run,), MASKS[mask]), slice(run.start, run.start + run.length)
        BACKEND.forward(q, k[:, rows], v[:, rows], visit, scoring, into=total, before=before)
        before = out
    whole = (x.double() for x in (q, k, v))
    expected = dense_attention(*whole, mask=MASKS[mask], softcap=softcap, sinks=SINKS.double())
    assert relative_error(out, expected[0]) <= 5e-3 and relative_error(lse, expected[1]) <= 1e-3
    first, second = (arguments for _, arguments in doubles[0].launches)
    for a, keys in ((first, 203), (second, 200)):
        few = mask != "full" and keys <= limit
        assert a["CONSUMERS"] == (3 if dtype == torch.bfloat16 and not few else 2)
    for a in (first, second):
        low, high = a["blocks"][:, 4:].unbind(1)
        assert len(low) == a["n_blocks"] and (high - low).max() == 64 * a["CONSUMERS"]


def test_sinks_come_with_hopper_kernels_and_alibi_without(doubles):
    inputs = random_inputs(1, 20, 4, 64, kv_heads=2, dtype=torch.float16)
    slopes = torch.ones(1, 4)
    for scoring, taken in ((Scoring(0.125, 2.0, sinks=SINKS), True), (Scoring(0.125, slopes=slopes), False)):
        for double in doubles:
            double.launches.clear()
        emulate_ring(BACKEND, inputs, Mask(right=0), "zigzag", 2, scoring)
        assert [bool(double.launches) for double in doubles] == [taken, taken]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [64, 128])
def test_long_sums_are_made_in_several_launches(monkeypatch, doubles, mask, dim):
    monkeypatch.setattr(launch, "LONGEST_SUM", 128)
    inputs = random_inputs(1, 500, 4, dim, kv_heads=2, dtype=torch.float16)
    check(emulate_ring(BACKEND, inputs, MASKS[mask], "contiguous", 1), dense(inputs, MASKS[mask]), 1e-3)
    assert len(doubles[1].launches) == 2 * 4


@pytest.mark.parametrize(("query_len", "key_len"), [(1, 1), (1, 300), (300, 1), (200, 301), (301, 200)])
@pytest.mark.parametrize("mask", MASKS)
def test_unequal_lengths_and_rows_that_see_nothing(mask, query_len, key_len):
    inputs = random_inputs(1, query_len, 2, 64, key_len=key_len, dtype=torch.float16)
    visit = plan.plan_one(MASKS[mask], query_len, key_len).visits[0]
    assert visit is not None
    q, k, v, dout, dlse = inputs
    total = Partial(torch.full_like(dout, nan), torch.full_like(dlse, nan))
    BACKEND.forward(q, k, v, visit, Scoring(0.125), into=total, before=None)
    empty = total.lse.isinf()
    state = BACKEND.start_backward(q, total, dout, dlse.masked_fill(empty, 0.0), Scoring(0.125), q.dtype)
    dk, dv = torch.full_like(k, nan), torch.full_like(v, nan)
    BACKEND.backward(q, k, v, dout, state, visit, Scoring(0.125), take_dkv=lambda: Sums(dk, dv, True), first=True)
    dq = BACKEND.finish_backward(state)
    expected = dense(inputs, MASKS[mask])
    assert torch.equal(empty, expected[1].isinf())
    assert not dq[empty.transpose(1, 2)].any() and not total.out[empty.transpose(1, 2)].any()
    for got, want in zip((*total, dq, dk, dv), expected, strict=True):
        assert (got.double() - want)[want.isfinite()].norm() <= 1e-3 * (want[want.isfinite()].norm() + 1)


def test_more_batches_than_a_grid_takes_are_several_launches(monkeypatch, doubles):
    inputs, scoring = random_inputs(5, 33, 2, 64, kv_heads=1, dtype=torch.float16), Scoring(0.125, sinks=SINKS[:2])
    whole = emulate_ring(BACKEND, inputs, Mask(right=0), "zigzag", 2, scoring)
    for double in doubles:
        double.launches.clear()
    monkeypatch.setattr(launch, "MOST_BATCHES", 2)
    assert all(map(torch.equal, emulate_ring(BACKEND, inputs, Mask(right=0), "zigzag", 2, scoring), whole))
    forward, backward = doubles
    assert {arguments["n_work"] for _, arguments in forward.launches} == {2, 4}  # batches x heads
    assert {grid[0] // arguments["n_blocks"] for grid, arguments in backward.launches} == {1, 2}


def test_deterministic_gradients_take_dq_from_the_portable_kernel(doubles):
    q, k, v, dout, _ = random_inputs(1, 70, 2, 64, dtype=torch.float16)
    gradients = []
    for deterministic in (True, False):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attention(*leaves, causal=True, deterministic=deterministic, backend="triton")
        gradients.append(torch.autograd.grad(out, leaves, dout))
        _, arguments = doubles[1].launches.pop()
        assert arguments["WITH_DQ"] == (not deterministic)
    assert all(relative_error(a, b) < 1e-3 for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (40, 24), (128, 96), (72, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("query_len", [1, 64, 129, 300])
def test_dq_comes_out_of_the_order_of_registers(query_len, dim, v_dim):
    q, _, _, dout, dlse = random_inputs(2, query_len, 3, dim, v_head_dim=v_dim, dtype=torch.float16)
    state = hopper_kernel.start_backward(q, Partial(dout, dlse), dout, None, Scoring(0.5), with_dq=True)
    tile = hopper_kernel.backward_tile(dim, v_dim)
    wanted = torch.randn(q.shape)
    for part in (0.25 * wanted, 0.75 * wanted):
        emulation.dq_in_register_order(state, part, tile.block_q, tile.block_d)
    dq = hopper_kernel.finish_backward(state)
    assert dq.dtype == torch.float16 and torch.allclose(dq.float(), 0.5 * wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_handing_p_over_above_head_dim_128_makes_gradients_no_more_wrong(monkeypatch, dtype):
    inputs = random_inputs(1, 512, 1, 256, dtype=dtype)
    wanted = dense(inputs, Mask())[2:]
    errors = []
    for sent in (emulation.p_sent, lambda p, dtype: p):
        monkeypatch.setattr(emulation, "p_sent", sent)
        got = emulate_ring(BACKEND, inputs, Mask(), "contiguous", 1)[2:]
        errors.append([relative_error(a, b) for a, b in zip(got, wanted, strict=True)])
    assert all(handed_over <= 1.05 * exact for handed_over, exact in zip(*errors, strict=True)), errors


def test_a_backward_pass_takes_out_and_lse_at_any_address(monkeypatch):
    """Hooks of saved tensors may have moved them."""
    q, _, _, dout, dlse = random_inputs(2, 37, 3, 64, dtype=torch.float16)
    moved = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in (dout, dlse)]
    assert launch.are_odd(moved[0]) and launch.are_odd(moved[1])
    expected = hopper_kernel.start_backward(q, Partial(dout, dlse), dout, None, Scoring(0.5), with_dq=True)
    odd, call = [], launch.Launch.__call__

    def spy(self: launch.Launch, *tensors: torch.Tensor | None) -> None:
        odd.extend(launch.are_odd(x) for x in tensors if x is not None)
        call(self, *tensors)

    monkeypatch.setattr(launch.Launch, "__call__", spy)
    for result in (Partial(moved[0], dlse), Partial(dout, moved[1])):
        state = hopper_kernel.start_backward(q, result, dout, None, Scoring(0.5), with_dq=True)
        assert torch.equal(state.minus_lse, expected.minus_lse)
        assert torch.equal(state.minus_delta, expected.minus_delta)
    assert odd and not any(odd)


def test_q_and_dout_at_odd_addresses_are_copied_once_a_pass():
    q, k, v, dout, dlse = random_inputs(2, 64, 3, 64, dtype=torch.float16)
    result = Partial(dout, torch.full_like(dlse, 12.0))
    odd_q, odd_dout = (torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in (q, dout))
    visit, results = plan.plan_one(Mask(right=0), 64, 64).own_visit, []
    for tensors in ((q, dout), (odd_q, odd_dout)):
        state = hopper_kernel.start_backward(tensors[0], result, tensors[1], None, Scoring(0.5), with_dq=True)
        assert not launch.are_odd(state.q, state.dout)
        sums = Sums(torch.empty_like(k), torch.empty_like(v), fresh=True)
        hopper_kernel.backward(k, v, state, visit, lambda sums=sums: sums)
        results.append((sums.dk, sums.dv, hopper_kernel.finish_backward(state)))
    assert all(x.any() and torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_a_cuda_graph_of_a_backward_pass_keeps_its_tables(monkeypatch):
    q, k, v, dout, dlse = random_inputs(1, 64, 2, 64, dtype=torch.float16)
    result = Partial(dout, torch.full_like(dlse, 12.0))
    visit = plan.plan_one(Mask(right=0), 64, 64).own_visit
    sums = Sums(torch.empty_like(k), torch.empty_like(v), fresh=True)
    kept: dict[int, object] = {}
    monkeypatch.setattr(launch, "_in_graphs", kept)
    for is_captured in (False, True):
        monkeypatch.setattr(hopper_kernel, "is_captured", lambda device, answer=is_captured: answer)
        state = hopper_kernel.start_backward(q, result, dout, None, Scoring(0.5), with_dq=True)
        hopper_kernel.backward(k, v, state, visit, lambda: sums)
        assert len(kept) == is_captured


@pytest.mark.parametrize(("softcap", "dropout_p"), [(None, 0.0), (3.0, 0.5)])
@pytest.mark.parametrize("has_dlse", [True, False])
@pytest.mark.parametrize(("query_len", "dim"), [(1, 64), (200, 40), (128, 128), (130, 256)])
def test_a_pass_starts_with_rows_of_whole_tiles(query_len, dim, has_dlse, softcap, dropout_p):
    q, _, _, dout, dlse = random_inputs(2, query_len, 3, dim, dtype=torch.float16)
    out, lse = torch.randn_like(dout), torch.randn_like(dlse)
    lse[1, 2, 0] = -inf
    strided = dlse.transpose(1, 2).contiguous().transpose(1, 2)
    words = torch.ones(2, 3, dtype=torch.int32) if dropout_p else None
    scoring = Scoring(0.5, softcap, dropout_p=dropout_p, head_words=words)
    dlse_given = strided if has_dlse else None
    state = hopper_kernel.start_backward(q, Partial(out, lse), dout, dlse_given, scoring, with_dq=True)
    rows = state.minus_lse.shape[2]
    assert rows % hopper_kernel.backward_tile(dim, dim).block_q == 0 and rows - query_len < 128
    delta = (out.float() * dout.float()).sum(3).transpose(1, 2) - (dlse if has_dlse else 0.0)
    assert torch.allclose(state.delta, delta, rtol=1e-5, atol=1e-5)
    unit = 0.5 if softcap is None else log(2)
    assert torch.equal(state.minus_lse[..., :query_len], torch.where(lse == -inf, -inf, -lse / unit))
    assert torch.equal(state.minus_delta[..., :query_len], -state.delta * (1 - dropout_p))
    assert (state.minus_lse[..., query_len:] == -inf).all() and not state.minus_delta[..., query_len:].any()
    assert state.dq is not None and not state.dq.any()
