"""The ranks of a program that torchrun started: their devices, their group, and reductions of a few numbers."""

import argparse
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    backend: str  # of the process group: gloo or nccl
    group: dist.ProcessGroup

    def say(self, *words: object, sep: str = " ") -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(*words, sep=sep, flush=True)


def add_world_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda where there is")
    parser.add_argument(
        "--pg-backend",
        choices=["auto", "gloo", "nccl"],
        default="auto",
        help="of the process group; auto: nccl when every rank has a GPU of its own, else gloo",
    )


def start_world(device: str = "auto", pg_backend: str = "auto", *, timeout: timedelta | None = None) -> World:
    """Join the group that torchrun announces in the environment; without torchrun, a world of one rank.

    Ranks take the GPUs of their host in turn, so several share one when there are more ranks than GPUs. NCCL refuses
    that, hence gloo is chosen then.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device, local_rank % torch.cuda.device_count()) if device == "cuda" else torch.device(device)
    if pg_backend == "auto":
        pg_backend = "nccl" if device == "cuda" and local_size <= torch.cuda.device_count() else "gloo"
    if place.type == "cuda":
        torch.cuda.set_device(place)
    meet_at = "env://" if "RANK" in os.environ else "tcp://127.0.0.1:0"
    device_id = place if pg_backend == "nccl" else None
    dist.init_process_group(pg_backend, meet_at, rank=rank, world_size=size, device_id=device_id, timeout=timeout)
    assert dist.group.WORLD is not None
    return World(rank, size, place, pg_backend, dist.group.WORLD)


def reduce(values: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Tensor:
    """Reduce a small CPU tensor over the ranks; every rank gets the result, on the CPU."""
    values = values.cuda() if dist.get_backend(group) == "nccl" else values.clone()
    dist.all_reduce(values, op, group)
    return values.cpu()
