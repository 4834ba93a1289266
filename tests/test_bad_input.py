"""Bad input gets an error on every rank that names the argument, what was seen and what is wanted; never a hang.

A case changes good arguments into bad ones. The workers apply it on all ranks or on one, call, say which error they
saw, and then make a correct call in the same group.
"""

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from oracle import dense, world
from torch.distributed.device_mesh import init_device_mesh

import ringflash
from ringflash.testing import Inputs, random_inputs, relative_error

Arguments = dict[str, Any]
ROWS = 6  # of each rank


class Case(NamedTuple):
    change: Callable[[Arguments], Arguments]
    message: str  # a regular expression
    error: type[Exception] = ValueError


def good_arguments() -> Arguments:
    q, k, v, *_ = random_inputs(1, ROWS, 4, 16, kv_heads=2)
    return {"q": q, "k": k, "v": v}


def option(message: str, error: type[Exception] = ValueError, **options: Any) -> Case:
    return Case(lambda arguments: options, message, error)


def tensors(message: str, change: Callable[..., Arguments]) -> Case:
    return Case(lambda arguments: change(**arguments), message)


# What both attention functions refuse
CASES = {
    "q of 3 dims": tensors(r"q must be \(batch.*\(6, 4, 16\)", lambda q, k, v: {"q": q[0]}),
    "q that is no tensor": option(r"q must be a Tensor, got NoneType", q=None),
    "k of 5 dims": tensors(r"k must be \(batch.*\(1, 1, 6, 2, 16\)", lambda q, k, v: {"k": k[None]}),
    "v of 2 dims": tensors(r"v must be \(batch.*\(2, 16\)", lambda q, k, v: {"v": v[0, 0]}),
    "mixed dtypes": tensors(r"one dtype.*float32.*float16", lambda q, k, v: {"k": k.half()}),
    "v of another dtype": tensors(r"one dtype.*float32.*bfloat16", lambda q, k, v: {"v": v.bfloat16()}),
    "integers": tensors(r"float.*int64", lambda q, k, v: {"q": q.long(), "k": k.long(), "v": v.long()}),
    "mixed devices": tensors(r"one device.*cpu.*meta", lambda q, k, v: {"v": v.to("meta")}),
    "batch sizes": tensors(r"one batch size.*1, 2 and 1", lambda q, k, v: {"k": torch.cat([k, k])}),
    "k and v lengths": tensors(r"one sequence length.*6 and 5", lambda q, k, v: {"v": v[:, :5]}),
    "k and v heads": tensors(r"one number of heads.*2 and 1", lambda q, k, v: {"v": v[:, :, :1]}),
    "heads that don't divide": tensors(
        r"k's heads must divide q's.*3 and 4",
        lambda q, k, v: {"k": k.repeat(1, 1, 2, 1)[:, :, :3], "v": v.repeat(1, 1, 2, 1)[:, :, :3]},
    ),
    "fewer query heads": tensors(r"k's heads must divide q's.*2 and 1", lambda q, k, v: {"q": q[:, :, :1]}),
    "no key heads": tensors(r"k's heads.*0 and 4", lambda q, k, v: {"k": k[:, :, :0], "v": v[:, :, :0]}),
    "q and k head dims": tensors(r"one head dim.*32 and 16", lambda q, k, v: {"q": torch.cat([q, q], -1)}),
    "head dim too small": tensors(
        r"head dim.*multiple of 8.*16 to 256.*8 in q and k", lambda q, k, v: {"q": q[..., :8], "k": k[..., :8]}
    ),
    "head dim no multiple of 8": tensors(r"head dim.*multiple of 8.*12 in v", lambda q, k, v: {"v": v[..., :12]}),
    "head dim too large": tensors(
        r"head dim.*16 to 256.*264 in v", lambda q, k, v: {"v": v.repeat(1, 1, 1, 17)[..., :264]}
    ),
    "unknown backend": option(r"backend must be one of .*torch.*triton.*'cudnn'", backend="cudnn"),
    "triton on a CPU": option(r'backend="triton".*(GPU|not installed).*', backend="triton"),
    "dropout of 1": option(r"dropout_p must be in \[0, 1\), got 1.0", dropout_p=1.0),
    "dropout below 0": option(r"dropout_p must be in \[0, 1\), got -0.1", dropout_p=-0.1),
    "dropout of NaN": option(r"dropout_p must be in \[0, 1\), got nan", dropout_p=float("nan")),
    "softcap of 0": option("softcap must be positive and finite, got 0", softcap=0.0),
    "softcap near 0": option("softcap must be from 1e-9 to 1e9, got 1e-18", softcap=1e-18),
    "softcap in place of none": option("softcap must be from 1e-9 to 1e9, got 1e[+]38", softcap=1e38),
    "softcap that is no number": option("softcap must be positive and finite, got 30", softcap="30"),
    "slopes of another batch size": option(
        r"alibi_slopes must be.*\(4,\) or \(1, 4\).*got torch.float32 \(3, 4\)", alibi_slopes=torch.zeros(3, 4)
    ),
    "slopes that are no tensor": option("alibi_slopes must be a floating-point Tensor.*list", alibi_slopes=[0.5] * 4),
    "slopes elsewhere": option("alibi_slopes must be on q's device", alibi_slopes=torch.zeros(4, device="meta")),
    "slopes that learn": option(
        "alibi_slopes must not require a gradient", alibi_slopes=torch.zeros(4, requires_grad=True)
    ),
    "sinks of another number of heads": option(
        r"sinks must be.*\(4,\).*got torch.float32 \(2,\)", sinks=torch.zeros(2)
    ),
    "sinks of integers": option("sinks must be.*int64", sinks=torch.zeros(4).long()),
    "sinks that are no tensor": option("sinks must be a floating-point Tensor.*got float", sinks=0.0),
    "sinks elsewhere": option("sinks must be on q's device cpu, got meta", sinks=torch.zeros(4, device="meta")),
    "cu_seqlens that are no tensor": option("cu_seqlens must be a Tensor, got list", cu_seqlens=[0, ROWS]),
    "cu_seqlens of floats": option("cu_seqlens must be int32 or int64.*float32", cu_seqlens=torch.tensor([0.0, 6.0])),
    "cu_seqlens of two dims": option(r"cu_seqlens must.*\(1, 2\)", cu_seqlens=torch.tensor([[0, ROWS]])),
    "cu_seqlens past 0": option("cu_seqlens must start at 0", cu_seqlens=torch.tensor([1, ROWS])),
    "cu_seqlens that go back": option("cu_seqlens must ascend.* 5 before 3", cu_seqlens=torch.tensor([0, 5, 3, ROWS])),
    "cu_seqlens of another length": option(
        r"cu_seqlens must end at the sequence length \d+, got 5", cu_seqlens=torch.tensor([0, 5])
    ),
    "a mask of another length": option(
        "cu_seqlens must end at the sequence.*got 5", mask=ringflash.Mask(cu_seqlens=[0, 5])
    ),
    "mask that is no Mask": option("mask must be a ringflash.Mask, got Tensor", mask=torch.ones(6, 6).bool()),
    "mask and causal": option("mask takes the place of causal", mask=ringflash.Mask(), causal=True),
    "mask and window": option("mask takes the place of.*window", mask=ringflash.Mask(), window=(1, 1)),
    "mask and cu_seqlens": option(
        "mask takes the place of.*cu_seqlens", mask=ringflash.Mask(), cu_seqlens=torch.tensor([0, ROWS])
    ),
    "window of one side": option(r"window must be \(left, right\).*\(3,\)", window=(3,)),
    "window that is a number": option(r"window must be \(left, right\).*3", window=3),
    "window below -1": option(r"window.*>= 0.*-1.*\(-2, 0\)", window=(-2, 0)),
    "window of fractions": option(r"window sides must be integers or None, got \(3.5, 0\)", window=(3.5, 0)),
    "scale of 0": option(r"scale must be positive.*0.0", scale=0.0),
    "scale of NaN": option(r"scale must be positive and finite, got nan", scale=float("nan")),
}

