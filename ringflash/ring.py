"""The ring: the forward loop and the backward loop. Transport, plan and backend are handed in; nothing is decided here.

Legend: `q_bshd`, `k_bsgd`, `v_bsgd` are this rank's shards; `lse_bhs` natural log. Sums over visits are fp32 (fp64 for
fp64 inputs); the last visit of a forward pass writes the inputs' dtype.

Note [Own visit beside]. A launch ends with multiprocessors that have nothing left to do, for longer where programs are
few and unlike each other. Backward, the own visit waits for nothing, and where its sums lie apart it shares dQ alone
with the launch before it: the Hopper kernel adds to that in any order. So it goes to a stream beside, as soon as that
launch has what it waits for, and fills the GPU from there on.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from . import comm
from .gradients import gradients, way_home
from .merge import NEG_INF, Partial, Sums, empty_like, sinks_gradient
from .plan import Plan, Visit
from .score import Scoring
from .streams import SideStream, beside


class Forward(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, visit: Visit, scoring: Scoring, into: Partial, before: Tensor | None
    ) -> None: ...


class State(Protocol):
    """A backward pass under way: the sum of dQ, and whatever else the backend's kernels want, in their form."""

    @property
    def delta(self) -> Tensor:
        """fp32 or fp64 `(b, h, s)`: `rowsum(dout * out) - dlse`."""
        ...

    @property
    def in_any_order(self) -> bool:
        """May visits of it run side by side? Those but the first, which may have to write what the others add to."""
        ...


class StartBackward(Protocol):
    def __call__(
        self, q: Tensor, result: Partial, dout: Tensor, dlse: Tensor | None, scoring: Scoring, sums: torch.dtype
    ) -> State: ...


class Backward(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        state: Any,
        visit: Visit,
        scoring: Scoring,
        take_dkv: Callable[[], Sums],
        first: bool,
    ) -> None: ...


class FinishBackward(Protocol):
    def __call__(self, state: Any) -> Tensor: ...


class Backend(NamedTuple):
    """The local attention: `reference.py` or `local_kernel.py`."""

    forward: Forward
    start_backward: StartBackward
    backward: Backward
    finish_backward: FinishBackward


def ring_forward(
    backend: Backend,
    plan: Plan,
    transport: comm.Transport | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
) -> Partial:
    """Attention of this rank's queries over the whole sequence: `out (b, s, h, d_v)` in q's dtype, `lse (b, h, s)`."""
    b, s, h, d = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)

    def new_out(dtype: torch.dtype) -> Tensor:
        return empty_like(q, dtype) if v.shape[3] == d else q.new_empty((b, s, h, v.shape[3]), dtype=dtype)

    if plan.hops == 0:
        total = Partial(new_out(q.dtype), q.new_empty((b, h, s), dtype=wide))
        backend.forward(q, k, v, plan.own_visit, scoring, into=total, before=None)
        return total
    assert transport is not None
    groups = comm.grouped(plan, k, v)
    with comm.visits(plan, groups, k, v, transport) as arrivals:
        lse, running = q.new_empty((b, h, s), dtype=wide), None  # beside the first transfers
        for index, visit, k_here, v_here in arrivals:
            assert visit is not None
            out = running
            if index == len(groups) - 1 and (running is None or running.dtype != q.dtype):
                out = new_out(q.dtype)
            elif out is None:
                out = new_out(wide)
            backend.forward(q, k_here, v_here, visit, scoring, into=Partial(out, lse), before=running)
            running = out
    assert running is not None
    return Partial(running, lse)


def ring_backward(
    backend: Backend,
    plan: Plan,
    transport: comm.Transport | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Partial,
    dout: Tensor,
    dlse: Tensor | None,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`(dq, dk, dv)` of this rank's shards, from every rank's queries and keys, in the inputs' dtype; `dsinks`, where
    there are sinks, from this rank's queries alone, fp32 or wider."""
    sums = q.dtype if plan.hops == 0 else torch.promote_types(q.dtype, torch.float32)

    def start() -> tuple[State, Tensor | None]:
        # the lse of a query that sees no key is a constant
        live = None if dlse is None else dlse.masked_fill(result.lse == NEG_INF, 0.0)
        state = backend.start_backward(q, result, dout, live, scoring, sums)
        return state, None if scoring.sinks is None else sinks_gradient(result.lse, state.delta, scoring.sinks)

    if plan.hops == 0:
        state, dsinks = start()
        own = Sums(empty_like(k), empty_like(v), fresh=True)
        backend.backward(q, k, v, dout, state, plan.own_visit, scoring, take_dkv=lambda: own, first=True)
        return backend.finish_backward(state), own.dk, own.dv, dsinks
    assert transport is not None
    way = way_home(plan, k, v, sums)
    side: SideStream | None = None  # see Note [Own visit beside]
    first = True

    def take() -> Sums:
        sums = dkv.take()
        if side is not None:
            side.mark()
        return sums

    try:
        with comm.visits(plan, way.groups, k, v, transport) as arrivals:
            dkv = gradients(plan, way, k, v, sums, transport)  # beside the first transfers
            state, dsinks = start()
            if dkv.is_apart and state.in_any_order:
                side = beside(torch.cuda.current_stream())
            for index, visit, k_here, v_here in arrivals:
                dkv.arrive(index)
                if visit is None:
                    take()
                    continue
                is_last = index == len(dkv.groups) - 1
                take_dkv = dkv.take if is_last else take
                with side if side is not None and is_last and not first else nullcontext():
                    backend.backward(q, k_here, v_here, dout, state, visit, scoring, take_dkv=take_dkv, first=first)
                first = False
                del k_here, v_here  # after the last visit nothing holds the memory that shards landed in
        if side is not None:
            side.join()
        dq = backend.finish_backward(state)
        del state  # and the sum of dQ goes, before dk and dv are made
        return dq, *dkv.home(), dsinks
    except BaseException:
        try:
            if side is not None:
                side.join()
        finally:
            transport.finish()  # dK and dV may be under way
        raise
