"""Train a byte-level transformer on sequences that are sharded across ranks by ring attention.

    torchrun --nproc-per-node 2 scripts/train_long_context.py --seq-len 8192 --steps 500 --out runs/demo
    torchrun --nproc-per-node 2 scripts/train_long_context.py --verify 5 --steps 5     # against plain attention
    torchrun --nproc-per-node 2 scripts/train_long_context.py --out runs/demo --resume

The ranks form a mesh of dp x cp. The `cp` ranks of one replica hold one sequence between them, the `dp` replicas hold
different sequences. Everything but attention is local to a token, so a rank runs the whole model on its own rows, and
ring attention is the only place where rows of different ranks meet. What can go wrong is at the shard edges, so:

    positions    a token's rotary angle comes from its global position, never from its row number
    labels       shifted on the whole sequence, then sharded: the label of a shard's last row lies on another rank
    loss         sum over this rank's tokens / number of valid tokens in the whole batch: ranks may hold unequal shares
    gradients    summed, not averaged, over all ranks: each rank's share already carries the global denominator

Writes `config.json`, `loss.csv`, `loss.png` and `checkpoints/` under `--out`. On GPUs it is the Triton kernel, and NCCL
where each rank has a GPU of its own; without a GPU it is the torch backend and gloo.

Legend: b sequences, s rows of this rank, h query heads, g key/value heads, d head dim.
"""

import argparse
import csv
import json
import math
import platform
import random
import resource
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from ringflash import flash_attention, positions, ring_attention, shard
from world import add_world_arguments, start_world

VOCAB = 256
END = 0  # ends a document in the byte stream; a file that holds a zero byte is not text
IGNORE = -100  # label of a token that predicts nothing

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q (b, s, h, d), k and v (b, s, g, d) -> (b, s, h, d)


# ---------------------------------------------------------------------------------------------------------- the model


