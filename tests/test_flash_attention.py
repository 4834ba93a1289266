"""`flash_attention` on one process, torch backend, against dense attention in fp64."""

import math
from functools import partial

import pytest
import torch
from oracle import FP32_BOUND, Attention, assert_close, dense, gradients, small_blocks
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

from ringflash import flash_attention
from ringflash.testing import Inputs, random_inputs, relative_error

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "causal-window": {"causal": True, "window": (9, None)},
}


def attend(inputs: Inputs, **options) -> Attention:
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    return Attention(out.detach(), lse.detach(), *gradients((out, lse), (q, k, v), inputs))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (4, None)}, {"window": (3, 2)}])
@pytest.mark.parametrize("query_len,key_len", [(20, 20), (11, 20)])
def test_dense_attention_is_what_pytorch_computes(options, query_len, key_len):
    """The oracle itself: which key head serves which query head, and where the masks lie."""
    inputs = random_inputs(2, query_len, 6, 16, kv_heads=2, key_len=key_len, v_head_dim=24, dtype=torch.float64)
    left, right = (math.inf if side is None else side for side in options.get("window", (None, None)))
    right = 0 if options.get("causal") else right
    distance = torch.arange(key_len) - (torch.arange(query_len)[:, None] + key_len - query_len)
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in inputs[:3])
    mask = (distance >= -left) & (distance <= right)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout)
    expected = dense(inputs._replace(dlse=torch.zeros_like(inputs.dlse)), **options)
    assert relative_error(out, expected.out) <= 1e-14
    for x, y in zip(grads, expected[2:], strict=True):
        assert relative_error(x.transpose(1, 2), y) <= 1e-14


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "query_len,key_len", [(1, 1), (2, 2), (33, 33), (64, 64), (1, 40), (40, 1), (29, 50), (50, 29), (300, 520)]
)
def test_matches_dense_attention(mask, query_len, key_len):
    inputs = random_inputs(2, query_len, 4, 16, kv_heads=2, key_len=key_len, v_head_dim=24)
    with small_blocks(8 if query_len < 300 else 256):
        assert_close(attend(inputs, **MASKS[mask]), dense(inputs, **MASKS[mask]), FP32_BOUND)


@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (4, 4), (4, 2), (5, 1), (28, 4), (40, 8), (71, 1)])
def test_grouped_heads_match_dense_attention(heads, kv_heads):
    inputs = random_inputs(2, 21, heads, 16, kv_heads=kv_heads)
    assert_close(attend(inputs, causal=True), dense(inputs, causal=True), FP32_BOUND)


@pytest.mark.parametrize(
    "head_dim,v_head_dim",
    [(16, 16), (24, 40), (40, 40), (64, 64), (80, 80), (96, 96), (128, 72), (192, 128), (256, 256)],
)
def test_head_dims_match_dense_attention(head_dim, v_head_dim):
    inputs = random_inputs(1, 19, 2, head_dim, v_head_dim=v_head_dim)
    assert_close(attend(inputs, causal=True), dense(inputs, causal=True), FP32_BOUND)


def test_no_dimension_is_guessed_from_its_size():
    """Batch, rows, heads and head dims that are all the same number."""
    inputs = random_inputs(16, 16, 16, 16)
    assert_close(attend(inputs, causal=True), dense(inputs, causal=True), FP32_BOUND)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(0, 0), (0, None), (None, 0), (-1, -1), (None, 3), (4, -1), (2, 5), (100, 100)])
@pytest.mark.parametrize("query_len,key_len", [(31, 31), (20, 33), (33, 20)])
def test_windows_match_dense_attention(causal, window, query_len, key_len):
    inputs = random_inputs(1, query_len, 2, 16, key_len=key_len)
    options = {"causal": causal, "window": window}
    with small_blocks():
        assert_close(attend(inputs, **options), dense(inputs, **options), FP32_BOUND)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**63 - 1, 2**64])
def test_a_window_side_of_any_size_is_taken(size):
    inputs = random_inputs(1, 20, 2, 16, key_len=15)
    for window, seen in (((0, size), (0, None)), ((size, 0), (None, 0)), ((size, size), None)):
        assert all(map(torch.equal, attend(inputs, window=window), attend(inputs, window=seen)))


@pytest.mark.parametrize("scale", [1e-3, 0.25, 1.0, 3.0])
def test_scale_multiplies_the_scores(scale):
    inputs = random_inputs(1, 17, 2, 16)
    q, k, v = (x.double().requires_grad_() for x in inputs[:3])
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    out, lse = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)
    expected = Attention(out, lse, *gradients((out, lse), (q, k, v), inputs))
    assert_close(attend(inputs, scale=scale), expected, FP32_BOUND)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (None, 0)}, {"window": (2, 1)}])
