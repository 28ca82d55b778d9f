"""What ``metaplastic inspect`` shows: one figure, one HTML page, one results file."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from .. import results
from ..models import MetaplasticForCausalLM
from ..report import Report
from .replay import LayerMemory, Spread, watch

_PIECE = 2048  # tokens fed at once: activations stay small, the memory goes on through the cache
SUMMARY = ("mixer", "kind", "limit", "ratio", "window")
LEGEND = (
    "limit: max |I - prior| / prior, least to largest head; far below 1 the memory is the additive rule (Mamba2).\n"
    "ratio: (I_max - I_min) / I_min, how differently its elements resist change; median over tokens, then heads.\n"
    "window: N = 1 / (1 - alpha), how many tokens it forgets over; median over tokens, then heads."
)
CAPTION = (
    "Every head of every mixer. Left: how far its surest element is above the prior (0 on the scale: as much evidence "
    "as the prior holds). Right: over how many tokens it forgets. Grey: no such quantity."
)
_LEAST = 1e-12  # what a limit of exactly 0 is drawn as


def inspect_text(
    model: MetaplasticForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Path,
    output: str | Path,
    *,
    title: str = "model",
    max_tokens: int = 32768,
) -> tuple[tuple[LayerMemory, ...], Path]:
    """Reads a text (or the beginning of a text file) with ``model``; writes results.json, memory.png and index.html.

    At most ``max_tokens`` tokens are read, and the results say whether that was the whole text. The model is moved to
    the GPU if there is one. Returns what every mixer did and the path of the page.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1, got {max_tokens}")
    enough = 16 * max_tokens  # characters: tokens are shorter, and a tokenizer takes long over what is not read
    if isinstance(text, Path):
        with text.open(encoding="utf-8", errors="replace") as file:
            text = file.read(enough + 1)
    # A shell hands over bytes that are no text as lone surrogates; they become unknown characters.
    beginning = text[:enough].encode(errors="surrogateescape").decode(errors="replace")
    ids = tokenizer(beginning, return_tensors="pt", add_special_tokens=False)["input_ids"].long()
    if not ids.shape[1]:
        raise ValueError("text must hold at least one token, got an empty text")
    whole = len(text) <= enough and ids.shape[1] <= max_tokens
    ids = ids[:, :max_tokens]
    if torch.cuda.is_available():
        nn.Module.cuda(model)
    model.eval()
    cache = None
    with torch.no_grad(), watch(model) as memory:
        for piece in ids.to(model.device).split(_PIECE, 1):
            cache = model.base_model(input_ids=piece, cache=cache, use_cache=True).cache
    layers = memory.report()
    settings = {"model": title, "mixers": model.config.mixers, "tokens": ids.shape[1], "whole_text": whole}
    record = results.record("inspect", {"layers": [as_dict(m) for m in layers]}, seeds=[], settings=settings)
    output = Path(output)
    results.write_json(output / "results.json", record)
    return layers, _write_page(layers, record, output)


def as_dict(layer: LayerMemory) -> dict[str, Any]:
    """A layer's numbers for JSON: a list over heads each; null where there is none or it is infinite."""

    def plain(value: Any) -> Any:
        if isinstance(value, Spread):
            return {name: plain(x) for name, x in value._asdict().items()}
        if isinstance(value, Tensor):
            return [x if math.isfinite(x) else None for x in value.tolist()]
        return value

    return {name: plain(value) for name, value in layer._asdict().items()}


def figure(layers: Sequence[LayerMemory]) -> Any:
    """A matplotlib figure: log10 of the limit and of the median window, layer by head; grey where there is none."""
    from matplotlib.figure import Figure

    panels = {
        ("largest |I - prior| / prior", "log10 of the limit"): [m.limit for m in layers],
        ("memory window N, median over tokens", "log10 of N in tokens"): [
            None if m.window is None else m.window.median for m in layers
        ],
    }
    drawing = Figure(figsize=(11, 1.6 + 0.3 * len(layers)), layout="constrained")
    for axes, ((title, shown), rows) in zip(drawing.subplots(1, 2), panels.items(), strict=True):
        axes.set(title=title, xlabel="head", ylabel="mixer", facecolor="#d8dee4")
        axes.set_yticks(range(len(layers)), [f"{i}  {m.kind}" for i, m in enumerate(layers)])
        heads = max((len(row) for row in rows if row is not None), default=1)
        grid = np.full((len(layers), heads), np.nan)
        for i, row in enumerate(rows):
            if row is not None:
                grid[i, : len(row)] = row.clamp(min=_LEAST).log10().nan_to_num(posinf=math.nan)
        axes.set_xticks(range(0, heads, max(1, heads // 8)))
        if np.isfinite(grid).any():
            drawing.colorbar(axes.imshow(grid, aspect="auto", interpolation="nearest"), ax=axes, label=shown)
        else:
            axes.imshow(grid, aspect="auto", vmin=0, vmax=1)
            axes.text(0.5, 0.5, "no such quantity", transform=axes.transAxes, ha="center", va="center")
    return drawing


def _write_page(layers: Sequence[LayerMemory], record: dict[str, Any], output: Path) -> Path:
    settings = record["settings"]
    page = Report(f"Memory of {settings['model']}")
    of = "the whole text" if settings["whole_text"] else "the beginning of a longer text"
    page.text(
        f"{settings['tokens']:,} tokens read: {of}. A head is in the additive (Mamba2) limit where "
        "max |I - prior| / prior is far below 1: without metaplasticity, each term of its answers would differ by at "
        "most that fraction. The ratio (I_max - I_min) / I_min says how differently its elements resist change; the "
        "window N = 1 / (1 - alpha) is how many tokens it forgets over."
    )
    page.figure(figure(layers), CAPTION, save=output / "memory.png")
    page.heading("Mixers")
    page.table(SUMMARY, [summary_row(m) for m in layers])
    for line in LEGEND.splitlines():
        page.text(line)
    page.heading("Heads")
    columns = ["mixer", "head", "limit, largest", "limit, median", "ratio, median", "ratio, largest"]
    columns += ["window, lower quartile", "window, median", "window, upper quartile"]
    page.table(columns, [row for m in layers for row in _head_rows(m)])
    page.facts(record)
    return page.write(output / "index.html")


def summary_row(layer: LayerMemory) -> list[Any]:
    """The columns of ``SUMMARY``: the limit's range; medians over tokens, then heads; "" where there is none."""
    limit = layer.note if layer.limit is None else f"{layer.limit.min():.3g} to {layer.limit.max():.3g}"
    medians = [s and float(s.median.quantile(0.5, interpolation="lower")) for s in (layer.ratio, layer.window)]
    return [layer.name, layer.kind, limit, *("" if m is None else m for m in medians)]


def _head_rows(layer: LayerMemory) -> list[list[Any]]:
    limit, median, ratio, window = layer.limit, layer.limit_median, layer.ratio, layer.window
    columns = [limit, median, *((ratio.median, ratio.largest) if ratio else (None, None))]
    columns += list(window[:3]) if window else [None] * 3
    heads = max((len(c) for c in columns if c is not None), default=0)
    return [[layer.name, h, *("" if c is None else float(c[h]) for c in columns)] for h in range(heads)]
