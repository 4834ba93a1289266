"""What a ring is timed and checked beside: one-GPU kernels on the whole sequence, and other ways to share a sequence.

    ulysses, ulysses-fa4        two all-to-alls: a rank gets all rows of some heads, and its rows of all heads back
    all-gather                  every rank gets all of K and V, and attends with its own rows of Q
    context-parallel-...        PyTorch's context_parallel: with cuDNN or FlashAttention-2, exchanging or gathering K/V
    ring-flash-attn-fa2, -fa4   ring_flash_attn 0.1.8 (to install by hand), with PyTorch's FlashAttention-2 or with
                                FlashAttention-4 as its kernel

The kernel of `ulysses` and `all-gather` is ringflash's own; it waits for their transfers. A contender holds the rows
of a layout: zigzag under a causal mask (ulysses: contiguous, since it ends with whole sequences), else contiguous. It
wants the same number of rows on every rank, and CUDA tensors in a group of NCCL. Tensors are `(b, s, h, d)`.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from peers import LOADERS, MASKS, WORK, Inputs, passes_of, reason
from ringflash import flash_attention, ops, ring_attention, shard
from ringflash.layout import Run, layout_runs, put_rows
from ringflash.plan import Plan, Visit
from world import World

T = TypeVar("T")

WRONG = 0.03  # ten times the rounding of bf16: what differs by more is another result, and not to be compared


class Candidate(NamedTuple):
    """Something to run on this rank."""

    attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None  # None: this rank only waits
    inputs: Inputs
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    captured: bool = False  # its passes are replayed from CUDA graphs

    def passes(self) -> dict[str, Callable[[], object]]:
        if self.attend is None:
            return dict.fromkeys(WORK, lambda: None)
        passes = passes_of(self.attend, self.inputs)
        return {name: capture(run) for name, run in passes.items()} if self.captured else passes

    def results(self) -> dict[str, Tensor]:
        """out, dq, dk and dv of this rank's rows; nothing where it only waits."""
        if self.attend is None:
            return {}
        leaves = [x.detach().requires_grad_() for x in self.inputs[:3]]
        with self.around():
            out = self.attend(*leaves)
            gradients = torch.autograd.grad(out, leaves, self.inputs.dout)
        return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def capture(run: Callable[[], object]) -> Callable[[], object]:
    """What replays `run` from a CUDA graph, without the host's share of it."""
    with torch.cuda.stream(torch.cuda.Stream()):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class Contender(NamedTuple):
    implementation: str
    layout: str  # empty on one GPU
    ranks: int
    build: Callable[[World, Inputs, bool], Candidate]  # from the whole inputs, and whether the mask is causal

    def __str__(self) -> str:
        return f"{self.ranks}x {self.implementation} {self.layout}".strip()


class Unavailable(RuntimeError):
    """Says on every rank which rank could not, and why."""


def together(step: Callable[[], T], world: World) -> T:
    """What `step` returns. Raises `Unavailable` on every rank where it raises on any: the others don't wait for it."""
    result, why = None, None
    try:
        result = step()
    except Exception as error:  # whatever it is: a table says so, and the others are measured
        why = reason(error)
    reasons: list[str | None] = [None] * world.size
    dist.all_gather_object(reasons, why, world.group)
    for rank, text in enumerate(reasons):
        if text is not None:
            raise Unavailable(f"rank {rank}: {text}")
    return result  # pyright: ignore[reportReturnType]


def check(candidate: Candidate, trusted: Candidate) -> None:
    """Raise `RuntimeError` unless the candidate's results on this rank are the trusted one's, to 16-bit rounding."""
    expected = trusted.results()
    for name, x in candidate.results().items():
        reference = expected[name].float()
        difference = ((x.float() - reference).norm() / reference.norm()).item()
        if not difference < WRONG:
            raise RuntimeError(f"its {name} differs from ring_attention's by {difference:.1e}")


