"""What the custom ops of the filter share: how a pair of them, forward and backward, becomes differentiable."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def differentiable(forward: Any, adjoint: Callable) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Registers ``adjoint`` as the backward of the custom op ``forward``; returns what the operator calls.

    ``forward(q, k, v, g, process_noise, observation_noise, rotation, mean, covariance, cu_seqlens, scale,
    output_variance, keep)`` -> output, variance (empty if not asked for), final mean and covariance, and what it keeps
    for the backward: entry means, entry covariances and inverse factors (empty unless ``keep``).
    ``adjoint(d_output, d_variance, d_mean, d_covariance, q, ..., covariance, *kept, cu_seqlens, scale)`` -> gradients.
    """

    def setup_context(ctx, inputs, output):
        *tensors, ctx.scale, ctx.output_variance, _ = inputs
        ctx.save_for_backward(*tensors, *output[4:])
        ctx.set_materialize_grads(False)

    def differentiate(ctx, d_output, d_variance, d_mean, d_covariance, *_):
        *inputs, cu_seqlens, means, covariances, whitenings = ctx.saved_tensors
        if d_output is None:
            d_output = inputs[0].new_zeros(inputs[2].shape)
        gradients = adjoint(
            d_output, d_variance if ctx.output_variance else None, d_mean, d_covariance,
            *inputs, means, covariances, whitenings, cu_seqlens, ctx.scale,
        )  # fmt: skip
        wanted = [d if x is not None else None for d, x in zip(gradients, inputs, strict=True)]
        return *wanted, None, None, None, None

    forward.register_autograd(differentiate, setup_context=setup_context)

    def apply(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output, variance (empty if not asked for), final mean and covariance."""
        keep = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given)
        return forward(*given, keep)[:4]

    return apply
