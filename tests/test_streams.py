"""The own visit on a stream beside the others', without a GPU: what is done where and when, by doubles that take notes.

`tests/test_gpu.py` has what comes of it on real streams.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from emulation import ResidentTransport
from peers import Shape, make_inputs
from ringflash import gradients, hopper_kernel, local_kernel, reference, ring, streams
from ringflash.mask import Mask
from ringflash.merge import Partial
from ringflash.plan import Plan, plan_ring
from ringflash.ring import Backend
from ringflash.score import Scoring

CPU = torch.device("cpu")
DOCUMENTS = Mask(right=0, cu_seqlens=(0, 5, 21, 40, 64))


class Side:
    """A double of `SideStream` that writes down what happens to it."""

    def __init__(self, notes: list[str]):
        self.notes = notes

    def mark(self) -> None:
        self.notes.append("mark")

    def __enter__(self) -> None:
        self.notes.append("beside")

    def __exit__(self, *_: object) -> None:
        self.notes.append("back")

    def join(self) -> None:
        self.notes.append("join")


@pytest.fixture
def notes(monkeypatch) -> list[str]:
    """What a backward pass does, one note after the other."""
    notes: list[str] = []
    made = gradients.empty_like

    def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        notes.append("memory")
        return made(x, dtype)

    add = gradients.StraightGradients._add

    def noted_add(dkv: gradients.StraightGradients) -> None:
        notes.append("add")
        add(dkv)

    monkeypatch.setattr(gradients, "empty_like", empty_like)
    monkeypatch.setattr(gradients.StraightGradients, "_add", noted_add)
    monkeypatch.setattr(ring, "beside", lambda _: Side(notes))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return notes


def noting_backend(notes: list[str], plan: Plan, fails: bool = False) -> Backend:
    """The torch backend, of which visits are noted, and maybe the own one fails."""

    def backward(q, k, v, dout, state, visit, scoring, take_dkv, first) -> None:
        notes.append("take")
        sums = take_dkv()
        is_own = visit.keys == plan.own_visit.keys
        notes.append("own visit" if is_own else "visit")
        if is_own and fails:
            raise ArithmeticError("the own visit")
        reference.backward(q, k, v, dout, state, visit, scoring, take_dkv=lambda: sums, first=first)

    def finish(state: reference.Started) -> Tensor:
        notes.append("finish")
        return reference.finish_backward(state)

    return Backend(reference.forward, reference.start_backward, backward, finish)


def go_back(backend: Backend, plan: Plan) -> None:
    rows = plan.rows[plan.rank]
    q, k, v, dout = make_inputs(Shape(1, 2, 1, rows, 16), torch.float32, torch.device("cpu"))
    result = Partial(torch.zeros_like(q), torch.zeros(1, 2, rows))
    transport = ResidentTransport(q.device)
    ring.ring_backward(backend, plan, transport, q, k, v, result, dout, None, Scoring(scale=0.25))


@contextmanager
def any_order(monkeypatch, allowed: bool) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(reference.Started, "in_any_order", allowed)
        yield


@pytest.mark.parametrize("lap_shards", [1, 8])
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    ("world_size", "layout", "mask"),
    [
        (2, "zigzag", Mask(right=0)),
        (4, "striped", Mask()),
        (4, "contiguous", Mask(right=0)),
        (4, "balanced", DOCUMENTS),
    ],
)
def test_the_own_visit_runs_beside_the_last_of_the_others(
    notes, monkeypatch, world_size, layout, mask, rank, lap_shards
):
    """From where that one has what it waits for; in memory that was there before; all joined in the end."""
    monkeypatch.setattr(gradients, "LAP_SHARDS", lap_shards)
    monkeypatch.setattr(gradients, "LAP_BYTES", 2**11)
    plan = plan_ring(mask, layout, 64, rank % world_size, world_size, mask if layout == "balanced" else None)
    with any_order(monkeypatch, True):
        go_back(noting_backend(notes, plan), plan)
    if "visit" not in notes:  # nothing to run beside
        assert "beside" not in notes and notes.count("own visit") == 1
        return
    last_mark = len(notes) - 1 - notes[::-1].index("mark")
    behind = notes[last_mark:]
    assert behind[: behind.index("finish")] in (
        ["mark", "visit", "beside", "take", "own visit", "back", "join"],
        ["mark", "beside", "take", "own visit", "back", "join"],  # the last of the others sees nothing here
    )
    assert notes.count("own visit") == notes.count("join") == 1
    k = torch.empty(1, 16, 1, 16)
    groups = gradients.way_home(plan, k, k, torch.float32).groups
    assert notes.count("mark") == len(groups) - 1  # also where nothing is seen: sums that came in may be added there


def test_sums_of_laps_are_added_before_what_the_own_visit_waits_for(notes, monkeypatch):
    monkeypatch.setattr(gradients, "LAP_SHARDS", 1)
    monkeypatch.setattr(gradients, "LAP_BYTES", 2**11)
    plan = plan_ring(Mask(), "striped", 64, 1, 4)
    with any_order(monkeypatch, True):
        go_back(noting_backend(notes, plan), plan)
    lap = ["mark", "visit", "take"]
    behind = notes[notes.index("visit") :]
    assert behind[:3] == lap[1:] + lap[:1] and behind.count("add") == 3
    assert behind[3 : behind.index("beside")] == ["visit", "take", "add", "mark", "visit"]


def test_a_visit_that_may_not_run_beside_others_does_not(notes, monkeypatch):
    plan = plan_ring(Mask(right=0), "zigzag", 64, 0, 2)
    with any_order(monkeypatch, False):
        go_back(noting_backend(notes, plan), plan)
    assert not {"mark", "beside", "join"} & set(notes)


def test_sums_that_travel_are_not_added_to_beside_others(notes, monkeypatch):
    monkeypatch.setattr(gradients, "APART_BYTES", 0)
    plan = plan_ring(Mask(right=0), "zigzag", 64, 0, 2)
    with any_order(monkeypatch, True):
        go_back(noting_backend(notes, plan), plan)
    assert "own visit" in notes and not {"mark", "beside", "join"} & set(notes)


def test_what_runs_beside_is_waited_for_when_it_fails(notes, monkeypatch):
    plan = plan_ring(Mask(right=0), "zigzag", 64, 0, 2)
    with any_order(monkeypatch, True), pytest.raises(ArithmeticError, match="own visit"):
        go_back(noting_backend(notes, plan, fails=True), plan)
    assert notes[-3:] == ["own visit", "back", "join"]


def test_transfers_are_finished_though_the_side_stream_cannot_be_waited_for(notes, monkeypatch):
    finished = []

    def fail(_: Side) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(Side, "join", fail)
    monkeypatch.setattr(ResidentTransport, "finish", lambda transport: finished.append(transport))
    plan = plan_ring(Mask(right=0), "zigzag", 64, 0, 2)
    with any_order(monkeypatch, True), pytest.raises(RuntimeError, match="lost"):
        go_back(noting_backend(notes, plan, fails=True), plan)
    assert len(finished) == 1


def test_the_hopper_kernel_alone_adds_to_dq_in_any_order():
    nothing: Any = None
    assert not local_kernel.Started(nothing, nothing, nothing).in_any_order
    assert not local_kernel.Ordered(nothing, nothing).in_any_order  # deterministic
    assert not reference.Started(nothing, nothing, nothing, nothing).in_any_order
    hopper = hopper_kernel.Started(nothing, nothing, nothing, nothing, nothing, torch.empty(0), nothing, False)
    assert hopper.in_any_order and not hopper._replace(dq=None).in_any_order


class Stream:
    """A double of CUDA's streams and events, which notes in `log` what is done in which order."""

    log: ClassVar[list[str]] = []
    made = 0

    def __init__(self, device: object = None):
        type(self).made += 1
        self.name, self.device = f"{type(self).__name__} {type(self).made}", device

    def __repr__(self) -> str:
        return self.name


