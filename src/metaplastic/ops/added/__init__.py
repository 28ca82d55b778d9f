r"""What a shard of a sequence adds to an affine memory, as products of matrices:

    c_n = sum_t left_t k_t^n v_{n,t}^T,   n = 1 (and 2 where there is evidence),   left_t = exp(g_{t+1} + ... + g_T)

k       [B, T, H, K]        floating point
left    [B, T, H, 1 or K]   the dtype of the sums: float32, or float64
v_n     [B, T, H, V]        one or two
c_n     [B, H, V, K]

Nothing is kept for the backward pass but the inputs:

    dv_n = c'_n k^n left,   d(k^n left) = v_n c'_n,   and from these dk and dleft                    (c': gradient of c)

``triton`` is one kernel each way, on the tensor cores, for k and v in bfloat16 on a GPU; ``torch``, for all else, are
batched products.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..convolution import reason_against as reason_against_convolution
from . import plain

WIDEST = 256  # keys of a head that the kernels hold


def choose(k: Tensor, left: Tensor, values: Sequence[Tensor]) -> str:
    """The backend of these inputs, "triton" or "torch"."""
    fit = left.dtype == torch.float32 and all(x.dtype == torch.bfloat16 for x in (k, *values))
    if fit and k.shape[-1] <= WIDEST and reason_against_convolution("triton", k.device.type) is None:
        return "triton"
    return "torch"


def sums(k: Tensor, left: Tensor, values: Sequence[Tensor], backend: str = "auto") -> tuple[Tensor, ...]:
    """c_1 and so on, in the dtype of left."""
    return _of(backend, k, left, values).sums(k, left, values)


def gradients(
    of_sums: Sequence[Tensor], k: Tensor, left: Tensor, values: Sequence[Tensor], backend: str = "auto"
) -> tuple[Tensor, ...]:
    """Those of k, left and every v, in their dtypes."""
    return _of(backend, k, left, values).gradients(of_sums, k, left, values)


def _of(backend: str, k: Tensor, left: Tensor, values: Sequence[Tensor]):
    if (choose(k, left, values) if backend == "auto" else backend) == "torch":
        return plain
    from . import launch

    return launch
