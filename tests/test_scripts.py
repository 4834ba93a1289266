"""The check and benchmark programs: dry runs on a CPU, and the parts that decide what passes and what is written."""

import argparse
import csv
import gzip
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count, product
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import accuracy
import bench_local
import bench_masks
import bench_ring
import bench_visits
import check_local
import check_ring
import hbm_bytes
import peers
import profile_ring
import report
import stress_ring
from accuracy import NAMES
from emulation import Rank, ResidentTransport
from peers import LOADERS, MASKS, Case, Inputs, Shape, make_inputs, make_mask
from ringflash import flash_attention, gradients, merge, ring_attention
from ringflash.layout import layout_runs, take_rows
from ringflash.mask import Mask, area
from ringflash.ops import HAS_TRITON
from ringflash.plan import plan_ring
from ringflash.reference import dense_attention
from ringflash.testing import Workers
from world import World

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


def run(script: str, *arguments: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    """A program of `scripts/`, under torchrun where `ranks` is given."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    return subprocess.run(
        [sys.executable, *launcher, str(ROOT / "scripts" / script), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        assert None not in row and None not in row.values(), "a row has more or fewer cells than the header"
        assert all(row[name] for name in ("date", "commit", "device", "torch", "triton", "cuda", "cudnn", "nccl"))
    return rows


# Dry runs


def test_plan_table_counts_what_ranks_do_and_receive(tmp_path):
    options = ["--worlds", "3", "--rows", "20", "--masks", "causal", "full", "--heads", "4", "2", "--dim", "16"]
    done = run("plan_table.py", *options, "--layouts", "contiguous", "zigzag", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = {(row["layout"], row["mask"]): row for row in read(tmp_path / "plan_table.csv")}
    everything = 2 * 20 * 2 * 2 * 16 * 2 / 1e6  # two other ranks' K and V, 2 heads of 16, 2 bytes
    assert all(float(row["received_mb"]) == pytest.approx(everything) for row in rows.values())
    pairs = {"contiguous": 20 * 40 + 20 * 21 / 2, "zigzag": 60 * 61 / 2 / 3}  # of the busiest rank
    for layout, most in pairs.items():
        assert float(rows[layout, "causal"]["tflop"]) == pytest.approx(4 * 4 * 16 * most / 1e12, rel=1e-3)
    assert float(rows["contiguous", "causal"]["busiest_over_mean"]) == pytest.approx(3 * 1010 / 1830, rel=1e-3)
    assert float(rows["zigzag", "full"]["busiest_over_mean"]) == 1


def test_bench_local_times_what_runs_and_says_why_the_rest_does_not(tmp_path):
    options = ["--shapes", "1,2,1,48,16", "--rounds", "3", "--round-ms", "1", "--device", "cpu", "--out", str(tmp_path)]
    done = run("bench_local.py", *options, "--only", "ringflash", "sdpa-fa2", "sdpa-cudnn")
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "bench_local.csv")
    assert len(rows) == 3 * 2 * 2  # implementations, masks, passes
    for row in rows:
        times = [row[f"{name}_ms"] for name in ("min", "median", "max")] + [row["tflops"]]
        if row["implementation"] == "sdpa-cudnn":  # needs a GPU
            assert row["note"] and times == [""] * 4
        else:
            low, median, high, tflops = map(float, times)
            pairs = {"full": 48 * 48, "causal": 48 * 49 / 2}[row["mask"]]
            work = 4 * 2 * 16 * pairs * {"forward": 1, "backward": 2.5}[row["pass"]]
            assert 0 < low <= median <= high and row["rounds"] == "3" and not row["note"]
            assert tflops == pytest.approx(work / median / 1e9, rel=1e-3)
    *_, header, rule, causal, full = done.stdout.splitlines()
    assert header.split() == ["case", "sdpa-fa2", "sdpa-cudnn"] and set(rule) <= {"-", " "}
    assert "causal" in causal and "full" in full and causal.endswith("- / -")


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed (it exists for Linux only)")
def test_bench_local_times_the_portable_kernels_when_asked_to(tmp_path, monkeypatch):
    from ringflash import local_kernel

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        taken.add(local_kernel.kernel_of("forward"))  # pyright: ignore[reportCallIssue]
        return flash_attention(q, k, v, mask=mask)

    monkeypatch.setattr(local_kernel, "kernel_of", lambda which: f"hopper {which}")
    monkeypatch.setitem(LOADERS, "ringflash", lambda: attend)
    small = ["--shapes", "1,1,1,16,16", "--masks", "full", "--only", "ringflash", "--device", "cpu", "--rounds", "1"]
    for asked, kernel, name in (
        ([], "hopper forward", "bench_local"),
        (["--portable"], "portable", "bench_local_portable"),
    ):
        taken: set[str] = set()
        monkeypatch.setattr(sys, "argv", ["bench_local.py", *small, "--round-ms", "1", "--out", str(tmp_path), *asked])
        bench_local.main()
        assert taken == {kernel}
        assert len(read(tmp_path / f"{name}.csv")) == 2


def test_bench_masks_relates_time_to_what_is_visible(tmp_path):
    shapes = ["--shapes", "1,2,1,48,16", "--option-shapes", "1,2,1,48,16", "--masks", "window8", "equal3-full"]
    timing = ["--rounds", "3", "--round-ms", "1", "--device", "cpu", "--dtypes", "fp32", "--out", str(tmp_path)]
    done = run("bench_masks.py", *shapes, *timing, "--peers", "fa2-varlen", "--yardsticks", "sdpa-fa2")
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "bench_masks.csv")
    assert len(rows) == 2 * 2 * 4  # masks, passes; ours and a peer, ours and another under the full mask
    by_name = {(row["run"], row["pass"], row["implementation"], row["mask"]): row for row in rows}
    for (run_mask, which, name, mask), row in by_name.items():
        pairs = {"window8": 8 * 48 - 28, "equal3-full": 3 * 16 * 16, "full": 48 * 48}[mask]
        assert float(row["share"]) == pytest.approx(pairs / 48**2, rel=1e-4)
        if name == "fa2-varlen":  # needs a GPU
            assert row["note"] and not row["median_ms"] and not row["factor"]
            continue
        work = 4 * 2 * 16 * pairs * {"forward": 1, "backward": 2.5}[which]
        assert float(row["tflops"]) == pytest.approx(work / float(row["median_ms"]) / 1e9, rel=1e-3)
        whole, ours = (by_name[run_mask, which, *who] for who in ((name, "full"), ("ringflash", mask)))
        ideal = float(whole["median_ms"]) * float(row["share"])
        assert float(row["factor"]) == pytest.approx(float(row["median_ms"]) / ideal, rel=1e-3)
        over = float(row["median_ms"]) / float(ours["median_ms"])
        assert float(row["over_ringflash"]) == pytest.approx(over, rel=1e-3)
    assert done.stdout.splitlines()[-1].startswith("b1 h2/1 s48 d16 fp32 equal3-full   0.3333")
    options = read(tmp_path / "bench_masks_options.csv")
    assert [row["option"] for row in options] == ["plain", *bench_masks.OPTIONS] * 2
    for row in options:
        (plain,) = (r for r in options if r["option"] == "plain" and r["pass"] == row["pass"])
        over = pytest.approx(float(row["median_ms"]) / float(plain["median_ms"]), rel=1e-3)
        assert row["kernel"] == "torch" and float(row["over_plain"]) == float(row["over_same_kernel"]) == over


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed (it exists for Linux only)")
def test_bench_masks_compares_options_with_plain_calls_of_the_same_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    small = ["--shapes", "--option-shapes", "1,1,1,17,16", "--options", "sinks", "--dtypes", "fp16"]
    timing = ["--rounds", "1", "--round-ms", "1", "--device", "cpu", "--out", str(tmp_path)]
    done = run("bench_masks.py", *small, "--backend", "triton", *timing)
    assert done.returncode == 0, done.stderr
    rows = {(row["option"], row["pass"]): row for row in read(tmp_path / "bench_masks_options.csv")}
    assert len(rows) == 2 * 3 and {row["kernel"] for row in rows.values()} == {"portable"}
    for (_, which), row in rows.items():
        for name, over in (("plain", "over_plain"), ("plain, portable", "over_same_kernel")):
            ratio = float(row["median_ms"]) / float(rows[name, which]["median_ms"])
            assert float(row[over]) == pytest.approx(ratio, rel=1e-3)


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed (it exists for Linux only)")
def test_the_kernels_of_a_call_are_noted_and_may_be_the_portable_ones(monkeypatch):
    from ringflash import local_kernel

    monkeypatch.setattr(local_kernel, "kernel_of", lambda which: f"hopper {which}")
    for portable, kernel in ((False, "hopper forward"), (True, "portable")):
        seen: set[str] = set()
        with peers.kernels(portable, seen):
            assert local_kernel.kernel_of("forward") == kernel  # pyright: ignore[reportCallIssue]
        assert seen == {kernel}


def test_a_peer_with_another_result_is_not_compared():
    case = Case(Shape(1, 2, 1, 24, 16), "window4", "fp32")
    inputs, ours = make_inputs(case.shape, torch.float32, CPU), LOADERS["ringflash"]()
    expected = bench_masks.results(bench_masks.prepare(ours, case, inputs, None))
    bench_masks.prepare(ours, case, inputs, expected)
    with pytest.raises(RuntimeError, match="its results differ from ringflash's by"):
        bench_masks.prepare(lambda q, k, v, mask: ours(q, k, v, Mask(4, causal=True)), case, inputs, expected)


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed (it exists for Linux only)")
def test_sweep_tiles_times_each_kernel_with_each_tile(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tiles = ["32,32,4,1", "64,64,4,2,tma,registers"]
    sizes = ["--tokens", "65", "--heads", "1", "--dims", "16", "--dtype", "fp16", "--masks", "causal"]
    timing = ["--rounds", "1", "--round-ms", "1", "--device", "cpu", "--out", str(tmp_path)]
    done = run("sweep_tiles.py", *sizes, *timing, "--tiles", *tiles)
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "tile_sweep.csv")
    assert {(row["kernel"], row["tile"]) for row in rows} == set(product(["forward", "dq", "dkv"], tiles))


def test_check_local_passes_on_cpu(tmp_path):
    options = ["--device", "cpu", "--csv", str(tmp_path / "rows.csv")]
    small = ["--lengths", "1", "37", "--dims", "16", "--heads", "2,1", "--dtypes", "bf16", "fp32", "--rows", "128"]
    done = run("check_local.py", *options, *small)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read(tmp_path / "rows.csv")
    assert len(rows) == 2 * 2 * 2 and {row["passed"] for row in rows} == {"True"}
    assert all(float(row[f"{name}_error"]) < 0.01 for row in rows for name in NAMES)


def test_check_ring_passes_on_two_ranks(tmp_path):
    small = ["--lengths", "17", "1", "--heads", "2,1", "--dims", "16", "--dtypes", "fp32", "bf16"]
    done = run("check_ring.py", "--device", "cpu", "--out", str(tmp_path), *small, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read(tmp_path / "check_ring.csv")
    assert len(rows) == 2 * 4 * 10 * 2  # lengths, layouts, masks and options, dtypes
    assert {(row["world"], row["passed"]) for row in rows} == {("2", "True")}
    assert all(float(row[f"{n}_error"]) <= 1e-5 for row in rows if row["dtype"] == "fp32" for n in NAMES)
    assert "160 of 160 passed at 2 ranks" in done.stdout


def cpu_world(group: dist.ProcessGroup | None = dist.group.WORLD) -> World:
    """The world of a worker."""
    group = group or dist.group.WORLD
    assert group is not None
    return World(dist.get_rank(), dist.get_world_size(), CPU, "gloo", group)


def check_a_ring_with_a_wrong_dk(path: Path) -> int:
    def wrong_on_rank_1(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
        out, lse = ring_attention(q, k, v, **options)
        return out + 1e-3 * dist.get_rank() * (k - k.detach()).sum(), lse

    world = cpu_world()
    small = ["--lengths", "32", "--heads", "2,2", "--dims", "16", "--dtypes", "fp32", "--masks", "causal"]
    with mock.patch.object(check_ring, "ring_attention", wrong_on_rank_1):
        return check_ring.check(world, check_ring.parse([*small, "--layouts", "zigzag", "--csv", str(path)]))


def test_check_ring_fails_on_every_rank_when_one_is_wrong(workers, tmp_path):
    assert workers(2).run(check_a_ring_with_a_wrong_dk, tmp_path / "rows.csv") == [1, 1]
    (row,) = read(tmp_path / "rows.csv")
    assert row["passed"] == "False"
    assert [name for name in NAMES if float(row[f"{name}_error"]) > 1e-5] == ["dk"]


@contextmanager
def seldom_wrong_merge() -> Iterator[None]:
    """A merge on rank 1 that now and then loses what it should add."""
    calls = count(1)

    def merge_or_not(out: Tensor, lse: Tensor, *other: Tensor) -> tuple[Tensor, Tensor]:
        lost = dist.get_rank() == 1 and next(calls) % 17 == 0
        return (out, lse) if lost else merge(out, lse, *other)

    with mock.patch("ringflash.reference.merge", merge_or_not):
        yield


@contextmanager
def leaking_ring() -> Iterator[None]:
    """Every result stays."""
    kept = []

    def leak(*tensors: Tensor, **options) -> tuple[Tensor, Tensor]:
        kept.append(ring_attention(*tensors, **options))
        return kept[-1]

    with mock.patch.object(stress_ring, "ring_attention", leak):
        yield


@contextmanager
def sleeping_rank() -> Iterator[None]:
    """Rank 1 stays away for longer than the timeout, after a while."""
    calls = count(1)

    def sleep(*tensors: Tensor, **options) -> tuple[Tensor, Tensor]:
        if dist.get_rank() == 1 and next(calls) == 12:  # past the 8 calls of the warm-up
            time.sleep(3)
        return ring_attention(*tensors, **options)  # pyright: ignore[reportReturnType]

    with mock.patch.object(stress_ring, "ring_attention", sleep):
        yield


@contextmanager
def no_fault() -> Iterator[None]:
    yield


def endure(path: Path, fault) -> int:
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    assert isinstance(group, dist.ProcessGroup)
    options = ["--iterations", "40", "--problems", "4", "--longest-delay", "0.5", "--timeout", "1.5"]
    with fault():
        return stress_ring.endure(cpu_world(group), stress_ring.parse([*options, "--csv", str(path)]), "gloo")


@pytest.mark.parametrize(
    ("fault", "status", "found"),
    [
        (no_fault, 0, "nothing"),
        (seldom_wrong_merge, stress_ring.MISMATCHED, "mismatches"),
        (leaking_ring, stress_ring.MISMATCHED, "leaks"),
        (sleeping_rank, stress_ring.HUNG, "hangs"),
    ],
)
def test_stress_ring_finds(tmp_path, fault, status, found):
    with Workers(2) as pool:  # of its own: a hang breaks what it is in
        assert pool.run(endure, tmp_path / "rows.csv", fault) == [status, status]
    (row,) = read(tmp_path / "rows.csv")
    numbers = {name: int(row[name]) for name in ("mismatches", "leaks", "hangs")}
    assert all((number > 0) == (name == found) for name, number in numbers.items()), numbers
    if found != "hangs":
        assert row["iterations"] == "40" and int(row["tensors_before"]) > 0
        assert float(row["iterations_per_s"]) == pytest.approx(40 / float(row["seconds"]), rel=1e-3)


def profile_a_ring(directory: Path) -> None:
    small = ["--shape", "1,4,2,128,16", "--repeats", "2", "--dtype", "fp32", "--mask", "full"]
    profile_ring.measure(cpu_world(), profile_ring.parse([*small, "--out", str(directory)]))


def test_profile_ring_writes_a_trace_whose_visits_have_names_a_picture_and_the_exposed_share(workers, tmp_path, capsys):
    workers(2).run(profile_a_ring, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"profile_ring.{x}" for x in ("csv", "json.gz", "png")]
    assert (tmp_path / "profile_ring.png").read_bytes().startswith(b"\x89PNG")
    rows = read(tmp_path / "profile_ring.csv")
    assert [(row["pass"], row["rank"]) for row in rows] == list(product(["forward", "backward"], "01"))
    for row in rows:
        assert 0 < float(row["compute_ms"]) < float(row["pass_ms"]) and float(row["transfer_ms"]) > 0
        assert 0 <= float(row["exposed_share"]) < 1 and row["repeats"] == "2"
    with gzip.open(tmp_path / "profile_ring.json.gz", "rt") as file:
        trace = json.load(file)
    for rank in (0, 1):
        events = [x for x in trace["traceEvents"] if x["pid"] // profile_ring.FIRST_PID == rank]
        names = {x["name"] for x in events if x.get("cat") == "user_annotation"}
        visits = {"ringflash visit 0 from ranks 0, 1"}  # forward, both at once
        visits |= {f"ringflash visit {index} from rank {(rank - 1 + index) % 2}" for index in range(2)}
        waits = {f"ringflash wait for rank {1 - rank}", "ringflash wait for dK and dV, come home"}
        assert names >= visits | waits | {"ringflash forward", "ringflash backward"}
    again = profile_ring.present(trace, tmp_path / "again.png")
    assert [row["exposed_ms"] for row in again] == [row["exposed_ms"] for row in rows]
    assert "exposed-transfer share: forward" in capsys.readouterr().out and (tmp_path / "again.png").exists()


def test_exposed_is_what_moves_while_nothing_is_computed():
    bar = profile_ring.Bar
    computing = [bar(0, 10, "0"), bar(8, 12, "0"), bar(20, 30, "1")]
    moving = [bar(5, 15, "K and V"), bar(14, 18, "dK and dV"), bar(22, 25, "signal"), bar(33, 34, "signal")]
    one = profile_ring.Pass(0, "forward", computing, moving)
    assert one.exposed == [(12, 18), (33, 34)]
    expected = {"pass": 34, "compute": 22, "transfer": 17, "exposed": 7, "idle": 5}
    assert one.milliseconds == pytest.approx({name: time / 1e3 for name, time in expected.items()})


def test_bench_ring_compares_two_ranks_with_the_fastest_single_one(tmp_path):
    options = ["--shapes", "1,2,1,64,16", "--rounds", "3", "--round-ms", "1", "--device", "cpu", "--out", str(tmp_path)]
    choice = ["--baselines", "ringflash", "sdpa-fa2", "--layouts", "zigzag", "striped"]
    others = ["ulysses", "all-gather", "context-parallel-cudnn-allgather"]
    done = run("bench_ring.py", *options, *choice, "--everywhere", "--contenders", *others, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read(tmp_path / "bench_ring.csv")
    assert len(rows) == (2 + 2 + 2 + 3) * 2  # one-GPU kernels, on one GPU and on all, layouts, others; passes
    for pass_name in ("forward", "forward+backward"):
        chosen = [row for row in rows if row["pass"] == pass_name]
        alone = [row for row in chosen if row["implementation"] in choice and not row["layout"]]
        everywhere = [row["implementation"] for row in chosen if row["ranks"] == "1" and row not in alone]
        assert len(alone) == 2 and everywhere == [f"{row['implementation']}-everywhere" for row in alone]
        fastest = min(float(row["median_ms"]) for row in alone)
        for row in chosen:
            if row["implementation"].startswith("context-parallel"):  # cuDNN needs a GPU
                assert row["note"] and not row["median_ms"]
                continue
            speedup = fastest / float(row["median_ms"])
            assert float(row["speedup"]) == pytest.approx(speedup, rel=1e-3)
            assert float(row["efficiency"]) == pytest.approx(speedup / int(row["ranks"]), rel=1e-3)
    assert "context-parallel-cudnn-allgather zigzag unavailable: rank 0: RuntimeError" in done.stdout


def test_bench_ring_emulates_ranks_one_after_the_other(tmp_path):
    options = [
        "--emulate",
        "4",
        "--shapes",
        "1,4,2,256,16",
        "--device",
        "cpu",
        "--dtypes",
        "fp32",
        "--out",
        str(tmp_path),
    ]
    timing = ["--rounds", "3", "--round-ms", "1", "--baselines", "ringflash", "sdpa-fa2"]
    done = run("bench_ring.py", *options, *timing)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read(tmp_path / "emulate_ring.csv")
    assert [row["pass"] for row in rows] == ["forward", "forward+backward"]
    for row in rows:
        for name, single in (("efficiency", "fastest_ms"), ("own_efficiency", "own_ms")):
            assert float(row[name]) == pytest.approx(float(row[single]) / 4 / float(row["median_ms"]), rel=1e-3)
        assert float(row["fastest_rank_ms"]) <= float(row["median_ms"])
        assert float(row["fastest_ms"]) <= float(row["own_ms"])
    visits = read(tmp_path / "emulate_ring_visits.csv")
    assert [(row["pass"], row["steps"]) for row in visits if row["pass"] == "forward"] == [
        ("forward", "before"),
        ("forward", "0 1 2 3"),  # so little that all of it is waited for
    ]
    assert all(float(row["ms"]) > 0 for row in visits if row["rows"] != "0")


def test_bench_ring_emulates_ranks_of_unequal_rows_under_documents(tmp_path):
    options = ["--emulate", "3", "--shapes", "1,2,1,100,16", "--device", "cpu", "--dtypes", "fp32"]
    masks = ["--masks", "documents24", "--layouts", "balanced", "--baselines", "ringflash"]
    done = run("bench_ring.py", *options, *masks, "--rounds", "1", "--round-ms", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read(tmp_path / "emulate_ring.csv")
    assert [(row["pass"], row["layout"], row["mask"]) for row in rows] == [
        (name, "balanced", "documents24") for name in ("forward", "forward+backward")
    ]
    mask = make_mask("documents24", 100)
    plan = plan_ring(mask, "balanced", 100, int(rows[-1]["slowest_rank"]), 3, mask)
    assert sorted(plan.rows) == [33, 33, 34]
    visits = [row for row in read(tmp_path / "emulate_ring_visits.csv") if row["pass"] == "backward" and row["steps"]]
    found = {row["steps"]: int(row["rows"]) for row in visits if row["steps"] != "before"}
    needed = {str(step): rows.stop - rows.start for step, rows in enumerate(plan.needed) if rows.stop > rows.start}
    assert found.pop("0") == needed.pop("0")
    assert found == {" ".join(needed): sum(needed.values())}  # in one launch


def test_sums_that_go_straight_home_arrive_at_an_emulated_rank_during_its_last_visit():
    inputs = make_inputs(Shape(2, 4, 2, 16, 8), torch.bfloat16, CPU)
    mask = Mask(left=20, right=0)  # reaches the 16 rows of the rank below and 4 of the one below that
    row = 2 * 2 * 2 * 8  # elements of k and v in a row of both batches
    for number in range(8):
        rank = Rank(plan_ring(mask, "contiguous", 128, number, 8), inputs, "torch", ResidentTransport(CPU))
        _, backward = rank.arriving()
        seen, sees = ((0, 16, 20)[min(n, 2)] for n in (7 - number, number))
        assert backward == [(sees * row * 2, 0), (0, 0), (0, seen * row * 4)]


@pytest.mark.parametrize(("halved", "apart"), [(False, False), (True, False), (True, True)])
def test_what_arrives_at_an_emulated_rank_is_what_its_plan_needs_and_the_sums_of_every_hop(monkeypatch, halved, apart):
    monkeypatch.setattr(gradients, "HALVED_BYTES", 0 if halved else 2**40)
    monkeypatch.setattr(gradients, "APART_BYTES", 2**40 if apart else 0)
    monkeypatch.setattr(gradients, "LAP_BYTES", 0)
    inputs = make_inputs(Shape(2, 4, 2, 16, 8), torch.bfloat16, CPU)
    row = 2 * 2 * 2 * 8  # elements of k and v in a row of both batches
    for number in range(8):
        rank = Rank(plan_ring(Mask(right=0), "zigzag", 128, number, 8), inputs, "torch", ResidentTransport(CPU))
        needed = sum(rows.stop - rows.start for rows in rank.plan.needed[1:])
        forward, backward = rank.arriving()
        assert sum(shards for shards, _ in forward) == sum(shards for shards, _ in backward) == needed * row * 2
        assert sum(sums for _, sums in backward) == 7 * 16 * row * 4 and not any(sums for _, sums in forward)
        parts = 2 if halved else 1
        assert all(sums == 16 // parts * row * 4 for _, sums in backward[2 : 2 + 7 * parts])


def test_an_emulated_rank_computes_what_the_backend_does_at_each_visit(monkeypatch):
    """With the other ranks' shards in the places where groups land, an emulated rank's result is a real one's."""
    whole = make_inputs(Shape(1, 2, 1, 64, 16), torch.float32, CPU)
    shards = [Inputs(*(take_rows(x, layout_runs("zigzag", 64, 4, r), 1) for x in whole)) for r in range(4)]
    transport = ResidentTransport(CPU)
    rank = Rank(plan_ring(Mask(right=0), "zigzag", 64, 1, 4), shards[1], "torch", transport)

    @contextmanager
    def carry(plan, k, v, first):
        def fetch(group, into):
            for piece in group.pieces:
                shard, place = (
                    shards[plan.source(piece.step)],
                    slice(piece.place, piece.place + piece.end - piece.begin),
                )
                for x, theirs in zip(into.views(group.rows), (shard.k, shard.v), strict=True):
                    x[:, place] = theirs[:, piece.begin : piece.end]
            return mock.Mock()

        yield fetch, [fetch(*x) for x in first]

    monkeypatch.setattr(transport, "carry", carry)
    with rank.around():
        out = rank.attend(*shards[1][:3])
    expected, _ = dense_attention(*whole[:3], mask=Mask(right=0))
    torch.testing.assert_close(
        out, take_rows(expected, layout_runs("zigzag", 64, 4, 1), 1).float(), rtol=1e-5, atol=1e-5
    )


# Masks and the peers that know them


def test_masks_by_name_are_what_they_say():
    assert make_mask("full", 10) == Mask() and make_mask("causal", 10) == Mask(causal=True)
    assert area(make_mask("window3", 10), 10, 10) == 3 * 10 - 3
    assert make_mask("equal4", 10) == Mask(causal=True, cu_seqlens=[0, 2, 5, 7, 10])
    assert make_mask("equal4-full", 10) == Mask(cu_seqlens=[0, 2, 5, 7, 10])
    for causal, name in ((True, "documents2048"), (False, "documents2048-full")):
        mask = make_mask(name, 2**20)
        assert mask.cu_seqlens is not None and mask == Mask(causal=causal, cu_seqlens=mask.cu_seqlens)
        lengths = torch.tensor(mask.cu_seqlens).diff().double()
        assert abs(lengths.mean() / 2048 - 1) < 0.15 and abs(lengths.log().std() - 1) < 0.15
    for name in ("window", "window0", "window4-full", "equal", "documents-full", "ring7"):
        with pytest.raises(ValueError, match=f"a mask is full, causal, windowN, .*got '{name}'"):
            make_mask(name, 10)


PEER_MASKS = ["full", "causal", "window5", "equal3", "equal3-full", "documents9"]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", PEER_MASKS)
def test_flex_attends_under_the_same_mask(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # its eager form is slow, and the same
    case = Case(Shape(1, 4, 2, 40, 16), name, "fp32")
    q, k, v, _ = make_inputs(case.shape, torch.float32, CPU)
    theirs, ours = (LOADERS[peer]()(q, k, v, case.who_sees) for peer in ("flex", "ringflash"))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PEER_MASKS)
def test_this_pytorch_takes_the_arguments_of_fa2_varlen(name):
    case = Case(Shape(1, 4, 2, 40, 16), name, "bf16")
    q, k, v = (torch.empty(1, 40, heads, 16, device="meta", requires_grad=True) for heads in (4, 2, 2))
    out = LOADERS["fa2-varlen"]()(q, k, v, case.who_sees)
    gradients = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert [x.shape for x in (out, *gradients)] == [q.shape, q.shape, k.shape, v.shape]


@pytest.mark.parametrize("peer", ["flex", "fa2-varlen", "sdpa-fa2"])
def test_a_peer_refuses_a_mask_that_it_does_not_know(peer):
    q, k, v, _ = make_inputs(Shape(1, 2, 1, 8, 16), torch.float32, CPU)
    with pytest.raises(ValueError, match=r"knows .* alone"):
        LOADERS[peer]()(q, k, v, Mask(causal=True, chunk=4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--masks", "ring7"], "a mask is full, causal, windowN, equalN(-full) or documentsN(-full); got 'ring7'"),
        (["--shapes", "1,2,3,4"], "a shape is b,h,g,s,d, all positive and g dividing h; got '1,2,3,4'"),
        (["--shapes", "1,4,2,x,16"], "a shape is b,h,g,s,d, all positive and g dividing h; got '1,4,2,x,16'"),
    ],
)
@pytest.mark.parametrize("script", [bench_local, bench_masks, bench_ring])
def test_a_wrong_argument_is_told_what_is_wanted(script, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    with pytest.raises(SystemExit):
        script.main()
    assert message in capsys.readouterr().err


def test_heads_are_two_numbers_of_which_one_divides_the_other():
    assert peers.parse_heads("4,2") == (4, 2)
    for text in ("4", "4,3", "4,2,1", "4,0", "a,b"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"heads are h,g, .*got '{text}'"):
            peers.parse_heads(text)


# What passes


@pytest.mark.parametrize(
    "name, dtype, error, trusted, passes",
    [
        ("out", torch.bfloat16, 2.1e-3, 2.0e-3, True),
        ("dq", torch.bfloat16, 2.3e-3, 2.0e-3, False),
        ("dk", torch.float16, 0.9e-5, 0.0, True),
        ("dv", torch.float16, 1.1e-5, 0.0, False),
        ("lse", torch.bfloat16, 2e-5, 2e-5, False),
        ("out", torch.float32, 1.1e-5, 1.0, False),
        ("out", torch.float32, 0.9e-5, 0.0, True),
        ("dq", torch.bfloat16, math.nan, 2.0e-3, False),
        ("dq", torch.bfloat16, 2.0e-3, math.nan, False),
        ("dq", torch.bfloat16, math.inf, 2.0e-3, False),
    ],
)
def test_an_error_passes_up_to_a_tenth_above_the_trusted_one_and_1e_5_in_fp32(name, dtype, error, trusted, passes):
    assert (accuracy.failures({name: error}, {name: trusted}, dtype) == []) is passes


def test_lse_of_capped_scores_is_compared_like_the_rest_in_16_bits():
    for error, dtype, passes in (
        (3.2e-5, torch.bfloat16, True),
        (3.4e-5, torch.bfloat16, False),
        (3.2e-5, torch.float32, False),
    ):
        assert (accuracy.failures({"lse": error}, {"lse": 3e-5}, dtype, capped=True) == []) is passes


def test_a_16_bit_result_without_a_trusted_one_must_be_exact_to_fp32():
    assert accuracy.failures({"dq": 1e-4}, {}, torch.bfloat16) == ["dq 1.00e-04 > 1.00e-05"]


def test_an_error_is_relative_to_the_reference_unless_that_is_zero():
    x, reference = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0], dtype=torch.float64)
    assert accuracy.relative_error(accuracy.squares(x, reference), natural=100.0) == pytest.approx(4 / 3)
    assert accuracy.relative_error(accuracy.squares(x, reference * 1e-16), natural=100.0) == pytest.approx(5 / 100)


