"""The curves of one training run, or of several beside each other, as one page."""

import json
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
MEMORY = {"window": "N_t (tokens)", "ratio": "r (spread of its precisions)"}
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#bf8700", "#8250df", "#0e8a94", "#d63384", "#6e7781")


def read_runs(folders: list[Path]) -> dict[str, dict[str, Any]]:
    """The result records of finished runs, by the names of their folders (longer where two have the same).

    Raises ValueError where a folder holds no finished training run.
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
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"runs: {file} is not a results file: {error}") from None
        if not _is_of_training(record):
            raise ValueError(f"runs: {file} is not the results file of a training run")
        records[name if names.count(name) == 1 else str(folder)] = record
    return records


def _is_of_training(record: Any) -> bool:
    """As far as what is drawn and tabulated needs it."""
    if not isinstance(record, dict) or not isinstance(record.get("settings", {}), dict):
        return False
    measured = record.get("measurements")
    if not isinstance(measured, dict) or not isinstance(measured.get("eval_loss"), int | float):
        return False
    history = measured.get("history")
    return isinstance(history, list) and all(isinstance(entry, dict) for entry in history)


def curves_page(records: Mapping[str, dict[str, Any]], output: Path) -> Path:
    """Writes ``index.html`` and its plots into ``output``, from what ``metaplastic train`` wrote, by name."""
    one = len(records) == 1
    report = Report(f"Training {next(iter(records))}" if one else "Training runs beside each other")
    report.table(["", *records], _summary(records))
    figure, axes = _panels(len(PANELS))
    for panel, (name, label) in zip(axes, PANELS.items(), strict=False):
        for number, (run, record) in enumerate(records.items()):
            style, shown = {"color": COLOURS[number % len(COLOURS)]}, _as_label(run)
            panel.plot(*_curve(record, name), label=shown, linewidth=1, alpha=0.8, **style)
            if name == "loss":
                panel.plot(*_curve(record, "eval_loss"), label=f"{shown}, held out", marker="o", markersize=4, **style)
        panel.set(xlabel="tokens seen", ylabel=label)
        panel.xaxis.set_major_formatter(_tokens)
        if name == "grad_norm":
            panel.set_yscale("log")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    caption = (
        "Loss in training (thin) and on held-out text (dots), gradient norm, learning rate and speed by tokens seen."
    )
    report.figure(figure, caption, save=output / "curves.png")
    for number, (run, record) in enumerate(records.items()):
        _memories(report, run, record, output / ("memory.png" if one else f"memory-{number}.png"))
    for run, record in records.items():
        if not one:
            report.heading(run)
        report.facts(record)
    return report.write(output / "index.html")


def _as_label(run: str) -> str:
    """What stands between dollars would be set as mathematics, and what begins with _ left out of the legend."""
    return run.replace("$", r"\$") if not run.startswith("_") else _as_label(f" {run}")


def _history(record: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [entry for entry in record["measurements"]["history"] if isinstance(entry.get(name), int | float)]


def _curve(record: dict[str, Any], name: str) -> tuple[list[float], list[float]]:
    found = [entry for entry in _history(record, name) if "num_input_tokens_seen" in entry]
    return [entry["num_input_tokens_seen"] for entry in found], [entry[name] for entry in found]


def _summary(records: Mapping[str, dict[str, Any]]) -> list[list[Any]]:
    """Rows of a table with a column for each run; what no run has is left out."""

    def middle(record: dict[str, Any], name: str, form: str) -> str:
        values = [entry[name] for entry in _history(record, name)]
        return format(statistics.median(values), form) if values else "-"

    def setting(record: dict[str, Any], name: str) -> str:
        value = record.get("settings", {}).get(name)
        return "-" if value is None else str(value)

    def result(record: dict[str, Any], name: str, form: str) -> str:
        value = record["measurements"].get(name)
        return "-" if value is None else format(value, form)

    rows: list[list[Any]] = [
        [label, *(read(record, name, form) for record in records.values())]
        for label, read, name, form in (
            ("held-out loss (nats per token)", result, "eval_loss", ".4f"),
            ("perplexity", result, "eval_perplexity", ".2f"),
            ("tokens seen", result, "tokens_seen", ",d"),
            ("parameters", result, "parameters", ",d"),
            ("tokens per second, median", middle, "tokens_per_second", ",.0f"),
            ("MFU, median", middle, "mfu", ".1%"),
            ("seconds of the last call", result, "seconds_this_call", ",.0f"),
        )
    ]
    rows += [
        [name.replace("_", " "), *(setting(record, name) for record in records.values())]
        for name in (
            "mixer",
            "recipe",
            "learning_rate",
            "batch_size",
            "accumulation",
            "block_length",
            "seed",
            "processes",
        )
    ]
    return [row for row in rows if set(row[1:]) != {"-"}]


def _memories(report: Report, run: str, record: dict[str, Any], file: Path) -> None:
    """N_t and r of each layer at the evaluations, from light (first layer) to dark (last)."""
    names = {name for entry in record["measurements"]["history"] for name in entry if name.startswith("eval_layer_")}
    layers = sorted({int(name.split("_")[2]) for name in names})
    kinds = [kind for kind in MEMORY if any(name.endswith(f"_{kind}") for name in names)]
    if not kinds:
        return
    figure, axes = _panels(len(kinds))
    for panel, kind in zip(axes, kinds, strict=False):
        for place, layer in enumerate(layers):
            shade = 0.25 + 0.75 * place / max(len(layers) - 1, 1)
            curve = _curve(record, f"eval_layer_{layer}_{kind}")
            panel.plot(*curve, color=(0.04, 0.41, 0.85, shade), marker="o", markersize=3, label=f"layer {layer}")
        panel.set(xlabel="tokens seen", ylabel=MEMORY[kind], yscale="log")
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


def _tokens(count: float, _: Any) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            return f"{count / size:g}{unit}"
    return f"{count:g}"