# What only ring_attention refuses. Its good calls have 3 ranks of 6 rows.
RING_CASES = {
    "unknown layout": option(
        r"layout must be one of .*balanced.*contiguous.*striped.*zigzag.*'spiral'", layout="spiral"
    ),
    "balanced without a mask": option(r'layout="balanced" wants layout_mask=Mask', layout="balanced"),
    "layout_mask of another layout": option(
        "layout_mask is for the layouts balanced.* alone", layout_mask=ringflash.Mask()
    ),
    "by document without documents": option(
        "wants a layout_mask with cu_seqlens", layout="zigzag-by-document", layout_mask=ringflash.Mask()
    ),
    "layout_mask that is no Mask": option("layout_mask must be a ringflash.Mask", layout="balanced", layout_mask=True),
    "layout_mask of another length": option(
        r"cu_seqlens must end at the sequence length \d+, got 7",
        layout="balanced",
        layout_mask=ringflash.Mask(cu_seqlens=[0, 7]),
    ),
    "queries of their own": option(
        "cu_seqlens_q: it is self-attention", mask=ringflash.Mask(cu_seqlens=[0, 3, 6], cu_seqlens_q=[0, 4, 6])
    ),
    "unknown transport": option(r"transport must be one of .*gloo.*nccl.*'mpi'", transport="mpi"),
    "nccl on a CPU": option(r"transport='nccl' can't move cpu tensors", transport="nccl"),
    "nvlink on a CPU": option(r"transport='nvlink' can't move cpu tensors", transport="nvlink"),
    "negative seq_len": option(r"seq_len must be >= 0, got -1", seq_len=-1),
    "seq_len that is no integer": option(r"seq_len must be an integer, got 18.0", seq_len=18.0),
    "rows that don't fit seq_len": option(r"zigzag gives rank \d of \d \d+ rows of seq_len=4, got 6", seq_len=4),
    "keys of another length": tensors(
        r"zigzag gives rank \d of \d 6 rows of seq_len=\d+, got 5 in k", lambda q, k, v: {"k": k[:, 1:], "v": v[:, 1:]}
    ),
}