class Event(Stream):
    made = 0

    def record(self, stream: Stream) -> None:
        self.log.append(f"{self} at {stream}")

    def wait(self, stream: Stream) -> None:
        self.log.append(f"{stream} waits for {self}")


def test_what_is_beside_comes_after_the_mark_and_before_what_comes_after_the_join(monkeypatch):
    monkeypatch.setattr(Stream, "log", log := [])
    monkeypatch.setattr(Stream, "made", 0)
    monkeypatch.setattr(Event, "made", 0)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append(f"to {stream}"))
    streams.beside.cache_clear()
    main: Any = Stream()
    side = streams.beside(main)
    assert streams.beside(main) is side and streams.beside(cast(Any, Stream())) is not side
    side.mark()
    with side:
        log.append("work")
    side.join()
    assert log == [
        "Event 1 at Stream 1",
        *("Stream 2 waits for Event 1", "to Stream 2", "work", "to Stream 1"),
        *("Event 2 at Stream 2", "Stream 1 waits for Event 2"),
    ]
    recorded = []
    table: Any = SimpleNamespace(record_stream=lambda stream: recorded.append(str(stream)))
    other: Any = Stream()
    for stream in (main, side.stream, other):
        streams.used_by(table, stream)
    assert recorded == ["Stream 1", "Stream 2", "Stream 2", "Stream 1", str(other)]
    streams.beside.cache_clear()
