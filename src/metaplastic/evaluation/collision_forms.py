r"""The collision without simulation: closed forms of what every association is answered with.

Identity j is the key ``k_j`` (unit) with a one-hot value; ``answers[..., i, j]`` is how much of value j the key ``k_i``
is answered with, ``G = k_i . k_j`` the Gram matrix of the keys. A schedule is a list of runs (j, n): write j n times.

**Counts.** Where order enters through decay alone, with ``n_j = sum_s alpha^(t - s)`` over the writes of j and
``N = diag(n)``:

    additive    omega G N
    Mesa        G (ridge Id + beta N G)^{-1} beta N                        the exact model behind Palimpsa, too
    Palimpsa    k_i . mu_j,   mu_jd = beta n_j k_jd / (prior + beta sum_i n_i k_id^2)         d: elements of a key

**Runs.** One write changes every answer through the answer to its own key alone, so n writes of j sum up:

    delta       y_j -> y* + (alpha (1 - b))^n (y_j - y*),     y* = b v / (1 - alpha (1 - b))
                y_i -> alpha^n y_i + G_ij (c - alpha^n (1 - (1 - b)^n) (y_j - y*))
                c = b (v - alpha y*) (1 - alpha^n) / (1 - alpha), 0 without decay
    elementwise Longhorn      s_d -> r^n s_d + v (1 - r^n) / k_d,     r = 1 - b k_d^2,  s_d: row d of the memory

**The Bayesian filter** (A = Id). Let ``C = k_i . Pb k_j`` be the predicted covariance of the answers, ``x = C_jj``,
``d_i = C_ij - G_ij x`` and ``2 cosh(theta) = 2 + l^2 / r^2``, ``s_n = sinh(n theta) / sinh(theta)``. The scalar filter
``x -> r^2 x / (r^2 + x) + l^2`` is a Moebius map of determinant 1, and its powers telescope the paper's series:

    q   = s_n x / r^2 + s_n - s_{n-1},       1 / q = prod(1 - gain),       Q = s_n / (r^2 q)
    x'  = (s_n ((1 + l^2 / r^2) x + l^2) - s_{n-1} x) / q
    y_i -> y_i + (G_ij (1 - 1/q) + d_i Q) (v - y_j)
    C   -> C + n l^2 G - G_.j G_.j^T (x - x' + n l^2) - (G_.j d^T + d G_.j^T) (1 - 1/q) - d d^T Q

For n -> infinity the bracket tends to ``(C_ij + G_ij h) / (x + h)``, where ``h`` solves ``h^2 + l^2 h = r^2 l^2``: the
variance that the memory settles at. A reset puts G_ij there: that ratio is the whole of the protection.
All but Palimpsa's and the elementwise rule are functions of G alone, hence blind to the basis of the keys.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Runs = Sequence[tuple[int, int]]


def counts(runs: Runs, identities: int, alpha: float = 1.0) -> Tensor:
    """``n [I]`` after the schedule, every write decayed by alpha at each later one."""
    found = torch.zeros(identities, dtype=torch.float64)
    for j, n in runs:
        found = found * alpha**n
        found[j] += n if alpha == 1 else (1 - alpha**n) / (1 - alpha)
    return found


def additive(gram: Tensor, n: Tensor, weight: float) -> Tensor:
    return weight * gram * n


def mesa(gram: Tensor, n: Tensor, beta: float, ridge: float) -> Tensor:
    system = ridge * torch.eye(len(n), dtype=gram.dtype) + beta * n[:, None] * gram
    return torch.linalg.solve(system, gram, left=False) * (beta * n)


def palimpsa(keys: Tensor, n: Tensor, beta: float, prior: float) -> Tensor:
    """keys ``[..., I, K]``; depends on their basis."""
    precision = prior + beta * (n[:, None] * keys.square()).sum(-2, keepdim=True)
    return keys @ (beta * n[:, None] * keys / precision).mT


def delta(gram: Tensor, runs: Runs, gain: float, alpha: float = 1.0) -> Tensor:
    answers = torch.zeros_like(gram)
    for j, n in runs:
        value = torch.zeros_like(gram[..., j, :])
        value[..., j] = 1
        settled = gain * value / (1 - alpha * (1 - gain))
        away = answers[..., j, :] - settled
        steady = 0 * value if alpha == 1 else gain * (value - alpha * settled) * (1 - alpha**n) / (1 - alpha)
        moved = steady - alpha**n * (1 - (1 - gain) ** n) * away
        own = settled + (alpha * (1 - gain)) ** n * away
        answers = alpha**n * answers + gram[..., :, j, None] * moved[..., None, :]
        answers[..., j, :] = own
    return answers


def elementwise_longhorn(keys: Tensor, runs: Runs, gain: float) -> Tensor:
    """keys ``[..., I, K]``; depends on their basis."""
    memory = torch.zeros_like(keys.mT)  # [..., K, I]
    for j, n in runs:
        k = keys[..., j, :]
        power = n * torch.log1p(-gain * k.square())
        memory = power.exp()[..., None] * memory
        memory[..., j] += torch.where(k == 0, 0, -power.expm1() / torch.where(k == 0, 1, k))
    return keys @ memory


def settled_variance(process_noise: float, observation_noise: float) -> float:
    """``h``, after many writes of one key: the posterior variance of its answer."""
    return (math.sqrt(process_noise**2 + 4 * observation_noise * process_noise) - process_noise) / 2


def bayesian(
    gram: Tensor, runs: Runs, prior_variance: float, process_noise: float, observation_noise: float
) -> tuple[Tensor, Tensor]:
    """Answers, and the predicted covariance C of the answers to the next token."""
    ratio = process_noise / observation_noise
    theta = math.acosh(1 + ratio / 2)

    def power(n: int, of: int) -> float:
        """``s_n exp(-of theta)``, which cannot overflow for n <= of."""
        if not theta:
            return float(n)
        return (math.exp((n - of) * theta) - math.exp(-(n + of) * theta)) / (2 * math.sinh(theta))

    answers, covariance = torch.zeros_like(gram), (prior_variance + process_noise) * gram
    for j, n in runs:
        overlap, x = gram[..., :, j], covariance[..., j, j, None]
        apart = covariance[..., :, j] - overlap * x
        s, before = power(n, n), power(n - 1, n)
        q = s * x / observation_noise + s - before
        last = (s * ((1 + ratio) * x + process_noise) - before * x) / q
        series, unmoved = s / (observation_noise * q), math.exp(-n * theta) / q
        residual = -answers[..., j, :]
        residual[..., j] += 1
        answers = answers + (overlap * (1 - unmoved) + apart * series)[..., None] * residual[..., None, :]
        mixed = overlap[..., :, None] * apart[..., None, :] * (1 - unmoved)[..., None]
        covariance = (
            covariance
            + n * process_noise * gram
            - overlap[..., :, None] * overlap[..., None, :] * (x - last + n * process_noise)[..., None]
            - (mixed + mixed.mT)
            - apart[..., :, None] * apart[..., None, :] * series[..., None]
        )
    return answers, covariance


def effective_overlap(gram: Tensor, covariance: Tensor, i: int, j: int, settled: float) -> Tensor:
    """The share of A's residual (j) that reaches B's answer (i) if A is now written for ever; a reset's is G_ij."""
    return (covariance[..., i, j] + gram[..., i, j] * settled) / (covariance[..., j, j] + settled)
