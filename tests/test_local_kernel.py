"""The Triton kernels without a GPU: in the interpreter, and compiled for GPUs that are not here."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from weakref import ref

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed (it exists for Linux only)")

from compile_kernels import KERNELS, Compiled, compile_kernel  # noqa: E402
from interpreted import run_cases  # noqa: E402

from ringflash import launch  # noqa: E402
from ringflash.launch import LONGEST_SUM, launches_of, to_device  # noqa: E402
from ringflash.local_kernel import choose_tiles  # noqa: E402

SHARED_BYTES = {80: 101_376, 90: 232_448, 100: 232_448}  # what one program may use; sm_86 and sm_89 have sm_80's tiles


@pytest.mark.timeout(600)
def test_kernels_match_dense_attention_in_the_interpreter():
    run_cases(Path(__file__).with_name("interpreter_cases.py"))


# kernel, dtype, head dim, compute capability, options of compile_kernel
Variant = tuple[str, torch.dtype, int, int, tuple[tuple[str, bool], ...]]
TUNED: list[Variant] = [
    (kernel, torch.bfloat16, dim, 90, options)
    for kernel in KERNELS
    for dim in (64, 128)
    for options in ((), (("accumulate", True),), (("full", True),))
]
EVERYTHING = (("softcap", True), ("alibi", True), ("dropout", True), ("accumulate", True))
TUNED += [(kernel, torch.bfloat16, dim, 90, EVERYTHING) for kernel in KERNELS for dim in (64, 128)]
TUNED += [
    (kernel, torch.bfloat16, 128, 90, ((option, True), ("accumulate", True)))
    for kernel in KERNELS
    for option in ("softcap", "alibi", "dropout")
]
TUNED += [("forward", torch.bfloat16, dim, 90, (("sinks", True),)) for dim in (64, 128)]
OTHERS: list[Variant] = [
    *((kernel, torch.float16, 256, 90, EVERYTHING) for kernel in KERNELS),
    *((kernel, torch.float32, 128, 80, EVERYTHING) for kernel in KERNELS),
    *((kernel, torch.float16, 256, 80, ()) for kernel in KERNELS),
    *((kernel, torch.bfloat16, 96, 80, ()) for kernel in KERNELS),
    *((kernel, torch.float32, 128, 80, ()) for kernel in KERNELS),
    *((kernel, torch.float16, 256, 90, ()) for kernel in KERNELS),
    *((kernel, torch.bfloat16, 128, 100, ()) for kernel in KERNELS),
]


def compiled(variant: Variant) -> Compiled:
    kernel, dtype, dim, capability, options = variant
    count = len({"softcap", "alibi", "dropout"} & {name for name, _ in options})
    tile = getattr(choose_tiles(dim, dim, dtype, divmod(capability, 10), count), kernel)
    return compile_kernel(kernel, tile, dtype, dim, capability=capability, **dict(options))


def describe(variant: Variant) -> str:
    kernel, dtype, dim, capability, options = variant
    return "-".join([kernel, f"{dtype}"[6:], f"d{dim}", f"sm_{capability}", *(name for name, _ in options)])


@pytest.fixture(scope="module")
def code() -> Iterator[Callable[[Variant], Compiled]]:
    """What a variant compiles to. All of them compile at once, as many side by side as there are cores."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("forkserver")) as pool:
        futures = {variant: pool.submit(compiled, variant) for variant in TUNED + OTHERS}
        yield lambda variant: futures[variant].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", TUNED, ids=describe)
def test_kernels_for_sm_90_use_wgmma_and_tma_and_spill_nothing(variant, code):
    made = code(variant)
    assert made.uses_wgmma and made.uses_tma
    kernel, *_, options = variant
    # triton 3.6 spills eight registers at most where a later visit's forward kernel has another table
    spills = triton.__version__ < "3.7" and kernel == "forward" and {"alibi", "dropout"} & {name for name, _ in options}
    assert made.spilled_bytes <= (32 if spills else 0)
    assert made.shared_bytes <= SHARED_BYTES[90]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", OTHERS, ids=describe)
def test_kernels_compile_and_fit_in_shared_memory(variant, code):
    assert code(variant).shared_bytes <= SHARED_BYTES[variant[3]]


def test_tiles_depend_on_shape_dtype_and_capability_alone():
    assert choose_tiles(128, 128, torch.bfloat16, (9, 0)) == choose_tiles(128, 96, torch.bfloat16, (9, 0))
    assert not any(tile.tma for tile in vars(choose_tiles(128, 128, torch.bfloat16, (8, 9))).values())


@pytest.mark.parametrize(
    ("rows", "heads"), [(0, 1), (1, 8), (2**16, 1), (2**16, 3), (2**15, 5), (2**20, 2), (200_001, 4)]
)
def test_launches_cover_every_row_of_every_head_once_and_sum_over_few(rows, heads):
    launches = launches_of(rows, heads)
    assert sum(n_heads * (high - low) for _, n_heads, low, high in launches) == rows * heads
    assert all(n_heads * (high - low) <= LONGEST_SUM for _, n_heads, low, high in launches)
    assert len({(first_head, low) for first_head, _, low, _ in launches}) == len(launches)


def test_tables_are_not_made_inside_a_cuda_graph(monkeypatch):
    # their memory would be the graph's, and they would hold nothing until it is replayed
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="once before capturing"):
        to_device(torch.zeros(1, dtype=torch.int32), torch.device("cuda"))


def test_tables_that_a_cuda_graph_knows_stay_when_others_take_their_place(monkeypatch):
    captures = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    monkeypatch.setattr(launch, "_in_graphs", {})

    @launch.stay_in_graphs
    @lru_cache(maxsize=1)
    def table_of(n: int, _: torch.device) -> torch.Tensor:
        return torch.full((1,), n)

    def seen(n: int, device: str = "cuda") -> "ref[torch.Tensor]":
        return ref(table_of(n, torch.device(device)))

    captures = True
    on_cpu, first = seen(0, "cpu"), seen(1)
    captures = False
    other, again = seen(2), seen(1)
    captures = True
    second = seen(1)  # made anew meanwhile: both graphs keep theirs
    captures = False
    seen(3)
    assert on_cpu() is None and other() is None
    assert again() is second() and first() is not None and second() is not None and first() is not second()