@pytest.mark.parametrize("query_len,key_len", [(20, 5), (20, 1), (9, 0)])
def test_rows_that_see_no_key_are_exact(options, query_len, key_len):
    """They are out = 0, lse = -inf and no gradient, whatever comes from above."""
    inputs = random_inputs(2, query_len, 4, 16, kv_heads=2, key_len=key_len)
    inputs = inputs._replace(dout=1e6 * inputs.dout, dlse=1e6 * inputs.dlse)
    empty = query_len - key_len - options.get("window", (0, 0))[1] if key_len else query_len
    assert empty > 0
    with small_blocks():
        actual = attend(inputs, **options)
    assert not actual.out[:, :empty].any() and not actual.dq[:, :empty].any()
    assert (actual.lse[:, :, :empty] == -math.inf).all() and actual.lse[:, :, empty:].isfinite().all()
    assert all(x.isfinite().all() for x in (actual.out, *actual[2:]))
    seeing = Inputs(inputs.q[:, empty:], inputs.k, inputs.v, inputs.dout[:, empty:], inputs.dlse[:, :, empty:])
    if key_len:
        expected = dense(seeing, **options)
        assert relative_error(actual.out[:, empty:], expected.out) <= FP32_BOUND
        assert relative_error(actual.dk, expected.dk) <= FP32_BOUND
        assert relative_error(actual.dv, expected.dv) <= FP32_BOUND


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch,query_len,key_len", [(2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 5, 5)])
def test_empty_tensors_are_attended_to(causal, batch, query_len, key_len):
    inputs = random_inputs(batch, query_len, 4, 16, kv_heads=2, key_len=key_len, v_head_dim=24)
    actual = attend(inputs, causal=causal)
    assert actual.out.shape == (batch, query_len, 4, 24) and actual.lse.shape == (batch, 4, query_len)
    assert (actual.lse == -math.inf).all()
    for x in (actual.out, *actual[2:]):
        assert not x.any()
    assert [x.shape for x in actual[2:]] == [x.shape for x in inputs[:3]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_output_and_gradients_come_in_the_inputs_dtype(dtype):
    inputs = random_inputs(2, 40, 4, 16, kv_heads=2, dtype=dtype)
    with small_blocks():
        actual = attend(inputs, causal=True)
    expected = dense(inputs, causal=True)
    assert actual.lse.dtype == torch.promote_types(dtype, torch.float32)
    assert relative_error(actual.lse, expected.lse) <= FP32_BOUND
    for x in (actual.out, *actual[2:]):
        assert x.dtype == dtype
    # One rounding at the end is all that half precision costs the output; delta reads that output for dq and dk.
    unit = torch.finfo(dtype).eps / 2
    assert relative_error(actual.out, expected.out) <= max(unit, 1e-6 if dtype == torch.float32 else 0, 1e-15)
    assert_close(actual, expected, {torch.float32: FP32_BOUND, torch.float64: 1e-14}.get(dtype, 1.5 * unit))


def test_lse_is_the_natural_log_of_the_sum_of_exponentials():
    q, k, v, *_ = random_inputs(1, 9, 1, 16, key_len=13, dtype=torch.float64)
    _, lse = flash_attention(q, k, v, return_lse=True, scale=0.7)
    assert torch.allclose(lse[0, 0].exp(), (0.7 * q[0, :, 0] @ k[0, :, 0].T).exp().sum(-1), rtol=1e-12)


def test_without_return_lse_only_the_output_comes_back():
    q, k, v, *_ = random_inputs(1, 9, 1, 16)
    out = flash_attention(q, k, v)
    assert isinstance(out, Tensor) and torch.equal(out, flash_attention(q, k, v, return_lse=True)[0])


@pytest.mark.parametrize("use", ["out", "lse", "both"])
def test_a_loss_of_out_or_lse_or_both_has_the_right_gradients(use):
    inputs = random_inputs(1, 20, 2, 16)
    used = inputs._replace(
        dout=inputs.dout if use != "lse" else torch.zeros_like(inputs.dout),
        dlse=inputs.dlse if use != "out" else torch.zeros_like(inputs.dlse),
    )
    expected = dense(used, causal=True)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    chosen = {
        "out": [(out, inputs.dout)],
        "lse": [(lse, inputs.dlse)],
        "both": [(out, inputs.dout), (lse, inputs.dlse)],
    }
    results, grads = zip(*chosen[use], strict=True)
    assert_close(Attention(out, lse, *torch.autograd.grad(results, (q, k, v), grads)), expected, FP32_BOUND)


@pytest.mark.parametrize("fast_mode", [True, False])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1)}])
def test_gradcheck_in_fp64_of_out_and_lse(options, fast_mode):
    query_len, key_len = (9, 14) if fast_mode else (3, 4)
    q, k, v, *_ = random_inputs(1, query_len, 2, 16, kv_heads=1, key_len=key_len, v_head_dim=24, dtype=torch.float64)
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    with small_blocks(2):
        attention = partial(flash_attention, return_lse=True, **options)
        assert torch.autograd.gradcheck(attention, leaves, fast_mode=fast_mode)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)])
