"""Profile ring attention: a trace of every rank on one time line, a picture of it, and how much transfer is exposed.

    torchrun --nproc-per-node 2 scripts/profile_ring.py                 # on GPUs where there are, else CPU and gloo
    torchrun --nproc-per-node 8 scripts/profile_ring.py --shape 1,32,8,65536,128 --transport nccl
    python scripts/profile_ring.py --read results/profile_ring.json.gz  # table and picture of a trace again

Writes results/profile_ring.json.gz (for https://ui.perfetto.dev or chrome://tracing; all ranks of one host),
profile_ring.png, and rows in profile_ring.csv. A pass of a rank lasts from its first operation on the device to its
last. `exposed`: a transfer is under way, or waits for a peer, and the rank computes nothing. `idle`: neither. On a CPU
everything that is not a wait for a transfer, or a copy for one, counts as computing. A profile slows the host down:
small shapes are idler than without.
"""

import argparse
import bisect
import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from peers import DTYPES, MASKS, Inputs, Shape, make_inputs
from report import Row, add_output_arguments, append_rows, environment, format_table, output_path, significant
from ringflash import ring_attention, shard, transport_of
from ringflash.comm import TRANSPORTS
from ringflash.layout import LAYOUTS, WANT_MASK
from world import World, add_world_arguments, start_world

PASSES = ("forward", "backward")
FIRST_PID = 2**23  # above any process id: rank r's processes have the numbers r * FIRST_PID and up
VISITS = ("tab:green", "yellowgreen")  # in turn
COLOURS = {"K and V": "tab:blue", "dK and dV": "tab:orange", "signal": "0.75"}

Event = dict[str, Any]  # of a Chrome trace: times in microseconds
Interval = tuple[float, float]


# Measure: a trace


def record(world: World, shape: Shape, options: argparse.Namespace, path: Path) -> None:
    """Profile `options.repeats` forward and backward passes and write the trace of this rank."""
    whole = make_inputs(shape, DTYPES[options.dtype], world.device)
    *leaves, dout = Inputs(*(shard(x, group=world.group, layout=options.layout) for x in whole))
    del whole
    q, k, v = (x.requires_grad_() for x in leaves)
    on_gpu = world.device.type == "cuda"

    def both() -> None:
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier(world.group)
        out = ring_attention(
            q,
            k,
            v,
            group=world.group,
            layout=options.layout,
            seq_len=shape.s,
            causal=options.mask == "causal",
            transport=options.transport,
            backend=options.backend,
        )
        torch.autograd.grad(out, (q, k, v), dout)
        if on_gpu:
            torch.cuda.synchronize()

    for _ in range(3):
        both()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=2, active=options.repeats, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        acc_events=True,  # or it warns that they go at the end of the only cycle
    ) as profiler:
        for _ in range(2 + options.repeats):
            both()
            profiler.step()


def join(paths: list[Path], about: Row) -> dict[str, Any]:
    """The traces of all ranks as one, whose processes are named by their ranks; with `about` in it."""
    events: list[Event] = []
    for rank, path in enumerate(paths):
        for event in json.loads(path.read_text())["traceEvents"]:
            if not isinstance(event.get("pid"), int):
                continue  # the profiler's own
            event["pid"] += rank * FIRST_PID
            if event.get("name") == "process_labels":
                event["args"]["labels"] = f"rank {rank}, {event['args']['labels']}"
            if event.get("name") == "process_sort_index":
                event["args"]["sort_index"] = event["pid"]
            if "id" in event:  # of an arrow
                event["id"] = f"{rank}.{event['id']}"
            events.append(event)
    return {"ringflash": dict(about), "traceEvents": events}


# Read: what each pass of each rank did


class Bar(NamedTuple):
    begin: float  # microseconds
    end: float
    what: str  # a kind of transfer, of COLOURS; or the number of a visit, empty outside of visits


class Pass(NamedTuple):
    """A pass of a rank: what its device computed, and what was on its way to it."""

    rank: int
    name: str  # of PASSES
    computing: list[Bar]
    moving: list[Bar]

    @property
    def span(self) -> Interval:
        bars = self.computing + self.moving
        return min(bar.begin for bar in bars), max(bar.end for bar in bars)

    @property
    def exposed(self) -> list[Interval]:
        return without(union(self.moving), union(self.computing))

    @property
    def milliseconds(self) -> dict[str, float]:
        begin, end = self.span
        compute, exposed = length(union(self.computing)), length(self.exposed)
        times = {"pass": end - begin, "compute": compute, "transfer": length(union(self.moving)), "exposed": exposed}
        return {name: time / 1e3 for name, time in (times | {"idle": end - begin - compute - exposed}).items()}


