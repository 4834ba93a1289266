"""Launches that recur: what they pass the first time, and afterwards."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

triton: Any = pytest.importorskip("triton", reason="triton is not installed (it exists for Linux only)")

from triton.backends.nvidia import driver as nvidia  # noqa: E402
from triton.compiler import CompiledKernel, LazyDict  # noqa: E402
from triton.runtime._allocation import NullAllocator  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from ringflash.launch import Kind, Launch  # noqa: E402


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


# The way below Triton's Python ----------------------------------------------------------------------------------------


class Driver:
    """As triton's, where there is no GPU; its maps are what they are made of."""

    def __init__(self):
        self.utils = self
        self.made: list[Any] = []
        self.stream = 5

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def fill_tma_descriptor(self, *arguments) -> Any:
        self.made.append(arguments)
        return SimpleNamespace(made_of=repr(arguments))

    fill_tma_descriptor_tiled = fill_tma_descriptor  # of triton 3.7


@pytest.fixture
def driver(monkeypatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return driver


class CompiledForm:
    """In a kernel's place: its form is triton's own, down to the function in C, in whose place `calls` are kept."""

    arg_names = Kernel.arg_names

    def __init__(self, scratch: int = 0):
        self.calls: list[list[Any]] = []
        signature = {"desc": "tensordesc<bf16[1, 64, 1, 32]>", "out": "*bf16", "table": "*i32", "n": "i32"}
        about = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 64, 1, 32], "fp4_padded": False}
        launcher: Any = object.__new__(nvidia.CudaLauncher)
        launcher.launch = nvidia.wrap_handle_tensordesc(self.keep, signature | {"BLOCK": "constexpr"}, [about])
        launcher.num_ctas, launcher.launch_cooperative_grid, launcher.launch_pdl = 1, False, False
        launcher.global_scratch_size, launcher.profile_scratch_size = scratch, 0
        launcher.global_scratch_align = launcher.profile_scratch_align = 1
        launcher.arg_annotations, launcher.kernel_signature = ["annotations"], b"signature"
        form: Any = object.__new__(CompiledKernel)
        form.module, form.src, form.name, form.function = "module", None, "kernel", 77
        form.packed_metadata, form.metadata = (4, 1, 1024), SimpleNamespace(tensordesc_meta=[about])
        form._run = launcher
        self.form = form

    def keep(self, *call) -> None:
        """Tensors by their addresses, maps by what they are made of, whoever watches as `None`."""
        call = (*call[:-1], *call[-1]) if isinstance(call[-1], (list, tuple)) else call
        watching = triton.knobs.HookChain, LazyDict
        told = (x.data_ptr() if isinstance(x, torch.Tensor) else getattr(x, "made_of", x) for x in call)
        self.calls.append([None if isinstance(x, watching) else x for x in told])

    def __getitem__(self, grid):
        def first(**arguments):
            self.form[grid](*(arguments[name] for name in self.arg_names))
            return self.form

        return first


def launch_of_form(kernel: CompiledForm) -> Launch:
    nothing = torch.empty(2, 128, 4, 32, dtype=torch.bfloat16, device="meta")
    box = TensorDescriptor(nothing, [2, 128, 4, 32], [16384, 128, 32, 1], [1, 64, 1, 32])
    return Launch(kernel, (7,), {"desc": box}, ("out", "table"), {"n": 5, "BLOCK": 16})


def some_tensors() -> tuple[torch.Tensor, torch.Tensor, None]:
    return torch.empty(2, 128, 4, 32, dtype=torch.bfloat16), torch.empty(8), None


def test_the_function_in_c_gets_what_triton_passes(driver):
    kernel = CompiledForm()
    launch = launch_of_form(kernel)
    others, tensors = some_tensors(), some_tensors()
    launch(*others)
    launch(*tensors)
    assert launch.direct is not None
    launch.direct = None
    launch(*tensors)  # by triton's Python
    first, direct, public = kernel.calls
    assert direct == public != first
    assert tensors[0].data_ptr() in driver.made[-1] and tensors[1].data_ptr() in direct and 77 in direct


def test_a_map_is_made_once_for_an_address_and_few_are_kept(driver, monkeypatch):
    kept: dict[Any, Any] = {}
    monkeypatch.setattr("ringflash.launch._maps", kept)
    monkeypatch.setattr("ringflash.launch.KEPT_MAPS", 2)
    launch = launch_of_form(CompiledForm())
    tensors = [some_tensors() for _ in range(3)]
    launch(*tensors[0])
    del driver.made[:]
    for which, made in ((0, 1), (0, 1), (1, 2), (0, 2), (2, 3), (2, 3), (0, 4)):
        launch(*tensors[which])
        assert len(driver.made) == made and len(kept) <= 2


def test_launches_keep_few_maps_together_and_none_of_each_other(driver, monkeypatch):
    kept: dict[Any, Any] = {}
    monkeypatch.setattr("ringflash.launch._maps", kept)
    monkeypatch.setattr("ringflash.launch.KEPT_MAPS", 3)
    tensors, launches = some_tensors(), [launch_of_form(CompiledForm()) for _ in range(5)]
    for launch in launches:
        launch(*tensors)
    del driver.made[:]
    for number, launch in enumerate((*launches, launches[-1])):
        launch(*tensors)
        assert len(driver.made) == min(number + 1, 5) and len(kept) <= 3


def test_launches_go_to_the_current_stream(driver):
    kernel = CompiledForm()
    launch = launch_of_form(kernel)
    for driver.stream in (5, 5, 6, 5):
        launch(*some_tensors())
    assert [call[3] for call in kernel.calls] == [5, 5, 6, 5]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_see_every_launch(driver, hook):
    kernel = CompiledForm()
    launch = launch_of_form(kernel)
    launch(*some_tensors())
    assert launch.direct is not None
    called = Mock(side_effect=launch.direct)
    launch.direct = called
    chain = getattr(triton.knobs.runtime, hook)
    watch = Mock()
    chain.add(watch)
    try:
        launch(*some_tensors())  # the function in C would call the hook: here it is seen that it gets it
    finally:
        chain.remove(watch)
    assert not called.called and len(kernel.calls) == 2
    launch(*some_tensors())
    assert called.called and len(kernel.calls) == 3


@pytest.mark.parametrize("version", ["3.5.1", "3.8.0", "4.0.0"])
def test_in_versions_that_nobody_looked_at_launches_go_by_triton(driver, monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    kernel = CompiledForm()
    launch = launch_of_form(kernel)
    for _ in range(2):
        launch(*some_tensors())
    assert launch.direct is None and len(kernel.calls) == 2


def test_a_kernel_that_wants_scratch_memory_is_launched_by_triton(driver, monkeypatch):
    kernel = CompiledForm(scratch=128)
    launch = launch_of_form(kernel)
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8))
    try:
        launch(*some_tensors())
    finally:
        triton.set_allocator(NullAllocator())
    assert launch.direct is None
