"""Worker pools that the whole test run shares, and settings of the tests that search for inputs."""

import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from ringflash.testing import Workers

# PyTorch's permission for symmetric memory of several ranks on one GPU; the workers inherit it.
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")

settings.register_profile("ringflash", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("ringflash")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, default=500, help="problems that tests/test_properties.py tries")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of cases that several processes share (interpreted.py), this one's."""
    part, parts = map(int, os.environ.get("CASES", "0 1").split())
    items[:] = items[part::parts]


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], Workers]]:
    """`workers(world_size)`: that many gloo processes, started once for all tests."""
    pools: dict[int, Workers] = {}
    yield lambda world_size: pools.setdefault(world_size, Workers(world_size))
    for pool in pools.values():
        pool.close()
