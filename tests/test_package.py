"""The package as others meet it: what importing does, what is public, which way imports point, what the README says."""

import ast
import importlib.resources
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import ringflash

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ringflash"
FUNCTIONS = [
    "flash_attention", "ring_attention", "shard", "unshard", "positions", "merge", "transport_of", "release_buffers"
]  # fmt: skip
PUBLIC = [*FUNCTIONS, "Mask"]
WITHOUT_LAYOUTS = [
    "ring", "gradients", "comm", "agreement", "nvlink", "plan", "local_kernel", "hopper_kernel", "launch", "reference",
    "score", "ops", "streams",
]  # fmt: skip
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))

# Each module and the modules of the package that it may import. An arrow that is not here points upward or sideways.
ARROWS = {
    "__init__": {"attention", "sharding", "mask", "merge"},
    "compat": {"attention", "ops", "mask", "sharding"},
    "attention": {"ops", "sharding", "mask", "score"},
    "ops": {
        "ring",
        "local_kernel",
        "reference",
        "agreement",
        "comm",
        "nvlink",
        "merge",
        "plan",
        "mask",
        "score",
        "span",
    },
    "sharding": {"agreement", "layout", "mask"},
    "ring": {"comm", "gradients", "merge", "plan", "score", "streams"},
    "local_kernel": {"hopper_kernel", "launch", "merge", "plan", "layout", "mask", "score"},
    "hopper_kernel": {
        "hopper_forward",
        "hopper_backward",
        "hopper_backward_wide",
        "gluon_compat",
        "launch",
        "score",
        "merge",
        "plan",
    },
    "hopper_backward": {"hopper_forward", "gluon_compat"},
    "hopper_backward_wide": {"hopper_forward", "hopper_backward", "gluon_compat"},
    "hopper_forward": {"gluon_compat"},
    "gluon_compat": set(),
    "launch": {"plan", "layout", "score", "streams"},
    "reference": {"merge", "plan", "layout", "mask", "score"},
    "gradients": {"comm", "merge", "nvlink", "plan", "span"},
    "comm": {"agreement", "nvlink", "plan", "span"},
    "agreement": set(),
    "nvlink": set(),
    "span": set(),
    "streams": set(),
    "plan": {"layout", "mask"},
    "merge": set(),
    "score": set(),
    "layout": {"mask"},
    "mask": set(),
}


def run_python(code: str) -> str:
    """What a fresh interpreter prints; a failure there fails the test here."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def imported_modules(path: Path) -> set[str]:
    """The modules that a file imports, anywhere in it; relative imports resolved: `ringflash.ops`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1
            base = ".".join(filter(None, ("ringflash" if node.level else "", node.module)))
            if base == "ringflash":  # `from ringflash import ops` imports a module
                names |= {f"ringflash.{alias.name}" for alias in node.names}
            else:
                names.add(base)
    return names


def text_constants(path: Path) -> set[str]:
    """The string literals of a file without its docstrings."""
    tree = ast.parse(path.read_text())
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    strings = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docs)
    return {n.value for n in strings if isinstance(n.value, str)}


def test_import_prints_nothing_leaves_the_environment_and_loads_no_triton_and_no_cuda():
    code = """
import os, sys, warnings
import torch
environment, hook, threads, modules = dict(os.environ), sys.excepthook, torch.get_num_threads(), set(sys.modules)
dtype, seed = torch.get_default_dtype(), torch.initial_seed()
warnings.simplefilter("error")
import ringflash
assert dict(os.environ) == environment, "environment changed"
assert (sys.excepthook, torch.get_num_threads()) == (hook, threads)
assert (torch.get_default_dtype(), torch.initial_seed()) == (dtype, seed)
assert "triton" not in set(sys.modules) - modules, "triton imported"
assert not torch.cuda.is_initialized(), "CUDA initialised"
"""
    assert run_python(code) == ""


