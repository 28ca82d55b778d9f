r"""The chunked backend: batched products in plain PyTorch, on any device, with memory bounded by the chunk.

Inside a chunk with entry state (M_0, J_0), D[t, s] = exp(g_{s+1} + ... + g_t) and gamma_t = exp(g_1 + ... + g_t):

    M_t = sum_{s <= t} D[t, s] w_s k_s^T + gamma_t M_0         J_t likewise with beta_s (k_s^2)^T
    R_t = 1 / (J_t + prior)    mu_t = M_t R_t    y_t = mu_t q_t    var_t = R_t q_t^2

The gradients of a chunk (dM, dJ at its end given; n_t = (dy_t q_t^T) R_t, n2_t = (dvar_t (q_t^2)^T) R_t^2):

    dM_t = sum_{s >= t} D[s, t] n_s + D[end, t] dM_end         dJ_t likewise with -(n_s mu_s + n2_s)
    dq_t = mu_t^T dy_t + 2 q_t (R_t^T dvar_t)    dw_t = dM_t k_t    dbeta_t = dJ_t k_t^2
    dk_t = dM_t^T w_t + 2 k_t (dJ_t^T beta_t)    dprior = -sum_t (n_t mu_t + n2_t)
    dg_t = alpha_t (<dM_t, M_{t-1}> + <dJ_t, J_{t-1}>)    dM_0 = alpha_1 dM_1, dJ_0 = alpha_1 dJ_1

dg is taken directly rather than by a reverse sum of differences: exact beside g = -1000.
About eight arrays [B, C, H, V, K] live at once; C shrinks as B H V K grows. The backward recomputes states from
about sqrt(T / C) checkpoints instead of keeping them all.
"""

import math

import torch
from torch import Tensor

from ..chunks import Chunks, chunk_size, segment_sums
from ..contract import compute_dtype
from .custom import register


class _Chunk:
    """States within one chunk: M, J [n, H, C, V, K] for every token, and the decays that made them."""

    def __init__(self, k: Tensor, w: Tensor, beta: Tensor, g: Tensor, m0: Tensor, j0: Tensor):
        g = g.transpose(1, 2)  # [n, H, C]
        self.decay = segment_sums(g).exp()
        self.alpha = g.exp()
        self.entry = g.cumsum(-1).exp()
        self.m0, self.j0 = m0, j0
        self.k, self.w, self.beta = (x.transpose(1, 2) for x in (k, w, beta))  # [n, H, C, K or V]

    def _all_tokens(self, write: Tensor, key: Tensor, start: Tensor) -> Tensor:
        outer = (write[..., :, None] * key[..., None, :]).flatten(-2)  # [n, H, C, V K]
        return (self.decay @ outer).unflatten(-1, start.shape[-2:]) + self.entry[..., None, None] * start[:, :, None]

    def states(self) -> tuple[Tensor, Tensor]:
        return self._all_tokens(self.w, self.k, self.m0), self._all_tokens(self.beta, self.k.square(), self.j0)

    def final(self) -> tuple[Tensor, Tensor]:
        """The state after the last token alone, without the trajectory."""
        tail = self.decay[..., -1, :, None]  # [n, H, C, 1]
        last = self.entry[..., -1, None, None]
        return (
            (self.w * tail).mT @ self.k + last * self.m0,
            (self.beta * tail).mT @ self.k.square() + last * self.j0,
        )


def _prepare(tensors: tuple[Tensor, ...], state: tuple, offsets: Tensor | None, dtype: torch.dtype):
    """q and the other inputs in the compute dtype, private copies of the states, and the chunking."""
    q, _, w = tensors[:3]
    rows = q.shape[0] if offsets is None else len(offsets) - 1
    shape = (rows, q.shape[2], w.shape[3], q.shape[3])
    states = [q.new_zeros(shape, dtype=dtype) if s is None else s.to(dtype).clone() for s in state]
    size = chunk_size(math.prod(shape), q.device)
    q, *inputs = (x.to(dtype) for x in tensors)
    return q, inputs, states, Chunks(q.shape[0], q.shape[1], offsets, size, q.device)


