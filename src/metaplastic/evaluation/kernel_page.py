"""What ``metaplastic bench kernels`` found, for a terminal and as a page."""

from pathlib import Path
from typing import Any

from ..report import Report
from .kernel_speed import OPERATIONS


def kernel_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """One measurement as names and readable values, for a terminal."""
    rows = []
    for name, value in found.items():
        if isinstance(value, dict) and "forward ms" in value:
            times = " / ".join(f"{value[f'{p} ms']:.3g}" for p in OPERATIONS if f"{p} ms" in value) + " ms"
            shares = [f"{value[f'{p} floor share']:.0%}" for p in OPERATIONS if f"{p} floor share" in value]
            of_floor = f", {' / '.join(shares)} of the floor" if shares else ""
            extra = f", {value['extra peak GB']:.2f} GB extra" if "extra peak GB" in value else ""
            rows.append((name, f"{times}{of_floor}{extra}"))
            if host := [f"{value[f'{p} host ms']:.2g}" for p in OPERATIONS if f"{p} host ms" in value]:
                rows.append(("  the host takes", f"{' / '.join(host)} ms to start it"))
            if called := [f"{value[f'{p} called ms']:.3g}" for p in OPERATIONS if f"{p} called ms" in value]:
                rows.append(("  called again and again", f"{' / '.join(called)} ms, the host's time included"))
            if "errors" in value:
                worst = max(value["errors"].items(), key=lambda x: x[1])
                rows.append(("  largest error", f"{worst[1]:.1e} ({worst[0]})"))
            if "20 runs equal" in value:
                rows.append(("  20 runs equal, bit for bit", "yes" if value["20 runs equal"] else "NO"))
            if "note" in value:
                rows.append(("  note", value["note"]))
        elif isinstance(value, dict):
            words = ", ".join(f"{n} {v:.4g}" if isinstance(v, float) else f"{n} {v}" for n, v in value.items())
            rows.append((name, words))
        else:
            rows.append((name, f"{value:.4g}" if isinstance(value, float) else str(value)))
    return rows


def kernel_page(record: dict[str, Any], output: Path) -> Path:
    """Tables and the throughput of one head, as one page."""
    report = Report("Kernels on this device")
    report.text("Forward / forward and backward, medians; shares are of the floor that no implementation can beat.")
    for name, found in record["measurements"].items():
        report.heading(name)
        if name != "one head":
            report.table(["measured", "value"], kernel_rows(found))
            continue
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 3.2))
        axes = figure.subplots()
        for label, rates in found.items():
            axes.plot([int(width) for width in rates], list(rates.values()), marker="o", label=label)
        axes.set(xlabel="K = V of the head", ylabel="thousand tokens / s", yscale="log")
        axes.legend()
        report.figure(figure, "16 x 2048 tokens through one head, forward.", save=output / "one-head.png")
    report.facts(record)
    return report.write(output / "index.html")
