"""What launchers share: launches that recur, sums over few rows, tables on the device, tensors as TMA takes them.

Note [Long sums]. Tensor cores truncate when they accumulate, so a sum's error grows with its length: on an H200, dK
over 4 heads x 65536 queries was 1.4 times as wrong in fp16 as over one head's, dQ over a million keys 1.13 times as
wrong in bf16 as FlashAttention-2's. So one launch backward sums over LONGEST_SUM rows at most, and launches add in
memory, which rounds.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, wraps
from itertools import count
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from .layout import count_rows
from .plan import TABLE_BYTES, Visit, keep_by_bytes
from .score import make_words
from .streams import used_by

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
    of a launch's time on the host (73 us, and 26 without, on a machine with an H200). So the form is kept too, and
    where `_find_entry` knows the way, what Triton makes of the arguments: see `_Direct`. Whoever keeps a launch keeps
    it for tensors that Triton takes for the same: kinds, and addresses in multiples of 16, on one device.

    Args:
        kernel: jitted; its arguments are tensors first, those of `boxes` first of all, then `numbers`.
        boxes: for each tensor that goes by TMA a descriptor of no memory; `tensors`: the names of the others.
        numbers: the other arguments; `options`: what Triton compiles with.
        is_scheduled: do its programs take turns as a schedule says, which is then one of the tensors?
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        boxes: Mapping[str, Any],
        tensors: tuple[str, ...],
        numbers: Mapping[str, Any],
        *,
        is_scheduled: bool = False,
        **options: Any,
    ):
        self.kernel, self.grid = kernel, (*grid, 1, 1)[:3]
        self.boxes = list(boxes.values())
        self.tensors, self.numbers, self.options = (*boxes, *tensors), numbers, options
        self.is_scheduled = is_scheduled
        self.run: Callable[..., object] | None = None
        self.direct: _Direct | None = None
        self.values: list[Any] = []

    def __call__(self, *tensors: Tensor | None) -> None:
        if self.direct is not None and not _has_hooks():
            self.direct(tensors)
            return
        arguments: list[Any] = list(tensors)
        for i, box in enumerate(self.boxes):
            arguments[i] = _descriptor_at(tensors[i], box)
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
            entry = _find_entry(form, self.grid)
            self.direct = None if entry is None else _Direct(form, entry, self.boxes, len(tensors), self.values)


def _descriptor_at(base: Any, box: Any) -> Any:
    """The descriptor `box` of memory. Its constructor checks for longer than a launch may take."""
    descriptor = object.__new__(type(box))
    descriptor.__dict__ = {**vars(box), "base": base}
    return descriptor


# Below Triton's Python -----------------------------------------------------------------------------------------------

KEPT_MAPS = 2**16  # of all launches: 20 MB
_maps: dict[tuple[int, int], Any] = {}  # by the argument's number and the address: what a kernel gets of a descriptor
_numbers = count()


class _Direct:
    """Launches as Triton does below its Python, with what it makes of every argument kept.

    A tensor's address is all that changes from one launch to the next. One that goes by TMA has a map of 128 bytes made
    of its address and the descriptor, which is copied at the launch (into a CUDA graph, too): a map is good again
    whenever its address comes again, whatever lay there in between.
    """

    def __init__(self, form: Any, entry: "_Entry", boxes: list[Any], n_tensors: int, values: list[Any]):
        self.enter = entry
        self.boxes: list[tuple[int, _Box]] = []
        self.arguments: list[Any] = []
        for box, about in zip(boxes, _metadata_of_maps(form), strict=True):
            self.boxes.append((len(self.arguments), _Box(next(_numbers), box, about)))
            self.arguments += [None, *box.shape, *box.strides]
        places = [place for place, _ in self.boxes]
        rest = range(len(self.arguments), len(self.arguments) + n_tensors - len(boxes))
        self.places = (*places, *rest)
        self.arguments += [None] * len(rest) + values
        active: Any = driver.active
        self.device, self.stream_of = active.get_current_device(), active.get_current_stream

    def __call__(self, tensors: tuple[Tensor | None, ...]) -> None:
        arguments = self.arguments.copy()
        for place, x in zip(self.places, tensors, strict=True):
            if x is not None:
                arguments[place] = x.data_ptr()
        for place, box in self.boxes:
            address = arguments[place]
            arguments[place] = _maps.get((box.number, address)) or box.make_map(address)
        self.enter(self.stream_of(self.device), arguments)


class _Box(NamedTuple):
    """An argument that goes by TMA: its descriptor of no memory, and what the compiled form says about it."""

    number: int
    descriptor: Any
    about: Any

    def make_map(self, address: int) -> Any:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(_maps) >= KEPT_MAPS:
            _maps.clear()
        descriptor = _descriptor_at(_Address(address), self.descriptor)
        made, *_ = make_tensordesc_arg(descriptor, self.about)  # shape and strides
        _maps[self.number, address] = made
        return made


class _Address(NamedTuple):
    """A tensor, as far as a descriptor sees it."""

    address: int

    def data_ptr(self) -> int:
        return self.address


_Entry = Callable[[int, list[Any]], object]


def _find_entry(form: Any, grid: tuple[int, ...]) -> _Entry | None:
    """The C function that launches a compiled form, of a stream and the arguments as the kernel gets them, or `None`
    where Triton is of a version that has not been looked at, or has more to do at a launch than that."""
    version, launcher = triton.__version__.split(".")[:2], cast(Any, getattr(form, "run", None))
    if version not in (["3", "6"], ["3", "7"]) or type(launcher).__name__ != "CudaLauncher":
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size or None in _metadata_of_maps(form):
        return None
    enter = launcher.launch
    if _metadata_of_maps(form):  # a function in Python that expands descriptors, for the one that it closes over
        enter = inspect.getclosurevars(enter).nonlocals["launcher"]
    ways = form.function, launcher.launch_cooperative_grid, launcher.launch_pdl
    no_scratch, no_hooks = (None, None), (None, None, None)
    if version == ["3", "6"]:
        fixed = *ways, *no_scratch, form.packed_metadata, *no_hooks
        return lambda stream, arguments: enter(*grid, stream, *fixed, *arguments)
    fixed = *ways, form.packed_metadata, *no_hooks, *no_scratch, launcher.arg_annotations, launcher.kernel_signature
    return lambda stream, arguments: enter(*grid, stream, *fixed, arguments)


def _metadata_of_maps(form: Any) -> list[Any]:
    """What a compiled form wants of its descriptors; `None` for one that it takes apart itself."""
    return list(getattr(form.metadata, "tensordesc_meta", None) or ())


def _has_hooks() -> bool:
    """Does somebody watch launches (a profiler)? They go the public way then."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


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


