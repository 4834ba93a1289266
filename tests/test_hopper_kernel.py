"""The Hopper kernels without a GPU: which passes take them, what is around them, and what they compile to."""

import heapq
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux only)")

from compile_kernels import Compiled, compile_hopper
from interpreted import run_cases

from peers import make_mask
from ringflash import hopper_backward, local_kernel
from ringflash.hopper_kernel import (
    JUMP,
    MASKED_COST,
    PIECE_COST,
    PROGRAM_COST,
    _schedule,
    backward_tile,
    forward_tile,
    heads_together,
    order_programs,
    share_out,
    ways_to_share,
)
from ringflash.local_kernel import kernel_of
from ringflash.plan import plan_one
from ringflash.score import Scoring

SHARED_BYTES = 232_448
HALF = [torch.float16, torch.bfloat16]


def test_hopper_passes_match_dense_attention_with_doubles_of_the_gluon_kernels():
    run_cases(Path(__file__).with_name("hopper_cases.py"))


@pytest.mark.parametrize("dtype", HALF)
def test_hopper_gpus_take_their_own_kernels(dtype):
    for dims in ((64, 64), (128, 128), (16, 128), (96, 40), (256, 256), (192, 128), (64, 136)):
        assert kernel_of("forward", *dims, dtype, (9, 0)) == kernel_of("backward", *dims, dtype, (9, 0)) == "hopper"


def test_other_gpus_and_fp32_take_the_portable_kernels(monkeypatch):
    for which in ("forward", "backward"):
        for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
            assert kernel_of(which, 128, 128, torch.bfloat16, capability) == "portable"
        assert kernel_of(which, 128, 128, torch.float32, (9, 0)) == "portable"
    monkeypatch.setattr(local_kernel, "HAS_GLUON", False)
    assert kernel_of.__wrapped__("forward", 128, 128, torch.bfloat16, (9, 0)) == "portable"


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_scores_with_more_than_a_scale_get_the_portable_kernels_above_head_dim_128_and_with_alibi(which):
    assert kernel_of(which, 128, 128, torch.bfloat16, (9, 0), plain=False) == "hopper"
    assert kernel_of(which, 128, 136, torch.bfloat16, (9, 0), plain=False) == "portable"
    assert kernel_of(which, 128, 128, torch.bfloat16, (9, 0), plain=False, alibi=True) == "portable"
    assert Scoring(0.5).is_plain and Scoring(0.5, sinks=torch.ones(2)).is_plain
    others = Scoring(0.5, 1.0), Scoring(0.5, slopes=torch.ones(1, 2)), Scoring(0.5, head_words=torch.ones(1, 2))
    assert not any(scoring.is_plain for scoring in others)


@pytest.mark.parametrize("tile_of", [forward_tile, backward_tile])
def test_tiles_hold_every_head_dim(tile_of):
    dims = range(16, 257, 8)
    for head_dim, v_dim in product(dims, dims):
        tile = tile_of(head_dim, v_dim)
        assert tile.block_d >= head_dim and tile.block_dv >= v_dim
        assert {tile.block_d, tile.block_dv} <= {64, 128, 256}


@pytest.mark.parametrize(
    ("rows", "kv_heads", "blocks", "together"),
    [(16384, 16, 128, 2), (16384, 16, 40, 4), (4096, 8, 32, 8), (128, 12, 1, 12), (2**20, 4, 2**13, 1)],
)
def test_heads_that_run_together_share_the_cache_and_occupy_the_gpu(rows, kv_heads, blocks, together):
    assert heads_together(kv_heads, rows * (128 + 128) * 2, blocks, multiprocessors=132) == together


@pytest.mark.parametrize(
    ("n_work", "full", "masked"),
    [
        (4 * 8, "turns", "turns"),  # fewer pieces than multiprocessors
        (64 * 8, "turns", "schedule"),
        (2**12 * 32, "turns", "grid"),  # more than a host should count
    ],
)
def test_programs_share_work_by_its_lengths_where_those_differ(n_work, full, masked):
    assert ways_to_share(n_work, 132, is_full=True) == full
    assert ways_to_share(n_work, 132, is_full=False) == masked


DOCUMENTS = make_mask("documents2048", 16384)
PROGRAMS = 132


def time_of(costs: list[float]) -> float:
    """Of a launch whose programs start in this order, each as a multiprocessor falls free; of equal shares it is 1."""
    free = [0.0] * PROGRAMS
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free) * PROGRAMS / sum(costs)


@pytest.mark.parametrize("together", [1, 2, 3, 8])
@pytest.mark.parametrize("n_heads", [8, 24])
def test_programs_backward_end_at_one_time_under_documents(n_heads, together):
    blocks = plan_one(DOCUMENTS, 16384, 16384).own_visit.key_blocks(128, JUMP)
    tiles, n_blocks = (blocks[:, 3] - blocks[:, 0]) / 64 * 4, len(blocks)
    order = order_programs(tiles, n_heads, together, PROGRAMS)
    assert order.dtype == torch.int32 and sorted(order.tolist()) == list(range(n_heads * n_blocks))
    cost = tiles + PROGRAM_COST
    heads = range(0, n_heads, together)
    in_place = time_of([x for head in heads for x in cost.tolist() for _ in range(min(together, n_heads - head))])
    assert time_of(cost[order % n_blocks].tolist()) < min(1.03, 1 + (in_place - 1) / 2)


