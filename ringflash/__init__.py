"""ringflash: exact attention over a sequence sharded across GPUs. See README.md."""

from .attention import flash_attention, ring_attention
from .merge import merge
from .sharding import positions, shard, unshard

__all__ = ["flash_attention", "merge", "positions", "ring_attention", "shard", "unshard"]
__version__ = "0.1.0"
