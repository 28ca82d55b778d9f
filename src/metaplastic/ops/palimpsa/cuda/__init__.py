"""The CUDA backend: kernels compiled at run time (:mod:`.compile`), one file per pass."""

from ..custom import register
from .backward import backward
from .forward import forward

apply = register("cuda", forward, backward)