@pytest.mark.parametrize(
    "mask",
    [Mask(), Mask(right=0), Mask(left=5, right=0), Mask(right=0, prefix=9)],
    ids=["full", "causal", "window", "prefix"],
)
def test_the_blockwise_fp64_reference_equals_dense_attention(mask):
    q, k, v, dout = make_inputs(Shape(2, 4, 2, 23, 8), torch.float64, CPU)
    dlse = torch.randn(2, 4, 23, dtype=torch.float64)
    found = accuracy.exact(q, k, v, dout, mask, dlse=dlse, max_scores=2 * 4 * 23 * 5, softcap=2.0)  # 5 rows at a time
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*leaves, mask=mask, softcap=2.0)
    expected = out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))
    for x, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(x, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_sampled_rows_of_the_reference_equal_those_of_the_whole(mask):
    inputs = make_inputs(Shape(1, 4, 2, 29, 8), torch.float64, CPU)
    whole = accuracy.exact(*inputs, MASKS[mask])
    rows = torch.tensor([0, 3, 17, 28])
    sampled = (
        *check_local.exact_queries(inputs, rows, MASKS[mask]),
        *check_local.exact_keys(inputs, whole, rows, MASKS[mask], block=7),
    )
    for x, reference in zip(sampled, check_local.take_rows(whole, rows), strict=True):
        torch.testing.assert_close(x, reference, rtol=1e-12, atol=1e-12)


def test_sampled_rows_show_a_wrong_key_where_it_is_seen():
    case = Case(Shape(1, 8, 1, 300, 16), "causal", "bf16")

    def wrong_last_key(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return LOADERS["ringflash"]()(q, k, torch.cat([v[:, :-1], v[:, -1:] + 100], 1), mask)

    inputs = make_inputs(case.shape, torch.bfloat16, CPU)
    errors = {place: theirs for place, _, theirs in check_local.check_sampled(case, inputs, wrong_last_key)}
    assert errors["last"]["out"] > 0.1 > 0.005 > max(errors["first"]["out"], errors["middle"]["out"])


# What is written


def test_rows_append_under_one_header(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    report.append_rows(path, [{"a": 1, "b": "x, y"}])
    report.append_rows(path, [{"a": 2, "b": ""}, {"a": 3, "b": "z"}])
    assert path.read_text() == 'a,b\n1,"x, y"\n2,\n3,z\n'


def test_rows_of_other_columns_are_refused_and_nothing_is_written(tmp_path):
    path = tmp_path / "rows.csv"
    report.append_rows(path, [{"a": 1, "b": 2}])
    before = path.read_text()
    with pytest.raises(ValueError, match=r"rows.csv has the columns \['a', 'b'\], these rows have \['a', 'c'\]"):
        report.append_rows(path, [{"a": 1, "c": 2}])
    with pytest.raises(ValueError, match="every row needs the columns"):
        report.append_rows(path, [{"a": 1, "b": 2}, {"b": 2, "a": 1}])
    assert path.read_text() == before


def test_a_copy_without_history_takes_the_commit_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setenv("RINGFLASH_COMMIT", "0123abc")
    assert report.commit() == "0123abc"
    monkeypatch.delenv("RINGFLASH_COMMIT")
    assert report.commit() == "unknown"


def test_the_commit_is_dirty_when_a_source_differs_but_not_for_new_results(tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "results").mkdir()
    for name in ("code.py", "results/rows.csv"):
        (tmp_path / name).write_text("1\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    clean = report.commit()
    assert len(clean) >= 7 and int(clean, 16) >= 0
    (tmp_path / "results/rows.csv").write_text("2\n")
    assert report.commit() == clean
    (tmp_path / "code.py").write_text("2\n")
    assert report.commit() == clean + "-dirty"


# How it is timed


def test_every_candidate_is_timed_in_every_round_inside_its_context():
    calls: list[str] = []

    @contextmanager
    def around():
        calls.append("enter")
        yield
        calls.append("leave")

    timings = report.time_interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        rounds=4,
        round_ms=0,
        device=CPU,
        around={"b": around},
    )
    assert {name: len(timing.rounds_ms) for name, timing in timings.items()} == {"a": 4, "b": 4}
    assert timings["a"].min <= timings["a"].median <= timings["a"].max
    text = "".join(calls).replace("enterbleave", "B")
    assert len(text) == 2 * 5  # one call to learn how long it takes, then one a round
    assert all(sorted(text[i : i + 2]) == ["B", "a"] for i in range(0, 10, 2))
    assert {text[i : i + 2] for i in range(2, 10, 2)} == {"aB", "Ba"}  # in an order that changes


def test_visits_are_timed_beside_rectangles_of_the_same_area(tmp_path):
    visits = bench_visits.visits_of(64)
    for name in ("square", "zigzag rank 1 step 0", "striped rank 0 step 1"):
        assert abs(bench_visits.area(visits[name]) - bench_visits.area(visits[f"rectangle of {name}"])) <= 64 // 2
    assert bench_visits.area(visits["square"]) == 64 * 64
    assert bench_visits.area(visits["striped rank 0 step 1"]) == 64 * 63 // 2
    options = ["--rows", "64", "--heads", "2,1,16", "--backend", "torch", "--rounds", "1", "--round-ms", "1", "--csv"]
    run("bench_visits.py", *options, str(tmp_path / "rows.csv"))
    rows = read(tmp_path / "rows.csv")
    assert len(rows) == 4 * 9 and {row["merged"] for row in rows} == {"True", "False"}
    for row in rows:
        assert (row["of_rectangle"] != "") == (row["merged"] == "False") and float(row["tflops"]) > 0


def test_hbm_bytes_adds_up_what_kernels_move_and_knows_what_must():
    metrics = 'dram__bytes_read.sum","byte","1,000"', 'dram__bytes_write.sum","byte","20"'
    kernels = ["attend", "attend", "at::spin_kernel(long)"] * 7 + ["attend", "at::spin_kernel(long)"]
    lines = [f'"{i}","{kernel}","{metric}' for i, kernel in enumerate(kernels) for metric in metrics]
    header = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    text = "\n".join(["==PROF== noise", header, *lines])
    assert hbm_bytes.add_up(text) == [{"read": 2000.0, "written": 40.0}] * 7 + [{"read": 1000.0, "written": 20.0}]
    with pytest.raises(SystemExit, match="counted 7 of 8 passes"):
        hbm_bytes.add_up("\n".join([header, *lines[:-2]]))
    with pytest.raises(SystemExit, match="counted 0 of 8 passes"):
        hbm_bytes.add_up("==ERROR== no permission")
    shape = Shape(1, 4, 2, 64, 16)
    queries, keys, scores = 4 * 64 * 16, 2 * 64 * 16, 4 * 64 * 64
    assert hbm_bytes.least_bytes("ringflash", "forward", shape, 2) == (2 * queries + 2 * keys) * 2
    assert hbm_bytes.least_bytes("dense", "forward", shape, 2) == (2 * queries + 2 * keys + 4 * scores) * 2
    assert hbm_bytes.least_bytes("ring visit", "forward", shape, 2) == (queries + 2 * keys) * 2 + 8 * queries


def test_what_hbm_bytes_runs_is_attention():
    inputs = make_inputs(Shape(1, 2, 2, 40, 16), torch.float32, CPU)
    expected = hbm_bytes.CASES["ringflash"](inputs)
    passes = hbm_bytes.CASES["dense"](inputs)
    results = ([run["forward"](), *run["backward"]()] for run in (passes, expected))
    assert all(torch.allclose(got, want, atol=1e-5) for got, want in zip(*results, strict=True))
    for run in hbm_bytes.CASES["ring visit"](inputs).values():
        run()
