"""Documents, prefix-LM, chunks and windows, in every layout, against dense attention of the whole sequence in fp64."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import FP32_BOUND, Attention, assert_close, dense, gradients, small_blocks, world
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from ringflash import Mask, flash_attention, positions, ring_attention, shard, unshard
from ringflash.mask import area
from ringflash.plan import plan_ring
from ringflash.testing import Inputs, random_inputs

LAYOUTS = ["contiguous", "zigzag", "striped", "balanced"]
TOKENS = 61
DOCUMENTS = [0, 1, 3, 3, 24, 25, 61]  # of 1 token, fewer than ranks, none, a shard's length, more than a shard
MASKS = {
    "documents": Mask(cu_seqlens=DOCUMENTS),
    "causal documents": Mask(causal=True, cu_seqlens=DOCUMENTS),
    "causal documents in a window": Mask(7, causal=True, cu_seqlens=DOCUMENTS),
    "documents in a window": Mask(3, 6, cu_seqlens=DOCUMENTS),
    "one document": Mask(causal=True, cu_seqlens=[0, TOKENS]),
    "documents of 1 token": Mask(cu_seqlens=range(TOKENS + 1)),
    "prefix": Mask(causal=True, prefix=23),
    "prefix of all": Mask(causal=True, prefix=100),
    "prefix in documents": Mask(causal=True, cu_seqlens=DOCUMENTS, prefix=[1, 1, 0, 0, 1, 30]),
    "prefix in a window": Mask(9, causal=True, prefix=23),
    "chunks": Mask(chunk=13),
    "causal chunks": Mask(causal=True, chunk=16),
    "causal chunks in documents": Mask(causal=True, cu_seqlens=DOCUMENTS, chunk=5),
    "everything": Mask(9, causal=True, cu_seqlens=DOCUMENTS, chunk=11, prefix=[0, 2, 0, 12, 0, 20]),
}


def attend(inputs: Inputs, **options: Any) -> Attention:
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    with small_blocks():
        out, lse = flash_attention(q, k, v, return_lse=True, **options)
        return Attention(out.detach(), lse.detach(), *gradients((out, lse), (q, k, v), inputs))


def ring_attend(inputs: Inputs, layout: str, layout_mask: Mask | None = None, **options: Any) -> Attention:
    """The whole results, gathered on every rank."""
    seq_len = inputs.q.shape[1]
    how = {"group": world(), "layout": layout, "layout_mask": layout_mask}
    q, k, v, dout = (shard(x, **how) for x in inputs[:4])
    part = Inputs(q, k, v, dout, shard(inputs.dlse, **how, dim=2))
    leaves = tuple(x.requires_grad_() for x in part[:3])
    with small_blocks():
        out, lse = ring_attention(*leaves, **how, seq_len=seq_len, return_lse=True, **options)
        results = out.detach(), lse.detach(), *gradients((out, lse), leaves, part)
    return Attention(*(unshard(x, **how, dim=1 + (i == 1), seq_len=seq_len) for i, x in enumerate(results)))


@pytest.mark.parametrize("name", MASKS)
def test_matches_dense_attention(name):
    inputs = random_inputs(2, TOKENS, 4, 16, kv_heads=2, v_head_dim=24)
    assert_close(attend(inputs, mask=MASKS[name]), dense(inputs, mask=MASKS[name]), FP32_BOUND)


def ring_under_every_mask(layout: str) -> dict[str, Attention]:
    inputs = random_inputs(1, TOKENS, 4, 16, kv_heads=2, v_head_dim=24)
    return {
        name: ring_attend(inputs, layout, layout_mask=mask if layout == "balanced" else None, mask=mask)
        for name, mask in MASKS.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ring_matches_dense_attention(workers, world_size, layout):
    inputs = random_inputs(1, TOKENS, 4, 16, kv_heads=2, v_head_dim=24)
    for results in workers(world_size).run(ring_under_every_mask, layout)[:1]:
        for name, mask in MASKS.items():
            assert_close(results[name], dense(inputs, mask=mask), FP32_BOUND, name)


def ring_by_option(dtype: torch.dtype) -> Attention:
    cu_seqlens = torch.tensor(DOCUMENTS, dtype=dtype)
    inputs = random_inputs(1, TOKENS, 2, 16)
    return ring_attend(inputs, "zigzag", causal=True, window=(7, None), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_documents_may_be_a_plain_option(workers, dtype):
    inputs = random_inputs(1, TOKENS, 2, 16)
    expected = attend(inputs, mask=MASKS["causal documents in a window"])
    cu_seqlens = torch.tensor(DOCUMENTS, dtype=dtype)
    assert all(map(torch.equal, attend(inputs, causal=True, window=(7, -1), cu_seqlens=cu_seqlens), expected))
    for actual in workers(2).run(ring_by_option, dtype):
        assert_close(actual, expected, FP32_BOUND)


def layers_of_one_model() -> tuple[Attention, Attention]:
    inputs, layout_mask = random_inputs(1, TOKENS, 2, 16), MASKS["causal documents"]
    window = Mask(4, causal=True, cu_seqlens=layout_mask.cu_seqlens)
    return tuple(ring_attend(inputs, "balanced", layout_mask, mask=mask) for mask in (layout_mask, window))  # pyright: ignore


def test_layers_with_other_masks_share_one_balanced_layout(workers):
    inputs = random_inputs(1, TOKENS, 2, 16)
    for wide, narrow in workers(3).run(layers_of_one_model):
        assert_close(wide, dense(inputs, mask=MASKS["causal documents"]), FP32_BOUND)
        assert_close(narrow, dense(inputs, mask=Mask(4, causal=True, cu_seqlens=DOCUMENTS)), FP32_BOUND)


def rows_of(inputs: Inputs, begin: int, end: int) -> Inputs:
    q, k, v, dout = (x[:, begin:end] for x in inputs[:4])
    return Inputs(q, k, v, dout, inputs.dlse[:, :, begin:end])


@pytest.mark.parametrize("causal", [False, True])
def test_a_packed_document_is_what_it_is_alone(causal):
    boundaries = [0, 1, 9, 10, 33, 47]
    packed = random_inputs(1, boundaries[-1], 2, 16, dtype=torch.float64)
    whole = attend(packed, causal=causal, cu_seqlens=torch.tensor(boundaries))
    for begin, end in pairwise(boundaries):
        alone = attend(rows_of(packed, begin, end), causal=causal)
        assert_close(Attention(*(x[:, :, begin:end] if x.ndim == 3 else x[:, begin:end] for x in whole)), alone, 1e-12)


def test_what_one_document_holds_changes_not_a_bit_of_another():
    inputs = random_inputs(1, 40, 2, 16)
    other = Inputs(*(x.clone() for x in inputs))
    for x in other:
        x.narrow(2 if x.ndim == 3 else 1, 12, 8).mul_(-3)
    before, after = (attend(x, cu_seqlens=torch.tensor([0, 12, 20, 40])) for x in (inputs, other))
    for x, y in zip(before, after, strict=True):
        rows = torch.tensor([*range(12), *range(20, 40)])
        dim = 2 if x.ndim == 3 else 1
        assert torch.equal(x.index_select(dim, rows), y.index_select(dim, rows)) and not torch.equal(x, y)


# Positions --------------------------------------------------------------------------------------------------------


def positions_here(layout: str, as_tensor: bool) -> tuple[Tensor, Tensor]:
    layout_mask = MASKS["documents"] if layout == "balanced" else None
    cu_seqlens = torch.tensor(DOCUMENTS) if as_tensor else DOCUMENTS
    options = {"group": world(), "layout": layout, "layout_mask": layout_mask}
    whole = torch.arange(TOKENS).unsqueeze(0)
    assert torch.equal(positions(TOKENS, **options), shard(whole, **options)[0])
    return shard(whole, **options)[0], positions(TOKENS, **options, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_restart_in_every_document(workers, layout, as_tensor):
    start = [max(b for b in DOCUMENTS if b <= position) for position in range(TOKENS)]
    for held, restarted in workers(3).run(positions_here, layout, as_tensor):
        assert restarted.dtype == torch.int64
        assert restarted.tolist() == [position - start[position] for position in held.tolist()]


# What moves, and what is computed ---------------------------------------------------------------------------------


def test_documents_of_one_rank_are_not_sent_round():
    mask = Mask(causal=True, cu_seqlens=range(0, 129, 16))
    assert [plan_ring(mask, "contiguous", 128, rank, 4).hops for rank in range(4)] == [0] * 4
    crossing = Mask(causal=True, cu_seqlens=[0, 40, 128])
    assert plan_ring(crossing, "contiguous", 128, 1, 4).visits[1] is not None
    assert plan_ring(Mask(chunk=32), "contiguous", 128, 1, 4).hops == 0


def test_blocks_outside_of_documents_are_not_computed():
    mask = Mask(causal=True, cu_seqlens=range(0, 4097, 64))
    (visit,) = plan_ring(mask, "contiguous", 4096, 0, 1).visits
    assert visit is not None
    begin, _, _, end = visit.key_ranges(64).T
    assert int((end - begin).sum()) * 64 < 2 * area(mask, 4096, 4096)


# The compiler, checkpoints ----------------------------------------------------------------------------------------


def batches() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    cuts = [torch.randint(0, 41, (2 + n,), generator=generator).sort().values.tolist() for n in (0, 0, 1, 4, 2)]
    return [[0, *cut, 40] for cut in cuts]


def check_graphs_of_many_batches(attention: Any, inputs: Inputs, **options: Any) -> int:
    """How many graphs five batches of documents compile to; each must be right."""
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def by_mask(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return 1.0 * attention(2 * q, k, v, mask=mask, **options)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def by_option(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        return 1.0 * attention(2 * q, k, v, causal=True, cu_seqlens=cu_seqlens, **options)

    for boundaries in batches():
        mask, cu_seqlens = Mask(causal=True, cu_seqlens=boundaries), torch.tensor(boundaries, dtype=torch.int32)
        q, k, v = leaves = tuple(x.detach().requires_grad_() for x in inputs[:3])
        expected = attention(2 * q, k, v, mask=mask, **options)
        wanted = torch.autograd.grad(expected, leaves, inputs.dout)
        for out in (by_mask(q, k, v, mask), by_option(q, k, v, cu_seqlens)):
            assert torch.equal(out, expected)
            assert all(map(torch.equal, torch.autograd.grad(out, leaves, inputs.dout), wanted))
    return counter.frame_count


def test_new_documents_are_no_new_graph():
    assert check_graphs_of_many_batches(flash_attention, random_inputs(1, 40, 4, 16, kv_heads=2)) <= 2


def graphs_of_a_ring(layout: str) -> int:
    layout_mask = Mask(causal=True, cu_seqlens=[0, 13, 40]) if layout == "balanced" else None
    how = {"group": world(), "layout": layout, "layout_mask": layout_mask}
    inputs = random_inputs(1, 40, 4, 16, kv_heads=2)
    q, k, v, dout = (shard(x, **how) for x in inputs[:4])
    part = Inputs(q, k, v, dout, inputs.dlse)
    return check_graphs_of_many_batches(ring_attention, part, **how)


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
def test_new_documents_are_no_new_graph_of_a_ring(workers, layout):
    assert all(graphs <= 2 for graphs in workers(2).run(graphs_of_a_ring, layout))


def attend_checkpointed(use_reentrant: bool) -> tuple[Tensor | None, ...]:
    """The mask is gone before the backward pass asks for it."""
    inputs = random_inputs(1, TOKENS, 2, 16)
    q, k, v = (shard(x, group=world()).requires_grad_() for x in inputs[:3])

    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Any:
        return ring_attention(q, k, v, group=world(), seq_len=TOKENS, mask=mask)

    out = checkpoint(layer, q, k, v, Mask(causal=True, cu_seqlens=DOCUMENTS), use_reentrant=use_reentrant)
    assert isinstance(out, Tensor)
    out.backward(shard(inputs.dout, group=world()))
    return tuple(x.grad if x.grad is None else unshard(x.grad, group=world(), seq_len=TOKENS) for x in (q, k, v))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_recompute_under_the_same_mask(workers, use_reentrant):
    inputs = random_inputs(1, TOKENS, 2, 16)
    expected = dense(inputs._replace(dlse=torch.zeros_like(inputs.dlse)), mask=MASKS["causal documents"])
    for dq, dk, dv in workers(2).run(attend_checkpointed, use_reentrant):
        assert_close(expected._replace(dq=dq, dk=dk, dv=dv), expected, FP32_BOUND)


def test_cu_seqlens_changed_before_the_backward_pass_are_an_error_or_change_nothing():
    inputs = random_inputs(1, 20, 2, 16)
    wanted = attend(inputs, cu_seqlens=torch.tensor([0, 8, 20]))
    for dtype in (torch.int32, torch.int64):
        cu_seqlens = torch.tensor([0, 8, 20], dtype=dtype)
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        with small_blocks():
            out, lse = flash_attention(q, k, v, cu_seqlens=cu_seqlens, return_lse=True)
            cu_seqlens[1] = 3
            try:
                grads = gradients((out, lse), (q, k, v), inputs)
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
            else:
                assert all(map(torch.equal, grads, wanted[2:]))


def ranks_of_a_group_see_documents_of_their_own_sequence() -> Attention:
    """Two groups of two, each with its own documents."""
    mine = dist.get_rank() // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    inputs = random_inputs(1, 30 + mine, 2, 16)
    mask = Mask(causal=True, cu_seqlens=[0, 7, 30] if mine == 0 else [0, 20, 31])
    how = {"group": groups[mine], "layout": "balanced", "layout_mask": mask}
    q, k, v = (shard(x, **how) for x in inputs[:3])
    out, lse = ring_attention(q, k, v, **how, seq_len=30 + mine, mask=mask, return_lse=True)
    expected = dense(inputs, mask=mask)
    out, lse = (unshard(x, **how, dim=dim, seq_len=30 + mine) for x, dim in ((out, 1), (lse, 2)))
    assert_close(expected._replace(out=out, lse=lse), expected, FP32_BOUND)
    return expected


def test_two_groups_have_their_own_documents(workers):
    assert len(workers(4).run(ranks_of_a_group_see_documents_of_their_own_sequence)) == 4
