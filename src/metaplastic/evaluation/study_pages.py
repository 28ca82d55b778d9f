"""Plots and pages of the two studies, drawn from their result records alone."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report import Report

Rows = list[dict[str, Any]]
_COLOURS = {
    "geometric": "#0969da", "palimpsa": "#cf222e", "matched": "#1a7f37", "rescaled": "#8250df", "window": "#1b1f24",
    "exact": "#1b1f24", "mean_field": "#1a7f37", "additive": "#bf8700",
}  # fmt: skip
_NAMES = {
    "geometric": "geometric (paper's N)", "palimpsa": "Palimpsa", "matched": "geometric, matched N'",
    "rescaled": "matched N', evidence rescaled", "window": "exact window", "exact": "exact", "mean_field": "mean-field",
    "additive": "additive",
}  # fmt: skip
_ASKED: dict[str, Any] = {"linestyle": "--", "marker": "s", "markersize": 4, "markerfacecolor": "white"}


def table(rows: Rows) -> dict[str, list[Any]]:
    """Rows as columns and values: a name is written once, not once a row."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return {"columns": columns, "rows": [[row.get(name) for name in columns] for row in rows]}


def rows(stored: dict[str, list[Any]], **where: Any) -> Rows:
    """Back from :func:`table`: those in which every named column has the given value."""
    each = (dict(zip(stored["columns"], values, strict=True)) for values in stored["rows"])
    return [row for row in each if all(row[name] == value for name, value in where.items())]


def _line(axes: Any, data: Rows, x: str, y: str, kind: str, *, label: str | None = None, **style: Any) -> None:
    """A curve over its rows, with a band of one standard deviation over draws."""
    data = [row for row in data if row[y] is not None]
    if not data:
        return
    places, middle = [row[x] for row in data], [row[y] for row in data]
    spread = [row.get(f"{y}_sd") or 0.0 for row in data]
    low, high = zip(*((m - s if m > s else m / 2, m + s) for m, s in zip(middle, spread, strict=True)), strict=True)
    colour = _COLOURS[kind]
    axes.plot(places, middle, color=colour, label=label or _NAMES[kind], **({"marker": "o", "markersize": 3} | style))
    axes.fill_between(places, low, high, color=colour, alpha=0.12, linewidth=0)


def _grid(across: int, down: int) -> tuple[Any, Any]:
    """At most three panels across: a page is 60 letters wide, and labels must be readable on it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * across, 2.8 * down))
    return figure, figure.subplots(down, across, squeeze=False)


def _add(report: Report, figure: Any, axes: Any, caption: str, path: Path, *, columns: int = 3) -> None:
    """One legend below all panels; those without a curve are left out."""
    entries: dict[str, Any] = {}
    for panel in axes.flat:
        panel.set_visible(panel.has_data())
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.tight_layout()
    figure.legend(list(entries.values()), list(entries), loc="upper center", bbox_to_anchor=(0.5, 0.0), ncol=columns)
    report.figure(figure, caption, save=path)


def _log(axis: Any, places: Sequence[float] = ()) -> None:
    """A logarithmic axis in plain numbers, ticks at ``places`` or at decades (and at 2 and 5 if it spans only one)."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    plain = FuncFormatter(lambda value, _: f"{value:g}" if 1e-3 <= value < 1e4 else f"$10^{{{math.log10(value):g}}}$")
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_formatter(plain)
    low, high = axis.get_view_interval()
    few = not places and math.floor(math.log10(high)) <= math.ceil(math.log10(low))  # one decade or none
    axis.set_major_locator(FixedLocator(sorted(set(places))) if places else LogLocator(subs=(1, 2, 5) if few else (1,)))
    axis.set_minor_formatter(NullFormatter())
    if places or few:
        axis.set_minor_locator(NullLocator())


def _opening(report: Report, settings: dict[str, Any], text: str) -> None:
    if settings["quick"]:
        report.text(
            f"This is a run with --quick, {settings['draws']} draws at small sizes, to see that everything runs: its "
            "numbers are not the findings."
        )
    report.text(text)