def forward(q, k, w, beta, g, prior, information, excess_precision, offsets, scale, output_variance):
    dtype = compute_dtype(q)
    state = (information, excess_precision)
    qs, inputs, (m, j), chunks = _prepare((q, k, w, beta, g), state, offsets, dtype)
    prior = prior.to(dtype)[:, None, None, None]
    output = q.new_zeros(w.shape)
    variance = q.new_zeros(w.shape if output_variance else (0,), dtype=dtype)
    for c in range(chunks.count):
        rows = chunks.rows(c)
        chunk = _Chunk(*[chunks.take(x, c) for x in inputs], m0=m[rows], j0=j[rows])
        query = (chunks.take(qs, c) * scale).transpose(1, 2)[..., None]  # [n, H, C, K, 1]
        M, J = chunk.states()
        R = 1 / (J + prior)
        chunks.put(output, c, ((M * R) @ query)[..., 0].transpose(1, 2))
        if output_variance:
            chunks.put(variance, c, (R @ query.square())[..., 0].transpose(1, 2))
        m[rows], j[rows] = M[:, :, -1], J[:, :, -1]
    return output, variance, m, j


def backward(
    d_output, d_variance, d_information, d_excess_precision,
    q, k, w, beta, g, prior, information, excess_precision, offsets, scale,
):  # fmt: skip
    dtype = compute_dtype(q)
    state = (information, excess_precision)
    qs, inputs, (m, j), chunks = _prepare((q, k, w, beta, g), state, offsets, dtype)
    p = prior.to(dtype)[:, None, None, None]
    dM_end, dJ_end = (
        torch.zeros_like(m) if d is None else d.to(dtype).clone() for d in (d_information, d_excess_precision)
    )
    grads = [x.new_zeros(x.shape) for x in (q, k, w, beta, g)]
    d_prior = torch.zeros_like(prior, dtype=dtype)

    def advance(c: int, entry: list[Tensor]) -> list[Tensor]:
        return list(_Chunk(*(chunks.take(x, c) for x in inputs), *entry).final())

    for c, entry in chunks.walk_back([m, j], advance):
        rows = chunks.rows(c)
        chunk = _Chunk(*(chunks.take(x, c) for x in inputs), *entry)
        query = (chunks.take(qs, c) * scale).transpose(1, 2)
        dy = chunks.take(d_output, c).to(dtype).transpose(1, 2)  # [n, H, C, V]
        dvar = None if d_variance is None else chunks.take(d_variance, c).to(dtype).transpose(1, 2)
        dq, *others, dp, dM, dJ = _chunk_backward(chunk, query, dy, dvar, dM_end[rows], dJ_end[rows], p)
        for out, value in zip(grads, (dq * scale, *others), strict=True):
            chunks.put(out, c, value.transpose(1, 2))
        d_prior += dp
        dM_end[rows], dJ_end[rows] = dM, dJ
    return *grads, d_prior.to(prior.dtype), dM_end, dJ_end


def _chunk_backward(chunk, q, dy, dvar, dM_end, dJ_end, prior):
    """Gradients of q, k, w, beta, g ``[n, H, C, ...]``, of the prior [H] and of the entry state."""
    M, J = chunk.states()
    R = 1 / (J + prior)
    mu = M * R
    n = (dy[..., :, None] * q[..., None, :]) * R
    dq = (dy[..., None, :] @ mu)[..., 0, :]
    dJ_source = n * mu
    if dvar is not None:
        dJ_source = dJ_source + (dvar[..., :, None] * q.square()[..., None, :]) * R.square()
        dq = dq + 2 * q * (dvar[..., None, :] @ R)[..., 0, :]
    d_prior = -dJ_source.sum((0, 2, 3, 4))
    tail = chunk.decay[..., -1, :, None, None]  # D[end, t]

    def gather(source: Tensor, end: Tensor) -> Tensor:
        return (chunk.decay.mT @ source.flatten(-2)).unflatten(-1, end.shape[-2:]) + tail * end[:, :, None]

    dM, dJ = gather(n, dM_end), gather(-dJ_source, dJ_end)
    k2 = chunk.k.square()
    dw = (dM @ chunk.k[..., None])[..., 0]
    dbeta = (dJ @ k2[..., None])[..., 0]
    dk = (chunk.w[..., None, :] @ dM)[..., 0, :] + 2 * chunk.k * (chunk.beta[..., None, :] @ dJ)[..., 0, :]
    before = [torch.cat([s0[:, :, None], s[:, :, :-1]], 2) for s0, s in ((chunk.m0, M), (chunk.j0, J))]
    dg = chunk.alpha * ((dM * before[0]).sum((-2, -1)) + (dJ * before[1]).sum((-2, -1)))
    first = chunk.alpha[..., 0, None, None]
    return dq, dk, dw, dbeta, dg, d_prior, first * dM[:, :, 0], first * dJ[:, :, 0]


apply = register("chunked", forward, backward)
