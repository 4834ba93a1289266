"""`ring_attention` over gloo, torch backend, against dense attention of the whole sequence in fp64.

The functions that run in the workers come first: each takes whole inputs, attends to its own rows and returns those.
"""

import threading
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from oracle import (
    FP32_BOUND,
    Attention,
    assemble,
    assert_close,
    dense,
    gradients,
    held_positions,
    local_part,
    small_blocks,
    world,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from ringflash import Mask, comm, flash_attention, plan, positions, ring_attention, shard, unshard
from ringflash import gradients as dkv
from ringflash.testing import Inputs, Workers, random_inputs, relative_error

LAYOUTS = ["contiguous", "zigzag", "striped"]
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"causal": True, "window": (11, None)}}
HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (3, 1)}
MODELS = {  # query heads, key/value heads, head dims of q and k, and of v
    "7 queries a key": (28, 4, 128, 128),
    "5 queries a key": (40, 8, 96, 96),
    "71 queries a key": (71, 1, 64, 64),
    "latent attention": (16, 16, 192, 128),
    "narrow": (6, 2, 80, 80),
    "narrower": (6, 3, 40, 40),
}
WORLDS = [1, 2, 3, 4, 8]

Ring = Callable[..., Any]  # ring_attention, wrapped in something


class Problem(NamedTuple):
    """What `random_inputs` makes one from: shorter to send than its tensors, and hashable."""

    batch: int
    seq_len: int
    heads: int
    head_dim: int = 16
    kv_heads: int | None = None
    v_head_dim: int | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def inputs(self) -> Inputs:
        return random_inputs(**self._asdict())


def held_here(layout: str, seq_len: int) -> list[int]:
    """This rank's positions, from the definition of the layout."""
    return held_positions(layout, seq_len, dist.get_world_size(), dist.get_rank())


def attend_here(inputs: Inputs, ring: Ring = ring_attention, group: Any = None, **options: Any) -> Attention:
    """Forward and backward of this rank's rows."""
    group = world() if group is None else group
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    with small_blocks():
        out, lse = ring(q, k, v, group=group, seq_len=options.pop("seq_len"), return_lse=True, **options)
        grads = gradients((out, lse), (q, k, v), inputs)
    return Attention(out.detach(), lse.detach(), *grads)


def attend_to_part(whole: Inputs, layout: str, **options) -> Attention:
    """This rank's share of one problem, the layout taken from its definition."""
    seq_len = whole.q.shape[1]
    held = held_here(layout, seq_len)
    return attend_here(local_part(whole, held), layout=layout, seq_len=seq_len, **options)


def attend_to_parts(problems: list[Problem], layout: str, **options) -> list[Attention]:
    return [attend_to_part(problem.inputs(), layout, **options) for problem in problems]


def ring_result(pool: Workers, problem: Problem, layout: str, **options) -> Attention:
    parts = pool.run(attend_to_parts, [problem], layout, **options)
    return assemble([part for [part] in parts], all_held(layout, problem.seq_len, pool.world_size))


def all_held(layout: str, seq_len: int, world_size: int) -> list[list[int]]:
    return [held_positions(layout, seq_len, world_size, rank) for rank in range(world_size)]


@cache
def dense_result(problem: Problem, mask: str) -> Attention:
    return dense(problem.inputs(), **MASKS[mask])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_out_lse_and_gradients_match_dense_attention(workers, world_size, layout, mask):
    """MHA, GQA and MQA; lengths even, odd, just around the world size, and with ranks that hold no row."""
    lengths = sorted({48, 61, 2 * world_size + 1, max(world_size - 1, 1), 1})
    problems = [
        Problem(batch=2, seq_len=seq_len, heads=h, kv_heads=g, v_head_dim=24, seed=seq_len)
        for seq_len in lengths
        for h, g in (HEADS.values() if seq_len in (48, 61) else [HEADS["gqa"]])
    ]
    by_rank = workers(world_size).run(attend_to_parts, problems, layout, **MASKS[mask])
    for problem, *parts in zip(problems, *by_rank, strict=True):
        actual = assemble(parts, all_held(layout, problem.seq_len, world_size))
        assert_close(actual, dense_result(problem, mask), FP32_BOUND, problem)


@pytest.mark.parametrize("model", MODELS)
def test_heads_and_head_dims_of_known_models_match_dense_attention(workers, model):
    heads, kv_heads, head_dim, v_head_dim = MODELS[model]
    problem = Problem(1, 37, heads, head_dim, kv_heads=kv_heads, v_head_dim=v_head_dim)
    actual = ring_result(workers(3), problem, "zigzag", causal=True)
    assert_close(actual, dense(problem.inputs(), causal=True), FP32_BOUND)