# What is good on each rank alone, but not beside the good arguments of the others
DISAGREEMENTS = {
    "batch": tensors(
        r"b: 1 \(ranks 0, 2\), 2 \(rank 1\)",
        lambda q, k, v: {"q": torch.cat([q, q]), "k": torch.cat([k, k]), "v": torch.cat([v, v])},
    ),
    "rows": tensors(
        r"seq_len: 18 \(ranks 0, 2\), 15 \(rank 1\)", lambda q, k, v: {"q": q[:, :5], "k": k[:, :5], "v": v[:, :5]}
    ),
    "query heads": tensors(r"heads: 4 \(ranks 0, 2\), 2 \(rank 1\)", lambda q, k, v: {"q": q[:, :, :2]}),
    "key heads": tensors(
        r"kv_heads: 2 \(ranks 0, 2\), 1 \(rank 1\)", lambda q, k, v: {"k": k[:, :, :1], "v": v[:, :, :1]}
    ),
    "head dim": tensors(
        r"d: 16 \(ranks 0, 2\), 32 \(rank 1\)", lambda q, k, v: {"q": torch.cat([q, q], -1), "k": torch.cat([k, k], -1)}
    ),
    "v's head dim": tensors(r"d_v: 16 \(ranks 0, 2\), 32 \(rank 1\)", lambda q, k, v: {"v": torch.cat([v, v], -1)}),
    "dtype": tensors(
        r"dtype: float32 \(ranks 0, 2\), bfloat16 \(rank 1\)",
        lambda q, k, v: {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16()},
    ),
    "layout": option(r"layout: zigzag \(ranks 0, 2\), striped \(rank 1\)", layout="striped"),
    "seq_len": option(r"seq_len: 18 \(ranks 0, 2\), 17 \(rank 1\)", seq_len=17),
    "causal": option(r"causal: False \(ranks 0, 2\), True \(rank 1\)", causal=True),
    "window": option(r"window: \(-1,-1\) \(ranks 0, 2\), \(4,-1\) \(rank 1\)", window=(4, None)),
    "documents": option(r"documents: none \(ranks 0, 2\), 2:\w+ \(rank 1\)", cu_seqlens=torch.tensor([0, 7, 18])),
    "prefix": option(r"prefix: 0 \(ranks 0, 2\), 3 \(rank 1\)", mask=ringflash.Mask(causal=True, prefix=3)),
    "chunk": option(r"chunk: 0 \(ranks 0, 2\), 3 \(rank 1\)", mask=ringflash.Mask(chunk=3)),
    "layout_mask": option(
        r"layout_mask: None \(ranks 0, 2\), .* \(rank 1\)", layout="balanced", layout_mask=ringflash.Mask(chunk=3)
    ),
    "scale": option(r"scale: 0.25 \(ranks 0, 2\), 0.5 \(rank 1\)", scale=0.5),
    "softcap": option(r"softcap: None \(ranks 0, 2\), 3.0 \(rank 1\)", softcap=3),
    "slopes": option(r"alibi_slopes: none \(ranks 0, 2\), 4xfloat32 \(rank 1\)", alibi_slopes=torch.ones(4)),
    "sinks": option(r"sinks: none \(ranks 0, 2\), 4xfloat32 \(rank 1\)", sinks=torch.ones(4)),
    "dropout": option(r"dropout_p: 0.0 \(ranks 0, 2\), 0.5 \(rank 1\)", dropout_p=0.5),
}

