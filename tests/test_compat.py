"""flash-attn's and ring-flash-attention's functions: their arguments in their order, each of which works or raises."""

import inspect
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import FP32_BOUND, world
from torch import Tensor

from ringflash import Mask, compat, flash_attention, shard, unshard
from ringflash.testing import random_inputs, relative_error

COMMON = ["dropout_p", "softmax_scale", "causal", "window_size"]
FLASH = [*COMMON, "softcap", "alibi_slopes", "deterministic", "return_attn_probs"]
RING = [*COMMON, "alibi_slopes", "deterministic", "return_attn_probs", "group"]
TWO_LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES = {
    "flash_attn_func": ["q", "k", "v", *FLASH],
    "flash_attn_kvpacked_func": ["q", "kv", *FLASH],
    "flash_attn_qkvpacked_func": ["qkv", *FLASH],
    "flash_attn_varlen_func": ["q", "k", "v", *TWO_LENGTHS, *FLASH, "block_table"],
    "flash_attn_varlen_kvpacked_func": ["q", "kv", *TWO_LENGTHS, *FLASH],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *FLASH],
    "ring_flash_attn_func": ["q", "k", "v", *RING],
    "zigzag_ring_flash_attn_func": ["q", "k", "v", *RING],
    "stripe_flash_attn_func": ["q", "k", "v", *RING],
    "ring_flash_attn_varlen_func": ["q", "k", "v", "cu_seqlens", "max_seqlen", *RING],
    "zigzag_ring_flash_attn_varlen_func": ["q", "k", "v", "cu_seqlens", "max_seqlen", *RING],
}
BOUNDARIES = [0, 8, 12, 24]  # of this rank's rows
CU_SEQLENS = torch.tensor(BOUNDARIES, dtype=torch.int32)


def arguments(name: str) -> dict[str, Any]:
    """Good ones, whole sequences of 24 rows."""
    q, k, v, *_ = random_inputs(1 if "varlen" in name else 2, 24, 4, 16, kv_heads=4)
    if "varlen" in name:
        q, k, v = q[0], k[0], v[0]
    tensors = {"q": q, "k": k, "v": v, "kv": torch.stack([k, v], -3), "qkv": torch.stack([q, k, v], -3)}
    lengths = dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), CU_SEQLENS)
    longest = dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k"), 12)
    known: dict[str, Any] = {**tensors, **lengths, **longest}
    return {argument: known[argument] for argument in SIGNATURES[name] if argument in known}


# A value other than the default, and what it must do: change the result, leave it alone, or raise.
CHANGES: dict[str, tuple[Any, str]] = {
    "softmax_scale": (0.7, "changes"),
    "causal": (True, "changes"),
    "window_size": ((2, 1), "changes"),
    "deterministic": (True, "same"),
    "return_attn_probs": (True, "changes"),
    "dropout_p": (0.1, "changes"),
    "softcap": (3.0, "changes"),
    "alibi_slopes": (torch.ones(4), "changes"),
    "block_table": (torch.zeros(1, 1), "block_table is not built"),
    "cu_seqlens": (torch.tensor([0, 24], dtype=torch.int32), "cu_seqlens|max_seqlen"),
    "cu_seqlens_q": (torch.tensor([0, 20, 22, 24]), "max_seqlen_q must be at least .* 20 tokens, got 12"),
    "cu_seqlens_k": (torch.tensor([0, 2, 4, 24]), "max_seqlen_k must be at least .* 20 tokens, got 12"),
    "max_seqlen": (11, "max_seqlen.* must be at least the longest document's 12 tokens, got 11"),
    "max_seqlen_q": (11, "max_seqlen_q must be at least the longest document's 12 tokens, got 11"),
    "max_seqlen_k": (11, "max_seqlen_k must be at least the longest document's 12 tokens, got 11"),
}


