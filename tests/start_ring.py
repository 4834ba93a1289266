"""Two ranks attend, forward and backward, started as the argument says: `python tests/start_ring.py spawn`, or fork."""

import multiprocessing
import sys
import tempfile

import torch
import torch.distributed as dist

from ringflash import flash_attention, ring_attention, shard, unshard

RANKS = 2


def attend(rank: int, meet_at: str) -> None:
    """Raises unless the ring's results are plain attention's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", meet_at, rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 101, heads, 16).requires_grad_() for heads in (4, 2, 2, 4))
    whole = flash_attention(q, k, v, causal=True)
    local = ring_attention(*(shard(x, group=group) for x in (q, k, v)), group=group, seq_len=101, causal=True)
    rings = unshard(local, group=group, seq_len=101)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(rings, whole)
    for x, expected in zip(*(torch.autograd.grad(out, (q, k, v), dout) for out in (rings, whole)), strict=True):
        torch.testing.assert_close(x, expected)
    dist.destroy_process_group()


def start(method: str) -> list[int | None]:
    """The exit codes of the ranks."""
    context = multiprocessing.get_context(method)
    with tempfile.TemporaryDirectory() as directory:
        meet_at = f"file://{directory}/store"
        processes = [context.Process(target=attend, args=(rank, meet_at)) for rank in range(RANKS)]  # pyright: ignore
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    return [process.exitcode for process in processes]


if __name__ == "__main__":
    sys.exit(start(sys.argv[1]) != [0] * RANKS)
