"""The helpers of `ringflash.testing` fail loudly: a test that leans on them can't pass by accident."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from ringflash.testing import WorkerError, Workers, random_inputs, relative_error


def sum_of_ranks(start: int) -> int:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def process_id() -> int:
    return os.getpid()


def raise_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise LookupError("the needle")
    dist.barrier()


def exit_on_first_rank() -> None:
    if dist.get_rank() == 0:
        os._exit(7)


def sleep_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(60)


def test_workers_share_a_group_and_stay_between_runs(workers):
    assert workers(2).run(sum_of_ranks, 10) == [21, 21]
    assert workers(2).run(process_id) == workers(2).run(process_id)


def test_an_exception_in_one_worker_names_its_rank_and_the_next_run_works():
    with Workers(2) as pool:
        pool.GRACE = 0.5
        with pytest.raises(WorkerError, match=r"(?s)rank 1 of 2: .*raise_on_last_rank.*LookupError: the needle"):
            pool.run(raise_on_last_rank)
        assert pool.run(sum_of_ranks, 0) == [1, 1]


def test_a_worker_that_dies_is_named():
    with Workers(2) as pool, pytest.raises(WorkerError, match="rank 0 of 2: the process ended with exit code 7"):
        pool.run(exit_on_first_rank)


def test_a_worker_that_hangs_is_named_with_its_stack():
    with Workers(2) as pool:
        pool.run(process_id)
        pool.timeout = 2.0  # from here: starting may take longer
        with pytest.raises(WorkerError, match=r"(?s)\Arank 1 of 2: no answer in 2 s.*in sleep_on_last_rank"):
            pool.run(sleep_on_last_rank)


def test_closing_ends_every_worker():
    with Workers(2) as pool:
        pids = pool.run(process_id)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_random_inputs_repeat_for_a_seed_and_differ_between_seeds():
    first, again, other = (random_inputs(2, 5, 4, 8, kv_heads=2, v_head_dim=6, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(first, other, strict=True))
    assert [tuple(x.shape) for x in first] == [(2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 6), (2, 5, 4, 6), (2, 4, 5)]


def test_relative_error_of_nan_and_of_missed_infinities_passes_no_bound():
    ref = torch.tensor([3.0, 4.0, float("-inf")])
    assert relative_error(torch.tensor([3.0, 4.5, float("-inf")]), ref) == pytest.approx(0.1)
    assert not relative_error(torch.tensor([3.0, float("nan"), float("-inf")]), ref) <= 1e9
    assert not relative_error(torch.tensor([3.0, 4.0, 0.0]), ref) <= 1e9
    assert not relative_error(torch.tensor([float("-inf"), 4.0, float("-inf")]), ref) <= 1e9
    assert not relative_error(torch.tensor([1e-9]), torch.zeros(1)) <= 1e9
    assert not relative_error(torch.tensor([float("nan")]), torch.zeros(1)) <= 1e9
    assert relative_error(torch.zeros(1), torch.zeros(1)) == 0
