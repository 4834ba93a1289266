"""Sharding a sequence over the ranks of a group, and putting it together again.

A whole tensor is *replicated*: the same on every rank, and so is its gradient. That makes `shard` and `unshard` each
other's inverse in the backward pass too, and a sharded program differentiates as the unsharded one would.
"""

from numbers import Integral

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .agreement import agree, all_gather_rows
from .layout import WANT_MASK, Runs, count_rows, layout_runs, put_rows, rows_held, runs_to_positions, take_rows
from .mask import Integers, Mask

Group = dist.ProcessGroup | DeviceMesh


def process_group(group: Group) -> dist.ProcessGroup:
    """The ProcessGroup of `group`, which may be a 1-D DeviceMesh. Raises `ValueError` for anything else."""
    if not isinstance(group, dist.ProcessGroup):
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"group must be a ProcessGroup or a 1-D DeviceMesh, got a mesh of shape {group.shape}")
            return group.get_group()
        hint = "" if dist.is_initialized() else "; call torch.distributed.init_process_group() first"
        raise ValueError(f"group must be a ProcessGroup or a 1-D DeviceMesh, got {type(group).__name__}{hint}")
    if group.rank() < 0:
        raise ValueError("this process is not in the group it passed")
    return group


def positions(
    seq_len: int,
    *,
    group: Group,
    layout: str = "zigzag",
    layout_mask: Mask | None = None,
    cu_seqlens: Integers | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """This rank's positions in the global sequence, in the order of its rows: what RoPE needs.

    Args:
        seq_len: tokens in the global sequence; any length, divisible or not.
        group: ProcessGroup or 1-D DeviceMesh that the sequence is sharded over.
        layout: "contiguous", "zigzag", "striped"; for packed documents also "balanced", "zigzag-by-document" or
            "contiguous-by-document".
        layout_mask: for the last three alone, which want it: the mask that all ranks get equal work under, or whose
            documents are cut. One for a whole model, also where its layers have several masks: it decides who holds
            what.
        cu_seqlens: boundaries of packed documents, a tensor (which is copied to the host) or a sequence such as
            `mask.cu_seqlens` of a `Mask`: positions are then counted from the start of their document.
        device: of the result, default the CPU.

    Returns:
        int64 `(rows,)`, in each document strictly ascending; empty on a rank that holds no row.

    Raises:
        ValueError: unknown layout, negative `seq_len`, a `layout_mask` that is missing, not wanted or does not fit,
            `cu_seqlens` that don't start at 0, ascend and end at `seq_len`, or not a group.

    Example: zigzag, 2 ranks, 8 tokens -> rank 0 holds 0 1 6 7, rank 1 holds 2 3 4 5. With `cu_seqlens=[0, 3, 8]` they
    get 0 1 3 4 and 2 0 1 2.
    """
    held = runs_to_positions(_runs(seq_len, process_group(group), layout, layout_mask))
    if cu_seqlens is not None:
        documents = Mask(cu_seqlens=cu_seqlens)
        documents.check_fits(seq_len, seq_len)
        held -= documents.first(held)
    return held.to(device)


def shard(x: Tensor, *, group: Group, layout: str = "zigzag", layout_mask: Mask | None = None, dim: int = 1) -> Tensor:
    """This rank's rows of a whole tensor that every rank has. No communication, except in the backward pass.

    Args:
        x: the whole tensor, the same on every rank, any dtype; the sequence is dimension `dim`, of any length.
        group: ProcessGroup or 1-D DeviceMesh.
        layout, layout_mask: see `positions`.
        dim: the sequence dimension; negative counts from the end.

    Returns:
        A new contiguous tensor, like `x` but with this rank's rows along `dim`, in ascending order of position.
        Differentiable: the gradient of `x` is gathered, whole and the same on every rank.

    Raises:
        ValueError: unknown layout, `dim` out of range, a `layout_mask` that is missing, not wanted or does not fit, or
            not a group.

    Example: zigzag, 2 ranks, `x = [0 1 2 3 4 5 6 7]` -> rank 0 gets `[0 1 6 7]`.
    """
    ranks, dim = process_group(group), _dimension(x, dim)
    _runs(x.shape[dim], ranks, layout, layout_mask)  # which checks them
    return _Shard.apply(x, ranks, layout, dim, layout_mask)


def unshard(
    x: Tensor,
    *,
    group: Group,
    layout: str = "zigzag",
    layout_mask: Mask | None = None,
    dim: int = 1,
    seq_len: int | None = None,
) -> Tensor:
    """The whole tensor from every rank's rows: the inverse of `shard`. One all-gather.

    Args:
        x: this rank's rows, any dtype; the sequence is dimension `dim`.
        group, layout, layout_mask, dim: as they were given to `shard`.
        seq_len: tokens in the global sequence; default `rows * world_size`, so say it when that does not hold.

    Returns:
        The whole tensor, on every rank. Differentiable: the gradient of the result is taken to be the same on every
        rank (each computes the same loss from the whole tensor), and each keeps its own rows of it.

    Raises:
        ValueError: on every rank: the number of rows is not what the layout gives this rank of `seq_len`, what `shard`
            raises for, or ranks that disagree in shapes, dtypes or options (names which rank passed what).

    Example: zigzag, 2 ranks holding `[0 1 6 7]` and `[2 3 4 5]` -> `[0 1 2 3 4 5 6 7]` on both.
    """
    group = process_group(group)
    try:
        dim = _dimension(x, dim)
        seq_len = x.shape[dim] * group.size() if seq_len is None else seq_len
        check_rows({"x": x.shape[dim]}, seq_len, group, layout)
        _runs(seq_len, group, layout, layout_mask)  # which checks them
    except Exception as error:  # whatever it is: the other ranks are about to wait for this one
        agree(group, "", error=error, device=x.device)
        raise
    return _Unshard.apply(x, group, layout, dim, layout_mask, seq_len)


def check_rows(rows: dict[str, int], seq_len: int, group: dist.ProcessGroup, layout: str) -> None:
    """Raise `ValueError` unless the rows of everything that is named are what the layout gives this rank."""
    _check_length(seq_len)
    rank, world_size = group.rank(), group.size()
    expected = rows_held(layout, seq_len, world_size, rank)
    for name, seen in rows.items():
        if seen != expected:
            raise ValueError(
                f"{layout} gives rank {rank} of {world_size} {expected} rows of seq_len={seq_len}, got {seen} in {name}"
            )


def _check_length(seq_len: int) -> None:
    if not isinstance(seq_len, (int, Integral)):  # an `int` is soon found to be one
        raise ValueError(f"seq_len must be an integer, got {seq_len!r}")


def _runs(seq_len: int, group: dist.ProcessGroup, layout: str, layout_mask: Mask | None) -> Runs:
    _check_length(seq_len)
    check_layout_mask(layout, layout_mask)
    return layout_runs(layout, seq_len, group.size(), group.rank(), layout_mask)


def check_layout_mask(layout: str, layout_mask: Mask | None) -> None:
    """Raise `ValueError` for a balanced layout without a mask, or a mask for another layout."""
    if layout_mask is not None and not isinstance(layout_mask, Mask):
        raise ValueError(f"layout_mask must be a ringflash.Mask, got {type(layout_mask).__name__}")
    if layout in WANT_MASK and layout_mask is None:
        raise ValueError(f'layout="{layout}" wants layout_mask=Mask(...), which says who holds what')
    if layout_mask is not None and layout not in WANT_MASK:
        raise ValueError(f"layout_mask is for the layouts {', '.join(WANT_MASK)} alone, got layout={layout!r}")
    if layout_mask is not None and layout != "balanced" and layout_mask.cu_seqlens is None:
        raise ValueError(f"{layout} wants a layout_mask with cu_seqlens, got {layout_mask}")


def _dimension(x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be in [{-x.ndim}, {x.ndim}) for a tensor of shape {tuple(x.shape)}, got {dim}")
    return dim % x.ndim


def _gather_all(
    x: Tensor, group: dist.ProcessGroup, layout: str, dim: int, layout_mask: Mask | None, seq_len: int
) -> Tensor:
    world_size = group.size()
    other_dims = "x".join(str(size) for i, size in enumerate(x.shape) if i != dim)
    words = f"call=unshard dim={dim} other_dims={other_dims} dtype={str(x.dtype).removeprefix('torch.')}"
    words += f" layout={layout} seq_len={seq_len}"
    if layout_mask is not None:
        words += f" layout_mask={layout_mask.digest}"
    agree(group, words, device=x.device)
    runs_by_rank = [layout_runs(layout, seq_len, world_size, rank, layout_mask) for rank in range(world_size)]
    shards = all_gather_rows(x.movedim(dim, 0), tuple(map(count_rows, runs_by_rank)), group)
    whole = x.new_empty(*x.shape[:dim], seq_len, *x.shape[dim + 1 :])
    for runs, rows in zip(runs_by_rank, shards, strict=True):
        put_rows(whole, rows.movedim(0, dim), runs, dim)
    return whole


class _Shard(torch.autograd.Function):
    """Its backward is `_Unshard`, whose backward it is: both are differentiable any number of times."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, layout: str, dim: int, layout_mask: Mask | None) -> Tensor:
        ctx.how = group, layout, dim, layout_mask, x.shape[dim]
        return take_rows(x, _runs(x.shape[dim], group, layout, layout_mask), dim)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Unshard.apply(grad, *ctx.how), None, None, None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, group: dist.ProcessGroup, layout: str, dim: int, layout_mask: Mask | None, seq_len: int
    ) -> Tensor:
        ctx.how = group, layout, dim, layout_mask
        return _gather_all(x, group, layout, dim, layout_mask, seq_len)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Shard.apply(grad, *ctx.how), None, None, None, None, None