def one_gpu(name: str, *, everywhere: bool = False) -> Contender:
    """A kernel of `peers.LOADERS` on rank 0, while the others wait; or everywhere, on every GPU at once, of which the
    slowest counts, as in a ring."""

    def build(world: World, whole: Inputs, causal: bool) -> Candidate:
        if world.rank != 0 and not everywhere:
            return Candidate(None, whole)
        attention, mask = LOADERS[name](), MASKS["causal" if causal else "full"]
        return Candidate(lambda q, k, v: attention(q, k, v, mask), whole)

    return Contender(f"{name}-everywhere" if everywhere else name, "", 1, build)


def ring(layout: str, backend: str, transport: str, world_size: int, *, captured: bool = False) -> Contender:
    def build(world: World, whole: Inputs, causal: bool) -> Candidate:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ring_attention(
                q,
                k,
                v,
                group=world.group,
                layout=layout,
                seq_len=whole.q.shape[1],
                transport=transport,
                causal=causal,
                backend=backend,
            )

        inputs = Inputs(*(shard(x, group=world.group, layout=layout) for x in whole))
        return Candidate(attend, inputs, captured=captured)

    return Contender("ringflash-graph" if captured else "ringflash", layout, world_size, build)


def other(name: str, causal: bool, world_size: int) -> Contender:
    """One of `OTHERS`."""
    layout = "zigzag" if causal and not name.startswith("ulysses") else "contiguous"

    def build(world: World, whole: Inputs, causal: bool) -> Candidate:
        if world.device.type == "cuda" and world.backend != "nccl":
            raise RuntimeError(f"{name} moves CUDA tensors by NCCL, which wants a GPU for every rank")
        if whole.q.shape[1] % (2 * world.size):
            raise ValueError(f"{name} wants a length that {2 * world.size} divides, got {whole.q.shape[1]}")
        mine = Inputs(*(shard(x, group=world.group, layout=layout) for x in whole))
        return OTHERS[name](world, mine, causal)

    return Contender(name, layout, world_size, build)


# All-to-all: heads for rows


