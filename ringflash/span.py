"""Names for what a pass is doing, in the profiles that `torch.profiler` makes."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd.profiler import record_function

_NOTHING = nullcontext()


def span(words: str, *values: object) -> AbstractContextManager[object]:
    """Inside, a profile shows a range `ringflash WORDS`, with `values` in the places of its `{}`.

    An NVTX range under `torch.autograd.profiler.emit_nvtx()`. Where no profiler is active, nothing is formatted.
    Example: `ringflash visit 2 from rank 5`.
    """
    if not torch.autograd._profiler_enabled():  # it has no public name; a range costs more than this question
        return _NOTHING
    return record_function(f"ringflash {words.format(*values)}")
