"""What the pages of the studies share: tables of rows, panels, axes and legends."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report import Report

Rows = list[dict[str, Any]]
COLOURS = {
    "geometric": "#0969da", "palimpsa": "#cf222e", "matched": "#1a7f37", "rescaled": "#8250df", "window": "#1b1f24",
    "exact": "#1b1f24", "mean_field": "#1a7f37", "additive": "#bf8700", "dense": "#1b1f24", "rank_1": "#0969da",
    "mesa": "#8250df", "diagonal": "#e16f24", "reset": "#0e8a94", "gated": "#d63384", "kda": "#6e7781",
    "longhorn_elementwise": "#7a4b1f", "mesa_forgetting": "#c297ff",
}  # fmt: skip
NAMES = {
    "geometric": "geometric (paper's N)", "palimpsa": "Palimpsa", "matched": "geometric, matched N'",
    "rescaled": "matched N', evidence rescaled", "window": "exact window", "exact": "exact", "mean_field": "mean-field",
    "additive": "additive", "dense": "Bayesian, dense", "rank_1": "Bayesian, rank 1", "mesa": "Mesa (exact model)",
    "diagonal": "Bayesian, diagonal", "reset": "delta (reset)", "gated": "gated delta", "kda": "KDA",
    "longhorn_elementwise": "Longhorn, elementwise", "mesa_forgetting": "Mesa, forgetting", "longhorn": "Longhorn",
    "gaussian": "full Gaussian", "rank_0": "Bayesian, rank 0 (isotropic)", "window_asked": "exact window",
}  # fmt: skip
DASHES: dict[str, Any] = {  # of rules whose curves lie on those of others
    "rank_1": (0, (4, 4)), "mesa": (0, (1, 2)), "mesa_forgetting": (0, (4, 2, 1, 2)), "gated": (0, (4, 4)),
    "kda": (0, (1, 2)),
}  # fmt: skip
HEADINGS = {
    "p_AB": "p_AB", "closed": "p_AB, closed form", "simulated": "p_AB, simulated", "step": "tokens",
    "retrieved_B": "B retrieved", "retrieved_others": "others retrieved", "error_A": "distance from A's new value",
    "error_B": "from B's value", "error_others": "from the others'", "load": "keys in the crowd",
    "difference": "largest difference",
}  # fmt: skip


def readable(name: str) -> str:
    """A rule, a belief or a column as people call it."""
    if name in NAMES or name in HEADINGS:
        return NAMES.get(name) or HEADINGS[name]
    if name.endswith("_sd"):
        return f"± {readable(name.removesuffix('_sd'))}"
    if name.endswith("_forgetting"):
        return f"{readable(name.removesuffix('_forgetting'))}, forgetting"
    kind, _, number = name.partition("_")
    if kind in ("rank", "block"):
        return f"Bayesian, rank {number}" if kind == "rank" else f"Bayesian, blocks of {number}"
    return name.replace("_", " ")


def table(rows: Rows) -> dict[str, list[Any]]:
    """Rows as columns and values: a name is written once, not once a row."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return {"columns": columns, "rows": [[row.get(name) for name in columns] for row in rows]}


def rows(stored: dict[str, list[Any]], **where: Any) -> Rows:
    """Back from :func:`table`: those in which every named column has the given value."""
    each = (dict(zip(stored["columns"], values, strict=True)) for values in stored["rows"])
    return [row for row in each if all(row[name] == value for name, value in where.items())]


def draw_line(axes: Any, data: Rows, x: str, y: str, kind: str, *, label: str | None = None, **style: Any) -> None:
    """A curve over its rows, with a band of one standard deviation over draws."""
    data = [row for row in data if row[y] is not None]
    if not data:
        return
    places, middle = [row[x] for row in data], [row[y] for row in data]
    spread = [row.get(f"{y}_sd") or 0.0 for row in data]
    low, high = zip(*((m - s if m > s else m / 2, m + s) for m, s in zip(middle, spread, strict=True)), strict=True)
    colour = COLOURS[kind]
    style = {"marker": "o", "markersize": 3, "linestyle": DASHES.get(kind, "-")} | style
    axes.plot(places, middle, color=colour, label=label or NAMES[kind], **style)
    axes.fill_between(places, low, high, color=colour, alpha=0.12, linewidth=0)


def grid(across: int, down: int) -> tuple[Any, Any]:
    """At most three panels across: a page is 60 letters wide, and labels must be readable on it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * across, 2.8 * down))
    return figure, figure.subplots(down, across, squeeze=False)


def add_figure(report: Report, figure: Any, axes: Any, caption: str, path: Path, *, columns: int = 3) -> None:
    """One legend below all panels; those without a curve are left out."""
    entries: dict[str, Any] = {}
    for panel in axes.flat:
        panel.set_visible(panel.has_data())
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.tight_layout()
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncol=columns,
        handlelength=3,
    )
    report.figure(figure, caption, save=path)


def log_axis(axis: Any, places: Sequence[float] = ()) -> None:
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


def study_name(name: str, quick: bool) -> str:
    """What the result is called; the terminal shows it above the summary."""
    return f"study {name}" + (" --quick (its numbers are not the findings)" if quick else "")


def opening(report: Report, settings: dict[str, Any], text: str) -> None:
    if settings["quick"]:
        report.text(
            "This is a run with --quick, few draws at small sizes, to see that everything runs: "
            "its numbers are not the findings."
        )
    report.text(text)


def show_table(report: Report, data: Rows) -> None:
    cells = [[readable(x) if name in ("rule", "belief") else x for name, x in row.items()] for row in data]
    report.table([readable(name) for name in data[0]], cells)


def show_summary(report: Report, told: dict[str, float]) -> None:
    """Names end in a rule or a belief, after a colon."""
    parts = [(name.rpartition(": "), value) for name, value in told.items()]
    report.table(["measured", "value"], [["".join([*head, readable(kind)]), value] for (*head, kind), value in parts])


def show_facts(report: Report, result: dict[str, Any]) -> None:
    """Without the measurements: they are thousands of rows, and in results.json."""
    report.facts({name: value for name, value in result.items() if name != "measurements"})
