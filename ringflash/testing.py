"""Help for tests of distributed attention: seeded inputs, relative error, and a pool of worker processes.

Imported by nothing in the package; meant for this package's tests and for yours. A worker runs functions that it can
import by name, and starts once for many of them:

    def rows_held(seq_len):  # at the top level of a module
        return len(ringflash.positions(seq_len, group=dist.group.WORLD))

    with Workers(4) as workers:
        assert workers.run(rows_held, 101) == [25, 26, 25, 25]
"""

import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")


class Inputs(NamedTuple):
    """One attention problem and the gradients that enter its backward pass."""

    q: Tensor  # (b, s, h, d)
    k: Tensor  # (b, key_len, g, d)
    v: Tensor  # (b, key_len, g, v_head_dim)
    dout: Tensor  # (b, s, h, v_head_dim)
    dlse: Tensor  # (b, h, s), fp32 (fp64 for fp64 inputs)


def random_inputs(
    batch: int,
    seq_len: int,
    heads: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    key_len: int | None = None,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Inputs:
    """Standard normal `(q, k, v, dout, dlse)`, the same on every rank, device and dtype (to rounding) for one seed.

    `kv_heads`, `key_len` and `v_head_dim` default to `heads`, `seq_len` and `head_dim`.
    """
    kv_heads, key_len, v_head_dim = (
        other if given is None else given
        for given, other in ((kv_heads, heads), (key_len, seq_len), (v_head_dim, head_dim))
    )
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype).to(device)

    return Inputs(
        q=normal(batch, seq_len, heads, head_dim),
        k=normal(batch, key_len, kv_heads, head_dim),
        v=normal(batch, key_len, kv_heads, v_head_dim),
        dout=normal(batch, seq_len, heads, v_head_dim),
        dlse=normal(batch, heads, seq_len, dtype=torch.promote_types(dtype, torch.float32)),
    )


def relative_error(x: Tensor, ref: Tensor) -> float:
    """`‖x - ref‖ / ‖ref‖` in fp64 over the finite entries of `ref`.

    Infinite where an infinity of `ref` (the lse of an empty row) is anything else in `x`, or where a zero `ref` is
    missed; NaN where `x` holds a NaN: neither passes a `<=`.
    """
    if x.shape != ref.shape:
        raise ValueError(f"relative_error wants equal shapes, got {tuple(x.shape)} and {tuple(ref.shape)}")
    x, ref = x.detach().double().cpu(), ref.detach().double().cpu()
    finite = ref.isfinite()
    if not torch.equal(x[~finite], ref[~finite]):
        return float("inf")
    difference, size = (x - ref)[finite].norm().item(), ref[finite].norm().item()
    if size > 0:
        return difference / size
    return difference if difference == 0 or difference != difference else float("inf")


class WorkerError(RuntimeError):
    """A function failed in a worker: says in which ranks and how, with their tracebacks."""


class Workers:
    """`world_size` processes in one process group, which stay and run function after function.

    The processes start at the first `run` and end with the `with` block (or `close`). After a failure, whose other
    ranks may be in the middle of a collective, they are killed; the next `run` starts fresh ones.

    Args:
        world_size: number of processes; rank r's default group is all of them.
        backend: of `init_process_group`. With "gloo" several ranks may use one GPU.
        timeout: seconds that one `run` may take. A collective gives up sooner, at half of it.

    Linux and macOS. Functions, arguments and results are pickled: functions by name, tensors by value (return CUDA
    tensors as `.cpu()`).
    """

    GRACE = 5.0  # seconds that the other ranks get to fail too after the first failure

    def __init__(self, world_size: int, *, backend: str = "gloo", timeout: float = 120.0) -> None:
        self.world_size = world_size
        self.backend = backend
        self.timeout = timeout
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._directory: Path | None = None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> list[Result]:
        """Call `function(*args, **kwargs)` in every worker; returns the results in rank order.

        Raises `WorkerError` when it raises or ends the process in any rank, or when a rank needs more than `timeout`
        seconds (with the stack that the rank was found in).
        """
        try:
            if not self._processes:
                self._start()
            job = pickle.dumps((function, args, kwargs))
            for pipe in self._pipes:
                pipe.send_bytes(job)
            return self._collect()
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """End the processes: politely, then not."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + self.GRACE
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0))
        self._kill()

    def _start(self) -> None:
        # One process does the imports that take seconds (torch's compiler comes with the first operator), and the
        # workers fork from it, before any thread or CUDA context exists.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", __package__ or "ringflash"])
        self._directory = Path(tempfile.mkdtemp(prefix="ringflash-workers-"))
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            settings = (rank, self.world_size, self.backend, self.timeout / 2, self._directory, theirs)
            process = context.Process(target=_worker, args=settings, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect()  # each says that it has joined the group

    def _collect(self) -> list[Any]:
        results: list[Any] = [None] * self.world_size
        failures: dict[int, str] = {}  # in the order in which they came: the first is likely the cause
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + self.timeout
        while waiting and (ready := wait(list(waiting), max(deadline - time.monotonic(), 0))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    failed, answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    self._processes[rank].join(self.GRACE)
                    failed, answer = True, f"the process ended with exit code {self._processes[rank].exitcode}"
                if failed:
                    deadline = min(deadline, time.monotonic() + self.GRACE)
                    failures[rank] = answer
                else:
                    results[rank] = answer
        if waiting and not failures:
            failures = {rank: f"no answer in {self.timeout:g} s\n{self._stack(rank)}" for rank in waiting.values()}
        if failures:
            reports = [f"rank {rank} of {self.world_size}: {report}" for rank, report in failures.items()]
            raise WorkerError("\n".join(reports))
        return results

    def _stack(self, rank: int) -> str:
        """What a worker that does not answer is doing."""
        assert self._directory is not None
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.1)
            if stack := (self._directory / f"stack-{rank}").read_text():
                return stack
        return "(and it does not say where it is)"

    def _kill(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._processes, self._pipes, self._directory = [], [], None


def _worker(rank: int, world_size: int, backend: str, timeout: float, directory: Path, pipe: Connection) -> None:
    """Join the group, then answer each job with `(failed, result or report)` until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # asks no name service who this machine is
    with open(directory / f"stack-{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        torch.set_num_threads(1)
        _answer(
            pipe,
            lambda: dist.init_process_group(
                backend,
                init_method=f"file://{directory}/store",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            ),
        )
        while True:
            try:
                job = pipe.recv_bytes()
            except (EOFError, ConnectionError):
                break
            _answer(pipe, lambda job=job: _call(job))
        dist.destroy_process_group()


def _call(job: bytes) -> Any:
    function, args, kwargs = pickle.loads(job)
    return function(*args, **kwargs)


def _answer(pipe: Connection, job: Callable[[], Any]) -> None:
    try:
        answer = pickle.dumps((False, job()))
    except Exception:
        answer = pickle.dumps((True, traceback.format_exc()))
    pipe.send_bytes(answer)
