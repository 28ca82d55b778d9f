"""The Triton backend: plain, portable kernels (:mod:`.kernels`) for any device that Triton compiles for."""

from ..custom import register
from .launch import backward, forward

apply = register("triton", forward, backward)