RING_TABLES = {"common": CASES, "ring": RING_CASES, "disagreements": DISAGREEMENTS}


def check_good_call() -> None:
    """The group still works: attention over the same rows on every rank is that over one rank's rows, repeated."""
    arguments = good_arguments()
    world_size = dist.get_world_size()
    out = ringflash.ring_attention(**arguments, group=world(), layout="contiguous")
    assert isinstance(out, torch.Tensor)
    q, k, v = (x.repeat(1, world_size, 1, 1) for x in arguments.values())
    expected = dense(Inputs(q, k, v, torch.zeros_like(q), torch.zeros(1, 4, q.shape[1])))
    assert relative_error(out, expected.out[:, :ROWS]) <= 1e-5


def errors_seen(table: str, bad_ranks: list[int]) -> dict[str, tuple[str, str]]:
    """The error of each case that this rank saw: its type and its words."""
    seen = {}
    for name, case in RING_TABLES[table].items():
        arguments = good_arguments()
        if dist.get_rank() in bad_ranks:
            arguments |= case.change(arguments)
        try:
            ringflash.ring_attention(**arguments, group=world())
            seen[name] = ("no error", "")
        except Exception as error:
            seen[name] = (type(error).__name__, str(error))
        check_good_call()
    return seen


@pytest.mark.parametrize("name", CASES)
def test_flash_attention_names_what_is_wrong(name):
    case = CASES[name]
    arguments = good_arguments()
    arguments |= case.change(arguments)
    with pytest.raises(case.error, match=case.message):
        ringflash.flash_attention(**arguments)


def test_cu_seqlens_of_fewer_queries_than_keys_are_named_as_they_were_given():
    q, k, v = good_arguments().values()
    with pytest.raises(ValueError, match="cu_seqlens must end at the number of queries 4, got 6"):
        ringflash.flash_attention(q[:, :4], k, v, cu_seqlens=torch.tensor([0, 3, 6]))