def same(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


def check_every_argument(name: str) -> None:
    function: Callable[..., Any] = getattr(compat, name)
    signature = inspect.signature(function)
    assert list(signature.parameters) == SIGNATURES[name]
    plain = function(*arguments(name).values())
    for argument in SIGNATURES[name]:
        if argument in ("q", "k", "v", "kv", "qkv"):
            changed = arguments(name)
            changed[argument] = 1.5 * changed[argument]
            assert not same(function(**changed), plain), argument
        elif argument == "group":
            assert same(function(**arguments(name), group=world()), plain)
        else:
            value, effect = CHANGES[argument]
            if effect in ("changes", "same"):
                assert same(function(**arguments(name) | {argument: value}), plain) == (effect == "same"), argument
            else:
                with pytest.raises((ValueError, NotImplementedError), match=effect):
                    function(**arguments(name) | {argument: value})


@pytest.mark.parametrize("name", [name for name in SIGNATURES if name.startswith("flash")])
def test_every_argument_works_or_raises(name):
    check_every_argument(name)


def check_every_argument_of_rings() -> None:
    for name in SIGNATURES:
        if not name.startswith("flash"):
            check_every_argument(name)


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_argument_of_a_ring_works_or_raises(workers, world_size):
    workers(world_size).run(check_every_argument_of_rings)


def test_every_function_is_in_the_table_of_signatures():
    functions = {name for name, f in vars(compat).items() if inspect.isfunction(f) and f.__module__ == compat.__name__}
    assert {name for name in functions if not name.startswith("_")} == set(SIGNATURES)


def test_flash_attn_forms_are_flash_attention():
    q, k, v, *_ = random_inputs(2, 24, 4, 16, kv_heads=2)
    expected = flash_attention(q, k, v, causal=True, window=(5, 0), scale=0.3, return_lse=True)
    options: dict[str, Any] = {"softmax_scale": 0.3, "causal": True, "window_size": (5, -1)}
    out, lse, probs = compat.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    assert same(out, expected[0]) and same(lse, expected[1]) and probs is None
    assert same(compat.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options), out)
    wide = [x.repeat_interleave(2, dim=2) for x in (k, v)]
    packed = compat.flash_attn_qkvpacked_func(torch.stack([q, *wide], 2), **options)
    assert isinstance(packed, Tensor) and relative_error(packed, expected[0]) <= 1e-6


@pytest.mark.parametrize("slopes", [None, torch.tensor([0.5, 0.1, 0.0, 1.0])], ids=["plain", "alibi"])
@pytest.mark.parametrize("causal", [False, True])
def test_varlen_documents_of_unequal_lengths_are_each_attended_to_alone(causal, slopes):
    cu_q, cu_k = torch.tensor([0, 3, 3, 10, 17]), torch.tensor([0, 9, 12, 16, 23])
    q, k, v, dout, dlse = random_inputs(1, 17, 4, 16, kv_heads=2, key_len=23)
    leaves = [x[0].requires_grad_() for x in (q, k, v)]
    attention: Callable[..., Any] = compat.flash_attn_varlen_func
    options: dict[str, Any] = {"causal": causal, "alibi_slopes": slopes}
    out, lse, _ = attention(*leaves, cu_q, cu_k, 7, 9, **options, return_attn_probs=True)
    grads = torch.autograd.grad((out, lse), leaves, (dout[0], dlse[0]))
    kv = torch.stack(leaves[1:], 1)
    assert same(compat.flash_attn_varlen_kvpacked_func(leaves[0], kv, cu_q, cu_k, 7, 9, **options), out)
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        own = [x.detach().requires_grad_() for x in (q[:, a:b], k[:, c:d], v[:, c:d])]
        expected = flash_attention(*own, **options, return_lse=True)
        wanted = torch.autograd.grad(expected, own, (dout[:, a:b], dlse[:, :, a:b]))
        pairs = [(out[a:b], expected[0][0]), (lse[:, a:b], expected[1][0]), (grads[0][a:b], wanted[0][0])]
        pairs += [(x[c:d], y[0]) for x, y in zip(grads[1:], wanted[1:], strict=True)]
        for actual, want in pairs:
            assert relative_error(actual, want) <= FP32_BOUND


