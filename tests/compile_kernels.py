"""Compile the kernels for a GPU that is not here, and read what the compiler made of them."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ringflash import local_kernel
from ringflash.local_kernel import Tile

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
KERNELS = {
    "forward": local_kernel._forward_kernel,
    "dq": local_kernel._dq_kernel,
    "dkv": local_kernel._dkv_kernel,
}
STREAMED = {"forward": "kv", "dq": "kv", "dkv": ("q", "dout")}  # by TMA where the tile says so
WIDE_ARGUMENTS = ("scale", "scale_log2")
FP32_POINTERS = ("lse", "delta")
INT_POINTERS = ("ranges", "seen_rows")


@dataclass
class Compiled:
    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str

    @property
    def uses_wgmma(self) -> bool:
        return "wgmma.mma_async" in self.ptx

    @property
    def uses_tma(self) -> bool:
        return "cp.async.bulk.tensor" in self.ptx


def compile_kernel(
    kernel: str,
    tile: Tile,
    dtype: torch.dtype,
    dim: int,
    v_dim: int | None = None,
    *,
    capability: int = 90,
    accumulate: bool = False,
    full: bool = False,
) -> Compiled:
    """Compile `kernel` ("forward", "dq", "dkv") with `tile`, as a launcher of `local_kernel.py` would ask for it: in a
    visit after the first when `accumulate`, under the full mask when `full`."""
    v_dim = dim if v_dim is None else v_dim
    block_d, block_dv = local_kernel._padded(dim), local_kernel._padded(v_dim)
    function = KERNELS[kernel]
    constants = {
        "D": dim, "DV": v_dim, "BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k, "BLOCK_D": block_d,
        "BLOCK_DV": block_dv, "MERGE": accumulate, "ADD": accumulate, "TMA": tile.tma,
        "Q_BY_TMA": tile.q_in_registers, "PRECISION": local_kernel._precision(dtype),
    }  # fmt: skip
    if full:
        constants["seen_rows"] = None
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    name = DTYPE_NAMES[dtype]
    signature = {}
    for argument in function.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in ("q", "k", "v", "dout"):
            cols = block_d if argument in "qk" else block_dv
            rows = tile.block_k if argument in "kv" else tile.block_q
            by_tma = tile.tma and (argument in STREAMED[kernel] or tile.q_in_registers)
            signature[argument] = f"tensordesc<{name}[1, {rows}, 1, {cols}]>" if by_tma else f"*{name}"
        elif argument in ("out", "dq", "dk", "dv"):
            signature[argument] = "*fp32" if accumulate else f"*{name}"
        elif argument in FP32_POINTERS:
            signature[argument] = "*fp32"
        elif argument in INT_POINTERS:
            signature[argument] = "*i32"
        elif argument in WIDE_ARGUMENTS:
            signature[argument] = "fp32"
        else:
            signature[argument] = "i32"
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(function.arg_names)
        if signature[argument].startswith("*") or argument.startswith("stride_")
    }
    source = ASTSource(function, signature, constants, aligned)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled = _resources(compiled.asm["cubin"])
    return Compiled(registers, spilled, compiled.metadata.shared, compiled.asm["ptx"])


def _resources(cubin: bytes) -> tuple[int, int]:
    """`(registers, bytes of local memory)` a thread, from the compiler's own tool (it comes with triton)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", text.stdout)
    assert found, text.stdout
    return int(found[1]), int(found[2]) + int(found[3])
