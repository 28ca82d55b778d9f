r"""How sure every memory grows while a model runs, and how near each head is to the additive rule (Mamba2's).

For every head, over the tokens that count (with the notation of ``metaplastic.rules.palimpsa``; arXiv 2602.09075):

    limit    max_ij |I_t - prior| / prior  =  max_ij J_t / prior      Sec. 2.3: the rule is additive where this is << 1
    ratio    r_t = (I_max - I_min) / I_min  over the elements ij      the metaplasticity ratio of Fig. 3
    window   N_t = 1 / (1 - alpha_t)                                  the memory window of Sec. 2.2, in tokens

The limit bounds the distance to the additive rule, element by element, for the same writes:

    |M / (prior + J) - M / prior|  =  |M / prior| J / (prior + J)  <=  |M / prior| min(1, J / prior)

A short window is not enough: J_t >= beta_t k_t^2 however small alpha is.

Layers carry no diagnostics: their inputs are caught by hooks, ``mixer.gates`` gives the inputs of the rule, and the
rule is replayed (J alone) in chunks of at most 64 tokens. What is kept is three numbers per head and token and one
histogram per head. Everything is in float32, in float64 for a float64 model.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..layers import MIXERS
from ..ops.chunks import Chunks, chunk_size, segment_sums
from ..ops.contract import compute_dtype, inside_sequences, read_offsets
from ..rules import AdditiveState, PalimpsaState

_BINS = 1 << 15  # non-negative float32 numbers by their first 16 bits: 128 bins an octave


class Spread(NamedTuple):
    """Quartiles and the largest value over tokens and batch, ``[H]`` each, float64; values that occurred."""

    low: Tensor
    median: Tensor
    high: Tensor
    largest: Tensor


class LayerMemory(NamedTuple):
    """What one mixer's memory did. ``None`` where its rule has no such quantity (``note`` says so)."""

    name: str  # of the module within the model
    kind: str  # its class
    tokens: int  # that count, over all rows of the batch: not padding, not the tail of packed sequences
    note: str
    limit: Tensor | None  # [H] max over tokens, batch, value rows and keys of |I - prior| / prior
    limit_median: Tensor | None  # [H] median over the same elements, to a relative 0.4%
    ratio: Spread | None  # [H] of r_t, one value per token
    window: Spread | None  # [H] of N_t; infinite where nothing is forgotten


class Watch:
    """What :func:`watch` collects; :meth:`report` may be called at any time."""

    def __init__(self, names: dict[nn.Module, str]):
        self._seen = {mixer: _Collected(name, mixer) for mixer, name in names.items()}

    def report(self) -> tuple[LayerMemory, ...]:
        """One entry per mixer that has run, in the order of the model's modules. ValueError if none has."""
        if ran := tuple(c.summary() for c in self._seen.values() if c.calls):
            return ran
        raise ValueError(f"model: none of its {len(self._seen)} mixers has run, so there is nothing to report")


@contextlib.contextmanager
def watch(model: nn.Module) -> Iterator[Watch]:
    """Looks at every mixer in ``model`` whenever it runs inside the block, whatever runs it: a forward pass, with or
    without cache, ``generate``, a training step, a model of another library around our layers.

    The model computes what it would without; its mode, gradients and hooks are as before afterwards, exceptions or not.
    Compiled models run uncompiled meanwhile (compiled code may skip hooks). Several calls add up.

    >>> with watch(model) as memory:                          # doctest: +SKIP
    ...     model.generate(prompt, max_new_tokens=100)
    >>> [layer.limit for layer in memory.report()]            # doctest: +SKIP
    """
    kinds = tuple(MIXERS.values())
    names = {module: name for name, module in model.named_modules() if isinstance(module, kinds)}
    if not names:
        raise ValueError(f"model must contain a mixer of metaplastic.layers, got a {type(model).__name__} without one")
    found = Watch(names)
    with contextlib.ExitStack() as undo:
        for mixer in names:
            hook = mixer.register_forward_pre_hook(found._seen[mixer].look, with_kwargs=True)
            undo.callback(hook.remove)
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        yield found


