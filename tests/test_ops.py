"""The registered operators keep the promises that `torch.compile` builds on: schema, fakes, autograd."""

from typing import Any

import pytest
import torch
from oracle import held_positions, local_part, world
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ringflash import Mask, flash_attention
from ringflash.score import draw_head_words
from ringflash.testing import Inputs, random_inputs


def options(group: str = "", seq_len: int = 0, causal: bool = True) -> tuple[Any, ...]:
    """What follows q, k and v."""
    layout, transport = ("zigzag", "gloo") if group else ("", "")
    mask = [-1, 0 if causal else -1, 0, 0]
    return None, None, None, 0.25, None, 0.0, mask, None, "torch", group, layout, [], None, seq_len, transport, False


def test_modes_are_asked_little_and_hooks_are_run_under_them():
    """A default device is such a mode. Hooks of saved tensors are the caller's."""
    asked, made = [], []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            asked.append(func)
            return func(*args, **(kwargs or {}))

    def pack(x: Tensor) -> Tensor:
        made.append(torch.empty(1).device.type)
        return x

    inputs = leaves(random_inputs(1, 64, 2, 16))
    with Watch():
        out = flash_attention(*inputs, causal=True)
        torch.autograd.grad(out, inputs, torch.ones_like(out.detach()))
    assert 0 < len(asked) <= 25  # 120 and more of a pass that they are asked in
    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        flash_attention(*inputs, causal=True)
    assert made and set(made) == {"meta"}


def leaves(inputs: Inputs) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in inputs[:3]]


def check_forward(inputs: Inputs, *option: Any) -> dict[str, str]:
    return torch.library.opcheck(torch.ops.ringflash.attention, (*leaves(inputs), *option))


def check_backward(inputs: Inputs, dlse: Tensor | None, *option: Any) -> dict[str, str]:
    """No autograd check: the backward has no derivative."""
    results = torch.ops.ringflash.attention(*inputs[:3], *option)
    sinks, slopes, _, *others = option
    arguments = (inputs.dout, dlse, *results, *inputs[:3], sinks, slopes, *others)
    checks = ("test_schema", "test_faketensor")
    return torch.library.opcheck(torch.ops.ringflash.attention_backward, arguments, test_utils=checks)


def transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize(
    ("query_len", "key_len", "dtype", "causal"),
    [
        (24, 24, torch.bfloat16, True), (24, 24, torch.float64, False), (9, 20, torch.float32, True),
        (20, 9, torch.bfloat16, False), (20, 9, torch.float32, True), (0, 4, torch.float64, True),
        (0, 4, torch.bfloat16, False),
    ],
)  # fmt: skip
def test_attention_passes_opcheck(query_len, key_len, dtype, causal):
    inputs = random_inputs(2, query_len, 4, 16, kv_heads=2, key_len=key_len, v_head_dim=24, dtype=dtype)
    assert set(check_forward(inputs, *options(causal=causal)).values()) == {"SUCCESS"}
    for dlse in (inputs.dlse, None):
        assert set(check_backward(inputs, dlse, *options(causal=causal)).values()) == {"SUCCESS"}


def test_attention_of_transposed_tensors_passes_opcheck():
    inputs = Inputs(*map(transposed, random_inputs(2, 12, 4, 16, kv_heads=2)))
    assert set(check_forward(inputs, *options()).values()) == {"SUCCESS"}
    assert set(check_backward(inputs, inputs.dlse, *options()).values()) == {"SUCCESS"}


def test_attention_under_a_mask_of_documents_passes_opcheck():
    inputs, mask = random_inputs(1, 12, 4, 16, kv_heads=2), Mask(causal=True, cu_seqlens=[0, 5, 12], prefix=[2, 3])
    option = (*options()[:6], list(mask.numbers), mask.documents, *options()[8:])
    assert set(check_forward(inputs, *option).values()) == {"SUCCESS"}
    assert set(check_backward(inputs, inputs.dlse, *option).values()) == {"SUCCESS"}


def test_attention_with_every_option_passes_opcheck():
    inputs, sinks, slopes = random_inputs(2, 12, 4, 16, kv_heads=2), torch.randn(4), torch.rand(4)
    option = (sinks.requires_grad_(), slopes, draw_head_words(2, 4), 0.25, 3.0, 0.2, *options()[6:])
    assert set(check_forward(inputs, *option).values()) == {"SUCCESS"}
    assert set(check_backward(inputs, inputs.dlse, *option).values()) == {"SUCCESS"}


def check_in_group() -> set[str]:
    group = world()
    part = local_part(random_inputs(1, 13, 4, 16, kv_heads=2), held_positions("zigzag", 13, group.size(), group.rank()))
    option = options(group.group_name, 13)
    return {*check_forward(part, *option).values(), *check_backward(part, part.dlse, *option).values()}


def test_ring_attention_passes_opcheck(workers):
    """Every rank runs the same checks in step."""
    assert workers(2).run(check_in_group) == [{"SUCCESS"}] * 2
