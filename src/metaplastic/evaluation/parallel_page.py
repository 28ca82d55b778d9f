"""What ``metaplastic bench parallel`` measured, for a terminal and as one page."""

from pathlib import Path
from typing import Any

from ..report import Report
from .words import digits

TOKENS, MEMORY = "tokens per second", "peak memory GB"
KEPT = "weights, gradients, optimiser GB"


def way_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What one way found, a line for a job."""
    return [(name, _job(job) if isinstance(job, dict) else str(job)) for name, job in found.items()]


def _job(job: dict[str, Any]) -> str:
    if "not run" in job:
        return job["not run"]
    said = []
    if job.get("losses"):
        said.append(f"loss {job['losses'][0]:.5f} to {job['losses'][-1]:.5f}")
        said.append(f"gradient norm {digits(job['gradient norms'][0])}")
    if "ms" in job:
        said.append(f"{digits(job['ms'])} ms, {job[TOKENS]:,.0f} tokens/s")
    if MEMORY in job:
        said.append(f"{digits(job[MEMORY])} GB")
    if "waits" in job:
        said.append(", ".join(f"{count} {name}" for name, count in job["waits"]["counts"].items()))
        said += [f"{count} times {place}" for place, count in job["waits"]["where"].items()]
    return "; ".join(said) or f"{job['seconds in all']} s"


def compared_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Every comparison with one process."""
    rows = []
    for name, ways in found.items():
        if "parts" in ways or "not run" in ways:
            rows.append((name, ways.get("not run") or f"{' > '.join(ways['parts'])}: {_equal(ways)}"))
            continue
        rows += [(f"{name}: {way}", _comparison(entry)) for way, entry in ways.items()]
    return rows


def _equal(entry: dict[str, Any]) -> str:
    found = {what.removeprefix("difference of "): x for what, x in entry.items() if what.startswith("difference")}
    differences = [f"{what} {x:.1e}, tolerance {entry[f'tolerance of {what}']:.0e}" for what, x in found.items()]
    return f"{'equal' if entry['equal'] else 'NOT EQUAL'} (differences: {'; '.join(differences)})"


def _comparison(entry: dict[str, Any]) -> str:
    said = [_equal(entry)] if "equal" in entry else []
    for what, value in entry.items():
        if "ratio" in what:
            note = f" ({entry['speed']})" if what == f"{TOKENS}, ratio" and "speed" in entry else ""
            said.append(f"{what.replace(', ratio', '')} {value:.3f} times{note}")
    return "; ".join(said)


def parallel_page(record: dict[str, Any], output: Path) -> Path:
    """The comparisons, then what every way found."""
    report, measured = Report("The same run on several GPUs"), record["measurements"]
    report.text("Steps of the real Trainer in as many processes as named, each beside one process with the same run.")
    report.table(["run and way", "beside one process"], compared_rows(measured.get("compared", {})))
    for way, found in measured.items():
        if way != "compared":
            report.heading(way)
            report.table(["job", "found"], way_rows(found))
    report.facts(record)
    return report.write(output / "index.html")
