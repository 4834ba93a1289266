"""What changes scores and probabilities beside the mask: every option in every layout, world size and mask.

Sinks are checked with their gradient: each rank's is by its own queries, and their sum is the whole.
"""

from functools import cache
from typing import Any

import pytest
import torch
from oracle import FP32_BOUND, Attention, assemble, assert_close, held_positions, local_part, small_blocks, world
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringflash import Mask, compat, flash_attention, ops, reference, ring_attention
from ringflash.merge import Partial
from ringflash.plan import Visit
from ringflash.score import Scoring, draw_head_words, kept, make_words, threshold
from ringflash.testing import Inputs, random_inputs, relative_error

OPTIONS: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": torch.tensor([0.7, -2.0, 3.0, float("-inf")])},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.01, 0.0])},
    "alibi of each batch": {"alibi_slopes": torch.tensor([[0.5, 0.25, 0.01, 0.0], [0.0, 0.3, 2.0, -0.1]])},
    "dropout": {"dropout_p": 0.3},
}
OPTIONS["all"] = {name: value for options in OPTIONS.values() for name, value in options.items()}
MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(5, 2),
    "documents": Mask(causal=True, cu_seqlens=[0, 1, 16, 20, 37]),
}
SEQ_LEN = 37
SEED = 3


def problem(seq_len: int = SEQ_LEN, **shape: Any) -> Inputs:
    return random_inputs(2, seq_len, 4, 16, kv_heads=2, v_head_dim=24, **shape)


def run(
    attention: Any, inputs: Inputs, sinks: Tensor | None = None, seed_here: int = SEED, **options: Any
) -> tuple[Attention, Tensor | None]:
    """Results of both passes, with the gradient of sinks; dropout goes by what is drawn after `seed_here`."""
    torch.manual_seed(seed_here)
    leaves = [x.detach().requires_grad_() for x in (*inputs[:3], *(() if sinks is None else (sinks,)))]
    options |= {} if sinks is None else {"sinks": leaves[3]}
    with small_blocks():
        out, lse = attention(*leaves[:3], **options)
        finite = lse.masked_fill(lse.isinf(), 0.0)
        loss = (out * inputs.dout).sum() + (finite * inputs.dlse).sum()
        dq, dk, dv, *dsinks = torch.autograd.grad(loss, leaves)
    return Attention(out.detach(), lse.detach(), dq, dk, dv), dsinks[0] if dsinks else None


def dense(inputs: Inputs, **options: Any) -> tuple[Attention, Tensor | None]:
    wide = Inputs(*(x.double() for x in inputs))
    if options.get("dropout_p"):
        torch.manual_seed(SEED)
        options |= {"head_words": draw_head_words(wide.q.shape[0], wide.q.shape[2])}
    return run(reference.dense_attention, wide, **options)


@cache
def dense_result(mask: str, option: str) -> tuple[Attention, Tensor | None]:
    return dense(problem(), mask=MASKS[mask], **OPTIONS[option])


def check(actual: tuple[Attention, Tensor | None], expected: tuple[Attention, Tensor | None], what: object) -> None:
    assert_close(actual[0], expected[0], FP32_BOUND, what)
    if expected[1] is not None:
        assert actual[1] is not None and relative_error(actual[1], expected[1]) <= FP32_BOUND, f"dsinks, {what}"


def attend_here(layout: str, option: str) -> list[tuple[Attention, Tensor | None]]:
    """This rank's rows under each mask. Rank 0 alone draws what the oracle goes by."""
    group, whole = world(), problem()
    part = local_part(whole, held_positions(layout, SEQ_LEN, group.size(), group.rank()))
    shared: dict[str, Any] = {"group": group, "layout": layout, "seq_len": SEQ_LEN, "return_lse": True}
    shared["seed_here"] = SEED + group.rank()
    return [run(ring_attention, part, **shared, mask=mask, **OPTIONS[option]) for mask in MASKS.values()]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rings_match_dense_attention_with_every_option(workers, world_size, layout, option):
    by_rank = workers(world_size).run(attend_here, layout, option)
    held = [held_positions(layout, SEQ_LEN, world_size, rank) for rank in range(world_size)]
    for mask, *parts in zip(MASKS, *by_rank, strict=True):
        dsinks = [part[1] for part in parts if part[1] is not None]
        actual = assemble([part[0] for part in parts], held), torch.stack(dsinks).sum(0) if dsinks else None
        check(actual, dense_result(mask, option), mask)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("query_len", "key_len"), [(1, 1), (9, 20), (20, 9), (5, 0), (0, 5)])
