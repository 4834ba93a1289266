"""What the attention tests compare with: dense fp64 attention with its gradients, and layouts written out by hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash import reference
from ringflash.mask import Mask
from ringflash.testing import Inputs, relative_error

FP32_BOUND = 1e-5


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class Attention(NamedTuple):
    """Results of a forward and a backward pass."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def mask_of(
    causal: bool = False, window: tuple[int | None, int | None] | None = None, mask: Mask | None = None
) -> Mask:
    """The mask that the options mean: the narrower of the two on either side."""
    if mask is not None:
        return mask
    left, right = (None if side in (None, -1) else side for side in window or (None, None))
    return Mask(left, right if not causal else 0)


def dense(inputs: Inputs, *, scale: float | None = None, **options: Any) -> Attention:
    """Forward and backward of dense attention in fp64, of a loss that uses out and lse."""
    q, k, v = (x.detach().double().requires_grad_() for x in inputs[:3])
    out, lse = reference.dense_attention(q, k, v, mask=mask_of(**options), scale=scale)
    return Attention(out.detach(), lse.detach(), *gradients((out, lse), (q, k, v), inputs))


def gradients(results: tuple[Tensor, Tensor], leaves: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
    """Gradients for `dout` and `dlse`; a leaf that reaches no result gets zeros."""
    out, lse = results
    return torch.autograd.grad(results, leaves, (inputs.dout.to(out.dtype), inputs.dlse.to(lse.dtype)))


def assert_close(actual: Attention, expected: Attention, bound: float, what: object = "") -> None:
    """Each of out, lse, dq, dk, dv within `bound`; says all five errors when one is not."""
    errors = {name: relative_error(x, y) for name, x, y in zip(Attention._fields, actual, expected, strict=True)}
    assert all(error <= bound for error in errors.values()), f"{what}: {errors}"


@contextmanager
def small_blocks(block: int = 8) -> Iterator[None]:
    """Let the torch backend go in small steps, so that short sequences have many blocks."""
    before, reference.BLOCK = reference.BLOCK, block
    try:
        yield
    finally:
        reference.BLOCK = before


def held_positions(layout: str, seq_len: int, world_size: int, rank: int) -> list[int]:
    """The layouts again, by their definition, token by token."""
    pieces = {"contiguous": world_size, "zigzag": 2 * world_size}.get(layout, seq_len)

    def owner(position: int) -> int:
        if layout == "striped":
            return position % world_size
        piece = next(p for p in range(pieces) if position < seq_len * (p + 1) // pieces)
        return min(piece, 2 * world_size - 1 - piece) if layout == "zigzag" else piece

    return [position for position in range(seq_len) if owner(position) == rank]


def local_part(inputs: Inputs, held: list[int]) -> Inputs:
    """The rows of the whole inputs that a rank holds."""
    q, k, v, dout = (x[:, held] for x in inputs[:4])
    return Inputs(q, k, v, dout, inputs.dlse[:, :, held])


def assemble(parts: list[Attention], held: list[list[int]]) -> Attention:
    """The whole results from every rank's rows; a position that no rank holds stays NaN."""
    seq_len = sum(map(len, held))
    whole = []
    for name, *rows in zip(Attention._fields, *parts, strict=True):
        dim = 2 if name == "lse" else 1
        shape = list(rows[0].shape)
        shape[dim] = seq_len
        x = rows[0].new_full(shape, float("nan"))
        for part, positions in zip(rows, held, strict=True):
            x.index_copy_(dim, torch.tensor(positions, dtype=torch.int64), part)
        whole.append(x)
    return Attention(*whole)
