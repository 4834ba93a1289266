"""On an NVIDIA GPU: the Triton kernels, and rings of several ranks that share it (gloo, through pinned host memory).

The bound of an error is what PyTorch's own flash attention has on the same inputs, or this package's with one rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from oracle import Attention, assert_close, dense, world
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringflash import flash_attention, ring_attention, shard, unshard
from ringflash.testing import Inputs, Workers, random_inputs, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
    pytest.mark.timeout(600),
]
RATIO = 1.1  # how much more wrong than the trusted result one may be
LAYOUTS = ["contiguous", "zigzag", "striped"]
GRADIENTS = ["dq", "dk", "dv"]


@pytest.fixture(scope="module")
def gpu_workers() -> Iterator[Callable[[int], Workers]]:
    pools: dict[int, Workers] = {}
    yield lambda world_size: pools.setdefault(world_size, Workers(world_size, timeout=240))
    for pool in pools.values():
        pool.close()


def attend(inputs: Inputs, **options) -> Attention:
    """Forward and backward by `flash_attention`."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out, lse = flash_attention(*leaves, return_lse=True, **options)
    return Attention(out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse)))


def ring_attend(inputs: Inputs, layout: str, **options) -> Attention:
    """The whole results of `ring_attention`, gathered on every rank."""
    group, seq_len = world(), inputs.q.shape[1]
    q, k, v, dout = (shard(x, group=group, layout=layout) for x in inputs[:4])
    dlse = shard(inputs.dlse, group=group, layout=layout, dim=2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = ring_attention(*leaves, group=group, layout=layout, seq_len=seq_len, return_lse=True, **options)
    local = (out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse)))
    whole = (unshard(x.detach(), group=group, layout=layout, dim=2 if x is lse else 1, seq_len=seq_len) for x in local)
    return Attention(*whole)


def errors(actual: Attention, expected: Attention) -> dict[str, float]:
    return {name: relative_error(a, e) for name, a, e in zip(Attention._fields, actual, expected, strict=True)}


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
def test_no_more_wrong_than_flash_attention_2(seq_len, dim, dtype, causal):
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


def test_fp32_is_as_exact_as_fp32():
    inputs = cuda_inputs(1, 777, 4, 128, kv_heads=2, v_head_dim=40, dtype=torch.float32)
    assert_close(attend(inputs, causal=True), dense(inputs, causal=True), 2e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "v_dim"), [(28, 4, 96, 96), (5, 1, 192, 128), (8, 8, 40, 80)])
def test_other_heads_and_dims_are_no_more_wrong_than_the_torch_backend(heads, kv_heads, dim, v_dim):
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


def test_queries_that_see_nothing_get_zero_and_give_no_nan():
    inputs = cuda_inputs(1, 300, 2, 64, key_len=200)
    actual, expected = attend(inputs, causal=True), dense(inputs, causal=True)
    assert torch.equal(actual.lse.isinf(), expected.lse.isinf()) and actual.lse[:, :, :100].isinf().all()
    assert not actual.out[:, :100].any() and not actual.dq[:, :100].any()
    assert all(not x.isnan().any() for x in actual)


def test_views_give_the_same_bits_as_their_copies():
    plain = cuda_inputs(2, 333, 4, 64)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain[:4]]
    padded = [F.pad(x, (8, 8))[..., 8:-8] for x in plain[:4]]
    misaligned = [F.pad(x, (1, 7))[..., 1:-7] for x in plain[:4]]
    expanded = Inputs._make([*(x[:1].expand(2, -1, -1, -1) for x in plain[:4]), plain.dlse])
    wanted = attend(plain, causal=True)
    for views in (heads_first, padded, misaligned):
        actual = attend(Inputs._make([*views, plain.dlse]), causal=True)
        assert all(map(torch.equal, actual, wanted))
    copies = Inputs._make(x.contiguous() for x in expanded)
    assert all(map(torch.equal, attend(expanded, causal=True), attend(copies, causal=True)))


def test_addresses_past_2_to_the_31_elements():
    whole = torch.randn(1, 70_000, 256, 128, device="cuda", dtype=torch.bfloat16)  # 2.3e9 elements
    x = whole[:, :, 255:]
    assert x.storage_offset() + x.stride(1) * (x.shape[1] - 1) > 2**31
    inputs = Inputs(x, x, x, x, torch.randn(1, 1, 70_000, device="cuda"))
    copies = Inputs._make(x.clone() for x in inputs)
    assert all(map(torch.equal, attend(inputs, causal=True), attend(copies, causal=True)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_bitwise_equal_from_run_to_run(dtype):
    inputs = cuda_inputs(2, 1111, 8, 128, kv_heads=2, dtype=dtype)
    first = attend(inputs, causal=True, deterministic=True)
    for _ in range(10):
        assert all(map(torch.equal, attend(inputs, causal=True, deterministic=True), first))


def test_nothing_waits_for_the_device():
    inputs = cuda_inputs(1, 512, 4, 64)
    attend(inputs, causal=True)
    with no_host_synchronisation():
        attend(inputs, causal=True)


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
    assert torch.equal(actual.out, expected.out) and torch.equal(actual.dq, -expected.dq)


def ring_errors(layout: str, causal: bool, seq_len: int, dtype: torch.dtype) -> tuple[dict, dict]:
    inputs = cuda_inputs(1, seq_len, 4, 128, kv_heads=2, dtype=dtype)
    expected = dense(inputs, causal=causal)
    return errors(ring_attend(inputs, layout, causal=causal), expected), errors(attend(inputs, causal=causal), expected)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_ring_on_one_gpu_is_no_more_wrong_than_one_rank(gpu_workers, world_size, layout, causal):
    for ring, alone in gpu_workers(world_size).run(ring_errors, layout, causal, 1001, torch.bfloat16):
        assert all(ring[name] <= max(RATIO * alone[name], 1e-6) for name in Attention._fields), (ring, alone)


def ring_without_synchronisation() -> None:
    inputs = cuda_inputs(1, 512, 4, 64)
    group = world()
    q, k, v, dout = (shard(x, group=group).requires_grad_() for x in inputs[:4])

    def step() -> None:
        torch.autograd.grad(ring_attention(q, k, v, group=group, causal=True), (q, k, v), dout)

    step()
    with no_host_synchronisation():
        step()


def test_the_loop_of_a_ring_waits_for_no_kernel(gpu_workers):
    gpu_workers(2).run(ring_without_synchronisation)


def ring_peak_memory(rows: int) -> int:
    """Bytes above the inputs, forward and backward."""
    group = world()
    q, k, v, dout = (torch.randn(1, rows, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(ring_attention(*leaves, group=group, causal=True), leaves, dout)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_peak_memory_does_not_grow_with_the_world_size(gpu_workers):
    two, four = (max(gpu_workers(world_size).run(ring_peak_memory, 8192)) for world_size in (2, 4))
    assert four <= 1.02 * two, (two, four)
