"""Plots and pages of the two studies, drawn from their result records alone."""

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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.3 * across, 2.7 * down))
    return figure, figure.subplots(down, across, squeeze=False)


def _add(report: Report, figure: Any, axes: Any, path: Path, *, columns: int = 5) -> None:
    """One legend below all panels."""
    entries: dict[str, Any] = {}
    for panel in axes.flat:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.tight_layout()
    figure.legend(list(entries.values()), list(entries), loc="upper center", bbox_to_anchor=(0.5, 0.0), ncol=columns)
    report.figure(figure, save=path)


def forgetting_page(result: dict[str, Any], output: Path) -> Path:
    measured, settings = result["measurements"], result["settings"]
    worlds = list(dict.fromkeys(row["world"] for row in rows(measured["distances"])))
    gates = list(dict.fromkeys(row["gate"] for row in rows(measured["distances"])))
    report = Report("Geometric forgetting and the sliding window")
    report.text(
        f"Linear regression, keys on the sphere of {settings['key_size']} dimensions, noise {settings['noise']:g}, "
        f"{settings['draws']} draws; bands are one standard deviation over them. KL is in nats per value row."
    )
    _summary(report, measured["summary"])
    report.heading("Distance from the exact window")
    report.text("Fixed gate: the window of N tokens. Varying gates: solid counted, dashed asked (last N_t tokens).")
    figure, axes = _grid(len(gates), len(worlds))
    for panels, world in zip(axes, worlds, strict=True):
        for panel, gate in zip(panels, gates, strict=True):
            meanings = {"asked": "-"} if gate == "fixed" else {"counted": "-", "asked": "--"}
            for belief in ("geometric", "palimpsa", "matched", "rescaled"):
                for window, style in meanings.items():
                    if style == "-" or belief in ("geometric", "palimpsa"):
                        data = rows(measured["distances"], world=world, gate=gate, belief=belief, window=window)
                        shown = None if style == "-" else "_"
                        _line(panel, data, "N", "divergence", belief, linestyle=style, label=shown)
            panel.set(xscale="log", yscale="log", xlabel="N", ylabel="KL from window", title=f"{world}, {gate} gate")
    _add(report, figure, axes, output / "distance.png")
    report.heading("Which is better: error against the true map, and calibration")
    report.text("Fixed gate. Calibration: squared error of the read-out over the variance claimed for it; 1 is right.")
    figure, axes = _grid(len(worlds), 3)
    for panels, what in zip(axes, ("error", "excess_loss", "calibration"), strict=True):
        for panel, world in zip(panels, worlds, strict=True):
            for belief in ("window", "geometric", "matched", "rescaled", "palimpsa"):
                name = "window_asked" if belief == "window" else belief
                _line(panel, rows(measured["qualities"], world=world, gate="fixed", belief=name), "N", what, belief)
            panel.set(xscale="log", yscale="log", xlabel="N", ylabel=what.replace("_", " "), title=world)
            if what == "calibration":
                panel.axhline(1, color="#8c959f", linestyle=":")
    _add(report, figure, axes, output / "quality.png")
    report.heading("Around a switch")
    figure, axes = _grid(2, 2)
    for panels, what in zip(axes, ("error", "divergence"), strict=True):
        for panel, gate in zip(panels, ("fixed", "step"), strict=True):
            for belief in ("window", "geometric", "matched", "rescaled", "palimpsa"):
                meaning = "window_asked" if gate == "fixed" else "window_kept"
                name = meaning if belief == "window" else belief
                data = rows(measured["course"], gate=gate, belief=name)
                _line(panel, data, "new_tokens", what, belief, marker="")
            window = settings["course"]
            panel.set(yscale="log", xlabel="tokens of the new world", ylabel=what, title=f"{gate} gate, N = {window}")
    _add(report, figure, axes, output / "course.png")
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
        panel.set(xlabel="N' / N", ylabel="KL per key dimension", title=f"evidence {evidence}", yscale="log")
    _add(report, figure, axes, output / "matching.png")
    report.heading("Other key sizes and noise (stationary, fixed gate)")
    _table(report, rows(measured["other_settings"]))
    _facts(report, result)
    return report.write(output / "index.html")


