"""Launches that recur: what they pass the first time, and afterwards."""

from typing import Any

import torch

from ringflash.launch import Kind, Launch


class Box:
    """As triton's descriptors: attributes, and a constructor that is not called again."""

    def __init__(self, base: torch.Tensor, rows: int):
        self.base, self.rows = base, rows


class Kernel:
    """A jitted kernel, as far as a launch sees it; `compiles` says whether it has a compiled form."""

    arg_names = ("desc", "out", "table", "n", "BLOCK")

    def __init__(self, *, compiles: bool = True):
        self.compiles = compiles
        self.bound: list[tuple[Any, dict[str, Any]]] = []
        self.direct: list[tuple[Any, tuple[Any, ...]]] = []

    def __getitem__(self, grid):
        def first(**arguments):
            self.bound.append((grid, arguments))
            return Form(self.direct) if self.compiles else None

        return first


class Form:
    def __init__(self, launches: list[tuple[Any, tuple[Any, ...]]]):
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, arguments))


def launch_of(kernel: Kernel) -> Launch:
    nothing = Box(torch.empty(0, device="meta"), rows=64)
    numbers = {"BLOCK": 16, "n": 5}  # in any order
    return Launch(kernel, (7,), {"desc": nothing}, ("out", "table"), numbers, num_warps=4)


def test_a_launch_goes_by_names_once_and_by_position_afterwards():
    kernel = Kernel()
    launch = launch_of(kernel)
    tensors = [torch.ones(2), torch.zeros(3)]
    launch(tensors[0], tensors[1], None)
    ((grid, arguments),) = kernel.bound
    assert grid == (7, 1, 1) and not kernel.direct
    assert arguments.pop("desc").base is tensors[0]
    assert arguments == {"out": tensors[1], "table": None, "n": 5, "BLOCK": 16, "num_warps": 4}

    others = [torch.ones(4), torch.zeros(5)]
    launch(others[0], others[1], None)
    ((grid, (desc, *rest)),) = kernel.direct
    assert grid == (7, 1, 1) and len(kernel.bound) == 1
    assert desc.base is others[0] and desc.rows == 64 and type(desc) is Box
    assert rest == [others[1], None, 5, 16]


def test_an_interpreted_kernel_is_launched_by_names_every_time():
    kernel = Kernel(compiles=False)
    launch = launch_of(kernel)
    for _ in range(2):
        launch(torch.ones(2), torch.zeros(3), None)
    assert len(kernel.bound) == 2 and not kernel.direct


def test_kinds_tell_apart_what_kernels_are_compiled_for():
    x = torch.zeros(2, 6, 4, 8)
    assert Kind.of(x) == Kind.of(torch.ones(2, 6, 4, 8))
    others = [x.half(), x[:, :3], x.transpose(1, 2), torch.zeros(2, 6, 4, 16)[..., ::2]]
    assert len({Kind.of(x), *map(Kind.of, others)}) == 5
