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
from .kinds import MEASURES, WINDOW, Measure, Spread
from .replay import LayerMemory, watch

_PIECE = 2048  # tokens fed at once: activations stay small, the memory goes on through the cache
SUMMARY = ("mixer", "kind", "memory", "window")
CAPTION = (
    "Every head of every mixer that has the quantity (as head.group where it has noise groups). "
    "Grey: no such head, or a window without an end."
)
_LEAST = 1e-12  # what exactly 0 is drawn as


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
            return plain(value.tolist())
        if isinstance(value, list):
            return [plain(x) for x in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    facts = {"name": layer.name, "kind": layer.kind, "tokens": layer.tokens, "note": layer.note}
    return facts | {name: plain(layer.measures.get(name)) for name in MEASURES}


def _part(layer: LayerMemory, measure: Measure, part: str) -> Tensor | None:
    """``[H]`` or ``[H, G]``: a part of a measure's spread over tokens, or the measure itself."""
    found = layer.measures.get(measure.name)
    return found if found is None or isinstance(found, Tensor) else getattr(found, part)


def figure(layers: Sequence[LayerMemory]) -> Any:
    """A matplotlib figure, a panel for every quantity: the layers that have it by their heads.

    Shares are drawn from 0 to 1 (to their largest, where that is above), other quantities in log10.
    """
    from matplotlib.figure import Figure

    panels = []
    for measure in MEASURES.values():
        parts = [(i, _part(m, measure, measure.drawn)) for i, m in enumerate(layers)] if measure.panel else []
        if rows := {i: part for i, part in parts if part is not None}:
            panels.append((measure, rows))
    columns = 2 if len(panels) > 1 else 1
    lines = [1.6 + 0.3 * max(len(rows) for _, rows in panels[i : i + columns]) for i in range(0, len(panels), columns)]
    drawing = Figure(figsize=(5.5 * columns, sum(lines) or 1.6), layout="constrained")
    if not panels:
        drawing.text(0.5, 0.5, "nothing to draw: no memory of a fixed size", ha="center", va="center")
        return drawing
    places = drawing.subplots(len(lines), columns, squeeze=False, height_ratios=lines).flatten()
    for axes in places[len(panels) :]:
        axes.remove()
    for axes, (measure, rows) in zip(places, panels, strict=False):
        axes.set(xlabel="head", ylabel="mixer", facecolor="#d8dee4")
        axes.set_title(measure.panel, fontsize="medium")
        axes.set_yticks(range(len(rows)), [f"{i}  {layers[i].kind}" for i in rows])
        heads = max(row.numel() for row in rows.values())
        grid = np.full((len(rows), heads), np.nan)
        for i, row in enumerate(rows.values()):
            grid[i, : row.numel()] = (row.clamp(min=_LEAST).log10() if measure.scale else row).flatten()
        grid[~np.isfinite(grid)] = np.nan
        groups = max(row.shape[1] if row.dim() > 1 else 1 for row in rows.values())
        ticks = range(0, heads, max(1, heads // 8))
        axes.set_xticks(ticks, [str(at) if groups == 1 else f"{at // groups}.{at % groups}" for at in ticks])
        known = grid[np.isfinite(grid)]
        ends = (None, None) if measure.scale and known.size else (0, max([1.0, *known]))
        image = axes.imshow(grid, aspect="auto", interpolation="nearest", vmin=ends[0], vmax=ends[1])
        if known.size:
            drawing.colorbar(image, ax=axes, label=measure.scale)
    return drawing


def _write_page(layers: Sequence[LayerMemory], record: dict[str, Any], output: Path) -> Path:
    settings = record["settings"]
    page = Report(f"Memory of {settings['model']}")
    of = "the whole text" if settings["whole_text"] else "the beginning of a longer text"
    kinds = list(dict.fromkeys(m.memory for m in layers))
    has_windows = any(m.window is not None for m in layers)
    page.text(
        " ".join(
            [
                f"{settings['tokens']:,} tokens read: {of}.",
                *(kind.about for kind in kinds if kind.about),
                *["The window N = 1 / (1 - alpha) is how many tokens a head forgets over."] * has_windows,
            ]
        )
    )
    page.figure(figure(layers), CAPTION, save=output / "memory.png")
    page.heading("Mixers")
    page.table(SUMMARY, [summary_row(m) for m in layers])
    for line in legend(layers).splitlines():
        page.text(line)
    tables = {kind: [row for m in layers if m.memory is kind for row in _head_rows(m)] for kind in kinds}
    if any(tables.values()):
        page.heading("Heads")
    for kind, rows in tables.items():
        if rows:  # attention has none
            page.table(["mixer", "head", *(title for m in kind.measures for title in m.columns.values())], rows)
    for line in legend(layers, brief=False).splitlines():
        page.text(line)
    page.facts(record)
    return page.write(output / "index.html")


def legend(layers: Sequence[LayerMemory], *, brief: bool = True) -> str:
    """What ``summary_row`` says of these memories, a line each; not ``brief``: what only the table of heads has."""
    found = [m for m in MEASURES.values() if any(m.name in x.measures for x in layers)]
    return "\n".join(m.legend for m in found if m.brief == brief)


def summary_row(layer: LayerMemory) -> list[Any]:
    """The columns of ``SUMMARY``. Of every quantity the range over heads of its median over tokens: one number of each
    would be of different heads, and together of none."""
    told = [layer.note] if layer.note else []
    for measure in layer.memory.measures:
        found = layer.measures.get(measure.name)
        if measure.brief and measure != WINDOW and found is not None:
            told.append(f"{measure.name.replace('_', ' ')} {_range(found)}")
    return [layer.name, layer.kind, ", ".join(told), "" if layer.window is None else _range(layer.window)]


def _range(x: Spread | Tensor) -> str:
    x = x.median if isinstance(x, Spread) else x
    least, largest = (_short(float(end)) for end in (x.min(), x.max()))
    return least if least == largest else f"{least} to {largest}"


def _short(x: float) -> str:
    """Three digits; thousands are whole and without an exponent."""
    return f"{x:,.0f}" if 999.5 <= x < 1e7 else f"{x:.3g}"


def _head_rows(layer: LayerMemory) -> list[list[Any]]:
    """A row per head, of a head with noise groups one per group."""
    columns = [_part(layer, m, part) for m in layer.memory.measures for part in m.columns]
    shape = max((tuple(c.shape) for c in columns if c is not None), key=len, default=(0,))
    wide = [c if c is None else c.view(*c.shape, *[1] * (len(shape) - c.dim())).expand(shape) for c in columns]
    return [
        [
            layer.name,
            at[0] if len(at) == 1 else ".".join(map(str, at)),
            *("" if c is None else float(c[tuple(at)]) for c in wide),
        ]
        for at in torch.ones(shape).nonzero().tolist()
    ]