def attend_in_pieces(
    problems: list[Problem], layout: str, group_bytes: int, apart_bytes: int, **options
) -> list[Attention]:
    """Backward half by half, the own shard too where it has more than `apart_bytes` of sums; forward in groups of at
    most so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dkv, "HALVED_BYTES", 0)
        patch.setattr(dkv, "APART_BYTES", apart_bytes)
        patch.setattr(comm, "GROUP_BYTES", group_bytes)
        patch.setattr(dkv, "STRAIGHT_BYTES", 0)
        patch.setattr(dkv, "LAP_BYTES", 0)
        return attend_to_parts(problems, layout, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_halves_and_small_groups_match_dense_attention(workers, world_size, layout):
    lengths = sorted({61, 2 * world_size + 1, max(world_size - 1, 1)})  # halves of unequal rows, of one row, of none
    problems = [Problem(2, seq_len, heads=4, kv_heads=2, v_head_dim=24, seed=seq_len) for seq_len in lengths]
    bytes_of_two_shards = 2 * -(-61 // world_size) * 2 * 2 * (16 + 24) * 4
    for mask, *sizes in (("full", 0, 2**30), ("causal", bytes_of_two_shards, 0), ("window", 2**30, 2**30)):
        by_rank = workers(world_size).run(attend_in_pieces, problems, layout, *sizes, **MASKS[mask])
        for problem, *parts in zip(problems, *by_rank, strict=True):
            actual = assemble(parts, all_held(layout, problem.seq_len, world_size))
            assert_close(actual, dense_result(problem, mask), FP32_BOUND, (mask, problem))


def steps_of_laps(world_size: int, rows: int, mask: Mask, layout: str = "zigzag") -> list[int] | None:
    """How many steps there are to a lap; `None` where sums go round the ring."""
    way = plan.plan_ring(mask, layout, world_size * rows, 1, world_size)
    k = torch.empty(1, rows, 8, 128, dtype=torch.bfloat16, device="meta")  # 8 KiB of sums a row
    straight = dkv.straight_of(way, k, k, torch.float32)
    return straight and [len(lap.sent) for lap in straight.laps]


def test_sums_go_straight_home_where_little_is_seen_and_in_laps_where_shards_are_small(monkeypatch):
    causal, window = Mask(right=0), Mask(left=1000, right=0)
    assert steps_of_laps(2, 1024, causal) is steps_of_laps(2, 32768, causal) is None
    assert steps_of_laps(2, 16384, window) is None
    assert steps_of_laps(2, 32768, window) == steps_of_laps(8, 32768, window, "contiguous") == [1]  # else in halves
    assert steps_of_laps(3, 16384, causal) == [2]  # 256 MiB of two shards
    assert steps_of_laps(3, 32768, causal) is None
    assert steps_of_laps(8, 2048, causal) == [7]
    assert steps_of_laps(16, 2048, causal) == [8, 7]
    assert steps_of_laps(32, 1024, causal) == [16, 15]
    assert steps_of_laps(16, 4096, causal) is None
    assert steps_of_laps(16, 4096, window) == [15]
    assert steps_of_laps(16, 2048, Mask(right=0, cu_seqlens=[0, 100, 16 * 2048])) is None  # another with every batch
    with monkeypatch.context() as patch:
        patch.setattr(dkv, "STRAIGHT_BYTES", 0)
        assert steps_of_laps(2, 32768, window) is None
    monkeypatch.setattr(dkv, "LAP_RANKS", 15)
    assert steps_of_laps(16, 2048, causal) is None and steps_of_laps(16, 4096, window) == [15]


def attend_in_laps(problems: list[Problem], layout: str, lap_bytes: int, **options) -> list[Attention]:
    """Backward, sums of at most so many bytes go straight home from every launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dkv, "STRAIGHT_BYTES", 0)
        patch.setattr(dkv, "LAP_BYTES", lap_bytes)
        patch.setattr(dkv, "LAP_SHARDS", 1)
        return attend_to_parts(problems, layout, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("world_size", "shards"), [(3, 1), (4, 2), (8, 1), (8, 3)])