def test_unequal_lengths_match_dense_attention_with_every_option(query_len, key_len, option):
    inputs = problem(query_len, key_len=key_len)
    for name in ("full", "causal", "window"):
        actual = run(flash_attention, inputs, mask=MASKS[name], return_lse=True, **OPTIONS[option])
        check(actual, dense(inputs, mask=MASKS[name], **OPTIONS[option]), name)


# Dropout ------------------------------------------------------------------------------------------------------------


def test_every_call_drops_others_and_torch_manual_seed_governs_which():
    q, k, v, *_ = problem()
    first, second = (flash_attention(q, k, v, dropout_p=0.5) for _ in torch.arange(2))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    before = flash_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(flash_attention(q, k, v, dropout_p=0.5), before)


def test_dropout_keeps_its_share_and_the_mean_and_leaves_lse_alone():
    q, k, v, *_ = random_inputs(2, 128, 2, 16, key_len=512)
    out, lse = flash_attention(q, k, torch.ones_like(v), dropout_p=0.25, return_lse=True)
    assert abs(out.mean() - 1) <= 0.01 and out.std() > 0.01
    assert torch.equal(lse, flash_attention(q, k, v, return_lse=True)[1])
    words = draw_head_words(2, 2, torch.Generator().manual_seed(11))
    share = kept(words, *make_words(torch.arange(512), torch.arange(512)), threshold(0.25)).double().mean((2, 3))
    assert (share - 0.75).abs().max() <= 5 * (0.25 * 0.75) ** 0.5 / 512  # five standard deviations


@pytest.mark.parametrize("dropout_p", [1e-9, 0.3, 1 - 1e-6, 1 - 1e-9, 1 - 1e-12])
def test_a_kept_weight_is_divided_by_the_share_that_is_kept(dropout_p, monkeypatch):
    q, k, v, *_ = random_inputs(1, 1, 1, 16, dtype=torch.float64)
    query_word, key_word = (int(x) for x in make_words(*torch.zeros(2, 1, dtype=torch.long)))
    largest = 2**31 - 1  # of all hashes: kept, whatever is dropped
    word = (largest * pow(query_word * key_word, -1, 2**32) + 2**31) % 2**32 - 2**31
    monkeypatch.setattr("ringflash.attention.draw_head_words", lambda *_: torch.tensor([[word]], dtype=torch.int32))
    lowest_kept = threshold(dropout_p) | 1  # hashes are odd
    share = ((largest - lowest_kept) // 2 + 1) / 2**31
    assert abs(share - (1 - dropout_p)) <= 2**-32 or share == 2**-31
    torch.testing.assert_close(flash_attention(q, k, v, dropout_p=dropout_p), v / share, rtol=1e-13, atol=0.0)


def test_what_is_dropped_depends_on_seed_batch_head_query_and_key():
    def draw(seed: int) -> Tensor:
        words = draw_head_words(2, 2, torch.Generator().manual_seed(seed))
        return (
            kept(words, *make_words(torch.arange(64), torch.arange(2**31 - 64, 2**31)), threshold(0.5)).double() * 2 - 1
        )

    x = draw(0)
    others = {"seed": (x, draw(1)), "batch": (x[0], x[1]), "head": (x[:, 0], x[:, 1])}
    others |= {"query": (x[:, :, 1:], x[:, :, :-1]), "key": (x[..., 1:], x[..., :-1])}
    others |= {"diagonal": (x[..., 1:, 1:], x[..., :-1, :-1]), "swapped": (x, x.transpose(2, 3))}
    for name, (one, other) in others.items():
        assert abs((one * other).mean()) * one.numel() ** 0.5 <= 5, name  # standard deviations


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_activation_checkpoints_drop_the_same_again(workers, world_size, use_reentrant):
    for plain, recomputed in workers(world_size).run(gradients_with_and_without_checkpoint, use_reentrant):
        assert all(map(torch.equal, plain, recomputed))


def gradients_with_and_without_checkpoint(use_reentrant: bool) -> list[list[Tensor]]:
    group, whole, found = world(), problem(), []
    part = local_part(whole, held_positions("zigzag", SEQ_LEN, group.size(), group.rank()))

    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, group=group, seq_len=SEQ_LEN, causal=True, dropout_p=0.4)

    for attention in (ring, lambda *x: checkpoint(ring, *x, use_reentrant=use_reentrant)):
        torch.manual_seed(7)
        leaves = [x.detach().requires_grad_() for x in part[:3]]
        attention(*leaves).backward(part.dout)
        found.append([x.grad for x in leaves])
    return found