def forgetting_page(result: dict[str, Any], output: Path) -> Path:
    measured, settings = result["measurements"], result["settings"]
    worlds = list(dict.fromkeys(row["world"] for row in rows(measured["distances"])))
    gates = list(dict.fromkeys(row["gate"] for row in rows(measured["distances"])))
    report = Report("Geometric forgetting and the sliding window")
    text = (
        f"Linear regression, keys on the sphere of {settings['key_size']} dimensions, noise {settings['noise']:g}, "
        f"{settings['draws']} draws; bands are one standard deviation over them. KL is in nats per value row."
    )
    _opening(report, settings, text)
    _summary(report, measured["summary"])
    report.heading("Distance from the exact window")
    report.text(
        "A fixed gate holds N tokens' worth, and the window is the last N tokens. With a varying gate the last N_t "
        "tokens (dashed, open squares) are not what the recursion holds, the last n_t tokens (solid, dots) are."
    )
    figure, axes = _grid(len(gates), len(worlds))
    for panels, world in zip(axes, worlds, strict=True):
        for panel, gate in zip(panels, gates, strict=True):
            held = "asked" if gate == "fixed" else "counted"  # the same where the gate is fixed
            for belief in ("geometric", "palimpsa", "matched", "rescaled"):
                data = rows(measured["distances"], world=world, gate=gate, belief=belief, window=held)
                _line(panel, data, "N", "divergence", belief)
                if gate != "fixed" and belief in ("geometric", "palimpsa"):
                    data = rows(measured["distances"], world=world, gate=gate, belief=belief, window="asked")
                    label = f"{_NAMES[belief]}, from the last N_t tokens"
                    _line(panel, data, "N", "divergence", belief, label=label, **_ASKED)
            ticks = [row["N"] for row in rows(measured["distances"], world=world, gate=gate, belief="geometric")]
            panel.set(xlabel="N (tokens)", ylabel="KL from window (nats)", title=f"{world}, {gate} gate")
            _log(panel.xaxis, ticks)
            _log(panel.yaxis)
    caption = (
        "KL from the exact window against N, by world and gate. Solid, dots: from the last n_t tokens, those that the "
        "recursion holds (N with a fixed gate). Dashed, open squares: from the last N_t tokens."
    )
    _add(report, figure, axes, caption, output / "distance.png")
    report.heading("Which is better: error against the true map, and calibration")
    report.text("Fixed gate. Calibration: squared error of the read-out over the variance claimed for it; 1 is right.")
    figure, axes = _grid(len(worlds), 3)
    labels = {
        "error": "squared error per element", "excess_loss": "excess log loss (nats)",
        "calibration": "error / claimed variance",
    }  # fmt: skip
    for panels, (what, label) in zip(axes, labels.items(), strict=True):
        for panel, world in zip(panels, worlds, strict=True):
            for belief in ("window", "geometric", "matched", "rescaled", "palimpsa"):
                name = "window_asked" if belief == "window" else belief
                _line(panel, rows(measured["qualities"], world=world, gate="fixed", belief=name), "N", what, belief)
            if what == "calibration":
                panel.axhline(1, color="#8c959f", linestyle=":")
            panel.set(xlabel="N (tokens)", ylabel=label, title=world)
            _log(panel.xaxis, settings["windows"])
            _log(panel.yaxis)
    caption = "Squared error per element, excess log loss and calibration (1 is right) against N, by world; fixed gate."
    _add(report, figure, axes, caption, output / "quality.png")
    report.heading("Around a switch")
    figure, axes = _grid(2, 2)
    labels = {"error": "squared error per element", "divergence": "KL from window (nats)"}
    for panels, (what, label) in zip(axes, labels.items(), strict=True):
        for panel, gate in zip(panels, ("fixed", "step"), strict=True):
            for belief in ("window", "geometric", "matched", "rescaled", "palimpsa"):
                meaning = "window_asked" if gate == "fixed" else "window_kept"
                name = meaning if belief == "window" else belief
                data = rows(measured["course"], gate=gate, belief=name)
                _line(panel, data, "new_tokens", what, belief, marker="")
            window = settings["course"]
            panel.set(xlabel="tokens of the new world", ylabel=label, title=f"{gate} gate, N = {window}")
            _log(panel.yaxis)
    caption = "Squared error and KL from the window before and after the switch, with a fixed and a step gate."
    _add(report, figure, axes, caption, output / "course.png")
    report.heading("Which N' comes closest to a window of N")
    figure, axes = _grid(2, 1)
    for panel, evidence in zip(axes[0], ("as is", "rescaled"), strict=True):
        data = rows(measured["matching"], evidence=evidence)
        for shade, window in enumerate(dict.fromkeys(row["N"] for row in data)):
            ours = [row for row in data if row["N"] == window]
            places, values = zip(*((row["ratio"], row["divergence_per_dimension"]) for row in ours), strict=True)
            panel.plot(places, values, "o-", alpha=0.35 + 0.2 * shade, color="#0969da", label=f"N = {window}")
        limit = sorted({(row["ratio"], row["many_tokens"]) for row in data})
        panel.plot(*zip(*limit, strict=True), "k:", label="many tokens, theory")
        panel.set(xlabel="N' / N", ylabel="KL per key dimension (nats)", title=f"evidence {evidence}")
        _log(panel.yaxis)
    caption = "KL per key dimension of geometric forgetting at N' from a window of N, against N' / N; stationary world."
    _add(report, figure, axes, caption, output / "matching.png", columns=5)
    report.heading("Other key sizes and noise (stationary, fixed gate)")
    _table(report, rows(measured["other_settings"]))
    _facts(report, result)
    return report.write(output / "index.html")


