"""One rank of a ring alone on a GPU: the passes that it would run, its transfers left out, and what those would be.

Everything but the transport is the package's own: plan, groups, halves, merges, sums in place, autograd. The shards of
the others are taken to be here already; their contents are random. So this is the compute side of a ring: what is
missing from a real one is exposed transfer, and what transfers take from kernels beside them.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from peers import DTYPES, FORMULA, LOADERS, WORK, Case, Inputs, Passes, Shape, make_inputs, passes_of, reason
from report import Row, append_rows, environment, format_table, output_path, significant, time_interleaved
from ringflash import comm, flash_attention, gradients, ops, release_buffers, ring
from ringflash.comm import Fetch, NvlinkTransport, Pending, RowShape, Shards
from ringflash.layout import WANT_MASK
from ringflash.nvlink import Flat
from ringflash.plan import Group, Plan, Straight, part_rows, plan_ring
from world import World

LONG = 1e15  # floating-point operations: see one_gpu_case
LINK = 380e9  # bytes a second each way: the copy engine between two H200s, 64 MiB at a time


class _Done:
    def wait(self) -> None:
        pass


class ResidentTransport:
    """A transport that moves nothing and hands out this device's own buffers, of the sizes that nvlink keeps, with the
    views that it keeps."""

    def __init__(self, device: torch.device):
        self.device = device
        self.kept: dict[str, Flat] = {}
        self.is_timed = False  # then also the places where groups land are kept, filled with random numbers

    def _keep(self, name: str, size: int, dtype: torch.dtype) -> Flat:
        """A flat tensor of that size or more."""
        old = self.kept.get(name)
        if old is None or old.x.numel() < size or old.x.dtype != dtype:
            self.kept[name] = Flat(torch.empty(size, dtype=dtype, device=self.device).normal_())
        return self.kept[name]

    @contextmanager
    def carry(
        self, plan: Plan, k: Tensor, v: Tensor, first: list[tuple[Group, Shards]]
    ) -> Iterator[tuple[Fetch, list[Pending]]]:
        self._keep("published", RowShape.of(k, v).size(max(plan.rows)), k.dtype)
        yield lambda group, into: _Done(), [_Done() for _ in first]

    def places(self, sizes: list[int], dtype: torch.dtype) -> list[Flat]:
        if self.is_timed:
            return [self._keep(f"place {turn} {dtype}", size, dtype) for turn, size in enumerate(sizes)]
        return [Flat(torch.empty(size, dtype=dtype, device=self.device)) for size in sizes]

    def buffers(self, count: int, size: int, dtype: torch.dtype) -> list[Flat]:
        return self._keep("sums", count * size, dtype).see(_cut, count, size)

    def exchange(self, send: Tensor, receive: Tensor, to: int, source: int, tag: int) -> Pending:
        return _Done()

    def collect(self, sums: Flat, ways: comm.Ways, into: Tensor) -> Pending:
        return _Done()

    def finish(self) -> None:
        pass


def _cut(flat: Flat, count: int, size: int) -> list[Flat]:
    return [Flat(x) for x in flat.x[: count * size].view(count, size)]


class Loopback(NvlinkTransport):
    """The nvlink transport in a group of one, where every peer is this rank: the host does all that it would."""

    @staticmethod
    def memory_of(rank: int) -> int:
        return 0


class Arriving(NamedTuple):
    """Bytes of K and V for the next visit, and of sums of dK and dV: for a later visit where shards go in halves or
    sums straight home, else for this one, which they delay."""

    shards: int
    sums: int


class VisitTime(NamedTuple):
    """One launch of the backend, in a pass."""

    backward: bool
    group: int
    ms: float


@dataclass(frozen=True)
class Rank:
    """One rank of `world_size`, with its rows of the inputs."""

    plan: Plan
    inputs: Inputs
    backend: str
    transport: Any  # of comm.Transport

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, backend=self.backend)  # under the plan's mask: see `around`

    @contextmanager
    def around(self) -> Iterator[None]:
        """Inside, attention runs this rank's plan: in the forward and in the backward pass."""
        with mock.patch.object(ops, "_prepare", lambda *_, **__: (self.plan, self.transport)):
            yield

    @property
    def forward_groups(self) -> tuple[Group, ...]:
        return comm.grouped(self.plan, self.inputs.k, self.inputs.v)

    @property
    def backward_groups(self) -> tuple[Group, ...]:
        return gradients.way_home(self.plan, self.inputs.k, self.inputs.v, _sums(self.inputs)).groups

    @property
    def straight(self) -> Straight | None:
        return gradients.straight_of(self.plan, self.inputs.k, self.inputs.v, _sums(self.inputs))

    @property
    def halves(self) -> gradients.Halves:
        return gradients.halved(self.plan, self.inputs.k, self.inputs.v, _sums(self.inputs))

    def visits_of(self, pass_name: str) -> int:
        visits = [group.visit for group in self.forward_groups]
        if pass_name != "forward":
            visits += [group.visit for group in self.backward_groups]
        return sum(visit is not None for visit in visits)

    def shards_of(self, pass_name: str) -> int:
        """How many shards those visits are about: several to a visit, or a shard's halves to two."""
        visible = sum(visit is not None for visit in self.plan.visits)
        return visible if pass_name == "forward" else 2 * visible

    def arriving(self) -> tuple[list[Arriving], list[Arriving]]:
        """What arrives before the first visit and during each, forward and backward."""
        k, v = self.inputs.k, self.inputs.v
        plan, parts = self.plan, self.halves.parts
        row = k.shape[0] * (k.shape[2] * k.shape[3] + v.shape[2] * v.shape[3])
        forward, backward = (
            [Arriving(_rows_of_others(group) * row * k.itemsize, 0) for group in groups] + [Arriving(0, 0)]
            for groups in (self.forward_groups, self.backward_groups)
        )
        if self.straight is not None:
            for index, lap in enumerate(self.straight.laps, start=2):
                rows = sum(piece.end - piece.begin for pieces in lap.received for piece in pieces)
                backward[index] = backward[index]._replace(sums=rows * row * _sums(self.inputs).itemsize)
            return forward, backward
        for index, group in enumerate(self.backward_groups[: plan.hops * parts]):
            step, part = group.last_step, index % parts
            cut = part_rows(plan.rows[plan.source(step + 1) if step < plan.hops else plan.rank], part, parts)
            nbytes = (cut.stop - cut.start) * row * _sums(self.inputs).itemsize
            backward[index + 2] = backward[index + 2]._replace(sums=nbytes)
        return forward, backward