def union(bars: Iterable[Bar | Interval]) -> list[Interval]:
    """As disjoint intervals in ascending order."""
    joined: list[Interval] = []
    for begin, end, *_ in sorted(bars):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def without(some: list[Interval], others: list[Interval]) -> list[Interval]:
    """What of `some` is in none of the `others`; each disjoint and ascending."""
    left: list[Interval] = []
    for begin, end in some:
        for other_begin, other_end in others:
            if other_begin < end and other_end > begin:
                if other_begin > begin:
                    left.append((begin, other_begin))
                begin = max(begin, other_end)
        if begin < end:
            left.append((begin, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


class Ranges:
    """The ranges that ringflash names, of one rank: who was inside of which, and when."""

    def __init__(self, events: list[Event]):
        self.by_thread: dict[tuple[int, int], list[Event]] = defaultdict(list)
        for event in events:
            if event.get("cat") == "user_annotation" and event["name"].startswith("ringflash "):
                self.by_thread[event["pid"], event["tid"]].append(event)
        for ranges in self.by_thread.values():
            ranges.sort(key=lambda event: (event["ts"], -event["dur"]))

    def around(self, event: Event) -> list[Event]:
        """From the outermost, a pass, to the innermost; empty where the event began in no pass."""
        ranges, when = self.by_thread[event["pid"], event["tid"]], event["ts"]
        before = ranges[: bisect.bisect_right(ranges, when, key=lambda event: event["ts"])]
        inside = [x for x in before if when < x["ts"] + x["dur"] and x is not event]
        return inside if inside and kind(inside[0]) in PASSES else []

    def passes(self) -> list[Event]:
        found = (x for ranges in self.by_thread.values() for x in ranges if kind(x) in PASSES)
        return sorted(found, key=lambda event: event["ts"])


def kind(event: Event) -> str:
    """`forward`, `backward`, `visit`, `fetch`, `exchange`, `wait` ..."""
    return event["name"].split()[1]


def is_transfer(path: list[Event]) -> bool:
    """Is what began inside these ranges part of a transfer? Else it is computing."""
    return kind(path[-1]) not in ("visit", *PASSES)


def bar(event: Event, path: list[Event]) -> Bar:
    if is_transfer(path):
        signals = event.get("cat") == "kernel" and ("barrier" in event["name"] or "signal" in event["name"])
        what = "signal" if signals else "dK and dV" if "dK and dV" in path[-1]["name"] else "K and V"
    else:
        what = path[-1]["name"].split()[2] if kind(path[-1]) == "visit" else ""
    return Bar(event["ts"], event["ts"] + event["dur"], what)


def read_rank(rank: int, events: list[Event]) -> list[Pass]:
    """The passes of one rank, in order."""
    events = [event for event in events if event.get("ph") == "X"]
    ranges = Ranges(events)
    launches = {
        event["args"]["correlation"]: event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    passes = {id(x): Pass(rank, kind(x), [], []) for x in ranges.passes()}
    operations = [x for x in events if x.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    for operation in operations:
        launch = launches.get(operation["args"].get("correlation"))
        if launch and (path := ranges.around(launch)):
            one = passes[id(path[0])]
            (one.moving if is_transfer(path) else one.computing).append(bar(operation, path))
    for event in events:
        if event["name"] in ("gloo:recv", "gloo:send") and (path := ranges.around(event)):
            passes[id(path[0])].moving.append(bar(event, path))
    if not operations:
        read_host(ranges, passes)
    return list(passes.values())


def read_host(ranges: Ranges, passes: dict[int, Pass]) -> None:
    """What a CPU did: each moment of a pass goes by the innermost range around it."""
    for all_of_thread in ranges.by_thread.values():
        for event in all_of_thread:
            path = [*ranges.around(event), event]
            if kind(path[0]) not in PASSES:
                continue
            inner = union((x["ts"], x["ts"] + x["dur"]) for x in all_of_thread if event in ranges.around(x))
            one = passes[id(path[0])]
            for begin, end in without([(event["ts"], event["ts"] + event["dur"])], inner):
                part = bar({"ts": begin, "dur": end - begin}, path)
                (one.moving if is_transfer(path) else one.computing).append(part)


def read(trace: dict[str, Any]) -> list[Pass]:
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        by_rank[event["pid"] // FIRST_PID].append(event)
    return [one for rank, events in sorted(by_rank.items()) for one in read_rank(rank, events)]


# Write: rows, a table, a picture


def summarise(passes: list[Pass], about: Row) -> list[Row]:
    """A row for each rank and kind of pass: medians over repeats."""
    rows: list[Row] = []
    for name in PASSES:
        for rank in sorted({one.rank for one in passes}):
            repeats = [one.milliseconds for one in passes if (one.rank, one.name) == (rank, name)]
            medians = {key: statistics.median(times[key] for times in repeats) for key in repeats[0]}
            share = statistics.median(times["exposed"] / times["pass"] for times in repeats)
            rows.append(
                dict(about)
                | {"pass": name, "rank": rank, "repeats": len(repeats)}
                | {f"{key}_ms": significant(value) for key, value in medians.items()}
                | {"exposed_share": significant(share, 4)}
            )
    return rows


def exposed_share(passes: list[Pass], name: str) -> float:
    """Of the time of all passes of that name, over all ranks and repeats."""
    times = [one.milliseconds for one in passes if one.name == name]
    return sum(x["exposed"] for x in times) / sum(x["pass"] for x in times)


def draw(passes: list[Pass], title: str, path: Path) -> None:
    """The last forward and backward pass of each rank: above what it computes, below what is on its way to it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    last = {(one.rank, one.name): one for one in passes}
    start = min(one.span[0] for one in last.values())
    ranks = max(one.rank for one in passes) + 1
    figure, axes = pyplot.subplots(figsize=(14, 1.5 + 0.9 * ranks), layout="constrained")

    def put(begin: float, end: float, y: float, height: float, **style: Any) -> None:
        axes.broken_barh([((begin - start) / 1e3, (end - begin) / 1e3)], (y, height), linewidth=0, **style)

    for one in last.values():
        y = ranks - 1 - one.rank
        for begin, end in one.exposed:
            put(begin, end, y + 0.05, 0.9, color="red", alpha=0.25)
        for x in one.computing:
            put(x.begin, x.end, y + 0.5, 0.4, color=VISITS[int(x.what) % 2] if x.what else "0.4")
        for x in one.moving:
            put(x.begin, x.end, y + 0.1, 0.35, color=COLOURS[x.what], alpha=0.8)
        for what in sorted({x.what for x in one.computing if x.what}, key=int):
            bars = [x for x in one.computing if x.what == what]
            middle = (min(x.begin for x in bars) + max(x.end for x in bars)) / 2
            axes.text((middle - start) / 1e3, y + 0.7, what, ha="center", va="center", fontsize=7)
    kinds = [Patch(color=colour, label=what) for what, colour in COLOURS.items()]
    kinds += [Patch(color="0.4", label="outside of visits"), Patch(color="red", alpha=0.25, label="exposed")]
    axes.legend(handles=kinds, ncols=len(kinds), loc="upper center", bbox_to_anchor=(0.5, -0.3 / ranks), frameon=False)
    axes.set(yticks=[ranks - 0.5 - rank for rank in range(ranks)], yticklabels=[f"rank {r}" for r in range(ranks)])
    axes.set(xlabel="ms; above: visits by number, below: transfers", title=title, ylim=(0, ranks))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def present(trace: dict[str, Any], picture: Path) -> list[Row]:
    """Print the table of a trace and draw its picture; returns its rows."""
    passes, about = read(trace), trace["ringflash"]
    rows = summarise(passes, about)
    columns = ["pass", "rank", "pass_ms", "compute_ms", "transfer_ms", "exposed_ms", "idle_ms", "exposed_share"]
    print(format_table(columns, [[str(row[column]) for column in columns] for row in rows]))
    shares = ", ".join(f"{name} {exposed_share(passes, name):.1%}" for name in PASSES)
    print(f"\nexposed-transfer share: {shares}")
    shape = Shape(*(int(about[name]) for name in Shape._fields))
    where = f"{about['world']}x {about['device']}, {about['transport']}"
    draw(passes, f"{where}: {shape} {about['mask']} {about['layout']}; exposed: {shares}", picture)
    print(f"{picture}")
    return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_world_arguments(parser)
    parser.add_argument(
        "--shape", type=Shape.parse, metavar="b,h,g,s,d", help="default: 1,32,8,16384,128; small on a CPU"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--mask", choices=MASKS, default="causal")
    parser.add_argument("--layout", choices=sorted({*LAYOUTS} - {*WANT_MASK}), default="zigzag")
    parser.add_argument("--backend", default="auto", help="attention backend: auto, triton or torch")
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto")
    parser.add_argument("--repeats", type=int, default=5, help="passes that are profiled; the picture shows the last")
    parser.add_argument("--read", type=Path, metavar="TRACE", help="measure nothing: table and picture of this trace")
    add_output_arguments(parser, "profile_ring")
    return parser.parse_args(arguments)


def measure(world: World, options: argparse.Namespace) -> None:
    """Profile a ring and write its trace, its picture and its rows."""
    default = Shape(1, 32, 8, 16384, 128) if world.device.type == "cuda" else Shape(1, 4, 2, 1024, 32)
    shape: Shape = options.shape or default
    path = output_path(options)
    path.parent.mkdir(parents=True, exist_ok=True)
    traces = [path.with_suffix(f".rank{rank}.json") for rank in range(world.size)]
    transport = transport_of(world.group, world.device) if options.transport == "auto" else options.transport
    record(world, shape, options, traces[world.rank])
    dist.barrier(world.group)
    if world.rank == 0:
        about = environment(world.device) | {"world": world.size, "process_group": world.backend}
        about |= {"transport": transport, "backend": options.backend, "layout": options.layout, "mask": options.mask}
        trace = join(traces, about | {"dtype": options.dtype} | shape._asdict())
        for part in traces:
            part.unlink()
        with gzip.open(path.with_suffix(".json.gz"), "wt") as file:
            json.dump(trace, file)
        append_rows(path, present(trace, path.with_suffix(".png")))
    dist.barrier(world.group)


def main() -> None:
    options = parse()
    if options.read:
        with gzip.open(options.read, "rt") as file:
            present(json.load(file), options.read.with_name(options.read.name.removesuffix(".json.gz") + ".png"))
        return
    measure(start_world(options.device, options.pg_backend), options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
