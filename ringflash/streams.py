"""A stream beside the current one, for what need not come after all that the current one was given."""

from functools import lru_cache

import torch

_pairs: dict[torch.cuda.Stream, torch.cuda.Stream] = {}  # of a stream the one beside it, and the other way round


class SideStream:
    """Inside, work goes to a stream of its own, and comes after what `current` had been given when it was marked last.

    Not to be entered twice. Memory is a stream's: what is used here and freed there, or the other way round, wants
    `join` before it goes, and what is made there and used here must be made before the mark.
    """

    def __init__(self, current: torch.cuda.Stream):
        self.current, self.stream = current, torch.cuda.Stream(current.device)
        self.begun, self.done = torch.cuda.Event(), torch.cuda.Event()

    def mark(self) -> None:
        self.begun.record(self.current)

    def __enter__(self) -> None:
        self.begun.wait(self.stream)
        torch.cuda.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self.current)

    def join(self) -> None:
        """The current stream waits for what went here."""
        self.done.record(self.stream)
        self.done.wait(self.current)


@lru_cache(maxsize=32)
def beside(current: torch.cuda.Stream) -> SideStream:
    """The one beside a stream: as streams that others use, or that a CUDA graph is captured on, have others."""
    side = SideStream(current)
    _pairs.update({current: side.stream, side.stream: current})
    return side


def used_by(x: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """A tensor that was made on another stream may be given up while this one reads it, or the one beside it."""
    x.record_stream(stream)
    if stream in _pairs:
        x.record_stream(_pairs[stream])
