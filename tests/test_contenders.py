"""What rings are compared with is right, or it is not timed; and what is made of the rows."""

import csv
import importlib.util
import math
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import accuracy_ring
import bench_ring
import check_ring
import contenders
import plot_ring
from accuracy import exact, relative_error, squares
from contenders import Candidate, Kernels, check, one_gpu, other, ring
from peers import MASKS, Case, Inputs, Shape, make_inputs
from ringflash import positions
from world import World

CPU = torch.device("cpu")
NAMES = ("out", "dq", "dk", "dv")


def this_world() -> World:
    assert dist.group.WORLD is not None
    return World(dist.get_rank(), dist.get_world_size(), CPU, "gloo", dist.group.WORLD)


def our_ring(layout: str) -> contenders.Contender:
    return ring(layout, "torch", "gloo", dist.get_world_size())


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# Right


def errors(name: str, shape: Shape, mask: str, dtype: torch.dtype = torch.float32, build=None) -> dict[str, float]:
    """Of this rank's rows, against fp64."""
    world, causal = this_world(), mask == "causal"
    whole = make_inputs(shape, dtype, CPU)
    contender = other(name, causal, world.size)
    with mock.patch.dict(contenders.OTHERS, {name: build} if build else {}):
        found = contender.build(world, whole, causal).results()
    reference = exact(*whole, MASKS[mask])
    rows = positions(shape.s, group=world.group, layout=contender.layout)
    return {n: relative_error(squares(found[n], getattr(reference, n)[:, rows]), 1.0) for n in NAMES}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["ulysses", "all-gather"])
@pytest.mark.parametrize(
    "ranks, shape", [(2, Shape(2, 6, 3, 20, 16)), (2, Shape(1, 4, 2, 36, 16)), (4, Shape(2, 8, 2, 24, 16))]
)
def test_contenders_equal_dense_attention(workers, name, ranks, shape, mask):
    if name == "ulysses" and shape.g == 3:
        shape = shape._replace(g=1)  # of 2 ranks neither gets a whole number of 3 key/value heads
    for found in workers(ranks).run(errors, name, shape, mask):
        assert set(found) == set(NAMES) and max(found.values()) < 1e-5