class _AllToAll(torch.autograd.Function):
    """Block `r` of dim 0 goes to rank `r`, and what came from rank `r` takes its place. So it is its own transpose."""

    @staticmethod
    def forward(ctx, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        blocks = blocks.contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return received

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _AllToAll.apply(grad, ctx.group), None


def ulysses(q: Tensor, k: Tensor, v: Tensor, *, group: dist.ProcessGroup, attend: Callable[..., Tensor]) -> Tensor:
    """Attention over a contiguously sharded sequence; each rank attends with 1 of `world_size` parts of the heads.

    Args:
        q, k, v: this rank's rows. The world size divides q's heads; k's and v's heads are repeated as often as it takes
            to be as many as ranks, and only where they are fewer.
        attend: (q, k, v) -> out over the whole sequence, causal or not.

    Source: DeepSpeed-Ulysses, Jacobs et al. (2023), https://arxiv.org/abs/2309.14509.
    """
    ranks, heads, kv_heads = dist.get_world_size(group), q.shape[2], k.shape[2]
    if heads % ranks or max(kv_heads, ranks) % min(kv_heads, ranks):
        raise ValueError(
            f"{ranks} ranks must divide the {heads} query heads, and divide the {kv_heads} key/value heads or be a "
            "multiple of them"
        )
    if kv_heads < ranks:
        k, v = (x.repeat_interleave(ranks // kv_heads, dim=2) for x in (k, v))

    def by_head(x: Tensor) -> Tensor:  # (b, s, ranks * heads, d) -> (ranks, b, s, heads, d)
        return x.unflatten(2, (ranks, -1)).movedim(2, 0)

    packed = torch.cat([by_head(x) for x in (q, k, v)], dim=3)  # one message to each rank
    counts = [x.shape[2] // ranks for x in (q, k, v)]
    arrived = _AllToAll.apply(packed, group)  # (rank whose rows these are, b, s, heads here, d)
    out = attend(*arrived.movedim(0, 1).flatten(1, 2).split(counts, dim=2))
    returned = _AllToAll.apply(out.unflatten(1, (ranks, -1)).movedim(1, 0), group)  # (rank whose heads these are, ...)
    return returned.movedim(0, 2).flatten(2, 3)


def _ulysses(world: World, mine: Inputs, causal: bool, *, kernel: str) -> Candidate:
    attention, mask = LOADERS[kernel](), MASKS["causal" if causal else "full"]
    return Candidate(partial(ulysses, group=world.group, attend=lambda q, k, v: attention(q, k, v, mask)), mine)


# All-gather: every rank gets K and V

# The names that they have since torch 2.13, or before.
_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _AllGather(torch.autograd.Function):
    """K and V of the whole sequence, by one all-gather; back by one reduce-scatter, in their dtype."""

    @staticmethod
    def forward(ctx, k: Tensor, v: Tensor, layout: str, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        ranks = dist.get_world_size(group)
        mine = torch.stack([k, v])
        shards = mine.new_empty(ranks, *mine.shape)
        _gather(shards.flatten(0, 1), mine, group=group)
        ctx.runs = [layout_runs(layout, k.shape[1] * ranks, ranks, rank) for rank in range(ranks)]
        ctx.group = group
        whole = mine.new_empty(2, k.shape[0], k.shape[1] * ranks, *k.shape[2:])
        for runs, rows in zip(ctx.runs, shards, strict=True):
            put_rows(whole, rows, runs, dim=2)
        return whole[0], whole[1]

    @staticmethod
    def backward(ctx, dk: Tensor, dv: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        b, s, g, d = dk.shape
        shards = dk.new_empty(len(ctx.runs), 2, b, s // len(ctx.runs), g, d)
        for places, runs in zip(shards, ctx.runs, strict=True):
            for x, place in zip((dk, dv), places, strict=True):
                torch.cat([x[:, run.start : run.start + run.length] for run in runs], dim=1, out=place)
        mine = torch.empty_like(shards[0])
        _reduce_scatter(mine, shards.flatten(0, 1), group=ctx.group)
        return mine[0], mine[1], None, None


def _all_gather(world: World, mine: Inputs, causal: bool) -> Candidate:
    layout, seq_len = "zigzag" if causal else "contiguous", mine.q.shape[1] * world.size
    queries = layout_runs(layout, seq_len, world.size, world.rank)
    visit = Visit(queries, (Run(0, 1, seq_len),), MASKS["causal" if causal else "full"])
    plan = Plan(0, (seq_len,), (visit,), (((0, seq_len),),))  # of one visit: these queries, all keys

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = _AllGather.apply(k, v, layout, world.group)  # pyright: ignore[reportGeneralTypeIssues]
        return flash_attention(q, k, v, causal=causal)

    def around() -> AbstractContextManager[object]:
        return mock.patch.object(ops, "_prepare", lambda *_, **__: (plan, None))

    return Candidate(attend, mine, around)


# PyTorch's context_parallel


def _context_parallel(world: World, mine: Inputs, causal: bool, *, kernel: SDPBackend, rotation: str) -> Candidate:
    """It takes as many key as query heads, so K/V are repeated, as its user must. Its head-tail balance is zigzag."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options, set_rotate_method

    mesh = init_device_mesh(world.device.type, (world.size,))
    mine = Inputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in mine))  # in memory as it prefers them

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    def around() -> AbstractContextManager[object]:
        """Inside, scaled_dot_product_attention is a ring."""
        set_rotate_method(rotation)
        _cp_options.enable_load_balance = causal  # it refuses to balance a full mask
        buffer = torch.empty(1, 1, 2 * world.size, 1, device=world.device)  # it wants something to cut
        return context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[2], no_restore_buffers={buffer})

    return Candidate(attend, mine, around)


# ring_flash_attn


class Kernels(NamedTuple):
    """What ring_flash_attn attends to a shard with. `lse (b, h, s)`, natural log."""

    forward: Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]  # q, k, v, scale, causal
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]  # dout, q, k, v, out, lse, scale, causal -> dq, dk, dv


def fa2_kernels() -> Kernels:
    """PyTorch's FlashAttention-2."""
    forward_op, backward_op = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward

    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        lengths = q.shape[1], k.shape[1]
        return forward_op(q, k, v, None, None, *lengths, 0.0, causal, False, scale=scale)[:2]

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths, no_seed = (q.shape[1], k.shape[1]), torch.zeros(2, dtype=torch.uint64, device=q.device)
        how = *lengths, 0.0, causal, no_seed, no_seed
        return backward_op(dout, q, k, v, out, lse, None, None, *how, scale=scale)

    return Kernels(forward, backward)


def fa4_kernels() -> Kernels:
    """FlashAttention-4's, from the package flash-attn-4."""
    from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]

    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        return interface._flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)[:2]

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return interface._flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=scale, causal=causal)[:3]

    return Kernels(forward, backward)


@contextmanager
def _modules(stand_ins: dict[str, ModuleType]) -> Iterator[None]:
    """Inside, these are what is imported by their names."""
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _import_ring_flash_attn(module: str) -> ModuleType:
    """Without the flash_attn 2 and the transformers that it imports: others stand in for the one's kernels, and nothing
    here wants the other."""
    names = "flash_attn.flash_attn_interface", "ring_flash_attn.adapters"
    interface, adapters = map(ModuleType, names)
    for kind in ("", "_varlen"):
        vars(interface).update({f"_flash_attn{kind}_forward": None, f"_flash_attn{kind}_backward": None})
    vars(adapters).update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    with _modules(dict(zip(names, (interface, adapters), strict=True))):
        return importlib.import_module(f"ring_flash_attn.{module}")


def _ring_flash_attn(world: World, mine: Inputs, causal: bool, *, load_kernels: Callable[[], Kernels]) -> Candidate:
    name = "zigzag_ring_flash_attn" if causal else "ring_flash_attn"
    module, kernels = _import_ring_flash_attn(name), load_kernels()

    def forward(q, k, v, softmax_scale, causal, **_: Any):
        return *kernels.forward(q, k, v, softmax_scale, causal), None, None

    def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, **_: Any) -> None:
        found = kernels.backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal)
        for place, x in zip((dq, dk, dv), found, strict=True):
            place.copy_(x)

    def around() -> AbstractContextManager[object]:
        return mock.patch.multiple(module, _flash_attn_forward=forward, _flash_attn_backward=backward)

    return Candidate(partial(getattr(module, f"{name}_func"), causal=causal, group=world.group), mine, around)


OTHERS: dict[str, Callable[[World, Inputs, bool], Candidate]] = {
    "ulysses": partial(_ulysses, kernel="ringflash"),
    "ulysses-fa4": partial(_ulysses, kernel="flash-attn-cute"),
    "all-gather": _all_gather,
    "ring-flash-attn-fa2": partial(_ring_flash_attn, load_kernels=fa2_kernels),
    "ring-flash-attn-fa4": partial(_ring_flash_attn, load_kernels=fa4_kernels),
    "context-parallel-cudnn-alltoall": partial(
        _context_parallel, kernel=SDPBackend.CUDNN_ATTENTION, rotation="alltoall"
    ),
    "context-parallel-cudnn-allgather": partial(
        _context_parallel, kernel=SDPBackend.CUDNN_ATTENTION, rotation="allgather"
    ),
    "context-parallel-fa2-alltoall": partial(_context_parallel, kernel=SDPBackend.FLASH_ATTENTION, rotation="alltoall"),
    "context-parallel-fa2-allgather": partial(
        _context_parallel, kernel=SDPBackend.FLASH_ATTENTION, rotation="allgather"
    ),
}
