"""The CUDA backend: kernels compiled at run time (:mod:`metaplastic.ops.nvrtc`), one file per pass."""

from ..custom import register
from .backward import backward
from .forward import forward

apply = register("cuda", forward, backward)
