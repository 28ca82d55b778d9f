"""The curves of one training run, or of several beside each other, as one page."""

import json
import math
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..report import Report

RESULTS = "results.json"
PANELS = {  # of the history: name, what to write at the axis
    "loss": "loss (nats per token)",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second",
}
NUMBERS = {  # of the measurements: how they are written
    "eval_loss": ".4f",
    "eval_perplexity": ".2f",
    "tokens_seen": ",d",
    "parameters": ",d",
    "seconds_this_call": ",.0f",
}
LOGARITHMIC = ("grad_norm", "_window", "_ratio")  # how the names of what has such an axis end
TOKENS = "num_input_tokens_seen"
LONG = 1e18  # from here on a number in the table has an exponent
SIZE = 100  # digits of the largest number that is drawn
MEMORY = {"window": "N_t (tokens)", "ratio": "r (spread of its precisions)"}
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#bf8700", "#8250df", "#0e8a94", "#d63384", "#6e7781")


def read_runs(folders: list[Path]) -> dict[str, dict[str, Any]]:
    """The result records of finished runs, by the names of their folders (longer where two have the same).

    Raises ValueError where a folder holds no finished training run, or its results cannot be tabulated: names the file
    and the key.
    """
    files = [folder / RESULTS if folder.is_dir() else folder for folder in folders]
    if len({file.resolve() for file in files}) < len(files):
        raise ValueError(f"runs: got {', '.join(map(str, folders))}, expected different ones")
    names = [file.resolve().parent.name if file.name == RESULTS else file.resolve().stem for file in files]
    records: dict[str, dict[str, Any]] = {}
    for folder, file, name in zip(folders, files, names, strict=True):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"runs: {folder} is no finished training run: {file} is missing") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"runs: {file} is not a results file: {error}") from None
        if wrong := _wrong(record):
            raise ValueError(f"runs: {file} is not the results file of a training run: {wrong}")
        records[name if names.count(name) == 1 else str(folder)] = record
    return records


def _wrong(record: Any) -> str | None:
    """What of a record cannot be tabulated or drawn at all, by its key. Odd points of curves are left out instead."""
    if not isinstance(record, dict):
        return f"it holds {_brief(record)}, expected an object"
    measured = record.get("measurements")
    for key, value in (("settings", record.get("settings", {})), ("measurements", measured)):
        if not isinstance(value, dict):
            return f"{key} is {_brief(value)}, expected an object"
    assert isinstance(measured, dict)
    if not isinstance(history := measured.get("history"), list):
        return f"measurements.history is {_brief(history)}, expected a list"
    for place, entry in enumerate(history):
        if not isinstance(entry, dict):
            return f"measurements.history[{place}] is {_brief(entry)}, expected an object"
    for key, form in NUMBERS.items():
        if (value := measured.get(key)) is None and key != "eval_loss":
            continue
        number = _number(value)
        if number is None or ("d" in form and not number.is_integer()):
            kind = "a whole number" if "d" in form else "a finite number"
            return f"measurements.{key} is {_brief(value)}, expected {kind}"
    return None


def _brief(value: Any) -> str:
    said = "nothing" if value is None else repr(value) if isinstance(value, str | bool | float | list | dict) else ""
    if isinstance(value, int) and not isinstance(value, bool):  # repr of a very long one is refused
        said = str(value) if abs(value) < 10**SIZE else f"a number beyond 1e{SIZE}"
    return said if len(said) <= 60 else f"{said[:56]} ..."


