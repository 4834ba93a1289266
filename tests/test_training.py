"""The training script: what can go wrong at shard edges, between ranks and between runs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import ringflash
import train_long_context as script
from ringflash.testing import Workers
from train_long_context import END, IGNORE, Corpus

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
TEXT = b"".join(b"def f%d(x):\n    return x + %d\n" % (i, i) for i in range(400))
TINY = ("--layers", "2", "--dim", "32", "--heads", "2", "--kv-heads", "1", "--seq-len", "101", "--held-out", "2")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("text")
    (directory / "functions.py").write_bytes(TEXT)
    (directory / "more").mkdir()
    (directory / "more" / "words.txt").write_bytes(b"two words\n" * 300)
    (directory / "more" / "picture").write_bytes(b"\x89\0\0\1" * 300)
    return directory


def train(*argv: str) -> list[float]:
    """Run the script in this process's group; the loss of every step."""
    args = script.parse_args([*TINY, "--device", "cpu", *argv])
    script.train(args, CPU, script.make_mesh(args, CPU))
    dist.barrier()  # rank 0 writes the log
    return losses(args.out)


def losses(out: Path) -> list[float]:
    return [float(row["loss"]) for row in script.read_log(out / "loss.csv")]


# --- data


def test_every_token_is_labelled_with_the_next_byte_except_the_end_of_a_document():
    window = torch.tensor([[97, 98, END, 99, 100], [END, END, 101, 102, END]], dtype=torch.uint8)
    tokens, labels = script.label_next_bytes(window)
    assert tokens.tolist() == [[97, 98, END, 99], [END, END, 101, 102]]
    assert labels.tolist() == [[98, END, IGNORE, 100], [IGNORE, IGNORE, 102, END]]