def test_programs_backward_keep_their_place_beside_those_of_other_heads():
    """But for the longest and the shortest."""
    tiles = torch.tensor([1.0, 5000.0, *range(100, 130), 0.0])
    order = order_programs(tiles, 64, 2, PROGRAMS)
    programs = [(int(place) % len(tiles), int(place) // len(tiles)) for place in order]  # block, head
    assert programs[:64] == [(1, head) for head in range(64)]
    assert programs[64:122] == [(block, head) for block in range(3, 32) for head in (0, 1)]
    assert programs[-192:] == [(block, head) for block in (2, 0, 32) for head in range(64)]


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("n_tiles", [1, 2, 5, 33, 512, 513])
def test_a_block_meets_every_tile_of_its_heads_once_wherever_it_starts(n_tiles, heads, monkeypatch):
    where = SimpleNamespace(where=lambda condition, a, b: a if condition else b)
    monkeypatch.setattr(hopper_backward, "gl", where)
    constants = {"STAGGER": hopper_backward.STAGGER.value, "STAGGERED": hopper_backward.STAGGERED.value}
    for name, value in constants.items():
        monkeypatch.setattr(hopper_backward, name, value)
    first, stop, tiles_of_head = 3, 3 + n_tiles, n_tiles + 7
    start_at: Any = hopper_backward._start_at
    next_tile: Any = hopper_backward._next_tile
    starts = [start_at.fn(block, first, stop, HAS_TABLE=False) for block in range(200)]
    assert (len(set(starts)) > 1) == (5 != n_tiles > 1 and n_tiles <= 512)
    for start in {first, *starts}:
        tile, place, met = start, 2 * tiles_of_head + start, []
        for _ in range(heads * n_tiles):
            met.append((tile, place))
            tile, place = next_tile.fn(tile, place, first, stop, start, tiles_of_head)
        every = [(tile, head * tiles_of_head + tile) for head in range(2, 2 + heads) for tile in range(first, stop)]
        assert sorted(met) == sorted(every)
        assert [place // tiles_of_head for _, place in met] == [2 + i // n_tiles for i in range(heads * n_tiles)]


@pytest.mark.parametrize(("n_batches", "n_heads", "together"), [(1, 8, 8), (2, 16, 8), (3, 12, 8), (1, 8, 2)])
def test_a_schedule_has_every_piece_once_and_ends_at_one_time_under_documents(n_batches, n_heads, together):
    blocks = plan_one(DOCUMENTS, 16384, 16384).own_visit.query_blocks(128, JUMP)
    n_blocks = len(blocks)
    n_work = n_batches * n_heads * n_blocks
    numbers = {"BLOCK_K": 128, "n_heads": n_heads, "n_blocks": n_blocks, "n_work": n_work, "heads_together": together}
    launch: Any = SimpleNamespace(numbers=numbers, grid=(PROGRAMS, 1, 1))
    counts, *turns = _schedule(launch, blocks, torch.device("cpu")).unbind(0)
    shares = [[int(turn[i]) for turn in turns[: counts[i]]] for i in range(PROGRAMS)]
    assert sorted(piece for share in shares for piece in share) == list(range(n_work))
    begin, full_begin, full_end, end, _, _ = blocks.T
    tiles = (end + 127) // 128 - begin // 128
    masked = tiles - (full_end // 128 - (full_begin + 127) // 128).clamp(min=0)
    cost = (tiles + MASKED_COST * masked + PIECE_COST).tolist()
    groups = [min(together, n_heads - head) for head in range(0, n_heads, together)] * n_batches
    by_piece = [cost[n_blocks - 1 - turn] for n in groups for turn in range(n_blocks) for _ in range(n)]
    times = [sum(by_piece[piece] for piece in share) for share in shares]
    assert max(times) < 1.03 * sum(times) / PROGRAMS


def test_shares_are_of_one_length_to_a_piece():
    lengths = list(range(128, 0, -1)) * 16  # causal, 16 heads
    shares = share_out(lengths, 132)
    assert sorted(piece for share in shares for piece in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    times = [sum(lengths[piece] + PIECE_COST for piece in share) for share in shares]
    assert max(times) < 1.01 * sum(times) / len(times)


# kernel, dtype, head dim, v's, options of compile_hopper
Variant = tuple[str, torch.dtype, int, int, tuple[tuple[str, bool], ...]]
LAST = (("accumulate", True), ("last", True))
TUNED: list[Variant] = [  # up to head dim 128
    *(
        ("forward", torch.bfloat16, dim, dim, options)
        for dim in (64, 128)
        for options in ((), (("accumulate", True),), LAST, (("full", True),), (("sinks", True),))
    ),
    *(("forward", torch.bfloat16, 128, 128, (("short", True), *merging)) for merging in ((), LAST[:1], LAST)),
    ("forward", torch.float16, 96, 96, ()),
    *(
        ("backward", torch.bfloat16, dim, dim, options)
        for dim in (64, 128)
        for options in ((), (("accumulate", True),), (("full", True),), (("without_dq", True),), (("ordered", True),))
    ),
    ("backward", torch.bfloat16, 128, 128, (("accumulate", True), ("full", True))),
    ("backward", torch.float16, 96, 96, ()),
    ("backward", torch.float16, 64, 128, (("accumulate", True),)),
    ("forward", torch.bfloat16, 64, 64, (("softcap", True), ("accumulate", True))),
    *(("forward", dtype, 128, 128, (("softcap", True),)) for dtype in HALF),
    *(("forward", torch.bfloat16, 128, 128, (("softcap", True), *merging)) for merging in (LAST[:1], LAST)),
    ("forward", torch.float16, 128, 128, (("softcap", True), ("dropout", True))),
    ("forward", torch.bfloat16, 128, 128, (("dropout", True), ("accumulate", True))),
    ("backward", torch.bfloat16, 128, 128, (("softcap", True),)),
]
WIDE: list[Variant] = [
    ("backward", torch.bfloat16, 256, 256, (("ordered", True),)),
    ("backward", torch.float16, 192, 128, (("accumulate", True),)),
    ("backward", torch.bfloat16, 160, 256, (("accumulate", True), ("full", True), ("without_dq", True))),
]
DROPPING: list[Variant] = [
    ("backward", torch.bfloat16, 64, 64, (("dropout", True), ("accumulate", True))),
    ("backward", torch.float16, 128, 128, (("softcap", True), ("dropout", True), ("without_dq", True))),
    ("forward", torch.bfloat16, 64, 64, (("dropout", True),)),
    ("forward", torch.bfloat16, 128, 128, (("softcap", True), ("dropout", True))),
]
OTHERS: list[Variant] = [
    ("forward", torch.bfloat16, 256, 256, (("accumulate", True),)),
    ("forward", torch.bfloat16, 256, 256, LAST),
    ("forward", torch.bfloat16, 192, 128, ()),
    *DROPPING,
    *WIDE,
]


def describe(variant: Variant) -> str:
    kernel, dtype, dim, v_dim, options = variant
    return "-".join([kernel, f"{dtype}"[6:], f"d{dim}", f"v{v_dim}", *(name for name, _ in options)])


def compiled(variant: Variant) -> Compiled:
    kernel, dtype, dim, v_dim, options = variant
    return compile_hopper(kernel, dtype, dim, v_dim, **dict(options))


@pytest.fixture(scope="module")
def code() -> Iterator[Callable[[Variant], Compiled]]:
    """What a variant compiles to. All of them compile at once, as many side by side as there are cores."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("forkserver")) as pool:
        futures = {variant: pool.submit(compiled, variant) for variant in TUNED + OTHERS}
        yield lambda variant: futures[variant].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", TUNED + OTHERS, ids=describe)
def test_kernels_use_wgmma_and_tma_and_fit_in_shared_memory(variant, code):
    made = code(variant)
    assert made.uses_wgmma and made.uses_tma
    with_dq = variant[0] == "backward" and not dict(variant[4]).get("without_dq")
    assert made.adds_four_floats_at_a_time == with_dq
    assert made.shared_bytes <= SHARED_BYTES


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", TUNED + OTHERS, ids=describe)
def test_what_warpgroups_are_told_is_not_stored_over_a_barrier(variant, code):
    assert code(variant).barriers_written_over == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", TUNED + OTHERS, ids=describe)
def test_products_of_a_tile_are_under_way_together(variant, code):
    """Where ptxas finds that a product may be read or overwritten too early, every instruction of all waits."""
    assert code(variant).waits_per_product < 0.5


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", TUNED, ids=describe)
def test_nothing_is_spilled_up_to_head_dim_128_but_scalars_and_what_merges(variant, code):
    """Forward with three consumers, once a block, not in loops over tiles."""
    made = code(variant)
    assert made.spills_in_loops == 0
    few = variant[0] == "forward" and variant[1] == torch.bfloat16 and ("short", True) not in variant[4]
    assert made.spilled_bytes <= (160 if ("last", True) in variant[4] else 80 if few else 0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", DROPPING, ids=describe)
def test_dropout_spills_ten_scalars_at_most_where_it_spills_in_loops(variant, code):
    made = code(variant)
    assert made.spilled_bytes <= (80 if made.spills_in_loops == 0 else 40)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", OTHERS, ids=describe)
def test_nothing_is_spilled_in_loops_of_the_forward_pass(variant, code):
    assert variant[0] == "backward" or code(variant).spills_in_loops == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", WIDE, ids=describe)
def test_the_backward_pass_above_128_spills_two_scalars_at_most(variant, code):
    assert code(variant).spilled_bytes <= 8


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", WIDE, ids=describe)
def test_p_above_head_dim_128_is_handed_over_unrounded_in_fp16(variant, code):
    made = code(variant)
    fp16 = variant[1] == torch.float16
    assert made.stores_four_floats_at_a_time == fp16  # nothing else would: dS and a rounded P go by stmatrix
    assert ("ldmatrix" in made.ptx) != fp16
