"""One-GPU attention: the inputs it is compared on, how its work is counted, and the implementations, ours and others'.

Tensors are `(b, s, h, d)`, keys and values with `g` heads.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringflash import flash_attention
from ringflash.mask import Mask, area

MASKS = {"full": Mask(), "causal": Mask(right=0)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMULA = "forward 4*b*h*d*pairs, backward 2.5x that; pairs s*s full, half when causal: s*(s+1)/2"


class Shape(NamedTuple):
    """Batch, query heads, key/value heads, sequence length, head dim; on a command line `b,h,g,s,d`."""

    b: int
    h: int
    g: int
    s: int
    d: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        numbers = [int(part) for part in text.split(",")]
        if len(numbers) != 5 or min(numbers) < 1 or numbers[1] % numbers[2]:
            raise ValueError(f"a shape is b,h,g,s,d, all positive and g dividing h; got {text!r}")
        return cls(*numbers)

    def __str__(self) -> str:
        return f"b{self.b} h{self.h}/{self.g} s{self.s} d{self.d}"


def parse_heads(text: str) -> tuple[int, int]:
    """Query and key/value heads from `h,g`."""
    h, g = (int(part) for part in text.split(","))
    return h, g


class Case(NamedTuple):
    """What is compared: one problem for all implementations."""

    shape: Shape
    mask: str  # of MASKS
    dtype: str  # of DTYPES

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def flops(self) -> float:
        """Floating-point operations of a forward pass: two matrix products over the visible (query, key) pairs."""
        b, h, _, s, d = self.shape
        return 4.0 * b * h * d * area(MASKS[self.mask], s, s)

    @property
    def columns(self) -> dict[str, int | str]:
        return self.shape._asdict() | {"dtype": self.dtype, "mask": self.mask}

    def __str__(self) -> str:
        return f"{self.shape} {self.mask} {self.dtype}"


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Inputs:
    """Standard normal q, k, v and dout: the power and so the speed of a kernel depend on the bits, zeros flatter it."""
    generator = torch.Generator(device).manual_seed(seed)
    b, h, g, s, d = shape
    return Inputs(*(torch.randn(b, s, n, d, generator=generator, device=device, dtype=dtype) for n in (h, g, g, h)))


WORK = {"forward": 1.0, "forward+backward": 3.5}  # floating-point operations, in forward passes


def passes_of(attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs) -> dict[str, Callable[[], object]]:
    """What is timed, under the names of `WORK`."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]

    def forward() -> object:
        with torch.no_grad():
            return attend(*leaves)

    def both() -> object:
        return torch.autograd.grad(attend(*leaves), leaves, inputs.dout)

    return dict(zip(WORK, (forward, both), strict=True))


# The implementations: (q, k, v, causal) -> out

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def _ringflash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flash_attention(q, k, v, causal=causal)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, *, backend: SDPBackend) -> Tensor:
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def _flex() -> Attention:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    compiled_for: object = None

    @lru_cache
    def causal_blocks(seq_len: int, device: torch.device) -> BlockMask:
        return create_block_mask(lambda b, h, query, key: query >= key, None, None, seq_len, seq_len, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        nonlocal compiled_for
        problem = q.shape, k.shape, q.dtype, causal
        if problem != compiled_for:  # past its limit of recompilations, dynamo would run the uncompiled function
            torch.compiler.reset()
            compiled_for = problem
        blocks = causal_blocks(q.shape[1], q.device) if causal else None
        grouped = q.shape[2] != k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=blocks, enable_gqa=grouped).transpose(1, 2)

    return attend


def _flash_attn_cute() -> Attention:
    from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out = flash_attn_func(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out  # some releases return (out, lse)

    return attend


LOADERS: dict[str, Callable[[], Attention]] = {
    "ringflash": lambda: _ringflash,
    "sdpa-fa2": lambda: partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": lambda: partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "flex": _flex,
    "flash-attn-cute": _flash_attn_cute,
}


def reason(error: Exception) -> str:
    """An exception in one short line, for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