def correlation_page(result: dict[str, Any], output: Path) -> Path:
    stored, settings = result["measurements"]["cases"], result["settings"]
    rules, load, noise = ("exact", "mean_field", "palimpsa", "additive"), settings["load"], settings["noise"]
    kinds = list(dict.fromkeys(row["keys"] for row in rows(stored)))
    report = Report("What Palimpsa loses as keys grow correlated")
    report.text(
        f"{settings['key_size']} key and {settings['value_size']} value dimensions, {settings['draws']} draws; bands "
        "are one standard deviation over them. Retrieved: the nearest stored value, by angle, is the right one."
    )
    _summary(report, result["measurements"]["summary"])
    report.heading(f"Load {load:g}, noise {noise:g}")
    panels_of = {
        "retrieved": "random", "recall_cosine": "random", "mean_distance": "map", "divergence": "map",
        "calibration_stored": "map", "calibration_fresh": "map",
    }  # fmt: skip
    figure, axes = _grid(len(panels_of), len(kinds))
    for panels, kind in zip(axes, kinds, strict=True):
        for panel, (what, values) in zip(panels, panels_of.items(), strict=True):
            for rule in rules:
                if not (rule == "exact" and what in ("mean_distance", "divergence")):
                    data = rows(stored, keys=kind, load=load, noise=noise, N=None, values=values, rule=rule)
                    _line(panel, data, "degree", what, rule)
            scale = "linear" if what in ("retrieved", "recall_cosine") else "log"
            degree = {"repeated": "times each key is seen", "activated": "scale of SiLU's input"}.get(kind, "rho")
            panel.set(yscale=scale, xlabel=degree, ylabel=what.replace("_", " "), title=f"{kind}, {values} values")
    _add(report, figure, axes, output / "correlation.png")
    report.heading("Loads, weak evidence, forgetting: shared keys, random values")
    cases: list[tuple[str, dict[str, Any]]] = [
        (f"load {each:g}", {"load": each, "noise": noise, "N": None}) for each in settings["loads"]
    ]
    cases += [(f"noise {each:g}", {"load": load, "noise": each, "N": None}) for each in settings["other_noises"]]
    windows = dict.fromkeys(r["N"] for r in rows(stored, keys="shared") if r["N"] is not None)
    cases += [(f"forgetting, N = {each:g}", {"load": load, "noise": noise, "N": each}) for each in windows]
    figure, axes = _grid(len(cases), 2)
    for panels, (what, values) in zip(axes, {"retrieved": "random", "calibration_stored": "map"}.items(), strict=True):
        for panel, (title, where) in zip(panels, cases, strict=True):
            for rule in rules:
                _line(panel, rows(stored, keys="shared", values=values, rule=rule, **where), "degree", what, rule)
            panel.set(xlabel="rho", ylabel=what.replace("_", " "), title=title)
            panel.set_yscale("linear" if what == "retrieved" else "log")
    _add(report, figure, axes, output / "loads.png")
    report.heading("One key seen again and again: the answer as a share of its value")
    _table(report, rows(result["measurements"]["overshoot"]))
    _facts(report, result)
    return report.write(output / "index.html")


def _table(report: Report, data: Rows) -> None:
    report.table([name.replace("_", " ") for name in data[0]], [list(row.values()) for row in data])


def _summary(report: Report, told: dict[str, float]) -> None:
    report.table(["measured", "value"], [[name.replace("_", " "), value] for name, value in told.items()])


def _facts(report: Report, result: dict[str, Any]) -> None:
    """Without the measurements: they are thousands of rows, and in results.json."""
    report.facts({name: value for name, value in result.items() if name != "measurements"})