def test_inputs_that_need_no_gradient_get_none(needed):
    inputs = random_inputs(1, 12, 2, 16)
    expected = attend(inputs, causal=True)[2:]
    leaves = [x.detach().requires_grad_(i in needed) for i, x in enumerate(inputs[:3])]
    out, lse = flash_attention(*leaves, causal=True, return_lse=True)
    torch.autograd.backward((out, lse), (inputs.dout, inputs.dlse))
    for i, (leaf, grad) in enumerate(zip(leaves, expected, strict=True)):
        assert (leaf.grad is None) == (i not in needed)
        assert leaf.grad is None or torch.equal(leaf.grad, grad)


def test_a_loss_of_the_lse_may_be_singular_where_no_key_is_seen():
    q, k, v, *_ = (x.requires_grad_() for x in random_inputs(1, 9, 2, 16, key_len=4))
    _, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    lse.square().masked_fill(lse.isinf(), 0.0).sum().backward()  # 0 * -inf: dlse is NaN in the empty rows
    assert q.grad is not None and k.grad is not None
    assert not q.grad[:, :5].any() and q.grad[:, 6:].any() and k.grad.isfinite().all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_runs_without_autograd(mode):
    inputs = random_inputs(1, 12, 2, 16)
    expected = attend(inputs)
    with mode():
        out, lse = flash_attention(*inputs[:3], return_lse=True)
    assert not out.requires_grad and torch.equal(out, expected.out) and torch.equal(lse, expected.lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype):
    inputs = random_inputs(1, 20, 2, 16, dtype=dtype)
    plain = attend(inputs, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, attend(inputs, causal=True), plain))


@pytest.mark.parametrize("is_linear", [False, True])  # then nothing that comes to the backward pass needs a gradient
def test_a_second_derivative_is_refused_not_wrong(is_linear):
    inputs = random_inputs(1, 12, 2, 16)
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    out = flash_attention(q, k, v)
    (dq,) = torch.autograd.grad((out if is_linear else out.square()).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(dq.square().sum() + q.sum(), q)


def test_forward_mode_derivatives_are_refused_not_wrong():
    q, k, v, *_ = random_inputs(1, 12, 2, 16)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda k: flash_attention(q, k, v), (k,), (k,))
    with forward_ad.dual_level():
        flash_attention(q, k, v)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            flash_attention(q, k, forward_ad.make_dual(v, v))


def test_compiled_autograd_traces_the_backward_pass():
    inputs = random_inputs(1, 12, 2, 16)
    expected = attend(inputs)
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    out, lse = flash_attention(q, k, v, return_lse=True)
    go_back = partial(torch.autograd.backward, (out, lse), (inputs.dout, inputs.dlse))
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: go_back(), backend="aot_eager")()
    for x, gradient in zip((q, k, v), expected[2:], strict=True):
        assert x.grad is not None and torch.equal(x.grad, gradient)


def test_boundaries_changed_before_the_backward_pass_are_noticed():
    q, k, v = (x.requires_grad_() for x in random_inputs(1, 12, 2, 16)[:3])
    boundaries = torch.tensor([0, 5, 12])
    out = flash_attention(q, k, v, cu_seqlens=boundaries)
    boundaries[1] = 7
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def strided(x: Tensor) -> Tensor:
    """Every second element of a wider tensor: no dimension is dense."""
    wide = torch.full([2 * n for n in x.shape], float("nan"), dtype=x.dtype)
    view = wide[tuple(slice(1, None, 2) for _ in x.shape)]
    return view.copy_(x)