_ANSWERS = {"retrieved": "share of values retrieved", "recall_cosine": "cosine of answer and value"}
_BELIEF = {
    "divergence": "KL from exact (nats)",
    "calibration_stored": "error / claimed variance,\nstored keys",
    "calibration_fresh": "error / claimed variance,\nfresh directions",
}
_KEYS = {
    "shared": ("keys share a direction", "rho, cosine of any two keys"),
    "neighbouring": ("each key follows the last", "rho, cosine of neighbours"),
    "repeated": ("keys repeat", "times each key is seen"),
    "activated": ("keys out of a SiLU", "scale of SiLU's input"),
}


def correlation_page(result: dict[str, Any], output: Path) -> Path:
    stored, settings = result["measurements"]["cases"], result["settings"]
    load, noise = settings["load"], settings["noise"]
    kinds = list(dict.fromkeys(row["keys"] for row in rows(stored)))
    report = Report("What Palimpsa loses as keys grow correlated")
    text = (
        f"{settings['key_size']} key and {settings['value_size']} value dimensions, {settings['draws']} draws; bands "
        "are one standard deviation over them. Retrieved: the nearest stored value, by angle, is the right one. Error "
        "over claimed variance: of the answers, squared, against the true map; 1 is calibrated."
    )
    _opening(report, settings, text)
    _summary(report, result["measurements"]["summary"])
    pages = {
        "recall": (_ANSWERS, "random", "Recall of random values: share retrieved and cosine of the answers"),
        "belief": (_BELIEF, "map", "Values of a true map: KL from the exact posterior and calibration"),
    }
    for name, (labels, values, title) in pages.items():
        report.heading(f"{title}; load {load:g}, noise {noise:g}")
        figure, axes = _grid(len(labels), len(kinds))
        for panels, kind in zip(axes, kinds, strict=True):
            for panel, what in zip(panels, labels, strict=True):
                where = {"keys": kind, "load": load, "noise": noise, "N": None, "values": values}
                _rules(panel, stored, where, what, labels[what], *_KEYS[kind])
        caption = f"{title}, against the degree of correlation, for four kinds of keys. Load {load:g}, noise {noise:g}."
        _add(report, figure, axes, caption, output / f"{name}.png", columns=4)
    report.heading("Loads, weak evidence, forgetting: keys that share a direction")
    cases: list[tuple[str, dict[str, Any]]] = [
        (f"load {each:g}", {"load": each, "noise": noise, "N": None}) for each in settings["loads"]
    ]
    cases += [(f"noise {each:g}", {"load": load, "noise": each, "N": None}) for each in settings["other_noises"]]
    windows = dict.fromkeys(r["N"] for r in rows(stored, keys="shared") if r["N"] is not None)
    cases += [(f"forgetting, N = {each:g}", {"load": load, "noise": noise, "N": each}) for each in windows]
    down = -(-len(cases) // 3)
    figure, axes = _grid(3, 2 * down)
    shown = {"retrieved": ("random", _ANSWERS), "calibration_stored": ("map", _BELIEF)}
    for panels, (what, (values, labels)) in zip((axes[:down], axes[down:]), shown.items(), strict=True):
        for panel, (title, where) in zip(panels.flat, cases, strict=False):
            where = where | {"keys": "shared", "values": values}
            _rules(panel, stored, where, what, labels[what], title, _KEYS["shared"][1])
    caption = (
        "Above: share of random values retrieved. Below: squared error over claimed variance at stored keys. Against "
        "the cosine of any two keys, for several loads, weak evidence (noise) and forgetting."
    )
    _add(report, figure, axes, caption, output / "loads.png", columns=4)
    report.heading("One key seen again and again: the answer as a share of its value")
    _table(report, rows(result["measurements"]["overshoot"]))
    _facts(report, result)
    return report.write(output / "index.html")


def _rules(
    panel: Any, stored: dict[str, list[Any]], where: dict[str, Any], what: str, label: str, title: str, degree: str
) -> None:
    """A panel of all four rules against the degree of correlation; the exact one is no distance from itself."""
    for rule in ("exact", "mean_field", "palimpsa", "additive"):
        if (rule, what) != ("exact", "divergence"):
            _line(panel, rows(stored, rule=rule, **where), "degree", what, rule)
    if what not in _ANSWERS:
        _log(panel.yaxis)
    panel.set(xlabel=degree, ylabel=label, title=title)


def _table(report: Report, data: Rows) -> None:
    report.table([name.replace("_", " ") for name in data[0]], [list(row.values()) for row in data])


def _summary(report: Report, told: dict[str, float]) -> None:
    report.table(["measured", "value"], [[name.replace("_", " "), value] for name, value in told.items()])


def _facts(report: Report, result: dict[str, Any]) -> None:
    """Without the measurements: they are thousands of rows, and in results.json."""
    report.facts({name: value for name, value in result.items() if name != "measurements"})