def rotary_angles(position: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of each position's angles, fp32 `(s, 1, d / 2)`; the angles in fp64, exact for millions of tokens."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=position.device) / head_dim)
    angle = rearrange(position, "s -> s 1 1") * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x_bshd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x_bshd.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x_bshd.dtype)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int):
        super().__init__()
        self.head_dim = dim // heads
        self.query = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.key = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = (rearrange(f(x), "b s (h d) -> b s h d", d=self.head_dim) for f in (self.query, self.key, self.value))
        return self.output(attend(rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        hidden = 32 * round(dim * 8 / 3 / 32)  # three matrices of this width hold what two of width 4 * dim would
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.output = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(dim), Attention(dim, heads, kv_heads)
        self.mlp_norm, self.mlp = nn.RMSNorm(dim), SwiGLU(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, attend)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Decoder-only, pre-norm. It does not know whether it sees a shard: `position` and `attend` say that."""

    def __init__(self, *, layers: int, dim: int, heads: int, kv_heads: int, rope_base: float, recompute: bool = False):
        super().__init__()
        self.head_dim, self.rope_base, self.recompute = dim // heads, rope_base, recompute
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # what writes to the residual stream is smaller, so that its sum keeps its scale
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if ".output." in name else 0.02)

    def forward(self, tokens: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """tokens `(b, s)` at global `position` `(s,)` -> logits `(b, s, 256)`."""
        cos, sin = rotary_angles(position, self.head_dim, self.rope_base)
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, cos, sin, attend, use_reentrant=False)
            else:
                x = block(x, cos, sin, attend)
        return self.head(self.norm(x))


# ------------------------------------------------------------------------------------------ the loss, sharded or whole


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def sharded_loss(model: nn.Module, tokens: Tensor, labels: Tensor, *, group: dist.ProcessGroup, layout: str) -> Tensor:
    """The losses of this rank's rows, summed. tokens, labels: whole, `(b, seq_len)`, the same on every rank."""
    seq_len = tokens.shape[1]
    position = positions(seq_len, group=group, layout=layout, device=tokens.device)
    attend = partial(ring_attention, causal=True, group=group, layout=layout, seq_len=seq_len)
    tokens, labels = (shard(x, group=group, layout=layout, dim=1) for x in (tokens, labels))
    return summed_loss(model(tokens, position, attend), labels)


def plain_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """The losses of all rows, summed, by one process alone: what the ranks' `sharded_loss` must add up to."""
    position = torch.arange(tokens.shape[1], device=tokens.device)
    return summed_loss(model(tokens, position, partial(flash_attention, causal=True)), labels)


def sum_over(group: dist.ProcessGroup | None, tensors: Iterable[Tensor]) -> None:
    """Add up each tensor over the ranks of `group`, in place, with one message."""
    tensors = list(tensors)
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, summed in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(summed.view_as(tensor))


class VerificationError(Exception):
    """The ring's loss or gradients are further from plain attention's than rounding explains."""


def tolerated_error(dtype: str) -> float:
    """Largest relative error of the loss and of each parameter's gradient that rounding explains.

    In bf16 the two runs round activations independently wherever their sums differ in the last bit: a few units of it.
    In fp32 they add the terms of a gradient in different orders, thousands of them, and rounding grows with the number.
    """
    return (4 if dtype == "bfloat16" else 256) * torch.finfo(getattr(torch, dtype)).eps


def relative_error(x: Tensor, expected: Tensor) -> float:
    """`‖x - expected‖ / ‖expected‖` in fp64; infinite where `x` isn't finite."""
    difference, size = (x.double() - expected.double()).norm().item(), expected.double().norm().item()
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else difference


def verify(
    model: nn.Module, loss: Tensor, tokens: Tensor, labels: Tensor, valid: Tensor, dp_group: dist.ProcessGroup
) -> tuple[float, float, str]:
    """Compare the loss and the gradients in `model`, both already summed over the ranks, with plain attention's.

    Every rank runs its replica's whole sequences alone. Returns the relative error of the loss, that of the worst
    gradient, and the name of its parameter, the same on every rank.
    """
    named = dict(model.named_parameters())
    expected_loss = plain_loss(model, tokens, labels) / valid
    expected = torch.autograd.grad(expected_loss, list(named.values()))
    expected_loss = expected_loss.detach()
    sum_over(dp_group, [expected_loss, *expected])
    errors = {}
    for (name, weight), want in zip(named.items(), expected, strict=True):
        assert weight.grad is not None
        errors[name] = relative_error(weight.grad, want)
    worst = max(errors, key=errors.__getitem__)
    found: list[tuple[float, float, str]] = [(0.0, 0.0, "")] * dist.get_world_size()
    dist.all_gather_object(found, (relative_error(loss, expected_loss), errors[worst], worst))
    return max(found, key=lambda errors: max(errors[:2]))


# ------------------------------------------------------------------------------------------------------------ the data


def find_text(paths: Sequence[Path]) -> list[Path]:
    """The files to read: `paths` and what lies under them, or the Python standard library's own sources."""
    if not paths:
        library = Path(sysconfig.get_path("stdlib"))
        return sorted(file for file in library.rglob("*.py") if not {"site-packages", "dist-packages"} & {*file.parts})
    for path in paths:
        if not path.exists():
            raise ValueError(f"--data {path} does not exist")
    return sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())


def read_stream(files: Iterable[Path]) -> bytes:
    """All documents in one stream, each ended by END, in an order that is shuffled but always the same."""
    documents = [text for file in files if END not in (text := file.read_bytes())]
    random.Random(0).shuffle(documents)
    return b"".join(text + bytes([END]) for text in documents)


def label_next_bytes(window: Tensor) -> tuple[Tensor, Tensor]:
    """`(b, seq_len + 1)` bytes -> tokens and their labels, int64 `(b, seq_len)`. Nothing is to be said about what
    follows the end of a document, so the label of END is IGNORE. `a b END c d -> tokens a b END c, labels b END - d`.
    """
    tokens, labels = window[:, :-1].long(), window[:, 1:].long()
    return tokens, labels.masked_fill(tokens == END, IGNORE)


class Corpus:
    """A stream of bytes whose last twentieth is held out, and sequences of `seq_len` bytes drawn from it.

    A training sequence is a function of (seed, step, index) alone. Every rank that asks for it gets the same bytes,
    whatever the mesh, and a resumed run gets the same as one that was never interrupted.
    """

    def __init__(self, stream: bytes, seq_len: int, seed: int):
        held_out = max(len(stream) // 20, seq_len + 1)
        if len(stream) - held_out < seq_len + 1:
            raise ValueError(
                f"seq_len={seq_len} needs {2 * (seq_len + 1)} bytes of text, half of it held out; got {len(stream)}"
            )
        everything = torch.frombuffer(bytearray(stream), dtype=torch.uint8)
        self.train, self.held_out = everything[:-held_out], everything[-held_out:]
        self.seq_len, self.seed = seq_len, seed
        self.checksum = zlib.crc32(stream)

    def training_batch(self, step: int, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Sequences `indices` of `step`: tokens and labels, int64 `(len(indices), seq_len)`."""
        count = len(self.train) - self.seq_len  # of possible starts
        starts = [int(np.random.default_rng((self.seed, step, index)).integers(count)) for index in indices]
        return self._windows(self.train, starts)

    def held_out_batch(self, index: int, count: int) -> tuple[Tensor, Tensor]:
        """Sequence `index` of `count` that lie evenly over the held-out bytes: tokens and labels `(1, seq_len)`."""
        last = len(self.held_out) - self.seq_len - 1
        return self._windows(self.held_out, [last * index // max(count - 1, 1)])

    def _windows(self, stream: Tensor, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        return label_next_bytes(torch.stack([stream[start : start + self.seq_len + 1] for start in starts]))


# --------------------------------------------------------------------------------------------- checkpoints and records

# A resumed run continues exactly only if these options, and the data, are what they were.
MODEL = ("layers", "dim", "heads", "kv_heads", "rope_base")
TRAINING = ("seq_len", "batch", "steps", "lr", "warmup", "weight_decay", "clip", "seed", "dtype")


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, facts: dict) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optimizer": optimizer_state, "step": step, "facts": facts}, checkpoint_id=path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict) -> int:
    """Load `path` into model and optimizer; returns the number of steps done. One of another run is a ValueError."""
    saved: dict = {"facts": dict(facts)}
    load(saved, checkpoint_id=path)
    changed = [
        f"{name} was {saved['facts'][name]}, is {facts[name]}" for name in facts if saved["facts"][name] != facts[name]
    ]
    if changed:
        raise ValueError(f"{path} is of another run: {'; '.join(changed)}")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def latest_checkpoint(directory: Path) -> Path:
    """The last whole checkpoint: its `.metadata` is written last, so an interrupted one has none."""
    whole = sorted(metadata.parent for metadata in directory.glob("step-*/.metadata"))
    if not whole:
        raise ValueError(f"nothing to resume: no checkpoint in {directory}")
    return whole[-1]


# The loss in nats a byte; the seconds of the whole step, its verification too; the peak memory of rank 0.
COLUMNS: tuple[str, ...] = ("step", "loss", "lr", "grad_norm", "tokens_per_s", "seconds", "peak_mib")


def open_log(path: Path, first_step: int) -> csv.DictWriter:
    """A CSV writer that continues at `first_step`: rows that a resumed run will write again are dropped."""
    kept = [row for row in read_log(path) if int(row["step"]) < first_step] if first_step and path.exists() else []
    writer = csv.DictWriter(path.open("w", buffering=1, newline=""), COLUMNS)
    writer.writeheader()
    writer.writerows(kept)
    return writer


def read_log(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def plot_loss(log: Path, picture: Path) -> None:
    """Draw the loss curve of a CSV that a run wrote. Reads nothing else and measures nothing."""
    rows = read_log(log)
    step, loss = [int(row["step"]) for row in rows], np.array([float(row["loss"]) for row in rows])
    window = max(1, len(rows) // 20)
    total = np.cumsum(np.concatenate(([0.0], loss)))
    smooth = [
        (total[i + 1] - total[max(0, i + 1 - window)]) / (i + 1 - max(0, i + 1 - window)) for i in range(len(loss))
    ]
    matplotlib.use("Agg")  # draws without a screen
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(step, loss, color="tab:blue", alpha=0.3, label="each step")
    axes.plot(step, smooth, color="tab:blue", label=f"mean of {window} steps")
    axes.set(xlabel="step", ylabel="training loss (nats a byte)", title=log.parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=150)
    plt.close(figure)


def peak_mib(device: torch.device) -> int:
    """Most memory held so far, MiB: the GPU's since its last reset, or the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) >> 20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak >> 20 if sys.platform == "darwin" else peak >> 10


# --------------------------------------------------------------------------------------------------------- the program


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level transformer with ring attention.")
    run, model, training = (parser.add_argument_group(name) for name in ("run", "model", "training"))
    add_world_arguments(parser)
    run.add_argument("--out", type=Path, default=Path("runs/train"), help="where the run's files go")
    run.add_argument("--data", type=Path, nargs="+", default=[], metavar="PATH", help="default: Python's own library")
    run.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="bfloat16 on GPUs")
    run.add_argument("--cp", type=int, help="ranks that share a sequence (default: all; the rest is data parallel)")
    run.add_argument("--layout", choices=("contiguous", "zigzag", "striped"), default="zigzag")
    run.add_argument("--verify", type=int, default=0, metavar="N", help="compare N steps with plain attention")
    run.add_argument("--save-every", type=int, default=0, metavar="N", help="checkpoint every N steps, and the last")
    run.add_argument(
        "--resume", nargs="?", const="latest", metavar="PATH", help="default: the latest checkpoint of --out"
    )
    run.add_argument("--checkpoint-activations", action="store_true", help="recompute each block in the backward pass")
    run.add_argument("--compile", action="store_true", help="torch.compile each block")
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--dim", type=int, default=256)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--kv-heads", type=int, default=2)
    model.add_argument("--rope-base", type=float, default=10_000.0)
    training.add_argument("--seq-len", type=int, default=4096, help="any length; it need not divide by the ranks")
    training.add_argument("--batch", type=int, help="sequences in a step, over all replicas (default: one each)")
    training.add_argument("--steps", type=int, default=200)
    training.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    training.add_argument("--warmup", type=int, default=20, help="steps of rising learning rate")
    training.add_argument("--weight-decay", type=float, default=0.1, help="on matrices")
    training.add_argument("--clip", type=float, default=1.0, help="largest norm of the whole gradient")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--held-out", type=int, default=8, metavar="N", help="sequences of the final validation")
    args = parser.parse_args(argv)
    if args.dim % (8 * args.heads) or args.heads % args.kv_heads:
        parser.error(
            f"--dim {args.dim} must be a multiple of 8 * --heads {args.heads}, and that of --kv-heads {args.kv_heads}"
        )
    return args


def make_mesh(args: argparse.Namespace, device: torch.device) -> DeviceMesh:
    """All ranks: replicas ("dp") of ranks that share a sequence ("cp"). Fills in the defaults that depend on them."""
    if args.dtype == "auto":
        args.dtype = "bfloat16" if device.type == "cuda" else "float32"
    world_size = dist.get_world_size()
    args.cp = args.cp or world_size
    if world_size % args.cp:
        raise ValueError(f"--cp {args.cp} does not divide the {world_size} ranks")
    replicas = world_size // args.cp
    args.batch = args.batch or replicas
    if args.batch % replicas:
        raise ValueError(f"--batch {args.batch} does not divide over {replicas} replicas")
    return init_device_mesh(device.type, (replicas, args.cp), mesh_dim_names=("dp", "cp"))


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(args.steps - args.warmup, 1)
    return args.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


def same_on_every_rank(facts: dict) -> None:
    """Ranks that read other text or were started with other options would train on nonsense: say so instead."""
    everyone: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            names = [name for name in facts if theirs[name] != everyone[0][name]]
            raise ValueError("; ".join(f"{n} is {everyone[0][n]} on rank 0, {theirs[n]} on rank {rank}" for n in names))


def train(args: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> None:
    replica, replicas = mesh.get_local_rank("dp"), mesh["dp"].size()
    dp_group, cp_group = mesh.get_group("dp"), mesh.get_group("cp")
    first_rank = dist.get_rank() == 0
    log, picture, checkpoints = args.out / "loss.csv", args.out / "loss.png", args.out / "checkpoints"

    # The data, the model (equal on every rank: the same seed), the optimizer.
    corpus = Corpus(read_stream(find_text(args.data)), args.seq_len, args.seed)
    facts = {"data": corpus.checksum, **{name: getattr(args, name) for name in MODEL + TRAINING}}
    same_on_every_rank({**facts, "layout": args.layout, "verify": args.verify, "save_every": args.save_every})
    torch.manual_seed(args.seed)
    options = {name: getattr(args, name) for name in MODEL}
    model = Transformer(**options, recompute=args.checkpoint_activations).to(device)
    weights = list(model.parameters())
    matrices, vectors = [w for w in weights if w.ndim == 2], [w for w in weights if w.ndim == 1]
    decay = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decay, lr=args.lr, betas=(0.9, 0.95))
    precision = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")  # the weights stay fp32

    # Where to start.
    first_step = 0
    if args.resume:
        source = latest_checkpoint(checkpoints) if args.resume == "latest" else Path(args.resume)
        first_step = load_checkpoint(source, model, optimizer, facts)
    elif checkpoints.exists():
        raise ValueError(f"{checkpoints} holds another run's checkpoints: give --resume, or another --out")
    dist.barrier()  # all have looked before anyone writes
    writer = None
    if first_rank:
        args.out.mkdir(parents=True, exist_ok=True)
        config = vars(args) | {"world_size": dist.get_world_size(), "data_crc32": corpus.checksum}
        config |= {"torch": torch.__version__, "python": platform.python_version(), "device": device_name(device)}
        (args.out / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
        writer = open_log(log, first_step)
        print(
            f"{sum(w.numel() for w in weights):,} parameters; {len(corpus.train):,} bytes to train on, {args.batch} "
            f"sequences of {args.seq_len:,} a step; {replicas} replicas x {args.cp} ranks, {args.layout}, "
            f"{dist.get_backend()}, {args.dtype}, {device_name(device)}"
        )
    if args.compile:
        for block in model.blocks:  # all layers share what is compiled for the first
            block.compile(fullgraph=True)

    # The loop.
    bar = tqdm(
        range(first_step, args.steps),
        initial=first_step,
        total=args.steps,
        unit="step",
        disable=not first_rank,
        mininterval=0.1 if sys.stderr.isatty() else 10,
    )
    for step in bar:
        started = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        tokens, labels = (x.to(device) for x in corpus.training_batch(step, range(replica, args.batch, replicas)))
        valid = (labels != IGNORE).sum()
        dist.all_reduce(valid, group=dp_group)

        with precision:
            loss = sharded_loss(model, tokens, labels, group=cp_group, layout=args.layout) / valid
        loss.backward()
        loss = loss.detach()
        sum_over(None, [loss, *(w.grad for w in weights if w.grad is not None)])
        if step < first_step + args.verify:
            with precision:
                loss_error, gradient_error, name = verify(model, loss, tokens, labels, valid, dp_group)
            found = f"relative error of the loss {loss_error:.1e}, of the worst gradient {gradient_error:.1e} ({name})"
            if not max(loss_error, gradient_error) <= tolerated_error(args.dtype):
                raise VerificationError(
                    f"step {step}: {found}; {args.dtype} explains {tolerated_error(args.dtype):.1e}"
                )
            if first_rank:
                tqdm.write(f"step {step} as with plain attention: {found}")

        norm = nn.utils.clip_grad_norm_(weights, args.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        nats, seconds = loss.item(), time.perf_counter() - started  # item() waits for the GPU
        if writer:
            speed = args.batch * args.seq_len / seconds
            row = (step, nats, learning_rate(step, args), norm.item(), speed, seconds, peak_mib(device))
            writer.writerow(dict(zip(COLUMNS, row, strict=True)))
            bar.set_postfix_str(f"loss {nats:.3f}, {speed:,.0f} tokens/s", refresh=False)
        if args.save_every and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            save_checkpoint(checkpoints / f"step-{step + 1:08d}", model, optimizer, step + 1, facts)

    # What it came to.
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, number of labels
    for index in range(replica, args.held_out, replicas):
        tokens, labels = (x.to(device) for x in corpus.held_out_batch(index, args.held_out))
        with torch.no_grad(), precision:
            total[0] += sharded_loss(model, tokens, labels, group=cp_group, layout=args.layout)
        total[1] += (labels != IGNORE).sum() / args.cp  # each rank of a replica counts the whole sequence
    sum_over(None, [total])
    if first_rank:
        plot_loss(log, picture)
        losses = [float(row["loss"]) for row in read_log(log)]
        if tail := losses[-10:]:
            mean = sum(tail) / len(tail)
            print(f"training loss: {losses[0]:.3f} at the first step, {mean:.3f} over the last {len(tail)}")
        if args.held_out:
            held_out = (total[0] / total[1]).item()
            print(f"held-out loss: {held_out:.3f} nats a byte ({held_out / math.log(2):.3f} bits)")
        print(f"loss curve:    {picture} (from {log})")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU"


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    world = start_world(args.device, args.pg_backend)
    try:
        train(args, world.device, make_mesh(args, world.device))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
