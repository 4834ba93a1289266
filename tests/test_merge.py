"""`merge` is a commutative monoid whose identity is exact, and its gradients are those of attention over the union."""

from itertools import permutations

import pytest
import torch
from torch import Tensor

from ringflash.merge import NEG_INF, merge
from ringflash.testing import relative_error

Partial = tuple[Tensor, Tensor]

# log-sum-exps of two partials: close, far apart on either side, far from zero, one side empty, both empty
LSE_PAIRS = [
    (0.0, 0.5),
    (1e4, -1e4),
    (-1e4, 1e4),
    (1e4, 1e4),
    (-1e4, -1e4),
    (3.0, NEG_INF),
    (NEG_INF, -3.0),
    (NEG_INF, NEG_INF),
]


def partial(lse: float | Tensor | None = None, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Partial:
    """A partial of shape b2 s5 h3 d4; its rows are zero where `lse` says that they saw no key."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(2, 5, 3, 4, generator=generator, dtype=torch.float64).to(dtype)
    noise = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64).to(dtype)
    lse_bhs = noise if lse is None else noise + lse
    return out * (lse_bhs > NEG_INF).transpose(1, 2).unsqueeze(-1), lse_bhs


def attention_over(scores: Tensor, v: Tensor) -> Partial:
    """Scores (b, h, s, keys) and values (b, keys, h, d) to a partial."""
    return torch.einsum("bhsk,bkhd->bshd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("lse_a,lse_b", LSE_PAIRS)
def test_merge_commutes_bitwise(lse_a, lse_b):
    a, b = partial(lse_a, seed=1), partial(lse_b, seed=2)
    for x, y in zip(merge(*a, *b), merge(*b, *a), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merge_associates_in_every_order_and_grouping(dtype):
    parts = [partial(lse, seed=seed, dtype=dtype) for seed, lse in enumerate((0.0, 2.0, -3.0, NEG_INF))]
    first, *others = (merge(*merge(*merge(*a, *b), *c), *d) for a, b, c, d in permutations(parts))
    a, b, c, d = parts
    others.append(merge(*merge(*a, *b), *merge(*c, *d)))
    for other in others:
        for x, y in zip(other, first, strict=True):
            assert relative_error(x, y) <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("lse", [0.0, 1e4, -1e4, 88.7, NEG_INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_empty_partial_is_a_bitwise_identity(lse, dtype):
    a, empty = (
        partial(lse, dtype=dtype),
        (torch.zeros(2, 5, 3, 4, dtype=dtype), torch.full((2, 3, 5), NEG_INF).to(dtype)),
    )
    for merged in (merge(*a, *empty), merge(*empty, *a)):
        for x, y in zip(merged, a, strict=True):
            assert torch.equal(x, y)


def test_merging_split_keys_gives_attention_over_all_of_them():
    generator = torch.Generator().manual_seed(0)
    scores = 4 * torch.randn(2, 3, 5, 12, generator=generator, dtype=torch.float64)
    v = torch.randn(2, 12, 3, 4, generator=generator, dtype=torch.float64)
    total = (torch.zeros(2, 5, 3, 4), torch.full((2, 3, 5), NEG_INF))
    for keys in (slice(0, 1), slice(1, 7), slice(7, 12)):
        total = merge(*total, *attention_over(scores[..., keys], v[:, keys]))
    for x, y in zip(total, attention_over(scores, v), strict=True):
        assert relative_error(x, y) <= 1e-14


@pytest.mark.parametrize("lse_a,lse_b", [(1e4, -1e4), (-1e4, 1e4), (200.0, 0.0)])
def test_far_apart_log_sum_exps_give_the_larger_side(lse_a, lse_b):
    a, b = partial(lse_a, seed=1), partial(lse_b, seed=2)
    for x, y in zip(merge(*a, *b), a if lse_a > lse_b else b, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("lse_a,lse_b", LSE_PAIRS)
def test_gradients_are_finite_and_an_empty_side_gets_none(lse_a, lse_b):
    a, b = partial(lse_a, seed=1), partial(lse_b, seed=2)
    leaves = [x.requires_grad_() for x in (*a, *b)]
    out, lse = merge(*leaves)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    assert all(grad.isfinite().all() for grad in grads)
    for empty, (grad_out, grad_lse) in ((lse_a == NEG_INF, grads[:2]), (lse_b == NEG_INF, grads[2:])):
        if empty:
            assert not grad_out.any() and not grad_lse.any()
    if lse_a == lse_b == 1e4:
        assert all(grad.any() for grad in grads)


def test_gradients_match_finite_differences():
    a, b = partial(0.0, seed=1, dtype=torch.float64), partial(1.0, seed=2, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (*a, *b)]
    assert torch.autograd.gradcheck(merge, leaves, fast_mode=True)


def test_merge_promotes_dtypes():
    a, b = partial(dtype=torch.bfloat16), partial(dtype=torch.float32)
    out, lse = merge(*a, *b)
    assert out.dtype == lse.dtype == torch.float32


def test_merge_of_mismatched_partials_names_the_shapes():
    out, lse = partial()
    with pytest.raises(ValueError, match=r"one shape.*\(2, 5, 3, 4\).*\(2, 4, 3, 4\)"):
        merge(out, lse, out[:, :4], lse)
    with pytest.raises(ValueError, match=r"one shape.*\(2, 3, 5\).*\(2, 3, 4\)"):
        merge(out, lse, out, lse[..., :4])
    with pytest.raises(ValueError, match=r"lse \(b, h, s\).*\(2, 5, 3\)"):
        merge(out, lse.transpose(1, 2), out, lse.transpose(1, 2))
