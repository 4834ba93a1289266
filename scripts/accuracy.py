"""How wrong a result is, against dense fp64 attention on the same inputs, and how wrong it may be.

The error of a tensor is `||x - ref|| / ||ref||`. The budget of 16-bit results is measured, not chosen: 1.1 times the
error that a trusted implementation makes on the same inputs. What is computed in fp32, `lse` of any inputs and all of
fp32 inputs, must be within 1e-5 whatever others do: two right answers differ by the order of their sums alone there,
and a ratio of such errors is luck.

Note [Floors]. The same luck decides where 16-bit results have no rounding to compare, so errors under 1e-5 always pass
(25 times under the rounding of fp16, 200 times under bf16's). That happens where a result is exact (out and dv of a
single key: copies of v and dout), and where a gradient is zero in exact arithmetic: with one key the softmax is 1
whatever q and k are, so dq = dk = 0 and all that is left is the rounding of `dP - delta` in fp32. Such a gradient is
measured against ||dout||, which for standard normal inputs is the size of the terms that cancel.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringflash.mask import Mask
from ringflash.reference import dense_attention

RATIO = 1.1
FP32_LIMIT = 1e-5  # see Note [Floors]
NAMES = ("out", "lse", "dq", "dk", "dv")


class Results(NamedTuple):
    """`lse` is `(b, h, s)`, the rest `(b, s, heads, d)`."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def exact(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask, *, dlse: Tensor | None = None, max_scores: int = 2**26,
    **options: Any,
) -> Results:  # fmt: skip
    """Self-attention and its gradients in fp64 by dense attention, which gets the options, a block of rows at a time.

    A block of `n` rows takes a few matrices of `b * h * n * s` fp64 scores; `max_scores` bounds one of them.
    """
    k, v = (x.double().requires_grad_() for x in (k.detach(), v.detach()))
    b, s, h, _ = q.shape
    out, dq = torch.empty_like(dout, dtype=torch.float64), torch.empty_like(q, dtype=torch.float64)
    lse = q.new_empty(b, h, s, dtype=torch.float64)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    block = max(1, max_scores // (b * h * s))
    for begin in range(0, s, block):
        rows = slice(begin, min(begin + block, s))
        keys = slice(0, rows.stop if mask.right == 0 and mask.prefix is None else s)  # all that the block sees
        q_rows = q[:, rows].detach().double().requires_grad_()
        positions = torch.arange(s, device=q.device)
        part_out, part_lse = dense_attention(
            q_rows, k[:, keys], v[:, keys], mask=mask,
            query_positions=positions[rows], key_positions=positions[keys], **options,
        )  # fmt: skip
        outputs, gradients = [part_out], [dout[:, rows].double()]
        if dlse is not None:
            outputs, gradients = [*outputs, part_lse], [*gradients, dlse[:, :, rows].double()]
        part_dq, part_dk, part_dv = torch.autograd.grad(outputs, (q_rows, k, v), gradients)
        out[:, rows], lse[:, :, rows], dq[:, rows] = part_out.detach(), part_lse.detach(), part_dq
        dk += part_dk
        dv += part_dv
    return Results(out, lse, dq, dk, dv)


def squares(x: Tensor, reference: Tensor) -> Tensor:
    """`||x - ref||^2` and `||ref||^2`, fp64 on the CPU; they add over parts of a tensor, so over ranks."""
    difference = x.double() - reference
    return torch.stack([difference.square().sum(), reference.square().sum()]).cpu()


def relative_error(sums: Tensor, natural: float) -> float:
    """The error from `squares`; against `natural`, a norm, where the reference is zero but for its own rounding."""
    difference, reference = sums.sqrt().tolist()
    return difference / (reference if reference > 1e-9 * natural else natural)


def limit(name: str, dtype: torch.dtype, trusted: float, capped: bool = False) -> float:
    """The largest error that the tensor `name` may have beside a trusted implementation's; NaN allows nothing.

    Where 16-bit inputs' scores are `capped`, GPUs take an approximate tanh: lse is compared as the rest is.
    """
    if dtype == torch.float32 or (name == "lse" and not capped):
        return FP32_LIMIT
    return max(RATIO * trusted, FP32_LIMIT)


def failures(
    errors: Mapping[str, float], trusted: Mapping[str, float], dtype: torch.dtype, capped: bool = False
) -> list[str]:
    """What is too wrong, as `dq 3.1e-03 > 2.7e-03`; a NaN is."""
    limits = {name: limit(name, dtype, trusted.get(name, 0.0), capped) for name in errors}
    return [f"{name} {errors[name]:.2e} > {most:.2e}" for name, most in limits.items() if not errors[name] <= most]
