"""What ``metaplastic bench training`` measured, for a terminal and as one page."""

from pathlib import Path
from typing import Any

from ..report import Report
from .training_profile import KERNELS
from .training_speed import LOADER
from .words import digits, with_unit

COLUMNS = ("tokens per second", "ms", "MFU", "peak memory GB", "parameters")


def training_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """One measurement as names and readable values, for a terminal; what a device does not have is left out."""
    if "ms" not in found:
        return [(name, f"{value:,.0f}" if isinstance(value, float) else str(value)) for name, value in found.items()]
    rows = [
        ("step", f"{digits(found['ms'])} ms ({digits(found['least ms'])} to {digits(found['most ms'])})"),
        ("rows", f"{found['batch']} x {found['length']:,} tokens, {found['layout']}"),
        (
            "how",
            f"{'bf16' if found['bf16'] else 'float32'}, checkpointing {found['checkpointing']}, loss {found['loss']}",
        ),
        ("tokens per second", f"{found['tokens per second']:,.0f}"),
        ("backend", ", ".join(found["backends"])),
        ("of the model", with_unit(found["model FLOP/s"], "FLOP/s")),
    ]
    if found["compile"]:
        rows.append(("compiled", f"in {digits(found['compile seconds'])} s, {found['graphs']} graphs"))
    known = (
        f"of {with_unit(found['peak FLOP/s'], 'FLOP/s')}" if "MFU" in found else "the peak is not known: --peak-flops"
    )
    rows.append(("MFU", f"{found['MFU']:.1%} {known}" if "MFU" in found else known))
    if "peak memory GB" in found:
        rows.append(("peak memory", f"{digits(found['peak memory GB'])} GB"))
    rows.append((LOADER, f"{digits(found[LOADER])} times"))
    if "waits" not in found:
        return rows
    counts, where = found["waits"]["counts"], found["waits"]["where"]
    rows.append(("in a step", ", ".join(f"{count} {name}" for name, count in counts.items())))
    return rows + [(f"  {count} times", place) for place, count in where.items()]


def kernel_rows(found: dict[str, Any], count: int) -> list[tuple[str, str]]:
    """Where a device's time goes in one step: the kernels that take most of it."""
    rows = found.get("kernels", [])[:count]
    return [(f"{row['ms']:.2f} ms, {row['share']:.1%}", f"{row['calls']} x {row['name']}") for row in rows]


def training_page(record: dict[str, Any], output: Path) -> Path:
    """One table and one plot to compare, then every measurement, as one page."""
    report, measured = Report("A training step on this device"), record["measurements"]
    report.text("Steps of the real Trainer, medians. MFU: the model's FLOPs over the peak of the device, where known.")
    steps = {name: found for name, found in measured.items() if "ms" in found}
    columns = [column for column in COLUMNS if any(column in found for found in steps.values())]
    shown = [[name, *(_cell(found, c) for c in columns), ", ".join(found["backends"])] for name, found in steps.items()]
    report.table(["model", *columns, "backend"], shown)
    if steps:
        _plot(report, steps, output)
    for name, found in measured.items():
        report.heading(name)
        report.table(["measured", "value"], training_rows(found))
        if found.get("kernels"):
            report.table(["of the kernels in a step", "which"], kernel_rows(found, KERNELS))
    report.facts(record)
    return report.write(output / "index.html")


def _cell(found: dict[str, Any], column: str) -> Any:
    """A number as it is, unless the page would give it an exponent."""
    if (value := found.get(column)) is None:
        return "-"
    if column == "MFU":
        return f"{value:.1%}"
    return round(value) if value >= 1000 else value


def _plot(report: Report, steps: dict[str, dict[str, Any]], output: Path) -> None:
    from matplotlib.figure import Figure

    colours = {"packed": "#0969da", "rows": "#bf8700"}
    figure = Figure(figsize=(8, 0.9 + 0.35 * len(steps)))
    axes = figure.subplots()
    for place, found in enumerate(steps.values()):
        middle = found["tokens per second"]
        tokens = found["batch"] * found["length"]
        slow, fast = (1e3 * tokens / found[which] for which in ("most ms", "least ms"))
        reach = [[max(0.0, middle - slow)], [max(0.0, fast - middle)]]
        axes.barh(place, middle, xerr=reach, color=colours[found["layout"]], ecolor="#57606a")
        axes.annotate(f"{middle:,.0f}", (max(middle, fast), place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(steps)), list(steps))
    axes.invert_yaxis()
    axes.margins(x=0.12)  # room for the numbers
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="tokens per second")
    figure.tight_layout()
    caption = "Tokens per second: the median of the steps, with the slowest and the fastest."
    report.figure(figure, caption, save=output / "tokens_per_second.png")
