"""One-GPU attention: the inputs it is compared on, how its work is counted, and the implementations, ours and others'.

Tensors are `(b, s, h, d)`, keys and values with `g` heads.
"""

import argparse
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringflash import flash_attention
from ringflash.mask import Mask, area

MASKS = {"full": Mask(), "causal": Mask(right=0)}  # those that every kernel knows: see `make_mask` for others
SIGMA = 1.0  # of the logarithm of the documents' lengths
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMULA = "forward 4*b*h*d*pairs, backward 2.5x that; pairs that are visible: s*s full, s*(s+1)/2 causal"


class Shape(NamedTuple):
    """Batch, query heads, key/value heads, sequence length, head dim; on a command line `b,h,g,s,d`."""

    b: int
    h: int
    g: int
    s: int
    d: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        numbers = [int(part) for part in text.split(",") if part.isdecimal()]
        if len(numbers) != 5 or text.count(",") != 4 or min(numbers) < 1 or numbers[1] % numbers[2]:
            raise argparse.ArgumentTypeError(f"a shape is b,h,g,s,d, all positive and g dividing h; got {text!r}")
        return cls(*numbers)

    def __str__(self) -> str:
        return f"b{self.b} h{self.h}/{self.g} s{self.s} d{self.d}"


def parse_heads(text: str) -> tuple[int, int]:
    """Query and key/value heads from `h,g`."""
    match = re.fullmatch(r"([1-9]\d*),([1-9]\d*)", text)
    if match is None or int(match[1]) % int(match[2]):
        raise argparse.ArgumentTypeError(f"heads are h,g, both positive and g dividing h; got {text!r}")
    return int(match[1]), int(match[2])


def log_normal_documents(tokens: int, seed: int = 0, mean: int = 2048, sigma: float = SIGMA) -> list[int]:
    """Boundaries of documents as corpora have them, the last one cut off."""
    rng, boundaries = random.Random(seed), [0]
    while boundaries[-1] < tokens:
        length = rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
        boundaries.append(min(boundaries[-1] + max(int(length), 1), tokens))
    return boundaries


def add_masks_argument(parser: argparse.ArgumentParser, default: list[str]) -> None:
    """`--masks`: names that `make_mask` knows."""

    def parse(text: str) -> str:
        try:
            make_mask(text, 1)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text

    what = (
        "full; causal; windowN: a query sees N keys; equalN: N equal documents; documentsN: documents of log-normal "
        "lengths with mean N. All causal, but for full and what ends in -full: equalN-full, documentsN-full. "
        "Default: %(default)s"
    )
    parser.add_argument("--masks", nargs="+", type=parse, metavar="MASK", default=default, help=what)


