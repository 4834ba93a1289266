"""The own visit on a stream beside the others', without a GPU: what is done where and when, by doubles that take notes.

`tests/test_gpu.py` has what comes of it on real streams.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from emulation import ResidentTransport
from peers import Shape, make_inputs
from ringflash import gradients, reference, ring
from ringflash.mask import Mask
from ringflash.merge import Partial
from ringflash.plan import Plan, plan_ring
from ringflash.ring import Backend
from ringflash.score import Scoring

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

    monkeypatch.setattr(gradients, "empty_like", empty_like)
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
