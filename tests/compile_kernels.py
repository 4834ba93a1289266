"""Compile the kernels for a GPU that is not here, and read what the compiler made of them."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from hopper_emulation import forget_launches
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from ringflash import hopper_kernel, local_kernel
from ringflash.local_kernel import Tile
from ringflash.mask import Mask
from ringflash.merge import Partial, Sums
from ringflash.plan import plan_one
from ringflash.score import Scoring

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
KERNELS = {
    "forward": local_kernel._forward_kernel,
    "dq": local_kernel._dq_kernel,
    "dkv": local_kernel._dkv_kernel,
}
FORWARD_KERNEL, BACKWARD_KERNEL = hopper_kernel.forward_kernel, hopper_kernel.backward_kernel
WIDE_BACKWARD_KERNEL = hopper_kernel.wide_backward_kernel
STREAMED = {"forward": "kv", "dq": "kv", "dkv": ("q", "dout")}  # by TMA where the tile says so
WIDE_ARGUMENTS = ("scale", "scale_log2", "cap_log2", "keep_scale")
FP32_POINTERS = ("out_before", "lse", "pairs", "slopes", "sinks")
INT_POINTERS = ("ranges", "blocks", "order", "seen_rows", "positions", "words", "head_words")


@dataclass
class Compiled:
    registers: int
    spilled_bytes: int
    spills_in_loops: int
    shared_bytes: int
    waits_per_product: float
    ptx: str

    @property
    def uses_wgmma(self) -> bool:
        return "wgmma.mma_async" in self.ptx

    @property
    def uses_tma(self) -> bool:
        return "cp.async.bulk.tensor" in self.ptx

    @property
    def adds_four_floats_at_a_time(self) -> bool:
        return "red.global.add.v4.f32" in self.ptx

    @property
    def barriers_written_over(self) -> list[int]:
        """Addresses of barriers in shared memory where what warpgroups are told is stored too."""
        places = dict.fromkeys(re.findall(r"mov\.b32\s+(%r\d+), global_smem;", self.ptx), 0)
        for register, base, offset in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", self.ptx):
            if places.get(base) == 0:
                places[register] = int(offset)
        barriers = [places[register] for register in re.findall(r"mbarrier\.init[^\[]*\[(%r\d+)\]", self.ptx)]
        stores = re.findall(r"st\.shared(?:\.v(\d))?\.b(\d+)\s*\[global_smem(?:\+(\d+))?\]", self.ptx)
        assert barriers and stores
        spans = [(int(at or 0), int(at or 0) + int(count or 1) * int(bits) // 8) for count, bits, at in stores]
        return [at for at in barriers if any(begin < at + 8 and at < end for begin, end in spans)]

    @property
    def stores_four_floats_at_a_time(self) -> bool:
        """In shared memory, at an address that a register holds: arguments of warpgroups lie at ones that are known."""
        return re.search(r"st\.shared\.v4\.b32\s*\[\s*%r", self.ptx) is not None


def compile_kernel(
    kernel: str,
    tile: Tile,
    dtype: torch.dtype,
    dim: int,
    v_dim: int | None = None,
    *,
    capability: int = 90,
    accumulate: bool = False,
    last: bool = False,
    full: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    dropout: bool = False,
    sinks: bool = False,
) -> Compiled:
    """Compile `kernel` ("forward", "dq", "dkv") with `tile`, as a launcher of `local_kernel.py` would ask for it: in a
    visit after the first when `accumulate`, the `last` one of a forward pass, under the full mask when `full`."""
    v_dim = dim if v_dim is None else v_dim
    block_d, block_dv = local_kernel._padded(dim), local_kernel._padded(v_dim)
    function = KERNELS[kernel]
    constants = {
        "D": dim, "DV": v_dim, "BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k, "BLOCK_D": block_d,
        "BLOCK_DV": block_dv, "IN_PLACE": accumulate and not last, "ADD": accumulate, "TMA": tile.tma,
        "Q_BY_TMA": tile.q_in_registers, "TOGETHER": tile.together, "PRECISION": local_kernel._precision(dtype),
        "CAP": None if not softcap else "exact" if dtype == torch.float32 else "fast", "ALIBI": alibi, "DROP": dropout,
    }  # fmt: skip
    given = {
        "seen_rows": not full,
        "positions": alibi,
        "words": dropout,
        "slopes": alibi,
        "head_words": dropout,
        "sinks": sinks,
        "out_before": accumulate,
    }
    constants |= {name: None for name, is_given in given.items() if not is_given}
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
            signature[argument] = "*fp32" if accumulate and not last else f"*{name}"
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
    return _read(compiled)


class Recorder:
    """In place of a kernel: keeps what a launcher passes."""

    arguments: dict[str, Any]

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda **arguments: setattr(self, "arguments", arguments)


def compile_hopper(
    kernel: str,
    dtype: torch.dtype,
    dim: int,
    v_dim: int | None = None,
    *,
    accumulate: bool = False,
    last: bool = False,
    full: bool = False,
    without_dq: bool = False,
    sinks: bool = False,
    softcap: bool = False,
    dropout: bool = False,
    ordered: bool = False,
    short: bool = False,
) -> Compiled:
    """Compile the Hopper kernel "forward" or "backward" for what its launcher passes; options as `compile_kernel`.

    `ordered`: where programs start in an order of their own, as a long document after a short one wants it. `short`: as
    few keys take, forward.
    """
    sums = torch.float32 if accumulate else dtype
    rows = 384 if short or kernel == "backward" else hopper_kernel.SHORT_KEYS + 384
    q, k = (torch.zeros(2, rows, heads, dim, dtype=dtype) for heads in (4, 2))
    v, dout = (torch.zeros(2, rows, heads, dim if v_dim is None else v_dim, dtype=dtype) for heads in (2, 4))
    running = dout.to(sums)
    total = Partial(dout if last else running, torch.zeros(2, 4, rows))
    mask = Mask(cu_seqlens=(0, 128, rows)) if ordered else Mask() if full else Mask(right=0)
    visit = plan_one(mask, rows, rows).visits[0]
    assert visit is not None
    head_words = torch.zeros(2, 4, dtype=torch.int32) if dropout else None
    scoring = Scoring(0.1, 30.0 if softcap else None, None, 0.1, head_words, torch.zeros(4) if sinks else None)
    recorder = Recorder()
    forget_launches()
    kernels = dict.fromkeys(("forward_kernel", "backward_kernel", "wide_backward_kernel"), recorder)
    with patch.multiple(hopper_kernel, **kernels):
        if kernel == "forward":
            function = FORWARD_KERNEL
            hopper_kernel.forward(q, k, v, visit, scoring, into=total, before=running if accumulate else None)
        else:
            function = BACKWARD_KERNEL if max(dim, v.shape[3]) <= 128 else WIDE_BACKWARD_KERNEL
            numbers = torch.zeros(2, 4, rows)
            dq = None if without_dq else torch.zeros(2, 4, 1, 1)
            q_kind, dout_kind = hopper_kernel.Kind.of(q), hopper_kernel.Kind.of(dout)
            score = hopper_kernel._ScoreNumbers.of(scoring)
            about = hopper_kernel._Pass(q_kind, dout_kind, not without_dq, score, q.device)
            state = hopper_kernel.Started(about, q, dout, numbers, numbers, dq, head_words, False)
            dkv = k.to(sums), v.to(sums)
            hopper_kernel.backward(k, v, state, visit, lambda: Sums(*dkv, fresh=not accumulate))
    arguments = recorder.arguments
    options = {name: arguments.pop(name) for name in ("num_warps", "maxnreg")}
    assert set(arguments) == set(function.arg_names)
    assert kernel == "forward" or (arguments["order"] is not None) == ordered
    signature, constants, aligned = {}, {}, {}
    for index, parameter in enumerate(function.params):
        name, value = parameter.name, arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, hopper_kernel.TensorDescriptor):
            signature[name] = f"tensordesc<{DTYPE_NAMES[dtype]}{value.block_shape},{value.layout!r}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{DTYPE_NAMES.get(value.dtype, 'i32')}"
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        pointer = signature[name].startswith("*") and not parameter.do_not_specialize_on_alignment
        if pointer or name.startswith("stride_"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(function, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return _read(compiled)


def _read(compiled: Any) -> Compiled:
    """By the compiler's own tool, which comes with triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        used, sass = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", used)
    assert found, used
    spilled = int(found[2]) + int(found[3])
    waits_per_product = sass.count("WARPGROUP.DEPBAR") / max(sass.count("HGMMA"), 1)
    shared, ptx = compiled.metadata.shared, compiled.asm["ptx"]
    return Compiled(int(found[1]), spilled, _spills_in_loops(sass), shared, waits_per_product, ptx)


def _spills_in_loops(sass: str) -> int:
    """Loads and stores of spilled registers in the loops over tiles: the innermost ones that multiply."""
    code = {int(at, 16): text for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.+?);", sass)}
    loops: list[tuple[int, int]] = []
    for at, text in code.items():  # (a wait's second try, out of line, comes back by a branch without a condition)
        back = re.match(r"@!?U?P\d+ BRA.* 0x([0-9a-f]+)", text)
        if back and int(back[1], 16) < at:
            begin = int(back[1], 16)
            inside = any(begin <= low and high <= at for low, high in loops)
            if not inside and any(begin <= place <= at and "HGMMA" in text for place, text in code.items()):
                loops.append((begin, at))
    assert loops or "HGMMA" not in sass
    return sum("LDL" in text or "STL" in text for at, text in code.items() if any(a <= at <= b for a, b in loops))