def sums_of(
    launches: Sequence[object], *results: Tensor, contiguous: bool = False
) -> AbstractContextManager[tuple[Tensor, ...]]:
    """Where launches put their sums: the results themselves, or fp32 in their place when several launches add.

    When they must be `contiguous`, results that are not (some rows of several batches) are copied there and back.
    """
    if len(launches) == 1 and (not contiguous or all(map(Tensor.is_contiguous, results))):
        return nullcontext(results)
    return _sums_elsewhere(results, len(launches) > 1, contiguous)


@contextmanager
def _sums_elsewhere(results: tuple[Tensor, ...], add: bool, contiguous: bool) -> Iterator[tuple[Tensor, ...]]:
    sums = tuple(x.to(torch.float32) for x in results) if add else results
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
    return x if are_aligned(Kind.of(x)) and not are_odd(x) else x.clone(memory_format=torch.contiguous_format)


def are_aligned(*kinds: Kind) -> bool:
    """Are tensors of these kinds `aligned`, but for their addresses?"""
    return all(map(_is_aligned, kinds))


@lru_cache(maxsize=1024)
def _is_aligned(kind: Kind) -> bool:
    shape, strides, dtype = kind
    long = [stride for size, stride in zip(shape[:3], strides, strict=False) if size > 1]
    unit = 16 // dtype.itemsize
    return strides[3] == 1 and all(s > 0 and s % unit == 0 for s in long) and (shape[1] == 1 or strides[1] < 2**23)


def are_odd(*tensors: Tensor) -> bool:
    """Is an address among theirs that is no multiple of 16?"""
    addresses = 0
    for x in tensors:
        addresses |= x.data_ptr()
    return addresses % 16 != 0


def tma_strides(shape: torch.Size, strides: tuple[int, ...]) -> list[int]:
    """The strides of an aligned tensor for a descriptor, which wants them of dimensions of size 1 too."""
    return [*(stride if size > 1 else 16 for size, stride in zip(shape[:3], strides, strict=False)), 1]


_in_graphs: dict[int, object] = {}
Tables = TypeVar("Tables", bound="Tensor | tuple[object, ...]")


def stay_in_graphs(tables_of: Callable[..., Tables]) -> Callable[..., Tables]:
    """Tables for a device, the last argument: those that a CUDA graph is captured with stay, as it knows no more than
    their addresses."""

    @wraps(tables_of)
    def found(*key: Any) -> Tables:
        tables = tables_of(*key)
        if is_captured(key[-1]):
            stay(tables)
        return tables

    return found


def is_captured(device: torch.device) -> bool:
    """Does a CUDA graph take what is launched now?"""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stay(tables: object) -> None:
    """See `stay_in_graphs`, for who asks once for many tables whether a graph is captured."""
    _in_graphs[id(tables)] = tables


@stay_in_graphs
@lru_cache(maxsize=256)
def ranges_of(visit: Visit, blocks: Literal["queries", "keys"], block: int, device: torch.device) -> Tensor:
    """What each block of queries or keys sees of the other side: int32 `(blocks, 4)`, see `plan.key_ranges`."""
    return to_device(visit.key_ranges(block) if blocks == "queries" else visit.query_ranges(block), device)


def seen_rows_of(visit: Visit, device: torch.device) -> Tensor | None:
    """The range of key rows that each query row sees; under the full mask none is needed."""
    return None if visit.mask.is_full else _row_table(visit, device)


@stay_in_graphs
@keep_by_bytes(TABLE_BYTES)
def _row_table(visit: Visit, device: torch.device) -> Tensor:
    return to_device(visit.seen_rows(), device)


@stay_in_graphs
@keep_by_bytes(TABLE_BYTES)
def positions_of(visit: Visit, device: torch.device) -> Tensor:
    """Positions of the query rows, then of the key rows: for what depends on them beside the mask."""
    return to_device(visit.positions(), device)


@stay_in_graphs
@keep_by_bytes(TABLE_BYTES)
def words_of(visit: Visit, device: torch.device) -> Tensor:
    """Dropout's words of the query rows, then of the key rows: int32, see `score.make_words`."""
    positions, n_q = visit.positions(), count_rows(visit.queries)
    return to_device(torch.cat(make_words(positions[:n_q], positions[n_q:])), device)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A table, there for every stream that asks for it later: copied on a stream of its own, which alone the host waits
    for, not behind work that the current one has been given. What comes here is kept and used again, so not inside a
    graph."""
    if device.type != "cuda":
        return x.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run attention on these shapes, masks and layouts once before capturing a CUDA graph of it")
    copying = _table_stream(device)
    with torch.cuda.stream(copying):
        made = x.pin_memory().to(device, non_blocking=True)
    copying.record_event().synchronize()
    used_by(made, torch.cuda.current_stream(device))
    return made


@lru_cache
def _table_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
