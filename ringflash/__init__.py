"""ringflash: exact attention over a sequence sharded across GPUs. See README.md."""

from .attention import flash_attention, release_buffers, ring_attention, transport_of
from .mask import Mask
from .merge import merge
from .sharding import positions, shard, unshard

__all__ = [
    "Mask",
    "flash_attention",
    "merge",
    "positions",
    "release_buffers",
    "ring_attention",
    "shard",
    "transport_of",
    "unshard",
]
__version__ = "0.1.0"
