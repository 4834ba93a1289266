"""On an NVIDIA GPU: the Triton kernels, and rings of several ranks. Where there are fewer GPUs than ranks, ranks share.

Rings go over gloo (through pinned host memory), over nvlink (ranks that share a GPU take turns on it: slow, but it is
the same code), and over NCCL where every rank has a GPU of its own.

The bound of an error is what PyTorch's own flash attention has on the same inputs, or this package's with one rank.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import pytest
import test_masks
import test_options
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import FP32_BOUND, Attention, assert_close, dense, world
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringflash import (
    Mask,
    comm,
    flash_attention,
    gradients,
    release_buffers,
    ring_attention,
    shard,
    transport_of,
    unshard,
)
from ringflash.layout import Run
from ringflash.merge import Partial
from ringflash.nvlink import SHARING
from ringflash.plan import Visit
from ringflash.score import Scoring
from ringflash.streams import SideStream
from ringflash.testing import Inputs, Workers, random_inputs, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
    pytest.mark.timeout(600),
]
KERNELS = ["chosen", "portable"]  # what the GPU gets by itself, and the portable ones where that is another
RATIO = 1.1  # how much more wrong than the trusted result one may be
LAYOUTS = ["contiguous", "zigzag", "striped"]
TRANSPORTS = ["gloo", "nvlink", "nccl"]
GRADIENTS = ["dq", "dk", "dv"]


@pytest.fixture(scope="module")
def gpu_workers() -> Iterator[Callable[..., Workers]]:
    """`gpu_workers(world_size, transport)`: processes in a group that has it; nvlink goes in a group of gloo."""
    pools: dict[tuple[int, str], Workers] = {}

    def pool(world_size: int, transport: str = "gloo") -> Workers:
        if transport == "nccl" and torch.cuda.device_count() < world_size:
            pytest.skip(f"NCCL wants a GPU a rank: {world_size} GPUs")
        backend = "nccl" if transport == "nccl" else "gloo"
        return pools.setdefault((world_size, backend), Workers(world_size, backend=backend, timeout=240))

    yield pool
    for workers in pools.values():
        workers.close()


def join_on_gpu() -> dist.ProcessGroup:
    """The group of all workers, each on a GPU of its own as far as there are."""
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return world()


def attend(inputs: Inputs, **options) -> Attention:
    """Forward and backward by `flash_attention`."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out, lse = flash_attention(*leaves, return_lse=True, **options)
    return Attention(out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse)))


def ring_attend(inputs: Inputs, layout: str, layout_mask: Mask | None = None, **options) -> Attention:
    """The whole results of `ring_attention`, gathered on every rank."""
    seq_len, how = inputs.q.shape[1], {"group": world(), "layout": layout, "layout_mask": layout_mask}
    part = sharded(inputs, how)
    leaves = [x.requires_grad_() for x in part[:3]]
    out, lse = ring_attention(*leaves, **how, seq_len=seq_len, return_lse=True, **options)
    local = Attention(out, lse, *torch.autograd.grad((out, lse), leaves, (part.dout, part.dlse)))
    return gathered(local, how, seq_len)


def sharded(inputs: Inputs, how: dict[str, Any]) -> Inputs:
    q, k, v, dout = (shard(x, **how) for x in inputs[:4])
    return Inputs(q, k, v, dout, shard(inputs.dlse, **how, dim=2))


def gathered(local: Attention, how: dict[str, Any], seq_len: int) -> Attention:
    dims = (2 if name == "lse" else 1 for name in Attention._fields)
    return Attention(*(unshard(x.detach(), **how, dim=d, seq_len=seq_len) for x, d in zip(local, dims, strict=True)))


def errors(actual: Attention, expected: Attention) -> dict[str, float]:
    return {name: relative_error(a, e) for name, a, e in zip(Attention._fields, actual, expected, strict=True)}


@pytest.fixture(params=KERNELS)
def kernels(request, monkeypatch) -> str:
    """Runs a test with the kernels that the GPU gets, and with the portable ones."""
    from ringflash import local_kernel

    if request.param == "portable":
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("this GPU gets the portable kernels anyhow")
        monkeypatch.setattr(local_kernel, "kernel_of", lambda *_, **__: "portable")
    return request.param


def test_a_hopper_gpu_gets_its_own_kernels():
    from ringflash.local_kernel import kernel_of

    capability = torch.cuda.get_device_capability()
    wanted = "hopper" if capability == (9, 0) else "portable"
    assert kernel_of("backward", 128, 128, torch.bfloat16, capability) == wanted