def _rows_of_others(group: Group) -> int:
    return sum(piece.end - piece.begin for piece in group.pieces if piece.step > 0)


def _sums(inputs: Inputs) -> torch.dtype:
    return torch.promote_types(inputs.q.dtype, torch.float32)


def time_visits(rank: Rank, run: Callable[[], object], device: torch.device, rounds: int) -> list[VisitTime]:
    """The time of every launch of the backend in `run`, forward and backward, the median of some rounds: one after the
    other, though a pass may have the last of them beside the one before."""
    make_backend = ops._backend
    readings: list[tuple[bool, Callable[[], float]]] = []

    def timed(launch: Callable[..., None], backward: bool) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            if device.type == "cuda":
                before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                before.record()
                launch(*arguments, **options)
                after.record()
                readings.append((backward, lambda: before.elapsed_time(after)))
            else:
                begin = time.perf_counter()
                launch(*arguments, **options)
                elapsed = (time.perf_counter() - begin) * 1e3
                readings.append((backward, lambda: elapsed))

        return call

    def timed_backend(*arguments: Any) -> Any:
        backend = make_backend(*arguments)
        return backend._replace(forward=timed(backend.forward, False), backward=timed(backend.backward, True))

    all_rounds: list[list[tuple[bool, float]]] = []
    with (
        rank.around(),
        mock.patch.object(ops, "_backend", timed_backend),
        mock.patch.object(ring, "beside", lambda _: None),
    ):
        for _ in range(rounds):
            readings.clear()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            all_rounds.append([(backward, read()) for backward, read in readings])
    indices = {
        False: [i for i, group in enumerate(rank.forward_groups) if group.visit is not None],
        True: [i for i, group in enumerate(rank.backward_groups) if group.visit is not None],
    }
    times = []
    for launches in zip(*all_rounds, strict=True):
        backward = launches[0][0]
        ms = sorted(ms for _, ms in launches)[len(launches) // 2]
        times.append(VisitTime(backward, indices[backward].pop(0), ms))
    return times


def transfers(rank: Rank, times: list[VisitTime]) -> list[Row]:
    """A row for each visit, forward and backward, with its time and what arrives meanwhile, and one for what arrives
    before the first."""
    rows: list[Row] = []
    passes = zip((rank.forward_groups, rank.backward_groups), rank.arriving(), strict=True)
    for backward, (groups, arriving) in enumerate(passes):
        ms = {time.group: time.ms for time in times if time.backward == backward}
        for index, (shards, sums) in enumerate(arriving, start=-1):
            if index < 0 and not shards:
                continue
            group = groups[index] if index >= 0 else None
            is_own_apart = group is not None and group.last_step == 0 and rank.halves.is_apart
            waits = rank.straight is None and rank.halves.parts == 1 and not is_own_apart
            late = sums if waits else 0
            exposed = max(shards + sums - late - ms.get(index, 0.0) / 1e3 * LINK, 0.0) + late
            rows.append(
                {"pass": "backward" if backward else "forward", "visit": index if group else ""}
                | {"steps": " ".join(map(str, sorted({piece.step for piece in group.pieces}))) if group else "before"}
                | {"rows": group.rows if group else 0, "ms": significant(ms.get(index, 0.0))}
                | {"shards_mb": significant(shards / 1e6), "sums_mb": significant(sums / 1e6)}
                | {"transfer_ms": significant((shards + sums) / LINK * 1e3)}
                | {"exposed_ms": significant(exposed / LINK * 1e3)}
            )
    return rows


def peak_memory(rank: Rank, run: Callable[[], object], device: torch.device) -> float:
    """MiB above the inputs at the peak of a pass, with all that the transport keeps; NaN on a CPU."""
    if device.type == "cpu":
        return math.nan
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    with rank.around():
        run()  # makes what is kept between passes
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def host_time(rank: Rank, run: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """Microseconds that the host needs to launch a pass, at best; NaN on a CPU, which computes in that time."""
    if device.type == "cpu":
        return math.nan
    times = []
    with rank.around():
        for _ in range(rounds + 1):  # the first makes what is kept
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize(device)
    return min(times[1:])


def nvlink_host_time(rank: Rank, run: Callable[[], object], device: torch.device) -> float:
    """The same with all that the nvlink transport launches."""
    if device.type == "cpu":
        return math.nan
    assert dist.group.WORLD is not None
    transport = Loopback(dist.group.WORLD, device)
    try:
        return host_time(replace(rank, transport=transport), run, device)
    finally:
        release_buffers(dist.group.WORLD)


def sample_of(world_size: int) -> list[int]:
    return list(range(world_size)) if world_size <= 8 else [world_size * i // 3 - (i == 3) for i in range(4)]


def one_gpu_case(case: Case) -> tuple[Case, int]:
    """What one GPU is timed on, and how many times the time counts: a long sequence with one key/value head of many."""
    b, h, g, s, d = case.shape
    if case.flops < LONG:
        return case, 1
    return case._replace(shape=Shape(1, h // g, 1, s, d)), b * g


def emulate(world: World, options: argparse.Namespace) -> None:
    """`bench_ring.py --emulate`: prints tables, appends rows to emulate_ring.csv and to emulate_ring_visits.csv."""
    device, world_size = world.device, options.emulate
    if world.size != 1:
        raise SystemExit("--emulate takes one process: start it without torchrun")
    ranks = options.ranks or sample_of(world_size)
    origin = environment(device)
    world.say(*origin.values(), f"{world_size} ranks emulated, {', '.join(map(str, ranks))} timed", sep=" | ")
    world.say(f"FLOPs: {FORMULA}; transfers at {LINK / 1e9:g} GB/s\n")
    options.csv_name = "emulate_ring.csv"
    path = output_path(options)
    for shape, mask, dtype, layout in product(options.shapes, options.masks, options.dtypes, options.layouts):
        case = Case(shape, mask, dtype)
        setting = {"world": world_size, "ranks": " ".join(map(str, ranks)), "layout": layout} | case.columns
        rows, visits = measure(case, layout, ranks, world, options)
        world.say(f"{case} {layout}, {world_size} ranks")
        print_tables(rows, visits, world)
        append_rows(path, [{**origin, **setting, **row} for row in rows])
        append_rows(path.with_stem(f"{path.stem}_visits"), [{**origin, **setting, **row} for row in visits])
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measure(
    case: Case, layout: str, ranks: list[int], world: World, options: argparse.Namespace
) -> tuple[list[Row], list[Row]]:
    """A row for each pass, about the slowest rank; a row for each visit of that rank."""
    device, world_size = world.device, options.emulate
    single, times_over = one_gpu_case(case)
    whole = make_inputs(single.shape, DTYPES[case.dtype], device)
    calls: dict[str, Passes] = {}
    for name in options.baselines:
        attention = None
        try:
            attention = LOADERS[name]()
            passes = passes_of(lambda q, k, v, attention=attention: attention(q, k, v, case.who_sees), whole)
            for run in passes.values():
                run()
            calls[name] = passes
        except Exception as error:  # whatever it is, the table says so and the others are measured
            world.say(f"1x {name} unavailable: {reason(error)}")

    mask, layout_mask = case.who_sees, case.who_sees if layout in WANT_MASK else None
    plans = [plan_ring(mask, layout, case.shape.s, number, world_size, layout_mask) for number in ranks]
    by_rows = {  # ranks of as many rows share their inputs
        rows: make_inputs(case.shape._replace(s=rows), DTYPES[case.dtype], device)
        for rows in {plan.rows[plan.rank] for plan in plans}
    }
    backend = ops.pick_backend(options.backend, device, whole.q.dtype)
    transport = ResidentTransport(device)
    around: dict[str, Callable[[], Any]] = {}
    peaks: list[float] = []
    emulated: dict[str, Rank] = {}
    for plan in plans:
        rank = Rank(plan, by_rows[plan.rows[plan.rank]], backend, transport)
        name = f"rank {plan.rank}"
        emulated[name], around[name], calls[name] = rank, rank.around, passes_of(rank.attend, rank.inputs)
        own = replace(rank, transport=ResidentTransport(device))
        peaks.append(peak_memory(own, passes_of(own.attend, own.inputs)["forward+backward"], device))
        del own
    transport.is_timed = True

    rows: list[Row] = []
    visits: list[Row] = []
    for pass_name in WORK:
        runs = {name: passes[pass_name] for name, passes in calls.items()}
        for name in emulated:
            with around[name]():
                runs[name]()
        timings = time_interleaved(runs, rounds=options.rounds, round_ms=options.round_ms, device=device, around=around)
        singles = {name: timings[name].median * times_over for name in timings if name not in emulated}
        fastest = min(singles, key=singles.__getitem__, default="")
        slowest = max(emulated, key=lambda name: timings[name].median)
        ms = timings[slowest].median
        rank = emulated[slowest]
        host = {"resident": host_time(rank, runs[slowest], device)}
        host["nvlink"] = nvlink_host_time(rank, runs[slowest], device)
        visits = transfers(rank, time_visits(rank, runs[slowest], device, options.rounds))
        mine = [row for row in visits if row["pass"] == "forward" or pass_name != "forward"]
        rows.append(
            {"pass": pass_name, "formula": FORMULA, "rounds": options.rounds, "slowest_rank": slowest.split()[1]}
            | {f"{key}_ms": significant(getattr(timings[slowest], key)) for key in ("median", "min", "max")}
            | {"fastest_rank_ms": significant(min(timings[name].median for name in emulated))}
            | {"one_gpu_heads": single.shape.b * single.shape.h, "fastest_one_gpu": fastest}
            | {"fastest_ms": significant(singles.get(fastest, math.nan))}
            | {"own_ms": significant(singles.get("ringflash", math.nan))}
            | {"efficiency": significant(singles.get(fastest, math.nan) / (world_size * ms))}
            | {"own_efficiency": significant(singles.get("ringflash", math.nan) / (world_size * ms))}
            | {"visits": rank.visits_of(pass_name), "shards": rank.shards_of(pass_name)}
            | {f"host_us_a_visit_{key}": significant(us / rank.visits_of(pass_name)) for key, us in host.items()}
            | {"transfer_ms": significant(sum(float(str(row["transfer_ms"])) for row in mine))}
            | {"exposed_ms": significant(sum(float(str(row["exposed_ms"])) for row in mine))}
            | {"peak_mib_above_inputs": significant(max(peaks))}
        )
    return rows, visits


def print_tables(rows: list[Row], visits: list[Row], world: World) -> None:
    header = {
        "pass": "pass", "slowest_rank": "rank", "median_ms": "ms", "fastest_rank_ms": "fastest",
        "own_ms": "own 1 GPU",
        "fastest_ms": "1 GPU", "fastest_one_gpu": "which", "efficiency": "eff", "own_efficiency": "own eff",
        "visits": "visits", "shards": "shards",
        "host_us_a_visit_resident": "host us/visit", "host_us_a_visit_nvlink": "with nvlink",
        "transfer_ms": "transfer ms", "exposed_ms": "exposed ms", "peak_mib_above_inputs": "MiB",
    }  # fmt: skip
    for table, columns in ((rows, header), (visits, {name: name for name in visits[0]})):
        world.say(format_table(list(columns.values()), [[str(row[name]) for name in columns] for row in table]), "\n")