@pytest.mark.parametrize("table", ["common", "ring"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_of_a_ring_names_what_all_passed(workers, world_size, table):
    for seen in workers(world_size).run(errors_seen, table, list(range(world_size))):
        for name, case in RING_TABLES[table].items():
            kind, words = seen[name]
            assert kind == case.error.__name__ and re.search(case.message, words), f"{name}: {kind}: {words}"


@pytest.mark.parametrize("table", ["common", "ring"])
@pytest.mark.parametrize("bad_rank", [0, 2])
def test_every_rank_of_a_ring_names_what_one_passed(workers, bad_rank, table):
    for rank, seen in enumerate(workers(3).run(errors_seen, table, [bad_rank])):
        for name, case in RING_TABLES[table].items():
            kind, words = seen[name]
            assert kind == case.error.__name__ and re.search(case.message, words), f"{name}: {kind}: {words}"
            assert rank == bad_rank or f"rank {bad_rank} " in words, f"{name}: {words}"


def test_every_rank_of_a_ring_names_who_disagrees(workers):
    for seen in workers(3).run(errors_seen, "disagreements", [1]):
        for name, case in DISAGREEMENTS.items():
            kind, words = seen[name]
            assert kind == "ValueError" and "disagree" in words, f"{name}: {kind}: {words}"
            assert re.search(case.message, words), f"{name}: {words}"


def wait_for_a_rank_that_stays_away() -> tuple[float, str]:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    assert isinstance(group, dist.ProcessGroup)
    started = time.monotonic()
    try:
        if dist.get_rank() == 0:
            ringflash.ring_attention(**good_arguments(), group=group)
    except RuntimeError as error:
        return time.monotonic() - started, str(error)
    return 0.0, "stayed away"


def test_a_rank_that_never_calls_is_an_error_within_the_timeout(workers):
    (seconds, words), _ = workers(2).run(wait_for_a_rank_that_stays_away)
    assert seconds < 10 and re.search(r"waiting for every rank of the group to make the same call failed", words), words


def refuse_in_a_compiled_call(bad: dict[str, Any]) -> str:
    ring: Callable[..., Any] = torch.compile(ringflash.ring_attention, backend="eager")
    try:
        ring(**good_arguments(), group=world(), **(bad if dist.get_rank() == 1 else {}))
    except Exception as error:
        check_good_call()
        return str(error)
    return "no error"


@pytest.mark.parametrize("bad", [{"softcap": -3.0}, {"seq_len": 5}])
def test_a_compiled_call_is_refused_like_any_other(workers, bad):
    first, second = workers(2).run(refuse_in_a_compiled_call, bad)
    assert "softcap must be positive" in second or "rows of seq_len=5" in second, second
    assert "rank 1 of the group refused" in first, first


def disagree_after_agreeing() -> list[str]:
    """Calls that went well before don't hide that one rank now passes something else, known too."""
    words = []
    for causal_here in (True, False):
        for causal in (True, False):
            ringflash.ring_attention(**good_arguments(), group=world(), causal=causal)
        try:
            causal = causal_here if dist.get_rank() == 0 else not causal_here
            ringflash.ring_attention(**good_arguments(), group=world(), causal=causal)
        except ValueError as error:
            words.append(str(error))
    return words


def test_ranks_that_agreed_before_are_seen_to_disagree(workers):
    for words in workers(2).run(disagree_after_agreeing):
        assert len(words) == 2 and all("disagree" in said for said in words)


def agree_on_one_in_two_kinds() -> None:
    ringflash.ring_attention(**good_arguments(), group=world(), window=((1, 0), (True, 0))[dist.get_rank()])


def test_a_window_of_true_is_one_of_1(workers):
    """Whichever of them a rank passed first: they are one key where plans and words are kept."""
    workers(2).run(agree_on_one_in_two_kinds)


def test_unknown_keywords_are_type_errors(workers):
    arguments = good_arguments()
    with pytest.raises(TypeError, match="casual"):
        ringflash.flash_attention(**arguments, casual=True)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        ringflash.flash_attention(*arguments.values(), True)  # pyright: ignore[reportCallIssue]
    for words in workers(2).run(misspell_everything):
        assert all("casual" in said for said in words) and len(words) == 4


def misspell_everything() -> list[str]:
    arguments, words = good_arguments(), []
    functions: list[tuple[Callable, tuple]] = [
        (ringflash.ring_attention, tuple(arguments.values())),
        (ringflash.shard, (arguments["q"],)),
        (ringflash.unshard, (arguments["q"],)),
        (ringflash.positions, (8,)),
    ]
    for function, positional in functions:
        try:
            function(*positional, group=world(), casual=True)
        except TypeError as error:
            words.append(str(error))
    check_good_call()
    return words


# Groups -----------------------------------------------------------------------------------------------------------


def errors_of_bad_groups() -> list[str]:
    x = torch.randn(1, 4, 2, 16)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    subgroup = dist.new_group([1, 3])
    bad = [None, 3, "sequence", [0, 1], square]
    if dist.get_rank() in (0, 2):
        bad.append(subgroup)
    words = []
    for group in bad:
        for call in (
            lambda group: ringflash.ring_attention(x, x, x, group=group),
            lambda group: ringflash.shard(x, group=group),
            lambda group: ringflash.unshard(x, group=group),
            lambda group: ringflash.positions(8, group=group),
        ):
            try:
                call(group)
                words.append(f"no error for {group}")
            except ValueError as error:
                words.append(str(error))
    check_good_call()
    return words


def test_what_is_no_group_of_this_process_is_refused(workers):
    for words in workers(4).run(errors_of_bad_groups):
        assert len(words) >= 20
        for said in words:
            assert re.search(r"group must be a ProcessGroup or a 1-D DeviceMesh, got|not in the group", said), said


# shard, unshard, positions ----------------------------------------------------------------------------------------

SHARD_CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "shard: unknown layout": (
        lambda: ringflash.shard(torch.zeros(1, 8), group=world(), layout="spiral"),
        r"layout must be one of .*'spiral'",
    ),
    "shard: dim": (
        lambda: ringflash.shard(torch.zeros(1, 8), group=world(), dim=2),
        r"dim must be in \[-2, 2\).*got 2",
    ),
    "shard: scalar": (lambda: ringflash.shard(torch.zeros(()), group=world(), dim=0), r"dim must be in .*got 0"),
    "unshard: unknown layout": (
        lambda: ringflash.unshard(torch.zeros(1, 8), group=world(), layout="spiral"),
        r"layout must be one of .*'spiral'",
    ),
    "unshard: dim": (lambda: ringflash.unshard(torch.zeros(1, 8), group=world(), dim=-3), r"dim must be in .*got -3"),
    "unshard: rows": (
        lambda: ringflash.unshard(torch.zeros(1, 8), group=world(), seq_len=9),
        r"zigzag gives rank \d of 3 \d rows of seq_len=9, got 8",
    ),
    "positions: unknown layout": (
        lambda: ringflash.positions(8, group=world(), layout="spiral"),
        r"layout must be one of",
    ),
    "positions: documents": (
        lambda: ringflash.positions(8, group=world(), cu_seqlens=[0, 9]),
        r"cu_seqlens must end at the sequence length 8, got 9",
    ),
    "shard: balanced": (
        lambda: ringflash.shard(torch.zeros(1, 8), group=world(), layout="balanced"),
        "wants layout_mask=",
    ),
    "unshard: layout_mask": (
        lambda: ringflash.unshard(torch.zeros(1, 2), group=world(), layout_mask=ringflash.Mask()),
        "alone",
    ),
    "positions: negative": (lambda: ringflash.positions(-1, group=world()), r"seq_len must be >= 0, got -1"),
}


def errors_of_sharding() -> dict[str, str]:
    words = {}
    for name, (call, _) in SHARD_CASES.items():
        try:
            call()
            words[name] = "no error"
        except ValueError as error:
            words[name] = str(error)
    check_good_call()
    return words


def test_shard_unshard_and_positions_name_what_is_wrong(workers):
    for seen in workers(3).run(errors_of_sharding):
        for name, (_, message) in SHARD_CASES.items():
            assert re.search(message, seen[name]), f"{name}: {seen[name]}"


UNSHARD_DISAGREEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "one rank's rows don't fit": ({"x": torch.zeros(1, 5, 2), "seq_len": 18}, r"rank 1.*6 rows of seq_len=18, got 5"),
    "rows that each fit": ({"x": torch.zeros(1, 5, 2)}, r"seq_len: 18 \(ranks 0, 2\), 15 \(rank 1\)"),
    "layout": ({"layout": "striped"}, r"layout: zigzag \(ranks 0, 2\), striped \(rank 1\)"),
    "layout_mask": (
        {"layout": "balanced", "layout_mask": ringflash.Mask(chunk=3)},
        r"layout: zigzag \(ranks 0, 2\), balanced \(rank 1\)",
    ),
    "dtype": ({"x": torch.zeros(1, 6, 2).double()}, r"dtype: float32 \(ranks 0, 2\), float64 \(rank 1\)"),
    "other dims": ({"x": torch.zeros(1, 6, 3)}, r"other_dims: 1x2 \(ranks 0, 2\), 1x3 \(rank 1\)"),
    "dim": ({"x": torch.zeros(6, 1, 2), "dim": 0}, r"dim: 1 \(ranks 0, 2\), 0 \(rank 1\)"),
}


