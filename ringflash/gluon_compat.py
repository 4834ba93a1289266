# pyright: reportAttributeAccessIssue=false
# (names differ between versions)
"""Gluon under one name where its versions differ: triton 3.6 (torch 2.11) to 3.9.

Gluon is Triton's lower-level language; it ships in triton. What the Hopper kernels use of it is imported from here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

__all__ = [
    "TensorDescriptor",
    "async_copy",
    "copy_async",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "tma_load",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
