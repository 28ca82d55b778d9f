"""The reference backend: :func:`metaplastic.rules.delta.scan` token by token, differentiated by autograd."""

import itertools

import torch

from ...rules import delta as rule
from ..contract import compute_dtype, read_offsets
from . import check_values


def apply(q, k, v, beta, g, mean, cu_seqlens, scale, keep=True):
    """Arguments and first two results as the op of :mod:`metaplastic.ops.delta.chunked`; autograd keeps its own."""
    offsets = read_offsets("delta", cu_seqlens, q.shape[1])
    check_values(beta, g, None if offsets is None else int(offsets[-1]))
    dtype = compute_dtype(q)
    inputs = tuple(x.to(dtype) for x in (q, k, v, beta, g))
    if mean is None:
        rows = q.shape[0] if offsets is None else len(offsets) - 1
        start = rule.init_state(rows, q.shape[2], v.shape[3], q.shape[3], dtype=dtype, device=q.device)
    else:
        start = rule.DeltaState(mean)
    if offsets is None:
        output, _, final = rule.scan(*inputs, state=start, scale=scale)
        # A scan over no tokens returns the initial state itself: states are values, so hand out a copy.
        return output.to(q.dtype), final.mean.clone() if final.mean is start.mean else final.mean
    edges = offsets.tolist()
    outputs, finals = [], [start.mean[:0]]
    for n, (a, b) in enumerate(itertools.pairwise(edges)):
        alone = rule.DeltaState(start.mean[n : n + 1])
        output, _, final = rule.scan(*(x[:, a:b] for x in inputs), state=alone, scale=scale)
        outputs.append(output)
        finals.append(final.mean)
    outputs.append(torch.zeros_like(inputs[2][:, edges[-1] :]))
    return torch.cat(outputs, 1).to(q.dtype), torch.cat(finals)
