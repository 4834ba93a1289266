"""A stream beside the current one, for what need not come after all that the current one was given."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache

import torch

_pairs: dict[torch.cuda.Stream, torch.cuda.Stream] = {}  # of a stream the one beside it, and the other way round


class SideStream:
    """A stream of its own: what goes to it comes after what `current` had been given when it was marked last.

    Memory is a stream's: what is used here and freed there, or the other way round, wants `join` before it goes, and
    what is made there and used here must be made before the mark.
    """

    def __init__(self, current: torch.cuda.Stream):
        self.current, self.stream = current, torch.cuda.Stream(current.device)
        self.begun, self.done = torch.cuda.Event(), torch.cuda.Event()

    def mark(self) -> None:
        self.begun.record(self.current)

    def enter(self) -> None:
        """Work goes here from now on."""
        self.begun.wait(self.stream)
        torch.cuda.set_stream(self.stream)

    def leave(self) -> None:
        """Work goes to the current stream again."""
        torch.cuda.set_stream(self.current)

    def join(self) -> None:
        """The current stream waits for what went here."""
        self.done.record(self.stream)
        self.done.wait(self.current)


class Turns:
    """On which of two streams each visit of a pass is: the current one, or the one beside it, where there is one.

    Args:
        follow: is told which stream is the current one whenever that is another.
    """

    def __init__(self, follow: Callable[[torch.cuda.Stream], None]):
        self.side: SideStream | None = None
        self.follow = follow
        self.is_beside = self.was_beside = False  # is what is launched now, was the last visit

    @contextmanager
    def on(self, beside: bool) -> Iterator[None]:
        """Inside, work goes to the stream beside, or to the other one."""
        before, side = self.is_beside, self.side
        if side is None or beside == before:
            yield
            return
        self._go(side, beside)
        try:
            yield
        finally:
            self._go(side, before)

    def _go(self, side: SideStream, beside: bool) -> None:
        (side.enter if beside else side.leave)()
        self.follow(side.stream if beside else side.current)
        self.is_beside = beside

    @contextmanager
    def visit(self, switch: bool) -> Iterator[None]:
        """Inside, the next visit: beside the last one, or on its stream."""
        with self.on(self.was_beside != switch):
            yield
        self.was_beside = self.was_beside != switch

    def last(self) -> AbstractContextManager[None]:
        """Inside, what comes after the last visit, not after what the next one waits for."""
        return self.on(self.was_beside)

    def mark(self) -> None:
        """What goes beside from now on comes after what the current stream was given."""
        if self.side is not None and not self.is_beside:
            self.side.mark()

    def join(self) -> None:
        """The current stream waits for what went beside."""
        if self.side is not None:
            self.side.join()


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