def test_attention_on_a_cpu_needs_no_triton():
    code = """
import sys
sys.modules["triton"] = None  # an import of it raises ImportError
import torch, ringflash
q, k, v = (torch.randn(1, 5, 2, 16, requires_grad=True) for _ in range(3))
ringflash.flash_attention(q, k, v, causal=True).sum().backward()
assert q.grad is not None and q.grad.isfinite().all()
"""
    assert run_python(code) == ""


def test_public_names_are_fixed():
    assert sorted(ringflash.__all__) == sorted(PUBLIC)
    assert all(callable(getattr(ringflash, name)) for name in PUBLIC)


def test_package_is_typed():
    assert (importlib.resources.files("ringflash") / "py.typed").is_file()
    for name in FUNCTIONS:
        function = getattr(ringflash, name)
        signature = inspect.signature(function)
        untyped = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
        assert untyped == [] and signature.return_annotation is not signature.empty, name


@pytest.mark.parametrize("name", ["flash_attention", "ring_attention"])
def test_overloads_take_what_the_function_takes(name: str):
    function = getattr(ringflash, name)
    overloads = typing.get_overloads(function)
    assert len(overloads) == 3  # return_lse is False, True, or not known beforehand
    for overload in overloads:
        own = inspect.signature(overload).parameters
        (options,) = typing.get_args(own["options"].annotation)
        assert {*own, *options.__annotations__} - {"options"} == set(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_docstring_names_every_argument(name: str):
    function = getattr(ringflash, name)
    doc = inspect.getdoc(function) or ""
    if "Everything else as in `flash_attention`" in doc:
        doc += inspect.getdoc(ringflash.flash_attention) or ""
    assert [p for p in inspect.signature(function).parameters if not re.search(rf"\b{p}\b", doc)] == []
    assert "Example: " in doc and "Returns:" in doc


@pytest.mark.parametrize("name", ["flash_attention", "ring_attention", "positions", "merge"])
def test_public_docstring_gives_shapes(name: str):
    assert re.search(r"\([a-z_]+,[a-z_, ]*\)", inspect.getdoc(getattr(ringflash, name)) or "")  # such as (b, s, h, d)


def test_every_module_has_its_place_in_the_design():
    assert set(MODULES) - {"testing"} == set(ARROWS)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_downward(name: str):
    own = {
        module.split(".")[1] for module in imported_modules(PACKAGE / f"{name}.py") if module.startswith("ringflash.")
    }
    allowed = set(MODULES) - {"testing"} if name == "testing" else ARROWS[name]
    assert own <= allowed, f"{name} imports {sorted(own - allowed)}"


def test_design_has_no_import_cycle():
    order: list[str] = []
    remaining = dict(ARROWS)
    while remaining:
        free = [name for name, targets in remaining.items() if targets <= set(order)]
        assert free, f"a cycle among {sorted(remaining)}"
        order += free
        remaining = {name: targets for name, targets in remaining.items() if name not in free}


def test_new_tensors_name_their_device():
    """Under `torch.set_default_device` they would lie elsewhere else."""
    makers = {"arange", "tensor", "as_tensor", "empty", "zeros", "ones", "full", "rand", "randn", "randint", "eye"}
    unnamed = [
        f"{name}.py:{call.lineno}"
        for name in MODULES
        for call in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in makers
        if isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
        if all(keyword.arg != "device" for keyword in call.keywords)
    ]
    assert unnamed == []


def test_only_the_kernels_import_triton():
    modules_by_user = {name: imported_modules(PACKAGE / f"{name}.py") for name in MODULES}
    users = {name for name, modules in modules_by_user.items() if any(m.split(".")[0] == "triton" for m in modules)}
    assert users == {"local_kernel", "hopper_kernel", "launch", "gluon_compat"}


@pytest.mark.parametrize("name", WITHOUT_LAYOUTS)
def test_no_layout_is_known_by_name_below_the_layouts(name: str):
    assert text_constants(PACKAGE / f"{name}.py") & {"contiguous", "zigzag", "striped", "balanced"} == set()