@contextmanager
def no_host_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def cuda_inputs(*shape: int, dtype: torch.dtype = torch.bfloat16, **options) -> Inputs:
    return random_inputs(*shape, dtype=dtype, device="cuda", **options)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("seq_len", [129, 1000, 2049])
def test_no_more_wrong_than_flash_attention_2(kernels, seq_len, dim, dtype, causal):
    inputs = cuda_inputs(2, seq_len, 4, dim, kv_heads=4, dtype=dtype)
    inputs = inputs._replace(dlse=torch.zeros_like(inputs.dlse))
    expected = dense(inputs, causal=causal)
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        q, k, v = (x.transpose(1, 2) for x in leaves)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    gradients = torch.autograd.grad(out, leaves, inputs.dout)
    theirs = errors(Attention(out, expected.lse, *gradients), expected)
    ours = errors(attend(inputs, causal=causal), expected)
    assert ours["lse"] < 1e-6
    for name in ("out", *GRADIENTS):
        assert ours[name] <= RATIO * theirs[name], (name, ours, theirs)


def far_apart(inputs: Inputs, how: str) -> Inputs:
    """With scores up to some hundreds: 44 above the first tiles' a sum may overflow (hopper_forward.py, Note [Fixed
    pivot]). Blocks start with the last keys that they see."""
    k = inputs.k.clone()
    if how == "growing":
        k *= torch.linspace(60, 0.1, k.shape[1], device=k.device, dtype=k.dtype)[:, None, None]
    elif how == "a few keys of a head":
        k[:, 100:103, 1] *= 100
    else:
        k[:, ::50] *= 1000
    return inputs._replace(k=k)


FAR = ["growing", "a few keys of a head", "every fiftieth key"]


@pytest.fixture(params=[0, 2**31], ids=["blocks of 192", "blocks of 128"])
def blocks_of_queries(request, monkeypatch) -> Iterator[None]:
    """Of the forward kernel in bf16 at head dim 128, under masks: of long passes, and of short ones."""
    from ringflash import hopper_kernel

    monkeypatch.setattr(hopper_kernel, "SHORT_KEYS", request.param)
    hopper_kernel._forward_launch.cache_clear()
    yield
    hopper_kernel._forward_launch.cache_clear()


@pytest.mark.parametrize("seq_len", [777, 2049])
@pytest.mark.parametrize("limits", ["none", "window", "documents", "a short document first"])
def test_blocks_of_either_size_are_as_right_under_every_mask(blocks_of_queries, seq_len, limits):
    inputs = cuda_inputs(1, seq_len, 4, 128, kv_heads=2)
    left, right = (300, 100) if limits == "window" else (None, None)
    documents = {"documents": (0, 1, 250, seq_len), "a short document first": (0, 64, seq_len)}.get(limits)
    for mask in (Mask(left, 0, cu_seqlens=documents), Mask(left, right, cu_seqlens=documents)):
        found = errors(attend(inputs, mask=mask), dense(inputs, mask=mask))
        assert max(found.values()) <= 4e-3 and found["lse"] < 1e-6, found


@pytest.mark.parametrize("how", FAR)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("dim", "blocks_of_queries"), [(64, 0), (128, 0), (128, 2**31), (256, 0)], indirect=["blocks_of_queries"]
)
def test_scores_far_above_those_before_are_no_more_wrong_than_by_flash_attention_2(blocks_of_queries, dim, causal, how):
    from ringflash import local_kernel

    inputs = far_apart(cuda_inputs(2, 2049, 4, dim, kv_heads=4), how)
    expected = dense(inputs, causal=causal)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        q, k, v = (x.transpose(1, 2) for x in inputs[:3])
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    out, lse = flash_attention(*inputs[:3], causal=causal, return_lse=True)
    bound = RATIO * relative_error(theirs, expected.out)
    assert relative_error(out, expected.out) <= bound and relative_error(lse, expected.lse) < 1e-6
    if dim <= 128:  # in two visits, of which the second one merges in place
        running, lse = torch.full_like(expected.out, torch.nan, dtype=torch.float32), torch.full_like(lse, torch.nan)
        mask, before = Mask(right=0) if causal else Mask(), None
        for keys in (Run(0, 1, 1000), Run(1000, 1, 1049)):
            rows = slice(keys.start, keys.start + keys.length)
            visit = Visit((Run(0, 1, 2049),), (keys,), mask)
            scoring, total = Scoring(dim**-0.5), Partial(running, lse)
            local_kernel.forward(inputs.q, inputs.k[:, rows], inputs.v[:, rows], visit, scoring, total, before)
            before = running
        assert relative_error(running, expected.out) <= bound and relative_error(lse, expected.lse) < 1e-6


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_scores_far_above_those_before_in_the_fortieth_block_of_a_program(causal):
    """A program's blocks are agreed on 32 at a time."""
    q, k, v = (torch.randn(64, 2048, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    k[5:60:3, 10:12] *= 200
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        theirs = F.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)  # pyright: ignore[reportArgumentType]
    assert relative_error(flash_attention(q, k, v, causal=causal), theirs) <= 1e-3


def test_fp32_is_as_exact_as_fp32():
    inputs = cuda_inputs(1, 777, 4, 128, kv_heads=2, v_head_dim=40, dtype=torch.float32)
    assert_close(attend(inputs, causal=True), dense(inputs, causal=True), 2e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "v_dim"), [(28, 4, 96, 96), (5, 1, 192, 128), (8, 8, 40, 80)])
