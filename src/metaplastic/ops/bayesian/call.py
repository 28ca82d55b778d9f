"""The arguments of one call of the chunked form, taken and put chunk by chunk."""

import math
from typing import Any

import torch
from torch import Tensor

from ..contract import compute_dtype, read_offsets
from .frame import Inputs


class Call:
    """Inputs and groups, cast chunk by chunk; who makes one says what its ``chunks`` are."""

    chunks: Any

    def __init__(self, q, k, v, g, process_noise, observation_noise, rotation, cu_seqlens, scale):
        self.offsets = read_offsets("bayesian", cu_seqlens, q.shape[1])
        self.dtype = compute_dtype(q)
        self.rows = q.shape[0] if self.offsets is None else len(self.offsets) - 1
        self.heads, self.keys, self.values = q.shape[2], q.shape[3], v.shape[3]
        self.grouped = observation_noise.dim() == 4
        self.groups = observation_noise.shape[3] if self.grouped else 1
        self.scale = scale
        self.paired = rotation is not None and g.dim() == 4  # one decay for both keys of a pair
        if self.paired:
            g = g.repeat_interleave(2, -1)
        per_head = (x if x.dim() == 4 else x[..., None] for x in (g, process_noise))
        noise = observation_noise if self.grouped else observation_noise[..., None]
        noise = noise.where(noise != 0, math.nan)  # devices check no values: 0 is what stands beyond a sequence's end
        self.inputs, self.rotation = (q, k, v, *per_head, noise), rotation

    def take(self, c: Any, dtype: torch.dtype | None = None) -> Inputs:
        """What belongs to ``c``, in the compute dtype unless another one is given."""

        def part(x: Tensor) -> Tensor:
            return self.tokens(x, c).to(self.dtype if dtype is None else dtype).transpose(1, 2)

        q, k, v, *gates = map(part, self.inputs)
        g, process, observation = (x.contiguous() for x in gates)  # or all products with them would be strided
        noise = observation.mT[..., None]  # [n, H, G, C, 1]
        noise = noise.where(noise != 0, 1)  # beyond a sequence's end everything is 0: an identity if the noise is not
        return Inputs(
            (q if self.scale == 1 else q * self.scale)[:, :, None],
            k[:, :, None],
            v.unflatten(-1, (self.groups, -1)).transpose(2, 3),
            g[:, :, None],
            process[:, :, None],
            noise,
            None if self.rotation is None else part(self.rotation)[:, :, None],
        )

    def tokens(self, x: Tensor, c: Any) -> Tensor:
        """Of ``x [B, T, H, ...]``: ``[n, C, H, ...]``."""
        return self.chunks.take(x, c)

    def put(self, out: Tensor, c: Any, value: Tensor) -> None:
        """``[n, H, 1 or G, C, x]`` into ``[B, T, H, ...]``: the group axis joins the last one."""
        self.chunks.put(out, c, value.permute(0, 3, 1, 2, 4).reshape(value.shape[0], value.shape[3], *out.shape[2:]))

    def split(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """States with a group axis: ``[N, H, G, K, V / G]`` and ``[N, H, G, K, K]``, copied."""
        columns = mean.unflatten(-1, (self.groups, -1)).movedim(-2, 2)
        return columns.contiguous().clone(), (covariance if self.grouped else covariance[:, :, None]).clone()

    def join(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        joined = mean.movedim(2, -2).flatten(-2).contiguous()
        return joined, covariance if self.grouped else covariance[:, :, 0].contiguous()