def errors_of_unsharding() -> dict[str, str]:
    words = {}
    for name, (change, _) in UNSHARD_DISAGREEMENTS.items():
        arguments: Arguments = {"x": torch.zeros(1, 6, 2)} | (change if dist.get_rank() == 1 else {})
        started = time.monotonic()
        try:
            ringflash.unshard(**arguments, group=world())
            words[name] = "no error"
        except ValueError as error:
            words[name] = str(error)
        assert time.monotonic() - started < 10, name
        check_good_call()
    return words


def test_every_rank_that_unshards_names_who_disagrees(workers):
    for seen in workers(3).run(errors_of_unsharding):
        for name, (_, message) in UNSHARD_DISAGREEMENTS.items():
            assert re.search(message, seen[name]), f"{name}: {seen[name]}"


def call_something_else_on_rank_1() -> str:
    try:
        if dist.get_rank() == 1:
            ringflash.unshard(torch.zeros(1, 6, 2), group=world())
        else:
            ringflash.ring_attention(**good_arguments(), group=world())
    except ValueError as error:
        check_good_call()
        return str(error)
    return "no error"


def test_ranks_that_call_different_functions_are_named(workers):
    for words in workers(3).run(call_something_else_on_rank_1):
        assert re.search(r"call: ring_attention \(ranks 0, 2\), unshard \(rank 1\)", words), words


@pytest.mark.parametrize(("name", "value"), [("dropout_p", None), ("dropout_p", "0.1"), ("scale", "x")])
def test_numbers_that_are_none_are_refused_by_name(name, value):
    q, k, v = random_inputs(1, 8, 2, 16)[:3]
    with pytest.raises(ValueError, match=f"{name} must be"):
        ringflash.flash_attention(q, k, v, **{name: value})


def test_a_missing_group_says_what_to_call_first():
    q, k, v = random_inputs(1, 8, 2, 16)[:3]
    with pytest.raises(ValueError, match=r"init_process_group\(\) first"):
        ringflash.ring_attention(q, k, v, group=None)  # pyright: ignore[reportArgumentType, reportCallIssue]
