"""A ring in one process: every rank's visits in turn, with a backend's own functions, and no transport."""

from functools import partial
from itertools import product

import torch
from torch import Tensor

from ringflash.layout import layout_runs, put_rows, take_rows
from ringflash.mask import Mask
from ringflash.merge import Partial, Sums, sinks_gradient
from ringflash.plan import plan_ring
from ringflash.ring import Backend
from ringflash.score import Scoring
from ringflash.testing import Inputs


def emulate_ring(
    backend: Backend,
    inputs: Inputs,
    mask: Mask,
    layout: str,
    world_size: int,
    scoring: Scoring | None = None,
) -> tuple[Tensor, ...]:
    """`(out, lse, dq, dk, dv)` of the whole sequence, fp32 (fp64 of fp64), as `world_size` ranks would compute them
    together; and `dsinks` with sinks.

    Every buffer is poisoned with NaN first: what no visit writes shows.
    """
    q, k, v, dout, dlse = inputs
    seq_len, wide = q.shape[1], torch.promote_types(q.dtype, torch.float32)
    scoring = Scoring(q.shape[3] ** -0.5) if scoring is None else scoring
    layout_mask = mask if layout == "balanced" else None
    shards = [layout_runs(layout, seq_len, world_size, rank, layout_mask) for rank in range(world_size)]
    plans = [plan_ring(mask, layout, seq_len, rank, world_size, layout_mask) for rank in range(world_size)]

    def rows_of(x: Tensor, dim: int = 1) -> list[Tensor]:
        return [take_rows(x, runs, dim) for runs in shards]

    def poisoned(like: Tensor, *shape: int) -> Tensor:
        return like.new_full(shape or like.shape, float("nan"), dtype=wide)

    qs, ks, vs, douts, dlses = rows_of(q), rows_of(k), rows_of(v), rows_of(dout), rows_of(dlse, dim=2)
    totals = [Partial(poisoned(d), poisoned(lse)) for d, lse in zip(douts, dlses, strict=True)]
    steps = range(plans[0].hops + 1)
    for step, rank in product(steps, range(world_size)):
        source, visit, rows = plans[rank].source(step), plans[rank].visits[step], plans[rank].needed[step]
        if visit is not None:
            k_here, v_here = ks[source][:, rows], vs[source][:, rows]
            before = totals[rank].out if step > 0 else None
            if not any(plans[rank].visits[step + 1 :]):  # the last one writes q's dtype
                totals[rank] = Partial(poisoned(douts[rank]).to(q.dtype), totals[rank].lse)
            backend.forward(qs[rank], k_here, v_here, visit, scoring, into=totals[rank], before=before)

    dks, dvs = ([poisoned(x) for x in shards] for shards in (ks, vs))
    states = [
        backend.start_backward(*arguments, scoring, wide) for arguments in zip(qs, totals, douts, dlses, strict=True)
    ]
    for step, rank in product(steps, range(world_size)):
        source, visit, rows = plans[rank].source(step), plans[rank].visits[step], plans[rank].needed[step]
        if visit is None:
            continue
        k_here, v_here, dk_here, dv_here = (x[source][:, rows] for x in (ks, vs, dks, dvs))
        backend.backward(
            qs[rank], k_here, v_here, douts[rank], states[rank], visit, scoring,
            take_dkv=partial(Sums, dk_here, dv_here, step == 0), first=step == 0,
        )  # fmt: skip

    def whole(parts: list[Tensor], dim: int = 1) -> Tensor:
        shape = list(parts[0].shape)
        shape[dim] = seq_len
        x = poisoned(parts[0], *shape)
        for runs, rows in zip(shards, parts, strict=True):
            put_rows(x, rows, runs, dim)
        return x

    outs, lses = zip(*totals, strict=True)
    dqs = [backend.finish_backward(state) for state in states]
    results = [whole(list(outs)), whole(list(lses), dim=2), whole(dqs), whole(dks), whole(dvs)]
    if scoring.sinks is not None:
        shares = [
            sinks_gradient(total.lse, state.delta, scoring.sinks) for total, state in zip(totals, states, strict=True)
        ]
        results.append(torch.stack(shares).sum(0))
    return tuple(results)
