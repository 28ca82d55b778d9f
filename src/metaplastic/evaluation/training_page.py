"""What ``metaplastic bench training`` measured, for a terminal and as one page."""

from pathlib import Path
from typing import Any

from ..report import Report
from .training_speed import LOADER


def training_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """One measurement as names and readable values, for a terminal."""
    if "waits" not in found:
        return [(name, f"{value:,.4g}" if isinstance(value, float) else str(value)) for name, value in found.items()]
    rows = [
        ("step", f"{found['ms']:,.4g} ms ({found['least ms']:,.4g} to {found['most ms']:,.4g})"),
        ("rows", f"{found['batch']} x {found['length']:,} tokens, {found['layout']}"),
        (
            "how",
            f"{'bf16' if found['bf16'] else 'float32'}, checkpointing {found['checkpointing']}, loss {found['loss']}",
        ),
        ("tokens per second", f"{found['tokens per second']:,.4g}"),
        ("backend", ", ".join(found["backends"])),
        ("model FLOP/s", f"{found['model FLOP/s'] / 1e12:,.4g} T"),
        ("MFU", f"{found['MFU']:.1%} of {found['peak FLOP/s'] / 1e12:,.0f} T" if "MFU" in found else "peak not known"),
        ("peak memory", f"{found['peak memory GB']:,.4g} GB" if "peak memory GB" in found else "of a GPU only"),
        (LOADER, f"{found[LOADER]:,.3g} times"),
    ]
    counts, where = found["waits"]["counts"], found["waits"]["where"]
    rows.append(("in a step", ", ".join(f"{count} {name}" for name, count in counts.items())))
    return rows + [(f"  {count} times", place) for place, count in where.items()]


def training_page(record: dict[str, Any], output: Path) -> Path:
    """One table to compare, then every measurement, as one page."""
    report, measured = Report("A training step on this device"), record["measurements"]
    report.text("Steps of the real Trainer, medians. MFU: the model's FLOPs over the dense bf16 peak of the device.")
    columns = ("tokens per second", "ms", "MFU", "peak memory GB", "parameters")
    steps = {name: found for name, found in measured.items() if "waits" in found}
    shown = [
        [name, *(found.get(c, "-") for c in columns), ", ".join(found["backends"])] for name, found in steps.items()
    ]
    report.table(["model", *columns, "backend"], shown)
    for name, found in measured.items():
        report.heading(name)
        report.table(["measured", "value"], training_rows(found))
    report.facts(record)
    return report.write(output / "index.html")
