"""A Palimpsa implementation as a ``torch.library`` custom op: fake, hand-written backward, value checks.

An implementation is a pair of plain functions on tensors (see :func:`register`); torch.compile sees one opaque op.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..contract import compute_dtype, full_precision, read_offsets
from . import check_values

Optional = Tensor | None


def register(name: str, forward: Callable, backward: Callable) -> Callable:
    """Registers ``metaplastic::palimpsa_<name>`` and its backward; returns the differentiable function.

    ``forward(q, k, w, beta, g, prior, information, excess_precision, offsets, scale, output_variance)``
        -> output [B,T,H,V] in q's dtype, variance [B,T,H,V] (empty if not asked for), final M, final J [N,H,V,K].
    ``backward(d_output, d_variance, d_information, d_excess_precision, q, ..., offsets, scale)``
        -> gradients of q, k, w, beta, g, prior, and of both initial states, in the dtypes of the inputs; d_variance
        and the gradients of the final states may be None.
    ``offsets`` is None or an int64 CPU tensor; initial states may be None (zeros), and then their gradients, too.
    """

    @torch.library.custom_op(f"metaplastic::palimpsa_{name}", mutates_args=())
    def op(
        q: Tensor, k: Tensor, w: Tensor, beta: Tensor, g: Tensor, prior: Tensor,
        information: Optional, excess_precision: Optional, cu_seqlens: Optional, scale: float, output_variance: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        offsets = read_offsets("palimpsa", cu_seqlens, q.shape[1])
        check_values(beta, g, prior, excess_precision, None if offsets is None else int(offsets[-1]))
        with full_precision(q.device):
            return forward(q, k, w, beta, g, prior, information, excess_precision, offsets, scale, output_variance)

    @op.register_fake
    def _(q, k, w, beta, g, prior, information, excess_precision, cu_seqlens, scale, output_variance):
        dtype = compute_dtype(q)
        rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = q.new_empty((rows, q.shape[2], w.shape[3], q.shape[3]), dtype=dtype)
        variance = q.new_empty(w.shape if output_variance else (0,), dtype=dtype)
        return q.new_empty(w.shape), variance, state, torch.empty_like(state)

    @torch.library.custom_op(f"metaplastic::palimpsa_{name}_backward", mutates_args=())
    def op_backward(
        d_output: Tensor, d_variance: Optional, d_information: Optional, d_excess_precision: Optional,
        q: Tensor, k: Tensor, w: Tensor, beta: Tensor, g: Tensor, prior: Tensor,
        information: Optional, excess_precision: Optional, cu_seqlens: Optional, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        offsets = read_offsets("palimpsa", cu_seqlens, q.shape[1])
        gradients = (d_output, d_variance, d_information, d_excess_precision)
        with full_precision(q.device):
            *found, d_m, d_j = backward(
                *gradients, q, k, w, beta, g, prior, information, excess_precision, offsets, scale
            )
        dq, dk, dw, d_beta, dg, d_prior = found
        d_m = q.new_empty(0) if information is None else d_m
        d_j = q.new_empty(0) if excess_precision is None else d_j
        return dq, dk, dw, d_beta, dg, d_prior, d_m, d_j

    @op_backward.register_fake
    def _(dy, dv, dm, dj, q, k, w, beta, g, prior, information, excess_precision, cu_seqlens, scale):
        inputs = (q, k, w, beta, g, prior, information, excess_precision)
        return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)

    def setup_context(ctx, inputs, output):
        *tensors, ctx.scale, ctx.output_variance = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    def differentiate(ctx, d_output, d_variance, d_information, d_excess_precision):
        *inputs, cu_seqlens = ctx.saved_tensors
        q, w = inputs[0], inputs[2]
        if d_output is None:
            d_output = q.new_zeros(w.shape)
        gradients = op_backward(
            d_output, d_variance if ctx.output_variance else None, d_information, d_excess_precision,
            *inputs, cu_seqlens, ctx.scale,
        )  # fmt: skip
        wanted = [d if x is not None else None for d, x in zip(gradients, inputs, strict=True)]
        return *wanted, None, None, None

    op.register_autograd(differentiate, setup_context=setup_context)
    return op
