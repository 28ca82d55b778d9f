"""The reference backend: :func:`metaplastic.rules.palimpsa.scan` token by token, differentiated by autograd.

Memory grows with T (autograd keeps every state). It exists to be read and to be compared with.
"""

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from ...rules import palimpsa as rule
from ..contract import compute_dtype, read_offsets
from . import check_values


def apply(q, k, w, beta, g, prior, information, excess_precision, cu_seqlens, scale, output_variance):
    """Arguments and results as in :func:`metaplastic.ops.palimpsa.custom.register`'s op."""
    offsets = read_offsets("palimpsa", cu_seqlens, q.shape[1])
    check_values(beta, g, prior, excess_precision, None if offsets is None else int(offsets[-1]))
    dtype = compute_dtype(q)
    inputs = tuple(x.to(dtype) for x in (q, k, w, beta, g))
    rows = q.shape[0] if offsets is None else len(offsets) - 1
    if information is None:
        state = rule.init_state(rows, q.shape[2], w.shape[3], q.shape[3], dtype=dtype, device=q.device)
    else:
        state = rule.PalimpsaState(information, excess_precision)
    run = functools.partial(rule.scan, prior=prior.to(dtype), scale=scale)
    if offsets is None:
        mean, variance, final = run(*inputs, state=state)
    else:
        mean, variance, final = _packed(run, inputs, state, offsets.tolist())
    # A scan over no tokens returns the initial state itself: states are values, so hand out a copy.
    final = [x.clone() if x is s else x for x, s in zip(final, state, strict=True)]
    return mean.to(q.dtype), variance, *final


def _packed(run: Callable, inputs: tuple[Tensor, ...], state: rule.PalimpsaState, offsets: list[int]):
    """``run`` on each sequence alone; zeros for the tail."""
    reads = []
    for n, (start, end) in enumerate(itertools.pairwise(offsets)):
        alone = rule.PalimpsaState(*(s[n : n + 1] for s in state))
        reads.append(run(*(x[:, start:end] for x in inputs), state=alone))
    tail = torch.zeros_like(inputs[2][:, offsets[-1] :])
    mean = torch.cat([*(r[0] for r in reads), tail], 1)
    variance = torch.cat([*(r[1] for r in reads), tail], 1)
    if not reads:
        return mean, variance, state
    return mean, variance, [torch.cat(parts) for parts in zip(*(r[2] for r in reads), strict=True)]