def test_other_heads_and_dims_are_no_more_wrong_than_the_torch_backend(kernels, heads, kv_heads, dim, v_dim):
    inputs = cuda_inputs(1, 515, heads, dim, kv_heads=kv_heads, v_head_dim=v_dim)
    options = {"causal": True, "window": (200, None)}
    expected = dense(inputs, **options)
    ours, plain = (
        errors(attend(inputs, **options), expected),
        errors(attend(inputs, backend="torch", **options), expected),
    )
    # the torch backend keeps P and dS in fp32, the kernel rounds them to bf16 for their products: 2.5e-3 in all
    assert ours["lse"] < 1e-6
    assert all(ours[name] <= max(RATIO * plain[name], 2.7e-3) for name in ("out", *GRADIENTS)), (ours, plain)


def test_queries_that_see_nothing_get_zero_and_give_no_nan(kernels):
    inputs = cuda_inputs(1, 300, 2, 64, key_len=200)
    actual, expected = attend(inputs, causal=True), dense(inputs, causal=True)
    assert torch.equal(actual.lse.isinf(), expected.lse.isinf()) and actual.lse[:, :, :100].isinf().all()
    assert not actual.out[:, :100].any() and not actual.dq[:, :100].any()
    assert all(not x.isnan().any() for x in actual)


def assert_same(actual: Attention, wanted: Attention) -> None:
    """The same bits; dq, which Hopper kernels sum in any order, but for its rounding."""
    for name, a, w in zip(Attention._fields, actual, wanted, strict=True):
        assert relative_error(a, w) <= 1e-3 if name == "dq" else torch.equal(a, w), name


def test_views_give_the_same_bits_as_their_copies(kernels):
    plain = cuda_inputs(2, 333, 4, 64)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain[:4]]
    padded = [F.pad(x, (8, 8))[..., 8:-8] for x in plain[:4]]
    misaligned = [F.pad(x, (1, 7))[..., 1:-7] for x in plain[:4]]
    expanded = Inputs._make([*(x[:1].expand(2, -1, -1, -1) for x in plain[:4]), plain.dlse])
    wanted = attend(plain, causal=True)
    for views in (heads_first, padded, misaligned):
        actual = attend(Inputs._make([*views, plain.dlse]), causal=True)
        assert_same(actual, wanted)
    copies = Inputs._make(x.contiguous() for x in expanded)
    assert_same(attend(expanded, causal=True), attend(copies, causal=True))