class _Collected:
    """The running statistics of one mixer."""

    def __init__(self, name: str, mixer: Any):
        self.name, self.mixer, self.calls, self.tokens = name, mixer, 0, 0
        self.per_token: dict[str, list[Tensor]] = {"limit": [], "ratio": [], "window": []}  # [tokens, H] each
        self.counts: Tensor | None = None  # [H, _BINS]: how many elements J / prior fall into each bin

    @torch.no_grad()
    def look(self, mixer: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """A forward pre-hook."""
        self.calls += 1
        call = inspect.signature(mixer.forward).bind(*args, **kwargs).arguments
        if not callable(getattr(mixer, "gates", None)):
            return
        gates = mixer.gates(*args, **kwargs)
        x: Tensor = call["x"]
        state, mask, cu_seqlens = (call.get(n) for n in ("state", "mask", "cu_seqlens"))
        keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask.bool()
        if cu_seqlens is not None:
            keep = inside_sequences(cu_seqlens, x.shape[1], x.device)[None]
        self.tokens += int(keep.sum())
        if (g := getattr(gates, "g", None)) is not None:
            window = -1 / torch.expm1(g[keep].to(compute_dtype(g)))  # 1 - exp(g) without cancellation
            if window.dim() == 3:  # a decay of its own for every key
                window = window.transpose(1, 2).flatten(0, 1)
            self.per_token["window"].append(window.cpu())
        if mixer.memory_type is PalimpsaState:
            self._replay(gates, None if state is None else state.memory.excess_precision, keep, cu_seqlens)

    def _replay(self, gates: Any, start: Tensor | None, keep: Tensor, cu_seqlens: Tensor | None) -> None:
        """J_t = sum_{s <= t} D[t, s] beta_s (k_s^2)^T + exp(g_1 + ... + g_t) J_0: the chunk form of docs/math.md."""
        dtype = compute_dtype(gates.k)
        k, beta, g, prior = (z.to(dtype) for z in (gates.k, gates.beta, gates.g, gates.prior))
        batch, length, heads, key_size = k.shape
        offsets = read_offsets("inspection", cu_seqlens, length)
        rows = batch if offsets is None else len(offsets) - 1
        entry = k.new_zeros(rows, heads, beta.shape[-1], key_size) if start is None else start.to(dtype).clone()
        chunks = Chunks(batch, length, offsets, chunk_size(entry.numel(), k.device), k.device)
        for c in range(chunks.count):
            here, counted = chunks.rows(c), chunks.take(keep, c).bool()
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
        self.per_token["limit"].append((high.T / prior).cpu())
        self.per_token["ratio"].append(((high - low).T / (low.T + prior)).cpu())
        bins = (excess / prior[:, None, None]).float().view(torch.int32)
        bins.bitwise_right_shift_(16).bitwise_and_(_BINS - 1)  # without the sign: NaN may have one
        bins += torch.arange(len(bins), device=bins.device, dtype=torch.int32)[:, None, None] * _BINS
        counts = torch.bincount(bins.flatten(), minlength=len(bins) * _BINS).view(-1, _BINS).cpu()
        self.counts = counts if self.counts is None else self.counts + counts

    def summary(self) -> LayerMemory:
        kind, memory = type(self.mixer).__name__, getattr(self.mixer, "memory_type", None)
        note = ""
        if memory is AdditiveState:
            note = "additive: no precision"
        elif memory is not PalimpsaState:
            note = "no element-wise precision"
        values = {n: torch.cat(parts) for n, parts in self.per_token.items() if parts and self.tokens}
        ratio, window = (_spread(values[n]) if n in values else None for n in ("ratio", "window"))
        if self.counts is None or "limit" not in values:
            return LayerMemory(self.name, kind, self.tokens, note, None, None, ratio, window)
        limit = values["limit"].double().amax(0)
        return LayerMemory(self.name, kind, self.tokens, note, limit, _median(self.counts), ratio, window)


def _spread(values: Tensor) -> Spread:
    """Over ``values [tokens, H]``; without interpolation, which would make NaN of infinite windows."""
    quartiles = np.quantile(values.double().numpy(), [0.25, 0.5, 0.75, 1.0], axis=0, method="inverted_cdf")
    return Spread(*torch.from_numpy(quartiles))


def _median(counts: Tensor) -> Tensor:
    """The middle of the bin that holds the median, per head; 0 for the bin of 0."""
    half = (counts.sum(1, keepdim=True) + 1) // 2
    bins = torch.searchsorted(counts.cumsum(1), half)[:, 0]
    middle = ((bins << 16) + 0x8000).to(torch.int32).view(torch.float32)
    return middle.double().where(bins > 0, 0.0)
