"""The CUDA backend as custom ops: kernels compiled at run time, one file per pass.

The kernels are for 16-bit inputs. float32 ones are for who wants exactness, which float32 products do not give where a
key is seen again and again: they go through the chunked backend in float64, whose products these devices make about as
fast (decoding has a kernel in float32). Of more than 256 keys P is too large for a multiprocessor however it is cut:
there the chunked backend runs too.
"""

import torch
from torch import Tensor

from ...contract import full_precision, read_offsets
from .. import check_values, chunked
from ..custom import differentiable
from .backward import backward, has_kernels
from .forward import forward
from .problem import CHUNK, padded, padded_keys, rest_rooms, room

LARGEST_KEYS = 256
HALF = (torch.bfloat16, torch.float16)

Optional = Tensor | None


@torch.library.custom_op("metaplastic::bayesian_cuda", mutates_args=())
def _filter(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, process_noise: Tensor, observation_noise: Tensor, rotation: Optional,
    mean: Tensor, covariance: Tensor, cu_seqlens: Optional, scale: float, output_variance: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    offsets = read_offsets("bayesian", cu_seqlens, q.shape[1])
    check_values(g, process_noise, observation_noise, rotation, None if offsets is None else int(offsets[-1]))
    inputs = (q, k, v, g, process_noise, observation_noise, rotation, mean, covariance)
    with full_precision(q.device):
        return forward(*inputs, offsets, scale, output_variance, keep)


@_filter.register_fake
def _(
    q, k, v, g, process_noise, observation_noise, rotation, mean, covariance, cu_seqlens, scale, output_variance, keep
):
    groups = observation_noise.shape[3] if observation_noise.dim() == 4 else 1
    variance = q.new_empty(observation_noise.shape if output_variance else (0,), dtype=mean.dtype)
    states = (x.new_empty(x.shape) for x in (mean, covariance))
    saved = [mean.new_empty(0) for _ in range(3)]
    if keep:
        chunks = room(mean.shape[0], q.shape[1], cu_seqlens is not None)
        keys, values = padded_keys(q.shape[3]), padded(v.shape[3] // groups)
        rests = rest_rooms(chunks, keys) if has_kernels(q, k, v, g, process_noise, observation_noise, rotation) else 0
        shapes = ((chunks, (values, keys)), (chunks + rests, (keys, keys)), (chunks, (CHUNK, CHUNK)))
        saved = [mean.new_empty(count, q.shape[2], groups, *shape) for count, shape in shapes]
    return q.new_empty(v.shape), variance, *states, *saved


@torch.library.custom_op("metaplastic::bayesian_cuda_backward", mutates_args=())
def _adjoint(
    d_output: Tensor, d_variance: Optional, d_mean: Optional, d_covariance: Optional,
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, process_noise: Tensor, observation_noise: Tensor, rotation: Optional,
    mean: Tensor, covariance: Tensor, means: Tensor, covariances: Tensor, whitenings: Tensor,
    cu_seqlens: Optional, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    offsets = read_offsets("bayesian", cu_seqlens, q.shape[1])
    inputs = (q, k, v, g, process_noise, observation_noise, rotation, mean, covariance)
    with full_precision(q.device):
        dq, dk, dv, dg, d_process, d_observation, d_rotation, d_first_mean, d_first_covariance = backward(
            d_output, d_variance, d_mean, d_covariance, *inputs, means, covariances, whitenings, offsets, scale
        )
    return dq, dk, dv, dg, d_process, d_observation, d_rotation, d_first_mean, d_first_covariance


@_adjoint.register_fake
def _(
    d_output, d_variance, d_mean, d_covariance, q, k, v, g, process_noise, observation_noise, rotation,
    mean, covariance, means, covariances, whitenings, cu_seqlens, scale,
):  # fmt: skip
    inputs = (q, k, v, g, process_noise, observation_noise, rotation, mean, covariance)
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


_apply = differentiable(_filter, _adjoint)


def apply(q: Tensor, *others) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, variance (empty if not asked for), final mean and covariance."""
    if all(x.dtype in HALF for x in (q, *others[:2])):
        return chunked.apply(q, *others) if q.shape[3] > LARGEST_KEYS else _apply(q, *others)
    if q.shape[1] == 1 and q.shape[3] <= LARGEST_KEYS and others[8] is None and not torch.is_grad_enabled():
        return _apply(q, *others)
    double = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in (q, *others)]
    output, variance, mean, covariance = chunked.apply(*double)
    return output.to(q.dtype), variance.float(), mean.float(), covariance.float()
