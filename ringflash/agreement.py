"""What the ranks of a group say to each other besides shards on their way: that all make the same call, where each is,
what one of them drew, and, for `unshard`, all rows of a tensor. Knows nothing of attention, nor of passes.

First what `comm.py` uses too: which backends a group has, and operations that say what failed and on which rank.

Legend: `rank` is one within the group.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

ABSENT_SECONDS = 0.5  # that a rank whose call failed waits to hear who else's did
_MESSAGE_BYTES = 1024
_agreed: WeakKeyDictionary[dist.ProcessGroup, set[tuple[str, str]]] = WeakKeyDictionary()


@contextmanager
def named(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """What fails inside says on which rank, and what it was."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"ringflash: rank {dist.get_rank(group)} of the group: {what} failed: {error}") from error


class Works:
    """Operations under way on CPU tensors, or on a stream of NCCL's, each with what it does in words."""

    def __init__(self, group: dist.ProcessGroup, works: list[tuple[dist.Work | None, str]]):
        self.group, self.works = group, works

    def wait(self) -> None:
        works, self.works = self.works, []  # gloo's can be waited for once
        for work, what in works:
            with named(self.group, what):
                if work is not None:
                    work.wait()


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    return dict(part.split(":") for part in dist.get_backend_config(group).split(",") if ":" in part)


def has_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Does NCCL move tensors of this device in this group?"""
    return device.type == "cuda" and backends_of(group).get("cuda") == "nccl"


def in_words(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def agree(group: dist.ProcessGroup, message: str, *, error: Exception | None = None, device: torch.device) -> None:
    """Make sure that every rank of the group came with the same `message` (a line of `name=value` words).

    Every rank calls this before the first exchange of a pass; a rank that refuses its own arguments calls it with that
    `error` and raises it itself afterwards. The others raise here, naming the rank: `ValueError` for ranks that
    disagree, or the error of the rank that refused.

    Shards that gloo moves are waited for anyway: there ranks compare at every call, so no disagreement goes unseen.
    Where NCCL has the device the host runs ahead, so only words not seen before in that group are compared, by gloo
    where the group has it, as NCCL would make it wait for the device.
    """
    if group.size() == 1:
        return
    text = message if error is None else f"!{type(error).__name__}: {error}"
    agreed = _agreed.setdefault(group, set())  # by the group itself: a name may come again, with other ranks
    if (device.type, text) in agreed:
        return
    always = not has_nccl(group, device)
    all_ranks, work = _gather(group, text, device)
    if error is not None and "nccl" in backends_of(group).values():  # what was refused may lie anywhere
        return  # the others may be past their check: don't wait for them
    if work is not None:
        try:
            Works(group, [(work, "waiting for every rank of the group to make the same call")]).wait()
        except RuntimeError as failure:
            absent = _absent(group)
            if error is None:
                raise RuntimeError(f"{failure}{absent}") from failure
            return  # what this rank refused says more than that the others did not come
    texts = _decode(all_ranks)
    if error is not None:
        return
    for rank, said in enumerate(texts):
        if said.startswith("!"):
            kind, _, words = said[1:].partition(": ")
            raise {"NotImplementedError": NotImplementedError}.get(kind, ValueError)(
                f"rank {rank} of the group refused its arguments: {words}"
            )
    if len(set(texts)) > 1:
        raise ValueError(f"the ranks of the group disagree: {_differences(texts)}")
    if not always:
        if len(agreed) > 4096:  # at the same call on every rank
            agreed.clear()
        agreed.add((device.type, text))


def _absent(group: dist.ProcessGroup) -> str:
    """After a call that every rank was to make failed: who has not failed in it too, in words; "" if nobody knows.

    Costs nothing before: where one rank times out the others' connections close, so all that came say so about now.
    """
    try:
        store = dist.PrefixStore("ringflash/came", group.get_group_store())
        store.set(str(dist.get_rank(group)), "")
        deadline = time.monotonic() + ABSENT_SECONDS
        while absent := [rank for rank in range(dist.get_world_size(group)) if not store.check([str(rank)])]:
            if time.monotonic() > deadline:
                return f"; within {ABSENT_SECONDS:g} s there was no word from {in_words(absent)}"
            time.sleep(0.02)
    except RuntimeError:  # the store went with the rank that kept it
        pass
    return ""


def from_first_rank(group: dist.ProcessGroup, x: Tensor, device: torch.device) -> Tensor:
    """Rank 0's `x`, which lies on the CPU, on the `device` of every rank. The host waits for gloo alone."""
    by_nccl = "gloo" not in backends_of(group).values()
    x = ahead(x, device) if by_nccl else x.clone()
    if group.size() > 1:
        work = dist.broadcast(x, group=group, group_src=0, async_op=True)
        Works(group, [(work, "waiting for what rank 0 of the group drew")]).wait()
    return x if by_nccl else ahead(x, device)


def ahead(x: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor on the CPU, on the device once that comes to it. The host goes on: for memory that is not
    pinned it would wait until all that the current stream has been given is done."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True, copy=True)


def _gather(group: dist.ProcessGroup, text: str, device: torch.device) -> tuple[list[Tensor], dist.Work | None]:
    """Start to gather every rank's line of text."""
    data = text.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES)
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if "gloo" not in dist.get_backend_config(group):
        mine = mine.to(device if device.type == "cuda" else "cuda")  # what was refused may lie anywhere
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    return all_ranks, dist.all_gather(all_ranks, mine, group=group, async_op=True)


def _decode(rows: list[Tensor]) -> list[str]:
    return [bytes(row.tolist()).decode(errors="replace").strip() for row in rows]


def all_texts(group: dist.ProcessGroup, text: str, device: torch.device) -> list[str]:
    """Every rank's line of text, in rank order."""
    rows, work = _gather(group, text, device)
    Works(group, [(work, "waiting for every rank of the group to say where it is")]).wait()
    return _decode(rows)


def _differences(texts: list[str]) -> str:
    """Which words differ, and who said what: `seq_len: 101 (rank 0), 100 (ranks 1, 2)`."""
    words = [{name: value for name, _, value in (word.partition("=") for word in text.split(" "))} for text in texts]
    found = []
    for name in words[0]:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, said in enumerate(words):
            ranks_by_value.setdefault(said.get(name, "nothing"), []).append(rank)
        if len(ranks_by_value) > 1:
            sayings = (f"{value} ({in_words(ranks)})" for value, ranks in ranks_by_value.items())
            found.append(f"{name}: {', '.join(sayings)}")
    return "; ".join(found)


def _bytes_of(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return x.view(-1).view(torch.uint8)


def all_gather_rows(x: Tensor, rows: tuple[int, ...], group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's `x`, where rank `r` has `rows[r]` rows along dim 0. CUDA tensors go through the host on gloo."""
    staged = x.is_cuda and "nccl" not in dist.get_backend_config(group)
    padded = x.new_zeros(max(rows), *x.shape[1:], device="cpu" if staged else x.device)
    padded[: x.shape[0]] = x
    gathered = [torch.empty_like(padded) for _ in rows]
    # as bytes: transports know fewer dtypes than there are
    dist.all_gather([_bytes_of(part) for part in gathered], _bytes_of(padded), group=group)
    return [part[:count].to(x.device) for part, count in zip(gathered, rows, strict=True)]
