"""What launchers share: launches that recur, sums over few rows, tables on the device, tensors as TMA takes them.

Note [Long sums]. Tensor cores truncate when they accumulate, so a sum's error grows with its length: on an H200, dK
over 4 heads x 65536 queries was 1.4 times as wrong in fp16 as over one head's, dQ over a million keys 1.13 times as
wrong in bf16 as FlashAttention-2's. So one launch backward sums over LONGEST_SUM rows at most, and launches add in
memory, which rounds.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .plan import TABLE_BYTES, Visit, keep_by_bytes

LONGEST_SUM = 2**16  # rows: see Note [Long sums]
MOST_BATCHES = 2**16 - 1  # of one launch: what CUDA takes as a grid's second or third dimension


class Kind(NamedTuple):
    """What a launch must know of a tensor beside its address."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> "Kind":
        return Kind(x.shape, x.stride(), x.dtype)


class Launch:
    """A launch of a kernel that recurs with other tensors of the same kinds: grid, numbers and options are kept.

    Triton asks at every launch what each argument is, to find the form of the kernel that it compiled for that: most
    of a launch's time on the host (73 us, and 26 without, on a machine with an H200). So the form is kept too. Whoever
    keeps a launch keeps it for tensors that Triton takes for the same: kinds, and addresses in multiples of 16.

    Args:
        kernel: jitted; its arguments are tensors first, those of `boxes` first of all, then `numbers`.
        boxes: for each tensor that goes by TMA a descriptor of no memory; `tensors`: the names of the others.
        numbers: the other arguments; `options`: what Triton compiles with.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        boxes: Mapping[str, Any],
        tensors: tuple[str, ...],
        numbers: Mapping[str, Any],
        **options: Any,
    ):
        self.kernel, self.grid = kernel, (*grid, 1, 1)[:3]
        self.boxes = [(type(box), vars(box)) for box in boxes.values()]
        self.tensors, self.numbers, self.options = (*boxes, *tensors), numbers, options
        self.is_scheduled = False  # does it take a schedule?
        self.run: Callable[..., object] | None = None
        self.values: list[Any] = []

    def __call__(self, *tensors: Tensor | None) -> None:
        arguments: list[Any] = list(tensors)
        for i, (kind, box) in enumerate(self.boxes):  # its constructor checks for longer than a launch may take
            arguments[i] = descriptor = object.__new__(kind)
            descriptor.__dict__ = {**box, "base": tensors[i]}
        if self.run is not None:
            self.run(*arguments, *self.values)
            return
        named = zip(self.tensors, arguments, strict=True)
        form = self.kernel[self.grid](**dict(named), **self.numbers, **self.options)
        if form is not None:  # an interpreted kernel has none
            names = self.kernel.arg_names
            assert tuple(names[: len(arguments)]) == self.tensors
            self.values = [self.numbers[name] for name in names[len(arguments) :]]
            self.run = form[self.grid]


@lru_cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability; (8, 0) for a CPU, where the interpreter runs kernels without TMA."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


@lru_cache
def count_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few for a CPU, where doubles and the interpreter stand in."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def count_blocks(rows: int, block: int) -> int:
    """Blocks that hold all rows. (`triton.cdiv` takes 50 times as long on the host.)"""
    return -(-rows // block)


def launches_of(rows: int, heads: int) -> list[tuple[int, int, int, int]]:
    """`(first_head, n_heads, low, high)` of each launch that sums over `rows` of `heads`: see Note [Long sums]."""
    per_launch = max(1, min(heads, LONGEST_SUM // max(rows, 1)))
    return [
        (first_head, min(per_launch, heads - first_head), low, min(low + LONGEST_SUM, rows))
        for first_head in range(0, heads, per_launch)
        for low in range(0, max(rows, 1), LONGEST_SUM)
    ]


@contextmanager
def sums_of(launches: list, *results: Tensor, contiguous: bool = False) -> Iterator[tuple[Tensor, ...]]:
    """Where launches put their sums: the results themselves, or fp32 in their place when several launches add.

    When they must be `contiguous`, results that are not (some rows of several batches) are copied there and back.
    """
    sums = results if len(launches) == 1 else tuple(x.to(torch.float32) for x in results)
    sums = tuple(x.contiguous() for x in sums) if contiguous else sums
    yield sums
    for result, total in zip(results, sums, strict=True):
        if total is not result:
            result.copy_(total)


def batches_of(x: Tensor) -> list[slice]:
    """The batches of each launch."""
    return [slice(begin, begin + MOST_BATCHES) for begin in range(0, x.shape[0], MOST_BATCHES)]


def aligned(x: Tensor) -> Tensor:
    """`x` itself where kernels and TMA can read it: unit stride in the head dim, the rest multiples of 16 bytes."""
    good = x.data_ptr() % 16 == 0 and _are_aligned(x.shape, x.stride(), 16 // x.dtype.itemsize)
    return x if good else x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1024)
def _are_aligned(shape: torch.Size, strides: tuple[int, ...], unit: int) -> bool:
    long = [stride for size, stride in zip(shape[:3], strides, strict=False) if size > 1]
    return strides[3] == 1 and all(s > 0 and s % unit == 0 for s in long) and (shape[1] == 1 or strides[1] < 2**23)


def tma_strides(shape: torch.Size, strides: tuple[int, ...]) -> list[int]:
    """The strides of an aligned tensor for a descriptor, which wants them of dimensions of size 1 too."""
    return [*(stride if size > 1 else 16 for size, stride in zip(shape[:3], strides, strict=False)), 1]


@lru_cache(maxsize=256)
def ranges_of(visit: Visit, blocks: Literal["queries", "keys"], block: int, device: torch.device) -> Tensor:
    """What each block of queries or keys sees of the other side: int32 `(blocks, 4)`, see `plan.key_ranges`."""
    return to_device(visit.key_ranges(block) if blocks == "queries" else visit.query_ranges(block), device)


def seen_rows_of(visit: Visit, device: torch.device) -> Tensor | None:
    """The range of key rows that each query row sees; under the full mask none is needed."""
    return None if visit.mask.is_full else _row_table(visit, device)


@keep_by_bytes(TABLE_BYTES)
def _row_table(visit: Visit, device: torch.device) -> Tensor:
    return to_device(visit.seen_rows(), device)


@keep_by_bytes(TABLE_BYTES)
def positions_of(visit: Visit, device: torch.device) -> Tensor:
    """Positions of the query rows, then of the key rows: for what depends on them beside the mask."""
    return to_device(visit.positions(), device)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Without stopping the host: from pinned memory. What comes here is kept and used again, so not inside a graph."""
    if device.type != "cuda":
        return x.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run attention on these shapes, masks and layouts once before capturing a CUDA graph of it")
    return x.pin_memory().to(device, non_blocking=True)
