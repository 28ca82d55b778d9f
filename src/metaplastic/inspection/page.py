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
    "Every head of every mixer (and group of one head after the other, where it has noise groups). The limit says how "
    "far its surest element is above the prior (0 on the scale: as much evidence as the prior holds), the uncertainty "
    "which share of its variance is left, gain and strength which share of an error one token corrects, the window "
    "over how many tokens it forgets. Grey: no such quantity."
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
    """A matplotlib figure: log10 of what the memories of ``layers`` have, layer by head; grey where there is none."""
    from matplotlib.figure import Figure

    panels = [m for m in MEASURES.values() if m.panel and (m == WINDOW or any(m in x.memory.measures for x in layers))]
    lines, columns = -(-len(panels) // 2), min(2, len(panels))
    drawing = Figure(figsize=(5.5 * columns, lines * (1.6 + 0.3 * len(layers))), layout="constrained")
    places = drawing.subplots(lines, columns, squeeze=False).flatten()
    for axes in places[len(panels) :]:
        axes.remove()
    for axes, measure in zip(places, panels, strict=False):
        rows = [_part(m, measure, measure.drawn) for m in layers]
        axes.set(title=measure.panel, xlabel="head", ylabel="mixer", facecolor="#d8dee4")
        axes.set_yticks(range(len(layers)), [f"{i}  {m.kind}" for i, m in enumerate(layers)])
        heads = max((row.numel() for row in rows if row is not None), default=1)
        grid = np.full((len(layers), heads), np.nan)
        for i, row in enumerate(rows):
            if row is not None:
                grid[i, : row.numel()] = row.flatten().clamp(min=_LEAST).log10().nan_to_num(posinf=math.nan)
        axes.set_xticks(range(0, heads, max(1, heads // 8)))
        if np.isfinite(grid).any():
            drawing.colorbar(axes.imshow(grid, aspect="auto", interpolation="nearest"), ax=axes, label=measure.scale)
        else:
            axes.imshow(grid, aspect="auto", vmin=0, vmax=1)
            axes.text(0.5, 0.5, "no such quantity", transform=axes.transAxes, ha="center", va="center")
    return drawing


def _write_page(layers: Sequence[LayerMemory], record: dict[str, Any], output: Path) -> Path:
    settings = record["settings"]
    page = Report(f"Memory of {settings['model']}")
    of = "the whole text" if settings["whole_text"] else "the beginning of a longer text"
    kinds = list(dict.fromkeys(m.memory for m in layers))
    page.text(
        " ".join(
            [
                f"{settings['tokens']:,} tokens read: {of}.",
                *(kind.about for kind in kinds if kind.about),
                "The window N = 1 / (1 - alpha) is how many tokens it forgets over.",
            ]
        )
    )
    page.figure(figure(layers), CAPTION, save=output / "memory.png")
    page.heading("Mixers")
    page.table(SUMMARY, [summary_row(m) for m in layers])
    for line in legend(layers).splitlines():
        page.text(line)
    page.heading("Heads")
    for kind in kinds:
        titles = [title for m in kind.measures for title in m.columns.values()]
        page.table(["mixer", "head", *titles], [row for m in layers if m.memory is kind for row in _head_rows(m)])
    page.facts(record)
    return page.write(output / "index.html")


def legend(layers: Sequence[LayerMemory]) -> str:
    """What the columns of ``SUMMARY`` mean for these memories, a line each."""
    return "\n".join(m.legend for m in MEASURES.values() if m.legend and any(m in x.memory.measures for x in layers))


def summary_row(layer: LayerMemory) -> list[Any]:
    """The columns of ``SUMMARY``: a plain number's range over heads; medians over tokens, then heads; "" for none."""
    told = [layer.note] if layer.note else []
    for measure in layer.memory.measures:
        found = layer.measures.get(measure.name)
        if measure.brief and measure != WINDOW and found is not None:
            words = measure.name.replace("_", " ")
            told.append(f"{words} {_middle(found):.3g}" if isinstance(found, Spread) else f"{words} {_range(found)}")
    return [layer.name, layer.kind, ", ".join(told), "" if layer.window is None else _middle(layer.window)]


def _middle(x: Spread) -> float:
    return float(x.median.quantile(0.5, interpolation="lower"))


def _range(x: Tensor) -> str:
    return f"{x.min():.3g} to {x.max():.3g}"


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