# All of them ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_every_option_compiles_into_one_graph(backend):
    sinks, slopes, inputs = OPTIONS["all"]["sinks"], OPTIONS["alibi"]["alibi_slopes"], problem()
    options: dict[str, Any] = {"softcap": 2.0, "alibi_slopes": slopes, "dropout_p": 0.2, "return_lse": True}

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attention(q, k, v, sinks=sinks, **options)

    actual = run(compiled, inputs, sinks)
    check(actual, run(flash_attention, inputs, sinks, **options), backend)


def test_slopes_of_0_and_a_wide_cap_change_nothing():
    q, k, v, *_ = problem()
    plain = flash_attention(q, k, v, causal=True)
    assert torch.equal(flash_attention(q, k, v, causal=True, alibi_slopes=torch.zeros(4)), plain)
    assert relative_error(flash_attention(q, k, v, causal=True, softcap=1e4), plain) <= 1e-4


def test_slopes_count_from_the_end_of_each_document():
    q, k, v, *_ = (x[0] for x in random_inputs(1, 12, 4, 16, key_len=17))
    cu_q, cu_k, slopes = torch.tensor([0, 3, 12]), torch.tensor([0, 10, 17]), OPTIONS["alibi"]["alibi_slopes"]
    packed = compat.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 10, causal=True, alibi_slopes=slopes)
    for a, b, c, d in ((0, 3, 0, 10), (3, 12, 10, 17)):
        alone = flash_attention(q[None, a:b], k[None, c:d], v[None, c:d], causal=True, alibi_slopes=slopes)
        assert isinstance(packed, Tensor) and relative_error(packed[a:b], alone[0]) <= FP32_BOUND


# Sinks --------------------------------------------------------------------------------------------------------------


def test_a_sink_is_a_key_of_value_0():
    q, k, v, *_ = random_inputs(1, 7, 1, 16)
    sink = torch.tensor([1.5])
    wanted = 1.5 / 0.25 * q[0, 0, 0] / q[0, 0, 0].square().sum()  # for query 0, a key with that score
    wide_k, wide_v = torch.cat([k, wanted[None, None, None]], 1), torch.cat([v, torch.zeros(1, 1, 1, 16)], 1)
    out, lse = flash_attention(q[:, :1], k, v, sinks=sink, return_lse=True)
    expected, expected_lse = flash_attention(q[:, :1], wide_k, wide_v, return_lse=True)
    assert relative_error(out, expected) <= 1e-6 and relative_error(lse, expected_lse) <= 1e-6


def test_with_one_visit_out_has_qs_dtype_at_once(monkeypatch):
    """Sinks leave nothing to do after it."""
    written, backend = [], ops._backend("torch", False)

    def spy(
        q: Tensor, k: Tensor, v: Tensor, visit: Visit, scoring: Scoring, into: Partial, before: Tensor | None
    ) -> None:
        backend.forward(q, k, v, visit, scoring, into, before)
        written.extend(into)

    monkeypatch.setattr(ops, "_backend", lambda *_: backend._replace(forward=spy))
    q, k, v, *_ = problem(dtype=torch.bfloat16)
    out, lse = flash_attention(q, k, v, sinks=OPTIONS["sinks"]["sinks"], return_lse=True)
    assert written[0] is out and written[1] is lse and out.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sinks_of_any_dtype_get_their_gradient_in_it(dtype):
    inputs, sinks = problem(), torch.tensor([0.75, -2.0, 3.0, float("-inf")], dtype=dtype)
    actual = run(flash_attention, inputs, sinks, mask=MASKS["causal"], return_lse=True)
    expected = dense(inputs, sinks=sinks.double(), mask=MASKS["causal"])
    assert_close(actual[0], expected[0], FP32_BOUND)
    assert actual[1] is not None and expected[1] is not None and actual[1].dtype == dtype
    assert relative_error(actual[1], expected[1]) <= max(FP32_BOUND, torch.finfo(dtype).eps)


def test_a_query_that_sees_no_key_has_the_sink_alone():
    inputs = random_inputs(1, 4, 2, 16, key_len=1)
    out, lse = flash_attention(*inputs[:3], causal=True, sinks=torch.tensor([0.5, -1.0]), return_lse=True)
    assert not out[:, :3].any() and lse[0, :, :3].tolist() == [[0.5] * 3, [-1.0] * 3]


def test_a_compiled_call_with_dropout_takes_another_batch_size():
    model = torch.compile(lambda x: flash_attention(x, x, x, dropout_p=0.3), backend="eager", fullgraph=True)
    for batch in (2, 3, 4):  # the second makes it symbolic
        x = torch.randn(batch, 8, 2, 16)
        torch.manual_seed(batch)
        expected = flash_attention(x, x, x, dropout_p=0.3)
        torch.manual_seed(batch)
        assert torch.equal(model(x), expected)