def test_a_training_sequence_depends_on_seed_step_and_index_alone():
    corpus, again = Corpus(TEXT, 101, seed=0), Corpus(TEXT, 101, seed=0)
    whole, labels = corpus.training_batch(7, range(4))
    again.training_batch(3, range(2))  # another history
    replicas = [again.training_batch(7, range(replica, 4, 2)) for replica in range(2)]
    assert torch.equal(whole, torch.stack([replicas[i % 2][0][i // 2] for i in range(4)]))
    assert torch.equal(labels, torch.stack([replicas[i % 2][1][i // 2] for i in range(4)]))
    others = [corpus.training_batch(8, range(4)), Corpus(TEXT, 101, seed=1).training_batch(7, range(4))]
    assert not any(torch.equal(whole, tokens) for tokens, _ in others)
    assert len({tuple(row) for row in whole.tolist()}) == 4


def test_held_out_bytes_are_never_trained_on():
    stream = bytes(range(1, 201)) + bytes(range(201, 255))  # every byte is its own position
    corpus = Corpus(stream, 53, seed=0)
    trained = {int(x) for step in range(2000) for x in corpus.training_batch(step, [0])[1].flatten()}
    held_out = {int(x) for x in corpus.held_out_batch(0, 1)[0].flatten()}
    assert max(trained) == 200 and min(held_out) == 201


def test_held_out_sequences_reach_from_the_first_byte_to_the_last():
    corpus = Corpus(TEXT * 4, 101, seed=0)
    assert torch.equal(corpus.held_out_batch(0, 3)[0][0], corpus.held_out[:101].long())
    assert torch.equal(corpus.held_out_batch(2, 3)[1][0], corpus.held_out[-101:].long())


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match=r"seq_len=53 needs 108 bytes of text, half of it held out; got 107"):
        Corpus(bytes(107), 53, seed=0)


def test_text_is_found_in_files_and_directories_and_binaries_are_left_out(text: Path):
    stream = script.read_stream(script.find_text([text]))
    assert sorted(stream.split(b"\0")) == sorted([b"", TEXT, b"two words\n" * 300])
    assert script.find_text([text / "functions.py"]) == [text / "functions.py"]
    with pytest.raises(ValueError, match="nowhere does not exist"):
        script.find_text([text / "nowhere"])


def test_the_default_text_is_the_standard_library():
    names = {file.name for file in script.find_text([])}
    assert {"argparse.py", "statistics.py"} <= names and "train_long_context.py" not in names


# --- the loss of shards


def compare_with_plain(layout: str, seq_len: int) -> tuple[float, float, str]:
    torch.manual_seed(0)
    model = script.Transformer(layers=2, dim=32, heads=2, kv_heads=1, rope_base=10_000.0)
    tokens, labels = Corpus(TEXT, seq_len, seed=0).training_batch(0, range(2))
    labels[0, seq_len // 2] = IGNORE  # ranks hold unequal numbers of labels
    valid = (labels != IGNORE).sum()
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    loss = script.sharded_loss(model, tokens, labels, group=mesh.get_group("cp"), layout=layout) / valid
    loss.backward()
    loss = loss.detach()
    script.sum_over(None, [loss, *(w.grad for w in model.parameters() if w.grad is not None)])
    return script.verify(model, loss, tokens, labels, valid, mesh.get_group("dp"))


@pytest.mark.parametrize("seq_len", [2, 64, 101])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("world", [2, 3])
def test_shards_add_up_to_the_loss_and_gradients_of_the_whole(
    workers: Callable[[int], Workers], world: int, layout: str, seq_len: int
):
    for loss_error, gradient_error, name in workers(world).run(compare_with_plain, layout, seq_len):
        assert loss_error <= script.tolerated_error("float32")
        assert gradient_error <= script.tolerated_error("float32"), name


@pytest.mark.parametrize("options", [["--layout", "striped"], ["--checkpoint-activations"], ["--dtype", "bfloat16"]])
def test_verify_passes(workers: Callable[[int], Workers], text: Path, tmp_path: Path, options: list[str]):
    argv = ["--data", str(text), "--out", str(tmp_path), "--steps", "2", "--verify", "2", *options]
    workers(2).run(train, *argv)


def row_numbers(seq_len: int, *, device: torch.device, **_) -> Tensor:
    """Positions as they would be if each shard were a sequence of its own."""
    return torch.arange(len(ringflash.positions(seq_len, **_)), device=device)


def attend_locally(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_) -> Tensor:
    """The ring that never fires."""
    return ringflash.flash_attention(q, k, v, causal=causal)  # pyright: ignore[reportReturnType]


def shift_after_sharding(x: Tensor, **where) -> Tensor:
    """Shards whose last label is missing because its token lies on another rank."""
    rows = ringflash.shard(x, **where)
    if IGNORE in x:
        rows[:, -1] = IGNORE
    return rows


def failure(*argv: str, **mistakes: Callable) -> str:
    """What a run that must fail says, with some functions of the script replaced."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Exception) as caught:
        for name, mistake in mistakes.items():
            patch.setattr(script, name, mistake)
        train(*argv)
    return f"{caught.typename}: {caught.value}"


@pytest.mark.parametrize(
    "mistake",
    [{"positions": row_numbers}, {"ring_attention": attend_locally}, {"shard": shift_after_sharding}],
    ids=lambda mistake: next(iter(mistake.values())).__name__,
)
def test_verify_catches(workers: Callable[[int], Workers], text: Path, tmp_path: Path, mistake: dict[str, Callable]):
    argv = ["--data", str(text), "--out", str(tmp_path), "--steps", "2", "--verify", "2"]
    for message in workers(2).run(failure, *argv, **mistake):
        assert message.startswith("VerificationError: step 0: relative error of the loss")


# --- runs


def test_the_losses_are_the_same_on_every_mesh(workers: Callable[[int], Workers], text: Path, tmp_path: Path):
    argv = ["--data", str(text), "--steps", "4", "--batch", "4"]
    alone = workers(1).run(train, *argv, "--out", str(tmp_path / "1"))[0]
    for cp in ("1", "2", "4"):
        curves = workers(4).run(train, *argv, "--cp", cp, "--verify", "4", "--out", str(tmp_path / f"4-{cp}"))
        for curve in curves:
            assert curve == pytest.approx(alone, rel=1e-5)


def test_a_resumed_run_continues_as_if_never_interrupted(workers: Callable[[int], Workers], text: Path, tmp_path: Path):
    argv = ["--data", str(text), "--steps", "6", "--save-every", "3"]
    whole = workers(2).run(train, *argv, "--out", str(tmp_path / "whole"))[0]
    assert len(whole) == 6 and len(set(whole)) == 6

    # Interrupted in its sixth step, while it wrote a checkpoint.
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    (tmp_path / "half" / "checkpoints" / "step-00000006" / ".metadata").unlink()
    assert workers(2).run(train, *argv, "--out", str(tmp_path / "half"), "--resume")[0] == whole

    # From a named checkpoint, into a log of its own.
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-00000003"
    assert workers(2).run(train, *argv, "--out", str(tmp_path / "new"), "--resume", str(checkpoint))[0] == whole[3:]


def test_a_run_that_cannot_resume_says_why(workers: Callable[[int], Workers], text: Path, tmp_path: Path):
    argv = ["--data", str(text), "--steps", "1", "--save-every", "1", "--out"]
    done, other = tmp_path / "done", tmp_path / "other"
    workers(2).run(train, *argv, str(done))
    for out, options, expected in (
        (done, [], f"{done}/checkpoints holds another run's checkpoints: give --resume, or another --out"),
        (done, ["--resume", "--lr", "0.1"], "step-00000001 is of another run: lr was 0.002, is 0.1"),
        (other, ["--resume"], f"nothing to resume: no checkpoint in {other}/checkpoints"),
    ):
        for message in workers(2).run(failure, *argv, str(out), *options):
            assert message.startswith("ValueError: ") and message.endswith(expected)


def failure_with_own_seed(*argv: str) -> str:
    return failure(*argv, "--seed", str(dist.get_rank()))


def test_ranks_that_were_started_differently_are_told(workers: Callable[[int], Workers], text: Path, tmp_path: Path):
    for message in workers(2).run(failure_with_own_seed, "--data", str(text), "--out", str(tmp_path)):
        assert message == "ValueError: seed is 0 on rank 0, 1 on rank 1"


def test_meshes_that_do_not_fit_are_refused(workers: Callable[[int], Workers], text: Path):
    for message in workers(3).run(failure, "--data", str(text), "--cp", "2"):
        assert message == "ValueError: --cp 2 does not divide the 3 ranks"
    for message in workers(3).run(failure, "--data", str(text), "--cp", "1", "--batch", "4"):
        assert message == "ValueError: --batch 4 does not divide over 3 replicas"


def test_plain_python_trains_writes_its_files_and_reports(text: Path, tmp_path: Path):
    arguments = [*TINY, "--device", "cpu", "--data", text, "--out", tmp_path / "run", "--steps", "40", "--warmup", "4"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "train_long_context.py"), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    curve = losses(tmp_path / "run")
    assert len(curve) == 40 and sum(curve[-10:]) / 10 < 0.75 * curve[0]
    assert f"{curve[0]:.3f} at the first step" in done.stdout
    assert str(tmp_path / "run" / "loss.png") in done.stdout
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "run" / "config.json").is_file()
