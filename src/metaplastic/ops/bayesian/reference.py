"""The reference backend: :func:`metaplastic.rules.bayesian.scan` token by token, differentiated by autograd."""

import itertools

import torch

from ...rules import bayesian as rule
from ..contract import compute_dtype, read_offsets
from . import check_values


def apply(q, k, v, g, process_noise, observation_noise, rotation, mean, covariance, cu_seqlens, scale, output_variance):
    """Arguments and results as :func:`metaplastic.ops.bayesian.chunked.apply`."""
    offsets = read_offsets("bayesian", cu_seqlens, q.shape[1])
    check_values(g, process_noise, observation_noise, rotation, None if offsets is None else int(offsets[-1]))
    dtype = compute_dtype(q)
    inputs = tuple(x.to(dtype) for x in (q, k, v, g, process_noise, observation_noise))
    turn = None if rotation is None else rotation.to(dtype)
    if offsets is None:
        output, variance, final = rule.scan(
            *inputs, state=rule.GaussianState(mean, covariance), scale=scale, rotation=turn
        )
        if q.shape[1] == 0:  # states are values: hand out copies
            final = rule.GaussianState(mean.clone(), covariance.clone())
        return output.to(q.dtype), variance, *final
    edges = offsets.tolist()
    outputs, variances, finals = [], [], [rule.GaussianState(mean[:0], covariance[:0])]
    for n, (a, b) in enumerate(itertools.pairwise(edges)):
        alone = rule.GaussianState(mean[n : n + 1], covariance[n : n + 1])
        output, variance, final = rule.scan(
            *(x[:, a:b] for x in inputs),
            state=alone,
            scale=scale,
            rotation=None if turn is None else turn[:, a:b],
        )
        outputs.append(output)
        variances.append(variance)
        finals.append(final)
    outputs.append(torch.zeros_like(inputs[2][:, edges[-1] :]))
    variances.append(torch.zeros_like(inputs[5][:, edges[-1] :]))
    states = (torch.cat(parts) for parts in zip(*finals, strict=True))
    return torch.cat(outputs, 1).to(q.dtype), torch.cat(variances, 1), *states