def transposed(x: Tensor) -> Tensor:
    """Memory in the order (b, h, s, d), or (b, s, h) for an lse."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def reversed_memory(x: Tensor) -> Tensor:
    """Memory in the order of the last dimension first."""
    order = tuple(reversed(range(x.ndim)))
    return x.permute(order).contiguous().permute(order)


@pytest.mark.parametrize("arrange", [strided, transposed, reversed_memory])
def test_strides_of_inputs_and_gradients_do_not_matter(arrange):
    inputs = random_inputs(2, 20, 4, 16, kv_heads=2)
    rearranged = Inputs(*map(arrange, inputs))
    assert not any(x.is_contiguous() for x in rearranged)
    expected = attend(inputs, causal=True)
    for x, y in zip(attend(rearranged, causal=True), expected, strict=True):
        assert relative_error(x, y) <= 1e-6


def test_expanded_inputs_and_gradients_are_read_as_they_look():
    """Stride 0 in batch, heads and rows; dout and dlse as `sum().backward()` makes them."""
    one = random_inputs(1, 1, 1, 16, seed=1)
    full = random_inputs(2, 20, 4, 16)
    expanded = Inputs(
        q=full.q[:1].expand(2, -1, -1, -1),
        k=full.k[:, :, :1].expand(-1, -1, 4, -1),
        v=one.v.expand(2, 20, 4, -1) * 1.0 + full.v,
        dout=one.dout[:, :, :, :1].expand(2, 20, 4, 16),
        dlse=one.dlse.expand(2, 4, 20),
    )
    assert expanded.q.stride(0) == expanded.k.stride(2) == 0 and set(expanded.dout.stride()) == {0}
    dense_memory = Inputs(*(x.contiguous() for x in expanded))
    assert_close(attend(expanded, causal=True), dense(dense_memory, causal=True), FP32_BOUND)


def storages(tensors) -> list[int]:
    return [x.untyped_storage().data_ptr() for x in tensors if x.numel()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_results_share_no_memory_with_inputs_or_each_other(dtype, options):
    inputs = random_inputs(1, 16, 2, 16, dtype=dtype)
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    grads = torch.autograd.grad((out, lse), (q, k, v), (inputs.dout, inputs.dlse))
    memory = storages([*inputs, out, lse, *grads])
    assert len(set(memory)) == len(memory)


def test_one_tensor_may_be_q_and_k_and_v():
    x = random_inputs(1, 16, 2, 16).q.requires_grad_()
    out = flash_attention(x, x, x, causal=True)
    (dx,) = torch.autograd.grad(out.square().sum(), x)
    wide = x.detach().double().requires_grad_()
    scores = (torch.einsum("bqhd,bkhd->bhqk", wide, wide) / 4).masked_fill(~torch.ones(16, 16).tril().bool(), -math.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), wide)
    (expected,) = torch.autograd.grad(out.square().sum(), wide)
    assert relative_error(dx, expected) <= FP32_BOUND


def test_a_later_call_changes_no_earlier_result():
    first = random_inputs(1, 24, 2, 16, seed=1)
    results = attend(first, causal=True)
    before = [x.clone() for x in results]
    attend(random_inputs(1, 24, 2, 16, seed=2), causal=True)
    attend(random_inputs(1, 30, 4, 16, seed=3))
    assert all(torch.equal(x, y) for x, y in zip(results, before, strict=True))


def test_inputs_are_left_as_they_were():
    inputs = random_inputs(1, 24, 2, 16)
    before = [x.clone() for x in inputs]
    attend(inputs, causal=True)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_deterministic_gradients_are_bitwise_equal():
    inputs = random_inputs(2, 40, 4, 16, kv_heads=2)
    first = attend(inputs, causal=True, deterministic=True)
    for _ in range(3):
        again = attend(inputs, causal=True, deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_large_scores_neither_overflow_nor_lose_the_answer():
    inputs = random_inputs(1, 24, 2, 16)
    inputs = inputs._replace(q=300 * inputs.q, k=10 * inputs.k)
    actual, expected = attend(inputs, causal=True), dense(inputs, causal=True)
    assert all(x.isfinite().all() for x in actual)
    assert relative_error(actual.lse, expected.lse) <= FP32_BOUND


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_into_one_graph(backend):
    @torch.compile(fullgraph=True, backend=backend)
    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flash_attention(2 * q, k, v, causal=True, window=(12, None), return_lse=True)
        return out + 1, lse

    for seq_len in (20, 24, 31):  # the second length makes sizes symbolic
        inputs = random_inputs(2, seq_len, 4, 16, kv_heads=2)
        q, k, v = (x.requires_grad_() for x in inputs[:3])
        out, lse = model(q, k, v)
        grads = torch.autograd.grad((out, lse), (q, k, v), (inputs.dout, inputs.dlse))
        expected = attend(inputs._replace(q=2 * inputs.q.detach()), causal=True, window=(12, None))
        assert torch.equal(out, expected.out + 1) and torch.equal(lse, expected.lse)
        assert torch.equal(grads[0], 2 * expected.dq)
        assert torch.equal(grads[1], expected.dk) and torch.equal(grads[2], expected.dv)