def _number(value: Any) -> float | None:
    """A number that can be drawn and tabulated, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 10**SIZE and math.isfinite(value) else None


def curves_page(records: Mapping[str, dict[str, Any]], output: Path) -> Path:
    """Writes ``index.html`` and its plots into ``output``, from what ``metaplastic train`` wrote, by name."""
    one = len(records) == 1
    report = Report(f"Training {next(iter(records))}" if one else "Training runs beside each other")
    report.table(["", *records], _summary(records))
    if said := not_comparable(records):
        report.text(said)
    left: list[tuple[str, str]] = []  # of which curves points are left out, and which
    figure, axes = _panels(len(PANELS))
    for panel, (name, label) in zip(axes, PANELS.items(), strict=False):
        for number, (run, record) in enumerate(records.items()):
            style, shown = {"color": COLOURS[number % len(COLOURS)]}, _as_label(run)
            panel.plot(*_curve(record, name, run, left), label=shown, linewidth=1, alpha=0.8, **style)
            if name == "loss":
                curve = _curve(record, "eval_loss", run, left)
                panel.plot(*curve, label=f"{shown}, held out", marker="o", markersize=4, **style)
        panel.set(xlabel="tokens seen", ylabel=label)
        panel.xaxis.set_major_formatter(_tokens)
        if name.endswith(LOGARITHMIC):
            _logarithmic(panel)
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    caption = (
        "Loss in training (thin) and on held-out text (dots), gradient norm, learning rate and speed by tokens seen."
    )
    report.figure(figure, caption, save=output / "curves.png")
    for number, (run, record) in enumerate(records.items()):
        _memories(report, run, record, output / ("memory.png" if one else f"memory-{number}.png"), left)
    if left:
        report.heading("Left out")
        report.text("Points that are no finite numbers of a size to be drawn, or not positive on a logarithmic axis.")
        report.table(["of the history", "points"], left)
    for run, record in records.items():
        if not one:
            report.heading(run)
        report.facts(record)
    return report.write(output / "index.html")


def _as_label(run: str) -> str:
    """What stands between dollars would be set as mathematics, and what begins with _ left out of the legend.

    Of a name that is no UTF-8 the odd bytes are shown by their numbers.
    """
    run = run.encode(errors="surrogateescape").decode(errors="backslashreplace")
    return run.replace("$", r"\$") if not run.startswith("_") else _as_label(f" {run}")


def _values(record: dict[str, Any], name: str) -> list[float]:
    found = (_number(entry.get(name)) for entry in record["measurements"]["history"])
    return [value for value in found if value is not None]


def _curve(record: dict[str, Any], name: str, run: str, left: list[tuple[str, str]]) -> tuple[list[float], list[float]]:
    """By tokens seen; says in ``left`` which points of ``name`` are left out, and one of their values."""
    seen, values, odd = [], [], []
    for entry in record["measurements"]["history"]:
        if name not in entry:
            continue
        place, value = _number(entry.get(TOKENS)), _number(entry[name])
        if value is None or (value <= 0 and name.endswith(LOGARITHMIC)):
            odd.append(f"{name} is {_brief(entry[name])}")
        elif place is None:
            odd.append(f"{TOKENS} is {_brief(entry.get(TOKENS))}")
        else:
            seen.append(place)
            values.append(value)
    if odd:
        left.append((f"{run}, {name}", f"{len(odd)}: {odd[0]}{' ...' if len(odd) > 1 else ''}"))
    return seen, values


def _summary(records: Mapping[str, dict[str, Any]]) -> list[list[Any]]:
    """Rows of a table with a column for each run; what no run has is left out."""

    def middle(record: dict[str, Any], name: str, form: str) -> str:
        values = _values(record, name)
        return _written(statistics.median(values), form) if values else "-"

    def setting(record: dict[str, Any], name: str) -> str:
        value = record.get("settings", {}).get(name)
        return "-" if value is None else str(value).encode(errors="replace").decode()

    def words(record: dict[str, Any], name: str, form: str) -> str:
        return _words(record.get("settings", {}), name).encode(errors="replace").decode()

    def result(record: dict[str, Any], name: str, form: str) -> str:
        value = record["measurements"].get(name)
        return "-" if value is None else _written(value, form)

    rows: list[list[Any]] = [
        [label, *(read(record, name, form) for record in records.values())]
        for label, read, name, form in (
            ("held-out loss (nats per token)", result, "eval_loss", NUMBERS["eval_loss"]),
            ("perplexity", result, "eval_perplexity", NUMBERS["eval_perplexity"]),
            ("tokens seen", result, "tokens_seen", NUMBERS["tokens_seen"]),
            ("parameters", result, "parameters", NUMBERS["parameters"]),
            ("tokens per second, median", middle, "tokens_per_second", ",.0f"),
            ("MFU, median", middle, "mfu", ".1%"),
            ("seconds of the last call", result, "seconds_this_call", NUMBERS["seconds_this_call"]),
            ("data", words, "data", ""),
            ("tokenizer", words, "tokenizer", ""),
            ("processes", words, "processes", ""),
        )
    ]
    rows += [
        [name.replace("_", " "), *(setting(record, name) for record in records.values())]
        for name in (
            "mixer",
            "layers",
            "hidden_size",
            "recipe",
            "learning_rate",
            "batch_size",
            "accumulation",
            "block_length",
            "seed",
        )
    ]
    return [row for row in rows if set(row[1:]) != {"-"}]


def _words(settings: dict[str, Any], name: str) -> str:
    """What was trained on, and how, for people: names without folders; "-" where a record does not say."""
    if name not in settings:
        return "-"
    data, dataset, model, files = (settings.get(key) for key in ("data", "dataset", "model", "files"))
    if name == "processes":
        shared = [str(settings["parallel"])] if settings.get("parallel") else []
        context = settings.get("context_parallel")
        shared += [f"{context} to a row"] if context not in (None, 1) else []
        return f"{settings[name]} ({', '.join(shared)})" if shared else str(settings[name])
    if name == "tokenizer":
        own = "of the data" if data else "of the model" if model else "bytes"
        return _last(settings[name]) if settings[name] else own
    if data or dataset:
        return _last(data) if data else str(dataset)
    names = [_last(file) for file in files] if isinstance(files, list) else []
    return ", ".join([*names[:3], *(["..."] if names[3:] else [])]) or "the Python standard library"


def _last(place: Any) -> str:
    return Path(str(place)).name or str(place)


def not_comparable(records: Mapping[str, dict[str, Any]]) -> str | None:
    """Why losses of these runs say nothing about each other, as far as their records know."""
    said = {"tokenizer": "", "data": " (Of the same files another seed or share holds out other documents.)"}
    for kind, why in said.items():  # in this order: other tokens are other data too
        found = {str(record.get("settings", {}).get(f"{kind}_sha256")) for record in records.values()} - {"None"}
        if len(found) > 1:
            return f"Not the same {kind}: losses cannot be compared.{why}"
    return None


def _written(value: float, form: str) -> str:
    if abs(value) >= LONG:
        return f"{value:.4g}"
    return format(int(value) if "d" in form else value, form)


def _memories(report: Report, run: str, record: dict[str, Any], file: Path, left: list[tuple[str, str]]) -> None:
    """N_t and r of each layer at the evaluations, from light (first layer) to dark (last)."""
    names = {name for entry in record["measurements"]["history"] for name in entry}
    found = [match for name in names if (match := re.fullmatch(r"eval_layer_(\d{1,6})_(window|ratio)", name))]
    layers = sorted({int(match[1]) for match in found})
    kinds = [kind for kind in MEMORY if any(match[2] == kind for match in found)]
    if not kinds:
        return
    figure, axes = _panels(len(kinds))
    for panel, kind in zip(axes, kinds, strict=False):
        for place, layer in enumerate(layers):
            shade = 0.25 + 0.75 * place / max(len(layers) - 1, 1)
            curve = _curve(record, f"eval_layer_{layer}_{kind}", run, left)
            panel.plot(*curve, color=(0.04, 0.41, 0.85, shade), marker="o", markersize=3, label=f"layer {layer}")
        panel.set(xlabel="tokens seen", ylabel=MEMORY[kind])
        _logarithmic(panel)
        panel.xaxis.set_major_formatter(_tokens)
    axes[0].legend(fontsize=6, ncols=2)
    figure.tight_layout()
    report.heading(f"How long each layer remembers: {run}")
    caption = f"{run}: by layer, how many tokens its memory holds (N_t)" + (
        " and how differently its elements resist change (r = (I_max - I_min) / I_min)." if "ratio" in kinds else "."
    )
    report.figure(figure, caption, save=file)


def _panels(count: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2 * -(-count // 2)))
    axes = figure.subplots(-(-count // 2), 2, squeeze=False).flatten()
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, axes


def _logarithmic(panel: Any) -> None:
    """With plain numbers at the ticks that matplotlib would write as powers of ten."""
    from matplotlib.ticker import LogFormatterSciNotation

    class Plain(LogFormatterSciNotation):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:,.10g}" if super().__call__(x, pos) else ""

    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(Plain())
    panel.yaxis.set_minor_formatter(Plain(labelOnlyBase=False))


def _tokens(count: float, _: Any) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            return f"{count / size:g}{unit}"
    return f"{count:g}"