def rings_and_whole(name: str, layout: str) -> tuple[float, ...]:
    """Errors of out, lse and the gradients of this rank's rows, beside attention over the whole sequence."""
    world_size = dist.get_world_size()
    varlen = "varlen" in name
    mask = Mask(causal=True, cu_seqlens=[world_size * b for b in BOUNDARIES]) if varlen else Mask(causal=True)
    whole = random_inputs(1, 24 * world_size, 4, 16, kv_heads=2)
    leaves = [x.requires_grad_() for x in whole[:3]]
    out, lse = flash_attention(*leaves, mask=mask, return_lse=True)
    expected = out, lse, *torch.autograd.grad((out, lse), leaves, (whole.dout, whole.dlse))
    how = {"group": world(), "layout": layout, "layout_mask": mask if varlen else None}
    parts = [shard(x.detach(), **how).requires_grad_() for x in whole[:3]]
    function: Callable[..., Any] = getattr(compat, name)
    if varlen:
        out, lse, _ = function(*(x[0] for x in parts), CU_SEQLENS, 12, causal=True, return_attn_probs=True)
        out, lse = out[None], lse[None]
    else:
        out, lse, _ = function(*parts, causal=True, return_attn_probs=True)
    upstream = shard(whole.dout, **how), shard(whole.dlse, **how, dim=2)
    actual = out, lse, *torch.autograd.grad((out, lse), parts, upstream)
    dims = (1, 2, 1, 1, 1)
    return tuple(
        relative_error(unshard(x.detach(), **how, dim=dim), y) for x, y, dim in zip(actual, expected, dims, strict=True)
    )


@pytest.mark.parametrize(
    "name,layout",
    [
        ("ring_flash_attn_func", "contiguous"),
        ("zigzag_ring_flash_attn_func", "zigzag"),
        ("stripe_flash_attn_func", "striped"),
        ("ring_flash_attn_varlen_func", "contiguous-by-document"),
        ("zigzag_ring_flash_attn_varlen_func", "zigzag-by-document"),
    ],
)
def test_rings_hold_their_rows_as_ring_flash_attention_does(workers, name, layout):
    for errors in workers(2).run(rings_and_whole, name, layout):
        assert max(errors) <= FP32_BOUND


def refuse_on_rank_1(name: str, bad: dict[str, Any]) -> str:
    try:
        getattr(compat, name)(**arguments(name) | (bad if dist.get_rank() == 1 else {}))
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "name,bad,words",
    [
        ("ring_flash_attn_func", {"softmax_scale": -1.0}, "scale must be positive"),
        ("zigzag_ring_flash_attn_varlen_func", {"max_seqlen": 3}, "max_seqlen must be at least"),
        ("ring_flash_attn_varlen_func", {"alibi_slopes": torch.ones(3, 4)}, "alibi_slopes of each document are not"),
        ("ring_flash_attn_varlen_func", {"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens must end at|at least"),
    ],
)
def test_what_one_rank_refuses_the_others_hear_of(workers, name, bad, words):
    first, second = workers(2).run(refuse_on_rank_1, name, bad)
    assert re.search(words, second) and "rank 1 of the group refused" in first and re.search(words, first)


def test_packed_tensors_of_another_shape_are_refused():
    x = torch.zeros(2, 8, 2, 4, 16)
    with pytest.raises(ValueError, match=r"qkv must have 5 dimensions, 3 in the third from the end"):
        compat.flash_attn_qkvpacked_func(x)
    with pytest.raises(ValueError, match=r"kv must have 4 dimensions, 2 in the third"):
        compat.flash_attn_varlen_kvpacked_func(x[0, :, 0], x, CU_SEQLENS, CU_SEQLENS, 12, 12)
    with pytest.raises(ValueError, match=r"q must be \(tokens, heads, head dim\)"):
        compat.flash_attn_varlen_func(x[:, :, 0], x[0], x[0], CU_SEQLENS, CU_SEQLENS, 12, 12)