def cpu_kernels() -> Kernels:
    """PyTorch's flash attention on a CPU, in the place of the GPU's."""

    def rows_first(*tensors: Tensor) -> list[Tensor]:
        return [x.transpose(1, 2) for x in tensors]

    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        q, k, v = rows_first(q, k, v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out.transpose(1, 2), lse

    def backward(dout, q, k, v, out, lse, scale: float, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = rows_first(dout, q, k, v, out)
        how = 0.0, causal
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = rows_first(*operator(dout, q, k, v, out, lse, *how, scale=scale))
        return dq, dk, dv

    return Kernels(forward, backward)


@pytest.mark.skipif(not importlib.util.find_spec("ring_flash_attn"), reason="ring_flash_attn is not installed")
@pytest.mark.parametrize("mask", MASKS)
def test_ring_flash_attn_is_driven_right(workers, mask):
    build = partial(contenders._ring_flash_attn, load_kernels=cpu_kernels)
    shape, dtype = Shape(1, 2, 2, 32, 16), torch.bfloat16  # in fp32 it adds dQ into a buffer that it overwrites
    for found in workers(2).run(errors, "ring-flash-attn-fa2", shape, mask, dtype, build):
        assert max(found.values()) < 0.01


# Wrong, or not there


def prepare(name: str, shape: Shape, wrong: bool = False) -> str | None:
    """Why a contender is not timed."""
    world = this_world()

    def with_a_wrong_dk_on_rank_1(world: World, mine: Inputs, causal: bool) -> Candidate:
        right = contenders._all_gather(world, mine, causal)
        assert right.attend is not None
        attend = right.attend
        return right._replace(attend=lambda q, k, v: attend(q, k, v) + 0.1 * world.rank * (k - k.detach()).sum())

    with mock.patch.dict(contenders.OTHERS, {name: with_a_wrong_dk_on_rank_1} if wrong else {}):
        whole = make_inputs(shape, torch.bfloat16, CPU)
        contender = other(name, True, world.size)
        outcome = bench_ring.prepare(contender, our_ring(contender.layout), world, whole, True)
    return outcome if isinstance(outcome, str) else None


def test_a_contender_that_is_wrong_on_one_rank_is_timed_on_none(workers):
    shape = Shape(1, 2, 2, 32, 16)
    assert workers(2).run(prepare, "all-gather", shape) == [None, None]
    first, second = workers(2).run(prepare, "all-gather", shape, wrong=True)
    assert first == second and "rank 1: RuntimeError: its dk differs from ring_attention's by" in first


@pytest.mark.parametrize(
    "name, shape, why",
    [
        ("ulysses", Shape(1, 3, 3, 32, 16), "2 ranks must divide the 3 query heads"),
        ("all-gather", Shape(1, 2, 2, 34, 16), "all-gather wants a length that 4 divides, got 34"),
        ("context-parallel-cudnn-alltoall", Shape(1, 2, 2, 32, 16), "RuntimeError"),  # on a CPU
    ],
)
def test_what_can_not_run_says_why_on_every_rank(workers, name, shape, why):
    first, second = workers(2).run(prepare, name, shape)
    assert first == second and first.startswith("rank 0: ") and why in first


def test_results_as_far_apart_as_rounding_pass_and_others_do_not():
    inputs = make_inputs(Shape(1, 2, 2, 32, 16), torch.float32, CPU)

    def attend(q: Tensor, k: Tensor, v: Tensor, factor: float) -> Tensor:
        return factor * (q + k * v)

    right = Candidate(partial(attend, factor=1.0), inputs)
    check(Candidate(partial(attend, factor=1.01), inputs), right)
    for factor in (1.1, math.nan):
        with pytest.raises(RuntimeError, match="its out differs"):
            check(Candidate(partial(attend, factor=factor), inputs), right)


# Four and eight ranks


def bench(shape: Shape) -> list[dict[str, object]]:
    world = this_world()
    compared = [
        one_gpu("ringflash"),
        our_ring("zigzag"),
        *(other(n, True, world.size) for n in ("ulysses", "all-gather")),
    ]
    return [dict(row) for row in bench_ring.measure(compared, our_ring, Case(shape, "causal", "bf16"), 1, 0.0, world)]


@pytest.mark.parametrize("ranks", [4, 8])
def test_bench_ring_measures_all_on_more_ranks(workers, ranks):
    rows, *others = workers(ranks).run(bench, Shape(1, 8, 4, 8 * ranks, 16))
    assert [row["note"] for row in rows] == [""] * 4 * 2
    assert [row["ranks"] for row in rows] == [1, ranks, ranks, ranks] * 2
    for row in rows:
        assert float(str(row["median_ms"])) > 0 and float(str(row["efficiency"])) > 0
    assert all(x == rows for x in others)  # so every rank tells the same


def check_small_rings(path: Path) -> int:
    small = ["--heads", "2,1", "--dims", "16", "--dtypes", "fp32", "--csv", str(path)]
    return check_ring.check(this_world(), check_ring.parse([*small, "--lengths", "37"]))


@pytest.mark.parametrize("ranks", [4, 8])
def test_check_ring_passes_on_more_ranks(workers, ranks, tmp_path):
    assert workers(ranks).run(check_small_rings, tmp_path / "rows.csv") == [0] * ranks
    assert {(row["world"], row["passed"]) for row in read(tmp_path / "rows.csv")} == {(str(ranks), "True")}


# Errors side by side


def compare(path: Path, factor: float) -> int:
    """The exit status where the ring's output is `factor` times what it should be."""
    attention = contenders.ring_attention

    def ring_attention(*tensors: Tensor, **options) -> Tensor:
        return attention(*tensors, **options) * factor

    words = [
        "--shapes",
        "1,4,2,64,16",
        "--contenders",
        "ulysses",
        "context-parallel-cudnn-alltoall",
        "--csv",
        str(path),
    ]
    with mock.patch.object(contenders, "ring_attention", ring_attention):
        return accuracy_ring.compare(this_world(), accuracy_ring.parse(words))


@pytest.mark.parametrize("factor, status", [(1.0, 0), (1.01, 1)])
def test_accuracy_ring_fails_when_the_ring_is_more_wrong_than_one_gpu(workers, tmp_path, factor, status):
    path = tmp_path / "accuracy_ring.csv"
    assert workers(2).run(compare, path, factor) == [status, status]
    rows = {row["implementation"] + row["layout"]: row for row in read(path)}
    assert rows["ringflashzigzag"]["passed"] == str(status == 0)
    assert rows["ringflash"]["passed"] == rows["ulyssescontiguous"]["passed"] == rows["sdpa-fa2"]["passed"] == "True"
    missing = rows["context-parallel-cudnn-alltoallzigzag"]
    assert missing["note"] and not missing["passed"] and not missing["dq_error"]
    for name in NAMES:
        assert 0 < float(rows["sdpa-fa2"][f"{name}_error"]) == float(rows["ulyssescontiguous"][f"{name}_fa2"]) < 0.02


# The picture


def row(name: str, ranks: int, s: int, efficiency: float, **changes: str) -> dict[str, str]:
    return {
        **{"date": "2031-01-02T03:04:05Z", "commit": "abc", "device": "A GPU", "transport": "nvlink"},
        **{"implementation": name, "layout": "zigzag", "ranks": str(ranks), "s": str(s), "efficiency": str(efficiency)},
        **{"b": "1", "h": "4", "g": "2", "d": "128", "dtype": "bf16", "mask": "causal", "pass": "forward"},
        **changes,
    }


ROWS = [
    row("ringflash", 2, 1024, 0.9),
    row("ringflash", 2, 1024, 0.1, date="2030-01-01T00:00:00Z"),  # measured again later
    row("ringflash", 2, 1024, 0.8, transport="nccl", date="2031-01-01T00:00:00Z"),
    row("other", 2, 1024, 0.6, transport="nccl", date="2031-01-01T00:00:00Z"),
    row("other", 2, 1024, 0.7),
    row("ringflash", 2, 512, 0.5),
    row("ringflash", 4, 2048, 0.85),
    row("ringflash", 2, 1024, 0.3, device="CPU x"),
    row("ringflash", 2, 1024, 0.3, mask="full"),
    row("one", 1, 1024, 1.0, layout=""),
]  # fmt: skip


def test_a_picture_is_of_the_last_run_of_each_case_and_transport():
    found = plot_ring.select(ROWS, "causal", "bf16", 128)
    panels = plot_ring.by_length(found, 2)
    points = {(plot_ring.label(row), row["s"], row["efficiency"]) for row in panels["2 GPUs"]}
    assert points == {
        ("ringflash, nvlink, zigzag", "1024", "0.9"),
        ("ringflash, nccl, zigzag", "1024", "0.8"),
        ("other, zigzag", "1024", "0.7"),
        ("ringflash, nvlink, zigzag", "512", "0.5"),
    }
    with pytest.raises(ValueError, match="nothing was measured on 8 GPUs"):
        plot_ring.by_length(found, 8)
    with pytest.raises(ValueError, match="no efficiency of causal fp16"):
        plot_ring.select(ROWS, "causal", "fp16", 128)


def test_the_scaling_curve_is_of_as_many_tokens_on_each_gpu():
    panels = plot_ring.by_ranks(plot_ring.select(ROWS, "causal", "bf16", 128))
    assert list(panels) == ["512 tokens a GPU, heads 4/2"]  # 256 were measured on 2 GPUs alone
    assert {row["ranks"] for row in panels["512 tokens a GPU, heads 4/2"]} == {"2", "4"}


@pytest.mark.parametrize("against", ["length", "ranks"])
def test_pictures_are_drawn_from_the_csv_alone(tmp_path, against):
    path = tmp_path / "bench_ring.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    plot_ring.main([against, "--csv", str(path), "--out", str(tmp_path / "new" / "picture.png")])
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")