def test_addresses_past_2_to_the_31_elements(kernels):
    whole = torch.randn(1, 70_000, 256, 128, device="cuda", dtype=torch.bfloat16)  # 2.3e9 elements
    x = whole[:, :, 255:]
    assert x.storage_offset() + x.stride(1) * (x.shape[1] - 1) > 2**31
    inputs = Inputs(x, x, x, x, torch.randn(1, 1, 70_000, device="cuda"))
    copies = Inputs._make(x.clone() for x in inputs)
    assert_same(attend(inputs, causal=True), attend(copies, causal=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_options_of_scores_match_the_torch_backend(head_dim, dtype):
    """Dropout too: the seed and the positions decide, not the backend."""
    inputs = cuda_inputs(2, 777, 4, head_dim, kv_heads=2, dtype=dtype)
    slopes, sinks = torch.tensor([0.5, 0.1, 0.01, 0.0]).cuda(), torch.tensor([0.5, -1.0, 2.0, 0.0]).cuda()
    every = {"softcap": 2.0, "alibi_slopes": slopes, "sinks": sinks, "dropout_p": 0.2}
    both = {"softcap": 2.0, "dropout_p": 0.2}  # by the Hopper kernels, where alibi is not
    for options in (*({name: value} for name, value in every.items()), both, every):
        results = []
        for backend, given in (("triton", inputs), ("torch", Inputs(*(x.float() for x in inputs)))):
            torch.manual_seed(1)
            results.append(attend(given, causal=True, backend=backend, **options))
        found = errors(*results)
        bound = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
        assert max(found.values()) <= bound, (list(options), found)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sinks_at_any_address_of_queries_that_see_no_key(kernels, head_dim, causal):
    inputs = cuda_inputs(2, 333, 4, head_dim, kv_heads=2, key_len=131, dtype=torch.float16)
    wide, many = Inputs(*(x.float() for x in inputs)), torch.linspace(-2, 9, 9, device="cuda")
    many[2] = -torch.inf  # a head's sink that is none
    for first in (0, 1, 4, 0):
        sinks = many[first : first + 4]
        q, k, v, *_ = inputs
        out, lse = flash_attention(q, k, v, causal=causal, sinks=sinks, return_lse=True)
        expected = flash_attention(*wide[:3], causal=causal, sinks=sinks, return_lse=True, backend="torch")
        assert relative_error(out, expected[0]) <= 1e-3 and torch.allclose(lse, expected[1], rtol=1e-3, atol=1e-3)
        assert not causal or not out[:, : 333 - 131].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gradients_are_bitwise_equal_over_20_runs(dim, dtype):
    inputs = cuda_inputs(2, 1111, 8, dim, kv_heads=2, dtype=dtype)
    first = attend(inputs, causal=True, deterministic=True)
    for _ in range(19):
        assert all(map(torch.equal, attend(inputs, causal=True, deterministic=True), first))


@pytest.mark.parametrize("options", [{}, {"softcap": 20.0}, {"dropout_p": 0.2}], ids=["plain", "softcap", "dropout"])
def test_nothing_waits_for_the_device(options):
    inputs = cuda_inputs(1, 512, 4, 64)
    attend(inputs, causal=True, **options)
    with no_host_synchronisation():
        attend(inputs, causal=True, **options)


def test_compiles_whole_and_replays_in_a_cuda_graph():
    inputs = cuda_inputs(1, 512, 4, 64)
    expected = attend(inputs, causal=True)
    compiled = torch.compile(lambda q, k, v: flash_attention(q, k, v, causal=True), fullgraph=True)
    assert torch.equal(compiled(*inputs[:3]), expected.out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = attend(inputs, causal=True)
    for x in inputs[:2]:
        x.neg_()  # the scores stay, dq and dk change sign
    graph.replay()
    assert_same(actual, expected._replace(dq=-expected.dq, dk=-expected.dk))


def test_tables_that_one_stream_asked_for_are_there_for_others(kernels):
    def attention(q: torch.Tensor) -> torch.Tensor:
        return flash_attention(q, q, q, window=(100, 3))

    seq_len = 1501 + KERNELS.index(kernels)  # of no other test: its tables are new
    x, y = (torch.randn(1, n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in (seq_len, seq_len + 9))
    attention(y)  # compiled
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(2**31)  # about a second
        attention(x)
    with torch.cuda.stream(other):
        actual = attention(x)
    other.synchronize()
    assert not busy.query(), "the test is too slow to see anything"
    torch.cuda.synchronize()
    assert torch.equal(actual, attention(x))


def test_a_cuda_graph_keeps_its_tables(kernels):
    def attention(q: torch.Tensor) -> torch.Tensor:
        return flash_attention(q, q, q, causal=True)

    x = torch.randn(1, 1000, 4, 64, device="cuda", dtype=torch.bfloat16)
    expected = attention(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = attention(x)
    for seq_len in range(1, 2500):  # more than all caches hold
        attention(x[:, :seq_len] if seq_len < 1000 else x[:, :1].expand(-1, seq_len, -1, -1))
    graph.replay()
    assert torch.equal(actual, expected)


SUMS_GO = {  # dK and dV: as is best, round the ring, and straight home from launches of one or two shards each
    "": {},
    "round": {"STRAIGHT_BYTES": 0, "LAP_BYTES": 0},
    "in laps": {"STRAIGHT_BYTES": 0, "LAP_BYTES": 600 * 2 * 2 * 128 * 4, "LAP_SHARDS": 1},
}


def ring_errors(layout: str, causal: bool, seq_len: int, dtype: torch.dtype, transport: str) -> tuple[list, dict]:
    join_on_gpu()
    inputs = cuda_inputs(1, seq_len, 4, 128, kv_heads=2, dtype=dtype)
    expected, found = dense(inputs, causal=causal), []
    for bounds in SUMS_GO.values():
        with pytest.MonkeyPatch.context() as patch:
            for name, value in bounds.items():
                patch.setattr(gradients, name, value)
            found.append(errors(ring_attend(inputs, layout, causal=causal, transport=transport), expected))
    return found, errors(attend(inputs, causal=causal), expected)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_ring_is_no_more_wrong_than_one_rank(gpu_workers, transport, world_size, layout, causal):
    pool = gpu_workers(world_size, transport)
    for found, alone in pool.run(ring_errors, layout, causal, 1001, torch.bfloat16, transport):
        for way, ring in zip(SUMS_GO, found, strict=True):
            assert all(ring[name] <= max(RATIO * alone[name], 1e-6) for name in Attention._fields), (way, ring, alone)


# Masks and options: the tables of the tests on CPUs, as they are and stretched to several blocks of the kernels

STRETCH = 19
Errors = dict[str, float]


def stretched(mask: Mask, factor: int) -> Mask:
    """The mask with all of its lengths so many times as long."""

    def times(x: Any) -> Any:
        return tuple(factor * n for n in x) if isinstance(x, tuple) else x and factor * x

    prefix = mask.prefix if mask.cu_seqlens or mask.prefix is None else mask.prefix[0]
    cu_seqlens, chunk = times(mask.cu_seqlens), times(mask.chunk)
    return Mask(times(mask.left), times(mask.right), cu_seqlens=cu_seqlens, prefix=times(prefix), chunk=chunk)


def ring_errors_under_masks(layout: str, transport: str) -> dict[str, tuple[Errors, Errors]]:
    """Of the ring and of one rank alone."""
    join_on_gpu()
    found = {}
    for factor, (name, mask) in product((1, STRETCH), test_masks.MASKS.items()):
        mask = stretched(mask, factor)
        inputs = cuda_inputs(1, factor * test_masks.TOKENS, 4, 64, kv_heads=2, v_head_dim=96)
        expected, alone = dense(inputs, mask=mask), attend(inputs, mask=mask)
        ring = ring_attend(inputs, layout, mask if layout == "balanced" else None, mask=mask, transport=transport)
        found[f"{name}, stretched {factor} times"] = errors(ring, expected), errors(alone, expected)
    return found


@pytest.mark.parametrize("layout", test_masks.LAYOUTS)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_ring_is_no_more_wrong_than_one_rank_under_every_mask(gpu_workers, transport, world_size, layout):
    for found in gpu_workers(world_size, transport).run(ring_errors_under_masks, layout, transport):
        for what, (ring, alone) in found.items():
            assert all(ring[name] <= max(RATIO * alone[name], 1e-6) for name in Attention._fields), (what, ring, alone)


def ring_errors_with_options(
    layout: str, transport: str, dtype: torch.dtype, factor: int
) -> dict[str, tuple[Errors, Errors]]:
    """Of the ring and of one rank alone; with sinks their gradient too, `dsinks`, summed over ranks."""
    group, found = join_on_gpu(), {}
    tables = test_options.MASKS.items(), test_options.OPTIONS.items()
    for (mask_name, mask), (option, arguments) in product(*tables):
        mask, seq_len = stretched(mask, factor), factor * test_options.SEQ_LEN
        inputs = cuda_inputs(2, seq_len, 4, 64, kv_heads=2, dtype=dtype)
        arguments = {n: x.to(inputs.q.device) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
        expected, dsinks = test_options.dense(inputs, mask=mask, **arguments)
        options = {"mask": mask, "return_lse": True, **arguments}
        alone, dsinks_alone = test_options.run(flash_attention, inputs, **options)
        how = {"group": group, "layout": layout, "layout_mask": mask if layout == "balanced" else None}
        options |= {"seed_here": test_options.SEED + group.rank(), "seq_len": seq_len, "transport": transport}
        local, share = test_options.run(ring_attention, sharded(inputs, how), **how, **options)
        ring_errors, alone_errors = errors(gathered(local, how, seq_len), expected), errors(alone, expected)
        if dsinks is not None:
            assert share is not None and dsinks_alone is not None
            shares: list[Any] = [None] * group.size()
            dist.all_gather_object(shares, share.cpu(), group)
            ring_errors["dsinks"] = relative_error(torch.stack(shares).sum(0), dsinks)
            alone_errors["dsinks"] = relative_error(dsinks_alone, dsinks)
        found[f"{option}, {mask_name}"] = ring_errors, alone_errors
    return found


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, STRETCH), (torch.float32, 1)], ids=["bf16", "fp32"])
@pytest.mark.parametrize("layout", test_masks.LAYOUTS)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_ring_is_no_more_wrong_than_one_rank_with_every_option(
    gpu_workers, transport, world_size, layout, dtype, factor
):
    floors = dict.fromkeys(Attention._fields, 1e-6 if dtype == torch.bfloat16 else FP32_BOUND)
    floors["dsinks"] = 2**-8 if dtype == torch.bfloat16 else FP32_BOUND  # of 4 numbers: below a rounding it is luck
    pool = gpu_workers(world_size, transport)
    for found in pool.run(ring_errors_with_options, layout, transport, dtype, factor):
        for what, (ring, alone) in found.items():
            assert all(ring[name] <= max(RATIO * alone[name], floors[name]) for name in ring), (what, ring, alone)


def bits_that_differ(transport: str, other: str) -> list[str]:
    """Problems that come out otherwise than over another transport; growing buffers, several sequences, every mask."""
    join_on_gpu()
    wrong: list[str] = []
    masks: list[dict[str, Any]] = [{}, {"causal": True}, {"causal": True, "window": (100, 0)}]
    for seq_len, batch, layout in (
        (300, 2, "striped"),
        (1001, 1, "zigzag"),
        (77, 3, "contiguous"),
        (2048, 2, "zigzag"),
    ):
        for options in masks:
            inputs = cuda_inputs(batch, seq_len, 4, 64, kv_heads=2, v_head_dim=96)
            actual = ring_attend(inputs, layout, transport=transport, deterministic=True, **options)
            expected = ring_attend(inputs, layout, transport=other, deterministic=True, **options)
            if not all(map(torch.equal, actual, expected)):
                wrong.append(f"{batch} x {seq_len} {layout} {options}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_nvlink_gives_the_bits_that_gloo_gives(gpu_workers, world_size):
    assert gpu_workers(world_size).run(bits_that_differ, "nvlink", "gloo") == [[]] * world_size


def test_nvlink_gives_the_bits_that_nccl_gives(gpu_workers):
    assert gpu_workers(2, "nccl").run(bits_that_differ, "nvlink", "nccl") == [[]] * 2


def in_group(group: dist.ProcessGroup, shards: list[torch.Tensor], transport: str) -> list[torch.Tensor]:
    """Of a deterministic causal ring in this group: out and gradients; `shards` are of q, k, v and dout."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in shards[:3]]
    out = ring_attention(q, k, v, group=group, causal=True, deterministic=True, transport=transport)
    return [out.detach(), *torch.autograd.grad(out, leaves, shards[3])]


def first_operation_of_a_group(transport: str, backend: str) -> bool:
    """Is what a ring gives in a group that nothing was done in before what it gives in the group of all?"""
    group = join_on_gpu()
    inputs = cuda_inputs(1, 600, 4, 64, kv_heads=2)
    fresh = dist.new_group(backend=backend)
    assert isinstance(fresh, dist.ProcessGroup)
    shards = [shard(x, group=group) for x in inputs[:4]]
    return all(map(torch.equal, *(in_group(g, shards, transport) for g in (fresh, group))))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_attention_may_be_the_first_operation_of_a_fresh_group(gpu_workers, transport):
    backend = "nccl" if transport == "nccl" else "gloo"
    assert gpu_workers(2, transport).run(first_operation_of_a_group, transport, backend) == [True] * 2


def test_attention_by_nvlink_may_be_the_first_operation_of_a_fresh_group_of_nccl(gpu_workers):
    assert gpu_workers(2, "nccl").run(first_operation_of_a_group, "nvlink", "nccl") == [True] * 2


def differences_where_zeroing_is_late(on_own_stream: bool) -> list[int]:
    """Results of first passes by nvlink that are not those by gloo, while the default stream of one rank is busy, where
    PyTorch zeroes the memory that it shares."""
    group, wrong = join_on_gpu(), []
    inputs = cuda_inputs(1, 600, 4, 64, kv_heads=2)
    shards = [shard(x, group=group) for x in inputs[:4]]

    expected = in_group(group, shards, "gloo")
    for late in range(dist.get_world_size(group)):
        fresh = dist.new_group(backend="gloo")
        assert isinstance(fresh, dist.ProcessGroup)
        torch.cuda.synchronize()
        dist.barrier(group)
        if dist.get_rank() == late:
            torch.cuda._sleep(2 * 10**9)  # a second
        with torch.cuda.stream(torch.cuda.Stream() if on_own_stream else torch.cuda.default_stream()):
            results = in_group(fresh, shards, "nvlink")
            torch.cuda.current_stream().synchronize()
        torch.cuda.synchronize()
        if not all(map(torch.equal, results, expected)):
            wrong.append(late)
    return wrong


@pytest.mark.parametrize("on_own_stream", [False, True])
def test_memory_that_is_zeroed_late_is_not_used_before(gpu_workers, on_own_stream):
    assert gpu_workers(2).run(differences_where_zeroing_is_late, on_own_stream) == [[]] * 2


def ring_step(
    transport: str, rows: int = 256, deterministic: bool = False
) -> tuple[list[torch.Tensor], Callable[[], list[torch.Tensor]]]:
    """Inputs of this rank, and a training step on them: out and the gradients."""
    group = join_on_gpu()
    q, k, v, dout = (torch.randn(1, rows, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> list[torch.Tensor]:
        out = ring_attention(*leaves, group=group, causal=True, transport=transport, deterministic=deterministic)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    return [*leaves, dout], step


def ring_without_synchronisation(transport: str) -> None:
    _, step = ring_step(transport)
    step()
    with no_host_synchronisation():
        for _ in range(3):
            step()


@pytest.mark.parametrize("transport", ["nvlink", "nccl"])
def test_the_loop_of_a_ring_waits_for_nothing_on_the_device(gpu_workers, transport):
    gpu_workers(2, transport).run(ring_without_synchronisation, transport)


def gloo_ring_without_synchronisation() -> None:
    _, step = ring_step("gloo")
    step()
    with no_host_synchronisation():
        step()


def test_the_loop_of_a_ring_over_gloo_waits_for_no_kernel(gpu_workers):
    gpu_workers(2).run(gloo_ring_without_synchronisation)


def same_but_for_dq(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Are the others, of out and gradients, the same bit by bit, and dq to what sums in another order do?"""
    out, dq, *dkv = (torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
    return out and all(dkv) and (dq or relative_error(actual[1], expected[1]) < 0.01)


def replays_that_differ(transport: str, deterministic: bool) -> list[int]:
    """Replays of a captured training step, between steps outside, that are not what a step outside gives."""
    inputs, step = ring_step(transport, deterministic=deterministic)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    wrong = []
    for replay in range(4):
        with torch.no_grad():
            for x in inputs:
                x.normal_()
        expected = step() if replay % 2 else None
        graph.replay()
        expected = expected or step()
        torch.cuda.synchronize()
        if not (all(map(torch.equal, captured, expected)) if deterministic else same_but_for_dq(captured, expected)):
            wrong.append(replay)
    return wrong


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("transport", ["nvlink", "nccl"])
def test_a_captured_ring_replays(gpu_workers, transport, world_size, deterministic):
    """Of 3 ranks: with two shards attended to at once. Where it need not be deterministic: on two streams."""
    pool = gpu_workers(world_size, transport)
    assert pool.run(replays_that_differ, transport, deterministic) == [[]] * world_size


def differing_beside(transport: str, lap_bytes: int) -> list[str]:
    """Passes with the own visit on a stream beside, early or late, that do not give what they do on one stream."""
    group, wrong = join_on_gpu(), []
    documents = Mask(causal=True, cu_seqlens=[0, 100, 333, 900, 1500])
    how = [("zigzag", Mask(right=0), {}), ("balanced", documents, {"layout_mask": documents})]
    enter, mark = SideStream.__enter__, SideStream.mark
    entered = []

    def enter_late(side: SideStream) -> None:
        enter(side)
        entered.append(side)
        torch.cuda._sleep(10**7)

    def go_on_late(side: SideStream) -> None:
        mark(side)
        torch.cuda._sleep(10**7)

    for layout, mask, given in how:
        shards = [shard(x, group=group, layout=layout, **given) for x in cuda_inputs(1, 1500, 4, 128, kv_heads=2)[:4]]

        def step(layout=layout, mask=mask, given=given, shards=shards) -> list[torch.Tensor]:
            leaves = [x.detach().requires_grad_() for x in shards[:3]]
            options: dict[str, Any] = {"layout": layout, "mask": mask, "seq_len": 1500, "transport": transport, **given}
            out = ring_attention(*leaves, group=group, **options)
            return [out.detach(), *torch.autograd.grad(out, leaves, shards[3])]

        with mock.patch.multiple(gradients, LAP_BYTES=lap_bytes, LAP_SHARDS=1):
            with mock.patch("ringflash.ring.beside", lambda _: None):
                expected = step()
            for name, late in (("__enter__", enter), ("__enter__", enter_late), ("mark", go_on_late)):
                with mock.patch.object(SideStream, name, late):
                    results = [step() for _ in range(3)]
                    torch.cuda.synchronize()
                if not all(same_but_for_dq(x, expected) for x in results):
                    wrong.append(f"{layout} {late}")
    return wrong if entered else ["nothing ran beside"]


@pytest.mark.parametrize("lap_bytes", [0, 2**20, 2**27])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_own_visits_beside_others_change_no_bit_of_dk_and_dv(gpu_workers, transport, world_size, lap_bytes):
    """Sums of three ranks go round the ring, straight home in two laps, or in one."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("visits of the Hopper kernels alone run beside each other")
    pool = gpu_workers(world_size, transport)
    assert pool.run(differing_beside, transport, lap_bytes) == [[]] * world_size


def error_of_a_capture(transport: str) -> str:
    _, step = ring_step(transport)
    step()
    release_buffers(world())
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step()
    except RuntimeError as error:
        return str(error)
    return "captured"


def test_nvlink_refuses_to_make_buffers_in_a_capture(gpu_workers):
    for said in gpu_workers(2).run(error_of_a_capture, "nvlink"):
        assert "before the capture" in said


def test_gloo_refuses_to_be_captured(gpu_workers):
    for said in gpu_workers(2).run(error_of_a_capture, "gloo"):
        assert "can't be captured in a CUDA graph" in said


def same_over_few_ctas() -> bool:
    group = join_on_gpu()
    settings = dist.ProcessGroupNCCL.Options()
    settings.config.max_ctas = 4
    few = dist.new_group(backend="nccl", pg_options=settings)
    assert isinstance(few, dist.ProcessGroup)
    inputs = cuda_inputs(1, 1024, 4, 64, kv_heads=2)
    q, k, v = (shard(x, group=group) for x in inputs[:3])
    return torch.equal(*(ring_attention(q, k, v, group=g, causal=True, transport="nccl") for g in (few, group)))


def test_a_group_of_nccl_may_have_few_ctas(gpu_workers):
    assert gpu_workers(2, "nccl").run(same_over_few_ctas) == [True] * 2


def transports_that_auto_takes() -> tuple[str, str]:
    group = join_on_gpu()
    return transport_of(group), transport_of(group, "cpu")


def test_auto_is_nvlink_where_every_rank_has_its_own_gpu(gpu_workers):
    wanted = "nvlink" if torch.cuda.device_count() >= 2 else "gloo"
    assert gpu_workers(2).run(transports_that_auto_takes) == [(wanted, "gloo")] * 2


def nvlink_on_one_gpu_without_permission() -> str:
    allowed, group = os.environ.pop(SHARING), dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    torch.cuda.set_device(0)
    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
    try:
        ring_attention(q, q, q, group=group, transport="nvlink")
    except ValueError as error:
        return str(error)
    finally:
        os.environ[SHARING] = allowed
    return "attended"


def test_nvlink_on_a_shared_gpu_needs_pytorchs_permission(gpu_workers):
    for said in gpu_workers(2).run(nvlink_on_one_gpu_without_permission):
        assert "ranks 0 and 1 share GPU 0" in said and SHARING in said


def ring_peak_memory(rows: int, transport: str) -> int:
    """Bytes above the inputs, forward and backward, without what attending to several shards at once may take."""
    group = join_on_gpu()
    q, k, v, dout = (torch.randn(1, rows, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    release_buffers(group)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "GROUP_BYTES", 0)
        patch.setattr(gradients, "STRAIGHT_BYTES", 0)
        patch.setattr(gradients, "LAP_BYTES", 0)
        torch.autograd.grad(ring_attention(*leaves, group=group, causal=True, transport=transport), leaves, dout)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before + release_buffers(group)


@pytest.mark.parametrize("transport", ["gloo", "nvlink"])
def test_peak_memory_does_not_grow_with_the_world_size(gpu_workers, transport):
    less, more = (max(gpu_workers(world_size).run(ring_peak_memory, 8192, transport)) for world_size in (3, 4))
    assert more <= 1.02 * less, (less, more)


def free_memory_after_release(rows: int) -> tuple[int, int]:
    """Bytes that `release_buffers` says it gave back, and bytes that the driver says are free again."""
    group = join_on_gpu()
    release_buffers(group)
    dist.barrier(group)
    before = torch.cuda.mem_get_info()[0]
    _, step = ring_step("nvlink", rows)
    step()
    torch.cuda.synchronize()
    dist.barrier(group)
    during = torch.cuda.mem_get_info()[0]
    said = release_buffers(group)
    dist.barrier(group)
    assert during < before
    return said, torch.cuda.mem_get_info()[0] - during


def test_released_buffers_are_free(gpu_workers):
    for said, freed in gpu_workers(2).run(free_memory_after_release, 65536):
        assert freed >= said > 65536 * 2 * 64 * 2 * 2
