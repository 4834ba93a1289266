"""The Triton kernels without a GPU: in the interpreter, and compiled for GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed (it exists for Linux only)")

from compile_kernels import KERNELS, compile_kernel  # noqa: E402

from ringflash.local_kernel import choose_tiles  # noqa: E402

CASES = Path(__file__).with_name("interpreter_cases.py")
SHARED_BYTES = {80: 101_376, 90: 232_448, 100: 232_448}  # what one program may use; sm_86 and sm_89 have sm_80's tiles


@pytest.mark.timeout(600)
def test_kernels_match_dense_attention_in_the_interpreter():
    # In a process of its own: triton decides when a kernel is defined whether it will be interpreted.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def compiled(kernel: str, dtype: torch.dtype, dim: int, capability: int, **options):
    tile = getattr(choose_tiles(dim, dim, dtype, divmod(capability, 10)), kernel)
    return compile_kernel(kernel, tile, dtype, dim, capability=capability, **options)


@pytest.mark.parametrize("accumulate", [False, True], ids=["write", "accumulate"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_for_sm_90_use_wgmma_and_tma_and_spill_nothing(kernel, dim, accumulate):
    code = compiled(kernel, torch.bfloat16, dim, 90, accumulate=accumulate)
    assert code.uses_wgmma and code.uses_tma
    assert code.spilled_bytes == 0
    assert code.shared_bytes <= SHARED_BYTES[90]


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float16, 256), (torch.bfloat16, 96), (torch.float32, 128)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_compile_and_fit_in_shared_memory(kernel, dtype, dim, capability):
    code = compiled(kernel, dtype, dim, capability, accumulate=True)
    assert code.shared_bytes <= SHARED_BYTES[capability]


def test_tiles_depend_on_shape_dtype_and_capability_alone():
    assert choose_tiles(128, 128, torch.bfloat16, (9, 0)) == choose_tiles(128, 96, torch.bfloat16, (9, 0))
    assert not any(tile.tma for tile in vars(choose_tiles(128, 128, torch.bfloat16, (8, 9))).values())