def test_laps_match_dense_attention(workers, world_size, shards, layout):
    lengths = sorted({61, 2 * world_size + 1, max(world_size - 1, 1)})
    for mask in ("full", "causal", "window"):
        for seq_len in lengths:
            problem = Problem(2, seq_len, heads=4, kv_heads=2, v_head_dim=24, seed=seq_len)
            lap_bytes = shards * -(-seq_len // world_size) * 2 * 2 * (16 + 24) * 4
            by_rank = workers(world_size).run(attend_in_laps, [problem], layout, lap_bytes, **MASKS[mask])
            actual = assemble([part for (part,) in by_rank], all_held(layout, seq_len, world_size))
            assert_close(actual, dense_result(problem, mask), FP32_BOUND, (mask, problem))


def attend_around_holes(problems: list[Problem], layout: str, **options) -> list[Attention]:
    """Of a shard the rows that are seen, and none between them; shards as large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "HOLE", 1)
        patch.setattr(dkv, "HALVED_BYTES", 0)
        patch.setattr(dkv, "APART_BYTES", 0)
        return attend_to_parts(problems, layout, **options)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shards_seen_in_parts_match_dense_attention(workers, world_size, layout):
    """Documents that end in the middle of shards: sums go straight home, from several places of a shard."""
    for causal in (False, True):
        problem = Problem(2, 67, heads=4, kv_heads=2, v_head_dim=24, seed=int(causal))
        options: Any = {"mask": Mask(causal=causal, cu_seqlens=[0, 20, 23, 50, 67])}
        parts = [of[0] for of in workers(world_size).run(attend_around_holes, [problem], layout, **options)]
        actual = assemble(parts, all_held(layout, 67, world_size))
        assert_close(actual, dense(problem.inputs(), **options), FP32_BOUND, causal)


@pytest.mark.parametrize("window", [(0, 0), (3, None), (-1, 4), (2, 30), (100, 0)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_match_dense_attention(workers, layout, window):
    problem = Problem(batch=1, seq_len=45, heads=2, kv_heads=1)
    actual = ring_result(workers(4), problem, layout, window=window)
    assert_close(actual, dense(problem.inputs(), window=window), FP32_BOUND)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_equal_shards_need_no_seq_len(workers, world_size, layout):
    whole = random_inputs(1, 32, 2, 16)
    parts = workers(world_size).run(attend_without_seq_len, whole, layout)
    assert_close(assemble(parts, all_held(layout, 32, world_size)), dense(whole, causal=True), FP32_BOUND)


def attend_without_seq_len(whole: Inputs, layout: str) -> Attention:
    held = held_here(layout, whole.q.shape[1])
    return attend_here(local_part(whole, held), layout=layout, seq_len=None, causal=True)


def test_zigzag_is_the_default_layout(workers):
    whole = random_inputs(1, 30, 2, 16)
    parts = workers(2).run(attend_by_defaults, whole)
    assert_close(assemble(parts, all_held("zigzag", 30, 2)), dense(whole), FP32_BOUND)


def attend_by_defaults(whole: Inputs) -> Attention:
    held = held_here("zigzag", whole.q.shape[1])
    return attend_here(local_part(whole, held), seq_len=whole.q.shape[1])


# Dtypes and accuracy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 3])
def test_half_precision_results_come_in_the_inputs_dtype(workers, world_size, dtype):
    problem = Problem(batch=1, seq_len=45, heads=4, kv_heads=2, dtype=dtype)
    actual = ring_result(workers(world_size), problem, "zigzag", causal=True)
    assert actual.lse.dtype == torch.float32
    assert {x.dtype for x in (actual.out, *actual[2:])} == {dtype}
    assert_close(actual, dense(problem.inputs(), causal=True), torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_error_does_not_grow_with_the_world_size(workers, dtype, options):
    """At most 1.1 times one rank's (in fp32, where that is a few roundings, at most 1.1 times or those few)."""
    problem = Problem(batch=1, seq_len=96, heads=4, head_dim=32, kv_heads=2, dtype=dtype)
    expected = dense(problem.inputs(), **options)

    def errors(world_size: int) -> list[float]:
        actual = ring_result(workers(world_size), problem, "zigzag", **options)
        return [relative_error(x, y) for x, y in zip(actual, expected, strict=True)]

    one_rank, slack = errors(1), 4 * torch.finfo(torch.float32).eps
    for world_size in WORLDS[1:]:
        for name, error, bound in zip(Attention._fields, errors(world_size), one_rank, strict=True):
            assert error <= max(1.1 * bound, slack), f"{name} of {world_size} ranks: {error}, of one: {bound}"


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp64_matches_to_the_last_digits(workers, world_size, layout):
    problem = Problem(batch=1, seq_len=29, heads=4, kv_heads=2, v_head_dim=24, dtype=torch.float64)
    for options in MASKS.values():
        actual = ring_result(workers(world_size), problem, layout, **options)
        assert_close(actual, dense(problem.inputs(), **options), 1e-13)


def gradcheck_of_the_sharded_program(layout: str, causal: bool) -> bool:
    """gradcheck perturbs one whole tensor, the same on every rank, so all ranks run the same passes in step."""

    def attention(*whole: Tensor) -> tuple[Tensor, Tensor]:
        group = world()
        q, k, v = (shard(x, group=group, layout=layout) for x in whole)
        out, lse = ring_attention(q, k, v, group=group, layout=layout, seq_len=5, causal=causal, return_lse=True)
        return (
            unshard(out, group=group, layout=layout, seq_len=5),
            unshard(lse, group=group, layout=layout, seq_len=5, dim=2),
        )

    q, k, v, *_ = random_inputs(1, 5, 2, 16, kv_heads=1, dtype=torch.float64)
    return torch.autograd.gradcheck(attention, tuple(x.requires_grad_() for x in (q, k, v)), fast_mode=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradcheck_in_fp64_of_out_and_lse_through_shard_and_unshard(workers, world_size, layout, causal):
    assert workers(world_size).run(gradcheck_of_the_sharded_program, layout, causal) == [True] * world_size


# Groups -----------------------------------------------------------------------------------------------------------


def attend_in_subgroup(whole: Inputs, ranks: list[int], layout: str) -> Attention | None:
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return None
    held = held_positions(layout, whole.q.shape[1], len(ranks), ranks.index(dist.get_rank()))
    return attend_here(local_part(whole, held), group=group, layout=layout, seq_len=whole.q.shape[1], causal=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [[1, 3], [0, 2, 3], [2]])
def test_a_subgroup_counts_its_own_ranks(workers, ranks, layout):
    whole = random_inputs(1, 27, 2, 16)
    results = workers(4).run(attend_in_subgroup, whole, ranks, layout)
    parts = [results[rank] for rank in ranks]
    assert_close(assemble(parts, all_held(layout, 27, len(ranks))), dense(whole, causal=True), FP32_BOUND)


def attend_on_mesh_axis(axis: str, problems: list[Problem]) -> tuple[int, Attention]:
    """A problem for each coordinate of the other axis; returns which one and this rank's rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    ring, other = mesh[axis], mesh["data" if axis == "sequence" else "sequence"]
    problem = problems[other.get_local_rank()]
    held = held_positions("zigzag", problem.seq_len, ring.size(), ring.get_local_rank())
    part = local_part(problem.inputs(), held)
    assert torch.equal(positions(problem.seq_len, group=ring), torch.tensor(held))
    return other.get_local_rank(), attend_here(part, group=ring, seq_len=problem.seq_len, causal=True)


@pytest.mark.parametrize("axis", ["data", "sequence"])
def test_each_ring_of_a_2x2_mesh_attends_to_its_own_sequence(workers, axis):
    problems = [Problem(batch=1, seq_len=seq_len, heads=2, seed=seq_len) for seq_len in (22, 31)]
    results = workers(4).run(attend_on_mesh_axis, axis, problems)
    for index, problem in enumerate(problems):
        parts = [part for which, part in results if which == index]
        whole = assemble(parts, all_held("zigzag", problem.seq_len, 2))
        assert_close(whole, dense(problem.inputs(), causal=True), FP32_BOUND)


def attend_beside_another_group(whole: Inputs) -> Attention:
    """Collectives of another group go on while the ring does, in the other order on each rank."""
    other = dist.new_group(list(range(dist.get_world_size())))
    counts = torch.ones(3)
    before = dist.all_reduce(counts, group=other, async_op=True)
    result = attend_to_part(whole, "zigzag", causal=True)
    assert before is not None
    before.wait()
    assert counts.tolist() == [dist.get_world_size()] * 3
    return result


def test_collectives_of_another_group_do_not_disturb_the_ring(workers):
    whole = random_inputs(1, 27, 2, 16)
    parts = workers(3).run(attend_beside_another_group, whole)
    assert_close(assemble(parts, all_held("zigzag", 27, 3)), dense(whole, causal=True), FP32_BOUND)


# What is communicated ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_key_on_rank_0_reaches_the_last_rank(workers, world_size, layout):
    whole = random_inputs(1, 24, 2, 16)
    changed = whole._replace(k=whole.k.clone())
    changed.k[:, 0] += 1.0  # position 0 is on rank 0 in every layout
    before, after = (workers(world_size).run(attend_to_part, x, layout, causal=True)[-1] for x in (whole, changed))
    assert 0 not in held_positions(layout, 24, world_size, world_size - 1)
    assert ((before.out - after.out).abs().amax(dim=(0, 2, 3)) > 1e-3).all()


def communication_of(whole: Inputs) -> list[str]:
    """Names of the c10d and gloo operations of a forward and a backward pass."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attend_to_part(whole, "zigzag", causal=True)
    return sorted({event.key for event in profile.key_averages() if "c10d" in event.key or "gloo" in event.key})


def test_one_rank_communicates_nothing(workers):
    whole = random_inputs(1, 12, 2, 16)
    assert workers(1).run(communication_of, whole) == [[]]
    assert all(workers(2).run(communication_of, whole))  # two ranks are seen to


def sent_elements(whole: Inputs) -> list[int]:
    """Sizes of the tensors that this rank sends in one forward pass."""
    sizes, isend = [], dist.isend
    dist.isend = lambda tensor, *args, **kwargs: sizes.append(tensor.numel()) or isend(tensor, *args, **kwargs)
    try:
        q, k, v, *_ = local_part(whole, held_here("zigzag", whole.q.shape[1]))
        ring_attention(q, k, v, group=world())
    finally:
        dist.isend = isend
    return sizes


def test_keys_and_values_travel_in_one_message_and_unrepeated(workers):
    whole = random_inputs(1, 24, 8, 16, kv_heads=2, v_head_dim=24)
    for sizes in workers(3).run(sent_elements, whole):
        assert sizes == [8 * 2 * (16 + 24)] * 2


# Memory of tensors ------------------------------------------------------------------------------------------------


class InOrder(comm.NcclTransport):
    """Batches of messages, one after the other, as they are on NCCL's stream."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, stream: Executor):
        super().__init__(group, device)
        self.stream = stream

    def exchange(self, *args: Any, **kwargs: Any) -> Any:
        exchange = super().exchange
        done = self.stream.submit(lambda: exchange(*args, **kwargs).wait())
        return SimpleNamespace(wait=done.result)


def attend_with_nccls_messages(whole: Inputs, layout: str, bounds: dict[str, int], **options: Any) -> bool:
    """Is the result the same, to the bit, when messages go as those of `NcclTransport` do: batched, untagged, a batch
    after the one before it has arrived?"""
    held = held_here(layout, whole.q.shape[1])
    options |= {"seq_len": whole.q.shape[1], "layout": layout, "causal": True}
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as stream:
        for name, value in bounds.items():
            patch.setattr(dkv, name, value)
        by_gloo = attend_here(local_part(whole, held), **options)
        patch.setattr(comm, "GlooTransport", None)
        patch.setattr(comm, "make_transport", lambda name, group, device: InOrder(group, device, stream))
        by_nccl = attend_here(local_part(whole, held), **options)
    return all(map(torch.equal, by_gloo, by_nccl))


ROUND = {"STRAIGHT_BYTES": 0, "LAP_BYTES": 0}
IN_LAPS = {"STRAIGHT_BYTES": 0, "LAP_BYTES": 2 * 10 * 2 * 2 * 2 * 16 * 4, "LAP_SHARDS": 1}  # of 1 to 3 steps


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_nccl_transports_messages_match_up_without_tags(workers, world_size, layout):
    # NCCL itself wants a GPU a rank. Gloo takes the same batches, and matches untagged messages in their order too.
    whole = Problem(2, 37, 4, kv_heads=2).inputs()
    short = Problem(1, world_size - 1, 2).inputs()  # a rank without rows sends nothing
    some = {"window": (2, None)}  # not all ranks see the shard of the last step
    for bounds, inputs, options in ((ROUND, whole, {}), (IN_LAPS, whole, {}), (ROUND, short, {}), ({}, whole, some)):
        same = workers(world_size).run(attend_with_nccls_messages, inputs, layout, bounds, **options)
        assert same == [True] * world_size


def strided(x: Tensor) -> Tensor:
    wide = torch.full([2 * n for n in x.shape], float("nan"), dtype=x.dtype)
    return wide[tuple(slice(1, None, 2) for _ in x.shape)].copy_(x)


def transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def reversed_memory(x: Tensor) -> Tensor:
    order = tuple(reversed(range(x.ndim)))
    return x.permute(order).contiguous().permute(order)


ARRANGEMENTS = {f.__name__: f for f in (strided, transposed, reversed_memory)}


def attend_rearranged(whole: Inputs, arrangement: str) -> Attention:
    held = held_here("striped", whole.q.shape[1])
    part = Inputs(*map(ARRANGEMENTS[arrangement], local_part(whole, held)))
    assert not any(x.is_contiguous() for x in part)
    return attend_here(part, layout="striped", seq_len=whole.q.shape[1], causal=True)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_strides_of_inputs_and_gradients_do_not_matter(workers, arrangement):
    whole = random_inputs(2, 31, 4, 16, kv_heads=2)
    parts = workers(3).run(attend_rearranged, whole, arrangement)
    assert_close(assemble(parts, all_held("striped", 31, 3)), dense(whole, causal=True), FP32_BOUND)


def attend_expanded(seq_len: int) -> Attention:
    """k and v of one head and one batch seen as several; dout and dlse as `sum().backward()` makes them."""
    held = held_here("zigzag", seq_len)
    q, k, v, *_ = local_part(random_inputs(2, seq_len, 4, 16), held)
    k, v = (x[:1, :, :1].expand(2, -1, 4, -1) for x in (k, v))
    one = torch.ones(())
    part = Inputs(q, k, v, one.expand(q.shape), one.expand(2, 4, len(held)))
    assert k.stride(0) == k.stride(2) == 0
    return attend_here(part, seq_len=seq_len, causal=True)


def test_expanded_inputs_and_gradients_are_read_as_they_look(workers):
    q, k, v, *_ = random_inputs(2, 25, 4, 16)
    k, v = (x[:1, :, :1].repeat(2, 1, 4, 1) for x in (k, v))
    parts = workers(3).run(attend_expanded, 25)
    whole = Inputs(q, k, v, torch.ones_like(q), torch.ones(2, 4, 25))
    assert_close(assemble(parts, all_held("zigzag", 25, 3)), dense(whole, causal=True), FP32_BOUND)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_dimension_is_guessed_from_its_size(workers, layout):
    """Batch, local rows, heads and head dims that are all the same number."""
    problem = Problem(batch=16, seq_len=32, heads=16)
    actual = ring_result(workers(2), problem, layout, causal=True)
    assert_close(actual, dense(problem.inputs(), causal=True), FP32_BOUND)


def assert_results_stand_alone(dtype: torch.dtype) -> None:
    """Nothing shares memory, and no later call changes an earlier result."""
    whole = random_inputs(1, 24, 2, 16, dtype=dtype)
    held = held_here("zigzag", 24)
    part = local_part(whole, held)
    inputs_before = [x.clone() for x in part]
    results = attend_here(part, seq_len=24, causal=True)
    memory = [x.untyped_storage().data_ptr() for x in (*part, *results)]
    assert len(set(memory)) == len(memory)
    before = [x.clone() for x in results]
    for seed, causal in ((1, True), (2, False)):
        attend_here(local_part(random_inputs(1, 24, 2, 16, dtype=dtype, seed=seed), held), seq_len=24, causal=causal)
    assert all(torch.equal(x, y) for x, y in zip(results, before, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(part, inputs_before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_share_no_memory_and_later_calls_change_none(workers, world_size, dtype):
    workers(world_size).run(assert_results_stand_alone, dtype)


# Autograd and training --------------------------------------------------------------------------------------------


def attend_under_a_default_device(device: str, layout: str) -> bool:
    """Lengths that no other test has, so that nothing is kept of them; first where the default is not the CPU."""
    mask = Mask(5, causal=True, cu_seqlens=[0, 30, 57, 83], prefix=[7, 0, 3])
    by_layout: dict[str, Any] = {"layout": layout, "layout_mask": mask if layout == "balanced" else None}
    x, slopes = random_inputs(1, 83, 2, 16), torch.ones(2)
    results = []
    for default in (device, "cpu"):
        with torch.device(default), small_blocks():
            torch.manual_seed(0)
            leaves = [shard(y, group=world(), **by_layout).requires_grad_() for y in x[:3]]
            options = {"seq_len": 83, "mask": mask, "alibi_slopes": slopes, "dropout_p": 0.1, **by_layout}
            out = ring_attention(*leaves, group=world(), **options)
            grads = torch.autograd.grad(unshard(out, group=world(), seq_len=83, **by_layout), leaves, x.dout)
            results.append([out, positions(83, group=world(), **by_layout), *grads])
    return all(map(torch.equal, *results))


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
def test_the_default_device_does_not_matter(workers, layout):
    assert workers(2).run(attend_under_a_default_device, "meta", layout) == [True] * 2


def attend_checkpointed(whole: Inputs, use_reentrant: bool) -> Attention:
    def ring(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
        return checkpoint(ring_attention, q, k, v, use_reentrant=use_reentrant, **options)

    if not use_reentrant:
        return attend_to_part_with(ring, whole)

    def reentrant(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
        return checkpoint(lambda *x: ring_attention(*x, **options), q, k, v, use_reentrant=True)

    return attend_to_part_with(reentrant, whole)


def attend_to_part_with(ring: Ring, whole: Inputs) -> Attention:
    seq_len = whole.q.shape[1]
    held = held_here("zigzag", seq_len)
    q, k, v = (x.detach().requires_grad_() for x in local_part(whole, held)[:3])
    part = local_part(whole, held)
    out, lse = ring(q, k, v, group=world(), seq_len=seq_len, causal=True, return_lse=True)
    torch.autograd.backward((out, lse), (part.dout, part.dlse))  # reentrant checkpoints refuse torch.autograd.grad
    grads = [x.grad for x in (q, k, v)]
    assert not any(x is None for x in grads)
    return Attention(out.detach(), lse.detach(), *(x for x in grads if x is not None))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoints_recompute_the_ring(workers, use_reentrant):
    whole = random_inputs(1, 27, 4, 16, kv_heads=2)
    parts = workers(3).run(attend_checkpointed, whole, use_reentrant)
    assert_close(assemble(parts, all_held("zigzag", 27, 3)), dense(whole, causal=True), FP32_BOUND)


def attend_and_go_back_in_another_thread(whole: Inputs) -> Attention:
    """The backward pass runs outside of every context that the forward ran in."""
    results = []
    held = held_here("zigzag", whole.q.shape[1])
    part = local_part(whole, held)
    q, k, v = (x.detach().requires_grad_() for x in part[:3])
    with torch.autograd.set_detect_anomaly(True), init_device_mesh("cpu", (dist.get_world_size(),)) as mesh:
        out, lse = ring_attention(q, k, v, group=mesh, seq_len=whole.q.shape[1], causal=True, return_lse=True)
    thread = threading.Thread(target=lambda: results.append(gradients((out, lse), (q, k, v), part)))
    thread.start()
    thread.join()
    return Attention(out.detach(), lse.detach(), *results[0])


def test_backward_runs_outside_of_the_forwards_context(workers):
    whole = random_inputs(1, 27, 2, 16)
    parts = workers(2).run(attend_and_go_back_in_another_thread, whole)
    assert_close(assemble(parts, all_held("zigzag", 27, 2)), dense(whole, causal=True), FP32_BOUND)


def interleave_two_models(problems: list[Problem], layouts: list[str]) -> list[Attention]:
    """Both forward passes, then both backward passes, the first model's first."""
    passes = []
    for problem, layout in zip(problems, layouts, strict=True):
        held = held_here(layout, problem.seq_len)
        part = local_part(problem.inputs(), held)
        leaves = tuple(x.detach().requires_grad_() for x in part[:3])
        options: dict[str, Any] = {"group": world(), "layout": layout, "seq_len": problem.seq_len, "return_lse": True}
        passes.append((part, leaves, ring_attention(*leaves, causal=layout == "zigzag", **options)))
    return [
        Attention(out.detach(), lse.detach(), *gradients((out, lse), leaves, part))
        for part, leaves, (out, lse) in passes
    ]


def test_two_models_of_different_shapes_interleave(workers):
    problems = [
        Problem(batch=1, seq_len=27, heads=4, kv_heads=2),
        Problem(batch=2, seq_len=40, heads=3, head_dim=32, v_head_dim=16, dtype=torch.float64),
    ]
    layouts = ["zigzag", "striped"]
    by_rank = workers(3).run(interleave_two_models, problems, layouts)
    for problem, layout, *parts in zip(problems, layouts, *by_rank, strict=True):
        actual = assemble(parts, all_held(layout, problem.seq_len, 3))
        assert_close(actual, dense(problem.inputs(), causal=layout == "zigzag"), FP32_BOUND)


def worst_error_of_random_problems(iterations: int, seed: int) -> float:
    """Each rank draws the same problems, attends to its rows and compares them with one-process attention."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    worst = 0.0
    for iteration in range(iterations):
        kv_heads, layout, causal = draw(1, 2), LAYOUTS[draw(0, 2)], bool(draw(0, 1))
        window = (draw(0, 20), None) if draw(0, 2) == 0 else None
        whole = random_inputs(
            draw(1, 2), draw(1, 40), kv_heads * draw(1, 3), 8 * draw(2, 4), kv_heads=kv_heads, seed=iteration
        )
        actual = attend_to_part(whole, layout, causal=causal, window=window)
        q, k, v = (x.requires_grad_() for x in whole[:3])
        out, lse = flash_attention(q, k, v, causal=causal, window=window, return_lse=True)
        dq, dk, dv = gradients((out, lse), (q, k, v), whole)
        held = held_here(layout, q.shape[1])
        expected = Attention(out[:, held], lse[:, :, held], dq[:, held], dk[:, held], dv[:, held])
        # A rank may hold no row: compare with the size of its results, or with 1e-2 where they are smaller.
        errors = [((x - y).norm() / y.norm().clamp(min=1e-2)).item() for x, y in zip(actual, expected, strict=True)]
        worst = max([worst, *errors])
    return worst


def test_hundreds_of_random_shapes_in_one_process_group(workers):
    for worst in workers(3).run(worst_error_of_random_problems, 200, 0):
        assert worst <= FP32_BOUND


def deterministic_runs(whole: Inputs) -> bool:
    first, *others = (attend_to_part(whole, "zigzag", causal=True, deterministic=True) for _ in range(4))
    return all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


def test_deterministic_gradients_are_bitwise_equal(workers):
    assert workers(3).run(deterministic_runs, random_inputs(1, 40, 4, 16, kv_heads=2)) == [True] * 3


def attend_compiled(whole: Inputs, backend: str) -> Attention:
    @torch.compile(fullgraph=True, backend=backend)
    def ring(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
        out, lse = ring_attention(q, k, v, **options)
        return 1.0 * out, lse

    seq_len = whole.q.shape[1]
    held = held_here("zigzag", seq_len)
    return attend_here(local_part(whole, held), ring=ring, layout="zigzag", seq_len=seq_len, causal=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_into_one_graph(workers, backend):
    whole = random_inputs(1, 27, 4, 16, kv_heads=2)
    parts = workers(2).run(attend_compiled, whole, backend)
    assert_close(assemble(parts, all_held("zigzag", 27, 2)), dense(whole, causal=True), FP32_BOUND)


def graphs_of_several_lengths(layout: str) -> tuple[int, bool]:
    """Graphs compiled for four lengths that were marked as dynamic, and whether all results were right."""
    counter = CompileCounterWithBackend("aot_eager")
    options: dict[str, Any] = {"group": world(), "layout": layout, "causal": True}
    ring = torch.compile(lambda q, k, v: 1.0 * ring_attention(q, k, v, **options), fullgraph=True, backend=counter)
    right = []
    for rows in (20, 34, 8, 5):
        q, k, v, *_ = random_inputs(1, rows, 2, 16, seed=dist.get_rank())
        for x in (q, k, v):
            torch._dynamo.mark_dynamic(x, 1)
        right.append(torch.equal(ring(q, k, v), ring_attention(q, k, v, **options)))
    return counter.frame_count, all(right)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lengths_may_be_dynamic_under_the_compiler(workers, layout):
    for graphs, right in workers(2).run(graphs_of_several_lengths, layout):
        assert right and graphs <= 2  # one more where the halves of a zigzag are not as long


class RingModule(torch.nn.Module):
    def __init__(self, layout: str):
        super().__init__()
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        return ring_attention(x, x, x, group=world(), layout=self.layout, causal=True)


def warnings_of_an_export(layout: str) -> list[str]:
    """For any length from 4 to 99."""
    rows = {"x": {1: torch.export.Dim("rows", min=4, max=99)}}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        exported = torch.export.export(
            RingModule(layout), (torch.randn(1, 20, 2, 16),), strict=True, dynamic_shapes=rows
        )
    for length in (20, 33):
        x = torch.randn(1, length, 2, 16)
        assert torch.equal(exported.module()(x), RingModule(layout)(x))
    return [str(warning.message) for warning in said]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_exported_for_all_lengths_without_a_warning(workers, layout):
    assert workers(1).run(warnings_of_an_export, layout) == [[]]


# shard, unshard, positions ----------------------------------------------------------------------------------------


def shard_and_back(x: Tensor, layout: str, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    group = world()
    part = shard(x, group=group, layout=layout, dim=dim)
    whole = unshard(part, group=group, layout=layout, dim=dim, seq_len=x.shape[dim])
    return part, whole, positions(x.shape[dim], group=group, layout=layout)


def tensors_to_shard() -> Iterable[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    for seq_len in (0, 1, 2, 5, 12, 17):
        x = torch.randn(2, seq_len, 3, generator=generator)
        yield from ((x, 1), (x, -2), (x.transpose(0, 1), 0), (x.transpose(1, 2), 2), (x.bfloat16(), 1))
        yield (100 * x).long()[0], 0
        yield (x > 0)[:, :, 0], -1


def shard_all_and_back(layout: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [shard_and_back(x, layout, dim) for x, dim in tensors_to_shard()]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_unshard_undoes_shard_and_positions_are_the_rows_of_a_shard(workers, world_size, layout):
    """Any dim, dtype, stride and length, down to none."""
    for rank, results in enumerate(workers(world_size).run(shard_all_and_back, layout)):
        for (x, dim), (part, whole, held) in zip(tensors_to_shard(), results, strict=True):
            assert held.tolist() == held_positions(layout, x.shape[dim], world_size, rank)
            assert held.dtype == torch.int64
            assert part.dtype == whole.dtype == x.dtype and part.is_contiguous()
            assert torch.equal(part, x.index_select(dim, held))
            assert torch.equal(whole, x)


DTYPES = [torch.bool, torch.int16, torch.uint16, torch.complex64, torch.float8_e4m3fn]


def shard_dtypes_and_back() -> list[bool]:
    wholes = [torch.arange(14).reshape(2, 7).remainder(2).to(dtype) for dtype in DTYPES]
    backs = [unshard(shard(x, group=world()), group=world(), seq_len=7) for x in wholes]
    return [
        x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in zip(wholes, backs, strict=True)
    ]


def test_tensors_of_any_dtype_are_sharded(workers):
    assert workers(3).run(shard_dtypes_and_back) == [[True] * len(DTYPES)] * 3


def gradient_penalty() -> list[float]:
    """Errors of the gradient of a loss that has a gradient in it, through `shard` and through both."""
    errors = []
    for middle in (lambda x: x, lambda x: unshard(x, group=world(), seq_len=7)):
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(1, 7, 2, generator=generator, dtype=torch.float64)
        sharded, plain = whole.clone().requires_grad_(), whole.clone().requires_grad_()
        results = middle(shard(sharded, group=world())).pow(3).sum(), plain.pow(3).sum()
        for x, loss in zip((sharded, plain), results, strict=True):
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (x.sum() + slope.square().sum()).backward()
        assert sharded.grad is not None and plain.grad is not None
        errors.append(relative_error(sharded.grad, plain.grad))
    return errors


def test_second_derivatives_go_through_shard_and_unshard(workers):
    for errors in workers(2).run(gradient_penalty):
        assert max(errors) <= 1e-14


def sharded_gradients(layout: str, seq_len: int) -> list[float]:
    """Errors of a replicated program with sharded middle: its gradients are those of the same program in one piece."""
    group = world()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, seq_len, 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(2, seq_len, 3, generator=generator, dtype=torch.float64)
    sharded, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    rows = shard(sharded, group=group, layout=layout)
    whole = unshard(rows.square(), group=group, layout=layout, seq_len=seq_len)
    (whole * weight).sum().backward()
    (plain.square() * weight).sum().backward()
    assert sharded.grad is not None and plain.grad is not None
    return [relative_error(whole, plain.square()), relative_error(sharded.grad, plain.grad)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_sharded_program_has_the_gradients_of_the_whole_one(workers, world_size, layout):
    for seq_len in (1, 8, 13):
        for errors in workers(world_size).run(sharded_gradients, layout, seq_len):
            assert max(errors) <= 1e-15


def expanded_gradient_through_shard_and_unshard() -> list[Tensor]:
    """`sum().backward()` sends a gradient of stride 0 through both."""
    x = torch.randn(1, 7, 2).requires_grad_()
    unshard(shard(x, group=world()), group=world(), seq_len=7).sum().backward()
    y = torch.randn(1, 7, 2).requires_grad_()
    shard(y, group=world()).sum().backward()
    assert x.grad is not None and y.grad is not None
    return [x.grad, y.grad]


def test_gradients_of_stride_0_go_through_shard_and_unshard(workers):
    for grads in workers(3).run(expanded_gradient_through_shard_and_unshard):
        for grad in grads:
            assert torch.equal(grad, torch.ones(1, 7, 2))


def shard_shares_memory() -> list[bool]:
    """With one rank a shard is the whole tensor's values, in memory of its own."""
    x = torch.randn(1, 8, 2)
    part = shard(x, group=world())
    whole = unshard(part, group=world())
    pointers = [t.untyped_storage().data_ptr() for t in (x, part, whole)]
    return [len(set(pointers)) == 3]


@pytest.mark.parametrize("world_size", [1, 2])
def test_shards_are_new_tensors(workers, world_size):
    assert workers(world_size).run(shard_shares_memory) == [[True]] * world_size


def train_step(layout: str) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a small attention layer's weights: from shards summed over ranks, and in one piece."""
    group, seq_len = world(), 21
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, seq_len, 32, generator=generator)
    target = torch.randn(1, seq_len, 32, generator=generator)
    weights = [torch.randn(32, 32, generator=generator) / 6 for _ in range(3)]

    def loss(x: Tensor, target: Tensor, weights: list[Tensor], attention: Callable[..., Any]) -> Tensor:
        q, k, v = ((x @ w).unflatten(-1, (2, 16)) for w in weights)
        return (attention(q, k, v, causal=True).flatten(-2) - target).square().sum() / (32 * seq_len)

    sharded, plain = ([w.clone().requires_grad_() for w in weights] for _ in range(2))

    def ring(*qkv: Tensor, **options) -> Any:
        return ring_attention(*qkv, group=group, layout=layout, seq_len=seq_len, **options)

    rows, rows_of_target = (shard(t, group=group, layout=layout) for t in (x, target))
    loss(rows, rows_of_target, sharded, ring).backward()
    loss(x, target, plain, flash_attention).backward()
    grads = [w.grad for w in sharded if w.grad is not None]
    for grad in grads:
        dist.all_reduce(grad)
    return grads, [w.grad for w in plain if w.grad is not None]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_gradients_summed_over_ranks_are_those_of_one_process(workers, layout):
    for sharded, plain in workers(4).run(train_step, layout):
        assert len(sharded) == len(plain) == 3
        for x, y in zip(sharded, plain, strict=True):
            assert relative_error(x, y) <= FP32_BOUND