@lru_cache(maxsize=256)
def make_mask(name: str, seq_len: int) -> Mask:
    """The mask of a name: one of MASKS, or with a number N

    windowN      causal, a query sees N keys
    equalN       N documents of equal length (to a token), causal
    documentsN   documents of log-normal lengths with mean N (sigma SIGMA, seed 0), causal
    equalN-full, documentsN-full    not causal
    """
    if name in MASKS:
        return MASKS[name]
    match = re.fullmatch(r"(window|equal|documents)([1-9]\d*)(-full)?", name)
    if match is None or (match[1] == "window" and match[3]):
        raise ValueError(f"a mask is {', '.join(MASKS)}, windowN, equalN(-full) or documentsN(-full); got {name!r}")
    number, causal = int(match[2]), match[3] is None
    if match[1] == "window":
        return Mask(number - 1, causal=True)
    if match[1] == "equal":
        return Mask(causal=causal, cu_seqlens=[seq_len * n // number for n in range(number + 1)])
    return Mask(causal=causal, cu_seqlens=log_normal_documents(seq_len, mean=number))


class Case(NamedTuple):
    """What is compared: one problem for all implementations."""

    shape: Shape
    mask: str  # see `make_mask`
    dtype: str  # of DTYPES

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def who_sees(self) -> Mask:
        return make_mask(self.mask, self.shape.s)

    @property
    def flops(self) -> float:
        """Floating-point operations of a forward pass: two matrix products over the visible (query, key) pairs."""
        b, h, _, s, d = self.shape
        return 4.0 * b * h * d * area(self.who_sees, s, s)

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


# What is timed

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Passes = dict[str, Callable[[], object]]
WORK = {"forward": 1.0, "forward+backward": 3.5}  # floating-point operations, in forward passes
WORK_APART = {"forward": 1.0, "backward": 2.5}


def passes_of(attend: Attend, inputs: Inputs) -> Passes:
    """What is timed, under the names of `WORK`."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]

    def forward() -> object:
        with torch.no_grad():
            return attend(*leaves)

    def both() -> object:
        return torch.autograd.grad(attend(*leaves), leaves, inputs.dout)

    return dict(zip(WORK, (forward, both), strict=True))


def passes_apart(attend: Attend, inputs: Inputs, parameters: Sequence[Tensor] = ()) -> Passes:
    """What is timed, under the names of `WORK_APART`, each already run once: compiled, tuned, and known to work.

    The backward pass gives the gradients of q, k, v and of `parameters`, which `attend` uses too.
    """
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*leaves)

    forward()
    out = attend(*leaves)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, [*leaves, *parameters], inputs.dout, retain_graph=True)

    backward()
    return dict(zip(WORK_APART, (forward, backward), strict=True))


@contextmanager
def kernels(portable: bool, seen: set[str]) -> Iterator[None]:
    """Inside, `seen` gets the kernels that ringflash's passes take: what the rule says, or the portable ones."""
    from ringflash import local_kernel

    rule = local_kernel.kernel_of

    def watched(*arguments: Any, **options: Any) -> str:
        kernel = "portable" if portable else rule(*arguments, **options)
        seen.add(kernel)
        return kernel

    with mock.patch.object(local_kernel, "kernel_of", watched):
        yield


# The implementations: (q, k, v, mask) -> out. Those that don't know a mask raise.

Attention = Callable[[Tensor, Tensor, Tensor, Mask], Tensor]


def _ringflash(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return flash_attention(q, k, v, mask=mask)


def _is_causal(mask: Mask) -> bool:
    """For those that know no masks but MASKS."""
    if mask not in MASKS.values():
        raise ValueError("knows full and causal masks alone")
    return mask.right == 0


def _check_knows(mask: Mask) -> None:
    """For those that know windows and documents, causal or full."""
    if mask != Mask(mask.left, causal=mask.right == 0, cu_seqlens=mask.cu_seqlens):
        raise ValueError("knows windows and documents alone")


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, backend: SDPBackend) -> Tensor:
    causal, grouped = _is_causal(mask), q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def _fa2_varlen(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """PyTorch's FlashAttention-2 for packed documents, by the operator that `torch.nn.attention.varlen` calls: under
    its own name it takes grouped heads in all releases."""
    _check_knows(mask)
    if q.shape[0] != 1:
        raise ValueError("takes one packed sequence")
    causal, (boundaries, longest) = mask.right == 0, _documents(mask, q.shape[1], q.device)
    out, *_ = torch.ops.aten._flash_attention_forward(
        *(x[0] for x in (q, k, v)), boundaries, boundaries, longest, longest, 0.0, causal, False,
        window_size_left=mask.left, window_size_right=mask.right,
    )  # fmt: skip
    return out[None]


@lru_cache
def _documents(mask: Mask, seq_len: int, device: torch.device) -> tuple[Tensor, int]:
    """Boundaries of documents, int32, and the length of the longest."""
    boundaries = mask.cu_seqlens or (0, seq_len)
    return torch.tensor(boundaries, dtype=torch.int32, device=device), max(b - a for a, b in pairwise(boundaries))


def _flex() -> Attention:
    from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    compiled_for: object = None

    @lru_cache
    def blocks_of(mask: Mask, seq_len: int, device: torch.device) -> BlockMask | None:
        """The mask as its users write it."""
        _check_knows(mask)
        parts, left = [], mask.left
        if mask.right == 0:
            parts.append(lambda b, h, query, key: query >= key)
        if left is not None:
            parts.append(lambda b, h, query, key: query - key <= left)
        if mask.cu_seqlens is not None:
            lengths = torch.tensor(mask.cu_seqlens, device=device).diff()
            document = torch.repeat_interleave(lengths, output_size=seq_len).int()
            parts.append(lambda b, h, query, key: document[query] == document[key])
        return create_block_mask(and_masks(*parts), None, None, seq_len, seq_len, device=device) if parts else None

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        nonlocal compiled_for
        problem = q.shape, k.shape, q.dtype, mask
        if problem != compiled_for:  # past its limit of recompilations, dynamo would run the uncompiled function
            torch.compiler.reset()
            compiled_for = problem
        blocks = blocks_of(mask, q.shape[1], q.device)
        grouped = q.shape[2] != k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=blocks, enable_gqa=grouped).transpose(1, 2)

    return attend


def _flash_attn_cute() -> Attention:
    from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        out = flash_attn_func(q, k, v, causal=_is_causal(mask))
        return out[0] if isinstance(out, tuple) else out  # some releases return (out, lse)

    return attend


LOADERS: dict[str, Callable[[], Attention]] = {
    "ringflash": lambda: _ringflash,
    "sdpa-fa2": lambda: partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": lambda: partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "fa2-varlen": lambda: _fa2_varlen,
    "flex": _flex,
    "flash-attn-cute": _flash_attn_cute,
}


def load(names: Sequence[str]) -> tuple[dict[str, Attention], dict[str, str]]:
    """The implementations that are installed here, and why the others are not."""
    loaded, missing = {}, {}
    for name in names:
        try:
            loaded[name] = LOADERS[name]()
        except Exception as error:  # a peer may fail in any way: what matters is that the table says so
            missing[name] = reason(error)
    return loaded, missing


def reason(error: Exception) -> str:
    """An exception in one short line, for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
