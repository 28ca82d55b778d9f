r"""What each kind of memory has to say: its quantities, how they are found, and the words for them.

A kind collects, call after call, values per token that counts, ``[tokens, H]`` (``[tokens, H, G]`` with noise groups).
Rules are replayed from the layer's gates in chunks, in float32 (float64 for a float64 model).

Palimpsa (``metaplastic.rules.palimpsa``, arXiv 2602.09075; J = I - prior is replayed alone):

    limit    max_ij |I_t - prior| / prior  =  max_ij J_t / prior      Sec. 2.3: the rule is additive where this is << 1
    ratio    r_t = (I_max - I_min) / I_min  over the elements ij      the metaplasticity ratio of Fig. 3
    window   N_t = 1 / (1 - alpha_t)                                  the memory window of Sec. 2.2, in tokens

The limit bounds the distance to the additive rule, element by element, for the same writes:

    |M / (prior + J) - M / prior|  =  |M / prior| J / (prior + J)  <=  |M / prior| min(1, J / prior)

A short window is not enough: J_t >= beta_t k_t^2 however small alpha is.

The Bayesian Layer (``metaplastic.rules.bayesian``, arXiv 2605.31163; the covariance P is replayed alone):

    uncertainty  tr(P_t) / (K p0)                      K (1 - uncertainty) directions' worth of evidence is held
    gain         k Pb k / (r^2 + k Pb k)               which share of its error about k_t the memory corrects
    first gain   p0 |k|^2 / (r^2 + p0 |k|^2)           the gain if nothing were known
    stationary   l_t^2 / (1 - a_t^2)                   the variance that an unobserved direction drifts to
    condition    of P, largest over smallest eigenvalue, and
    known        how many of its eigenvalues are below p0 / 2: both of the states that calls leave
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..layers.attention import AttentionState
from ..ops.bayesian.chunked import Plan
from ..ops.bayesian.frame import Frame
from ..ops.chunks import Chunks, chunk_size, segment_sums
from ..ops.contract import compute_dtype, full_precision, read_offsets
from ..rules import AdditiveState, DeltaState, GaussianState, PalimpsaState

_BINS = 1 << 15  # non-negative float32 numbers by their first 16 bits: 128 bins an octave


class Spread(NamedTuple):
    """Quartiles and the largest value over tokens and batch, ``[H]`` or ``[H, G]`` each; values that occurred."""

    low: Tensor
    median: Tensor
    high: Tensor
    largest: Tensor


class Measure(NamedTuple):
    """A quantity of a kind of memory, and how a person is told about it."""

    name: str
    legend: str  # a line for tables
    columns: dict[str, str]  # in the table of heads: part of the Spread ("" for a plain tensor) -> title
    panel: str = ""  # title in the figure; "": not drawn
    scale: str = ""  # of the figure's colours, which are log10, in words; "": a share, drawn from 0 to 1
    drawn: str = ""  # the part of the Spread that is drawn
    brief: bool = True  # whether the line that sums a mixer up names it


class Call(NamedTuple):
    """One call of a mixer."""

    gates: Any
    memory: Any  # the state it started from, None for the first
    keep: Tensor  # [B, T], which tokens count
    cu_seqlens: Tensor | None


_HEADS = "least to largest head"
_MEDIANS = f"median over tokens, {_HEADS}"
_QUARTILES = {"low": "lower quartile", "median": "median", "high": "upper quartile"}
WINDOW = Measure(
    "window",
    f"window: N = 1 / (1 - alpha), how many tokens it forgets over; {_MEDIANS}.",
    {part: f"window, {words}" for part, words in _QUARTILES.items()},
    "memory window N, median over tokens",
    "log10 of N in tokens",
    "median",
)


class Kind:
    """Any memory: its window, if its gates have a decay."""

    note = "no element-wise precision"
    about = ""  # a sentence for the page
    measures: tuple[Measure, ...] = (WINDOW,)

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = {}

    def look(self, call: Call) -> None:
        if (g := getattr(call.gates, "g", None)) is not None:
            # 1 - exp(g) without cancellation
            self.add("window", _per_head(-1 / torch.expm1(g[call.keep].to(compute_dtype(g)))))

    def add(self, name: str, values: Tensor) -> None:
        """``values [tokens, H]`` or ``[tokens, H, G]``."""
        self.values.setdefault(name, []).append(values.cpu())

    def report(self) -> dict[str, Spread | Tensor]:
        """By measure; without those that saw no token."""
        found = {name: torch.cat(parts) for name, parts in self.values.items()}
        return {name: spread(x) for name, x in found.items() if len(x)}


class Additive(Kind):
    note = "additive: no precision"


class Delta(Kind):
    note = ""
    about = "The delta rule's write strength beta is the share of its error about a key that the memory corrects."
    measures = (
        Measure(
            "strength",
            f"strength: beta, which share of its error about a key it corrects; {_MEDIANS}.",
            {part: f"strength, {words}" for part, words in _QUARTILES.items()},
            "write strength beta, median over tokens",
            drawn="median",
        ),
        WINDOW,
    )

    def look(self, call: Call) -> None:
        super().look(call)
        self.add("strength", call.gates.beta[call.keep])


class Attention(Kind):
    note = "keeps its tokens: no fixed memory to be sure of"
    measures = ()


class Palimpsa(Kind):
    note = ""
    about = (
        "A head of Palimpsa is in the additive (Mamba2) limit where max |I - prior| / prior is far below 1: without "
        "metaplasticity, each term of its answers would differ by at most that fraction. The ratio (I_max - I_min) / "
        "I_min says how differently its elements resist change."
    )
    measures = (
        Measure(
            "limit",
            f"limit: max |I - prior| / prior over all elements and tokens, {_HEADS}; far below 1 the memory is the "
            "additive rule (Mamba2).",
            {"": "limit, largest"},
            "largest |I - prior| / prior",
            "log10 of the limit",
        ),
        Measure(
            "limit_median",
            "limit, median: of all elements and tokens, where the limit is the largest.",
            {"": "limit, median"},
            brief=False,
        ),
        Measure(
            "ratio",
            f"ratio: (I_max - I_min) / I_min, how differently its elements resist change; {_MEDIANS}.",
            {"median": "ratio, median", "largest": "ratio, largest"},
        ),
        WINDOW,
    )

    def __init__(self) -> None:
        super().__init__()
        self.counts: Tensor | None = None  # [H, _BINS]: how many elements J / prior fall into each bin

    def look(self, call: Call) -> None:
        """J_t = sum_{s <= t} D[t, s] beta_s (k_s^2)^T + exp(g_1 + ... + g_t) J_0: the chunk form of docs/math.md."""
        super().look(call)
        gates, dtype = call.gates, compute_dtype(call.gates.k)
        k, beta, g, prior = (z.to(dtype) for z in (gates.k, gates.beta, gates.g, gates.prior))
        batch, length, heads, key_size = k.shape
        offsets = read_offsets("inspection", call.cu_seqlens, length)
        rows = batch if offsets is None else len(offsets) - 1
        if call.memory is None:
            entry = k.new_zeros(rows, heads, beta.shape[-1], key_size)
        else:
            entry = call.memory.excess_precision.to(dtype).clone()
        chunks = Chunks(batch, length, offsets, chunk_size(entry.numel(), k.device), k.device)
        for c in range(chunks.count):
            here, counted = chunks.rows(c), chunks.take(call.keep, c).bool()
            k_c, beta_c, g_c = (chunks.take(z, c).transpose(1, 2) for z in (k, beta, g))  # [n, H, C, ...]
            evidence = (beta_c[..., :, None] * k_c.square()[..., None, :]).flatten(-2)  # [n, H, C, V K]
            excess = segment_sums(g_c).exp() @ evidence
            excess += g_c.cumsum(-1).exp()[..., None] * entry[here].flatten(-2)[:, :, None]
            entry[here] = excess[:, :, -1].unflatten(-1, entry.shape[-2:])
            excess = excess.transpose(0, 1)  # [H, n, C, V K]
            self._count(excess.flatten(1, 2) if counted.all() else excess[:, counted], prior)

    def _count(self, excess: Tensor, prior: Tensor) -> None:
        """Adds the statistics of ``excess [H, tokens, V K]``."""
        low, high = excess.aminmax(dim=-1)
        self.add("limit", high.T / prior)
        self.add("ratio", (high - low).T / (low.T + prior))
        bins = (excess / prior[:, None, None]).float().view(torch.int32)
        bins.bitwise_right_shift_(16).bitwise_and_(_BINS - 1)  # without the sign: NaN may have one
        bins += torch.arange(len(bins), device=bins.device, dtype=torch.int32)[:, None, None] * _BINS
        counts = torch.bincount(bins.flatten(), minlength=len(bins) * _BINS).view(-1, _BINS).cpu()
        self.counts = counts if self.counts is None else self.counts + counts

    def report(self) -> dict[str, Spread | Tensor]:
        found = super().report()
        if self.counts is not None and isinstance(limit := found.get("limit"), Spread):
            found |= {"limit": limit.largest, "limit_median": _histogram_median(self.counts)}
        return found


class Gaussian(Kind):
    note = ""
    about = (
        "A head of the Bayesian Layer knows as much as its uncertainty tr(P) / (K p0) is below 1. Its gain is the "
        "share of its error about a key that it corrects: the first gain if it knew nothing, less for what it knows."
    )
    measures = (
        Measure(
            "uncertainty",
            f"uncertainty: tr(P) / (K p0), the variance that is left of its prior's; {_MEDIANS}.",
            {part: f"uncertainty, {words}" for part, words in _QUARTILES.items()},
            "uncertainty tr(P) / (K p0), median over tokens",
            drawn="median",
        ),
        Measure(
            "gain",
            f"gain: k P k / (r2 + k P k), which share of its error about a key it corrects; {_MEDIANS}.",
            {part: f"gain, {words}" for part, words in _QUARTILES.items()},
            "gain k P k / (r2 + k P k), median over tokens",
            drawn="median",
        ),
        Measure(
            "first_gain",
            "first gain: what the gain would be if nothing were known.",
            {"median": "first gain, median"},
            brief=False,
        ),
        Measure(
            "known",
            "known: how many of the K directions have less than half the prior's variance when a call (2,048 tokens "
            f"here) ends; median over calls, {_HEADS}.",
            {"median": "known, median"},
        ),
        Measure(
            "condition",
            f"condition: largest over smallest variance of a direction then; median over calls, {_HEADS}.",
            {"median": "condition, median", "largest": "condition, largest"},
        ),
        Measure(
            "stationary",
            "stationary: l2 / (1 - a^2), the variance of a direction that is never observed.",
            {"median": "stationary, median"},
            brief=False,
        ),
        Measure("prior", "prior: p0, the variance of every direction at first.", {"": "prior"}, brief=False),
        WINDOW,
    )

    def __init__(self) -> None:
        super().__init__()
        self.prior: Tensor | None = None

    def look(self, call: Call) -> None:
        super().look(call)
        gates, keep = call.gates, call.keep
        dtype = compute_dtype(gates.k)
        q, k, _, g, process, observation, prior = (z.to(dtype) for z in gates[:-1])
        self.prior, keys = prior, k.shape[-1]
        self._look_at_noise(k[keep], g[keep], process[keep], observation[keep], prior)
        width = prior.shape[1] if prior.dim() == 2 else 1  # the mean does not matter: one column a group, of zeros
        v = k.new_zeros(*k.shape[:3], width)
        plan = Plan(q, k, v, g, process, observation, gates.rotation, call.cu_seqlens, 1.0)
        start = prior[..., None, None] * torch.eye(keys, dtype=dtype, device=k.device)
        start = start.expand(plan.rows, *start.shape) if call.memory is None else call.memory.covariance.to(dtype)
        mean, state = plan.split(k.new_zeros(plan.rows, k.shape[2], keys, width), start)
        counted_rows = torch.zeros(plan.rows, dtype=torch.bool, device=k.device)
        per_group = prior.view(-1, width)
        for c in range(plan.chunks.count):
            rows, counted = plan.chunks.rows(c), plan.chunks.take(keep, c).bool()
            with full_precision(k.device):
                frame = Frame(plan.take(c))
                chunk = frame.enter(mean[rows], state[rows])
                # P_t = Pb_t - n n^T: what each token took away, n = b^1/2 Pb k, is the last row of U if the chunk ended
                # there; the diagonal gathers it as it gathers the process noise.
                taken = frame.decay.entry * (chunk.whitening @ chunk.spread)
                taken = taken + frame.decay.over_earlier(chunk.whitening, chunk.gathered)
                entered = frame.decay.entry.square() * state[rows].diagonal(dim1=-2, dim2=-1)[..., None, :]
                held = entered + frame.noise.diagonal - frame.decay.gathered(taken.square())
                gain = 1 - chunk.whitening.diagonal(dim1=-2, dim2=-1).square()  # its pivots: 1 + k Pb k / r^2
                _, state[rows] = frame.leave(*chunk.final())
            counted_rows[rows] |= counted.any(1)
            for name, x in (("uncertainty", held.sum(-1) / (keys * per_group[..., None])), ("gain", gain)):
                self.add(name, self._of_groups(x.permute(0, 3, 1, 2)[counted]))
        variances = torch.linalg.eigvalsh(state[counted_rows].double())  # ascending
        self.add("condition", self._of_groups(variances[..., -1] / variances[..., 0]))
        self.add("known", self._of_groups((variances < per_group[..., None].double() / 2).sum(-1).double()))

    def _look_at_noise(self, k: Tensor, g: Tensor, process: Tensor, observation: Tensor, prior: Tensor) -> None:
        """What needs no replay, of the tokens that count, ``[tokens, H, ...]``."""
        first = prior * k.square().sum(-1).view(*k.shape[:2], *[1] * (prior.dim() - 1))
        self.add("first_gain", first / (observation + first))
        decay = -torch.expm1(2 * g)
        if process.dim() == 3 and decay.dim() == 3 and process.shape[-1] != decay.shape[-1]:
            decay = decay.repeat_interleave(2, -1)  # one decay for both keys of a pair
        elif process.dim() != decay.dim():
            process, decay = (x if x.dim() == 3 else x[..., None] for x in (process, decay))
        self.add("stationary", _per_head((process / decay).where(process > 0, 0)))  # without noise nothing drifts

    def _of_groups(self, x: Tensor) -> Tensor:
        """``[..., H, G]`` without the axis of groups where the layer has none."""
        return x if self.prior is not None and self.prior.dim() == 2 else x[..., 0]

    def report(self) -> dict[str, Spread | Tensor]:
        found = super().report()
        return found | {"prior": self.prior.double().cpu()} if found and self.prior is not None else found


KINDS: dict[type, type[Kind]] = {
    AdditiveState: Additive, PalimpsaState: Palimpsa, DeltaState: Delta, GaussianState: Gaussian,
    AttentionState: Attention,
}  # fmt: skip
MEASURES: dict[str, Measure] = {
    m.name: m for m in (*Palimpsa.measures[:-1], *Gaussian.measures[:-1], *Delta.measures[:-1], WINDOW)
}


def _per_head(x: Tensor) -> Tensor:
    """Values ``[tokens, H]``; those of keys ``[tokens, H, K]`` count one by one."""
    return x.transpose(1, 2).flatten(0, 1) if x.dim() == 3 else x


def spread(values: Tensor) -> Spread:
    """Over ``values [tokens, ...]``; without interpolation, which would make NaN of infinite windows."""
    quartiles = np.quantile(values.double().numpy(), [0.25, 0.5, 0.75, 1.0], axis=0, method="inverted_cdf")
    return Spread(*torch.from_numpy(quartiles))


def _histogram_median(counts: Tensor) -> Tensor:
    """The middle of the bin that holds the median, per head; 0 for the bin of 0."""
    half = (counts.sum(1, keepdim=True) + 1) // 2
    bins = torch.searchsorted(counts.cumsum(1), half)[:, 0]
    middle = ((bins << 16) + 0x8000).to(torch.int32).view(torch.float32)
    return middle.double().where(bins > 0, 0.0)
