"""Plots and pages of the studies, drawn from their result records alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report import Report
from .drawing import (
    COLOURS,
    NAMES,
    Rows,
    add_figure,
    draw_line,
    grid,
    log_axis,
    opening,
    rows,
    show_facts,
    show_summary,
    show_table,
    study_name,
    table,
)  # fmt: skip

__all__ = ["collision_page", "correlation_page", "forgetting_page", "rows", "study_name", "table"]
_ASKED: dict[str, Any] = {"linestyle": "--", "marker": "s", "markersize": 4, "markerfacecolor": "white"}


def forgetting_page(result: dict[str, Any], output: Path) -> Path:
    measured, settings = result["measurements"], result["settings"]
    worlds = list(dict.fromkeys(row["world"] for row in rows(measured["distances"])))
    gates = list(dict.fromkeys(row["gate"] for row in rows(measured["distances"])))
    report = Report("Geometric forgetting and the sliding window")
    text = (
        f"Linear regression, keys on the sphere of {settings['key_size']} dimensions, noise {settings['noise']:g}, "
        f"{settings['draws']} draws; bands are one standard deviation over them. KL is in nats per value row."
    )
    opening(report, settings, text)
    show_summary(report, measured["summary"])
    report.heading("Distance from the exact window")
    report.text(
        "A fixed gate holds N tokens' worth, and the window is the last N tokens. With a varying gate the last N_t "
        "tokens (dashed, open squares) are not what the recursion holds, the last n_t tokens (solid, dots) are."
    )
    figure, axes = grid(len(gates), len(worlds))
    for panels, world in zip(axes, worlds, strict=True):
        for panel, gate in zip(panels, gates, strict=True):
            held = "asked" if gate == "fixed" else "counted"  # the same where the gate is fixed
            for belief in ("geometric", "palimpsa", "matched", "rescaled"):
                data = rows(measured["distances"], world=world, gate=gate, belief=belief, window=held)
                draw_line(panel, data, "N", "divergence", belief)
                if gate != "fixed" and belief in ("geometric", "palimpsa"):
                    data = rows(measured["distances"], world=world, gate=gate, belief=belief, window="asked")
                    label = f"{NAMES[belief]}, from the last N_t tokens"
                    draw_line(panel, data, "N", "divergence", belief, label=label, **_ASKED)
            ticks = [row["N"] for row in rows(measured["distances"], world=world, gate=gate, belief="geometric")]
            panel.set(xlabel="N (tokens)", ylabel="KL from window (nats)", title=f"{world}, {gate} gate")
            log_axis(panel.xaxis, ticks)
            log_axis(panel.yaxis)
    caption = (
        "KL from the exact window against N, by world and gate. Solid, dots: from the last n_t tokens, those that the "
        "recursion holds (N with a fixed gate). Dashed, open squares: from the last N_t tokens."
    )
    add_figure(report, figure, axes, caption, output / "distance.png")
    report.heading("Which is better: error against the true map, and calibration")
    report.text("Fixed gate. Calibration: squared error of the read-out over the variance claimed for it; 1 is right.")
    figure, axes = grid(len(worlds), 3)
    labels = {
        "error": "squared error per element", "excess_loss": "excess log loss (nats)",
        "calibration": "error / claimed variance",
    }  # fmt: skip
    for panels, (what, label) in zip(axes, labels.items(), strict=True):
        for panel, world in zip(panels, worlds, strict=True):
            for belief in ("window", "geometric", "matched", "rescaled", "palimpsa"):
                name = "window_asked" if belief == "window" else belief
                draw_line(panel, rows(measured["qualities"], world=world, gate="fixed", belief=name), "N", what, belief)
            if what == "calibration":
                panel.axhline(1, color="#8c959f", linestyle=":")
            panel.set(xlabel="N (tokens)", ylabel=label, title=world)
            log_axis(panel.xaxis, settings["windows"])
            log_axis(panel.yaxis)
    caption = "Squared error per element, excess log loss and calibration (1 is right) against N, by world; fixed gate."
    add_figure(report, figure, axes, caption, output / "quality.png")
    report.heading("Around a switch")
    figure, axes = grid(2, 2)
    labels = {"error": "squared error per element", "divergence": "KL from window (nats)"}
    for panels, (what, label) in zip(axes, labels.items(), strict=True):
        for panel, gate in zip(panels, ("fixed", "step"), strict=True):
            for belief in ("window", "geometric", "matched", "rescaled", "palimpsa"):
                meaning = "window_asked" if gate == "fixed" else "window_kept"
                name = meaning if belief == "window" else belief
                data = rows(measured["course"], gate=gate, belief=name)
                draw_line(panel, data, "new_tokens", what, belief, marker="")
            window = settings["course"]
            panel.set(xlabel="tokens of the new world", ylabel=label, title=f"{gate} gate, N = {window}")
            log_axis(panel.yaxis)
    caption = "Squared error and KL from the window before and after the switch, with a fixed and a step gate."
    add_figure(report, figure, axes, caption, output / "course.png")
    report.heading("Which N' comes closest to a window of N")
    figure, axes = grid(2, 1)
    for panel, evidence in zip(axes[0], ("as is", "rescaled"), strict=True):
        data = rows(measured["matching"], evidence=evidence)
        for shade, window in enumerate(dict.fromkeys(row["N"] for row in data)):
            ours = [row for row in data if row["N"] == window]
            places, values = zip(*((row["ratio"], row["divergence_per_dimension"]) for row in ours), strict=True)
            panel.plot(places, values, "o-", alpha=0.35 + 0.2 * shade, color="#0969da", label=f"N = {window}")
        limit = sorted({(row["ratio"], row["many_tokens"]) for row in data})
        panel.plot(*zip(*limit, strict=True), "k:", label="many tokens, theory")
        panel.set(xlabel="N' / N", ylabel="KL per key dimension (nats)", title=f"evidence {evidence}")
        log_axis(panel.yaxis)
    caption = "KL per key dimension of geometric forgetting at N' from a window of N, against N' / N; stationary world."
    add_figure(report, figure, axes, caption, output / "matching.png", columns=5)
    report.heading("Other key sizes and noise (stationary, fixed gate)")
    show_table(report, rows(measured["other_settings"]))
    show_facts(report, result)
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
    opening(report, settings, text)
    show_summary(report, result["measurements"]["summary"])
    pages = {
        "recall": (_ANSWERS, "random", "Recall of random values: share retrieved and cosine of the answers"),
        "belief": (_BELIEF, "map", "Values of a true map: KL from the exact posterior and calibration"),
    }
    for name, (labels, values, title) in pages.items():
        report.heading(f"{title}; load {load:g}, noise {noise:g}")
        figure, axes = grid(len(labels), len(kinds))
        for panels, kind in zip(axes, kinds, strict=True):
            for panel, what in zip(panels, labels, strict=True):
                where = {"keys": kind, "load": load, "noise": noise, "N": None, "values": values}
                _rules(panel, stored, where, what, labels[what], *_KEYS[kind])
        caption = f"{title}, against the degree of correlation, for four kinds of keys. Load {load:g}, noise {noise:g}."
        add_figure(report, figure, axes, caption, output / f"{name}.png", columns=4)
    report.heading("Loads, weak evidence, forgetting: keys that share a direction")
    cases: list[tuple[str, dict[str, Any]]] = [
        (f"load {each:g}", {"load": each, "noise": noise, "N": None}) for each in settings["loads"]
    ]
    cases += [(f"noise {each:g}", {"load": load, "noise": each, "N": None}) for each in settings["other_noises"]]
    windows = dict.fromkeys(r["N"] for r in rows(stored, keys="shared") if r["N"] is not None)
    cases += [(f"forgetting, N = {each:g}", {"load": load, "noise": noise, "N": each}) for each in windows]
    down = -(-len(cases) // 3)
    figure, axes = grid(3, 2 * down)
    shown = {"retrieved": ("random", _ANSWERS), "calibration_stored": ("map", _BELIEF)}
    for panels, (what, (values, labels)) in zip((axes[:down], axes[down:]), shown.items(), strict=True):
        for panel, (title, where) in zip(panels.flat, cases, strict=False):
            where = where | {"keys": "shared", "values": values}
            _rules(panel, stored, where, what, labels[what], title, _KEYS["shared"][1])
    caption = (
        "Above: share of random values retrieved. Below: squared error over claimed variance at stored keys. Against "
        "the cosine of any two keys, for several loads, weak evidence (noise) and forgetting."
    )
    add_figure(report, figure, axes, caption, output / "loads.png", columns=4)
    report.heading("One key seen again and again: the answer as a share of its value")
    show_table(report, rows(result["measurements"]["overshoot"]))
    show_facts(report, result)
    return report.write(output / "index.html")


def _rules(
    panel: Any, stored: dict[str, list[Any]], where: dict[str, Any], what: str, label: str, title: str, degree: str
) -> None:
    """A panel of all four rules against the degree of correlation; the exact one is no distance from itself."""
    for rule in ("exact", "mean_field", "palimpsa", "additive"):
        if (rule, what) != ("exact", "divergence"):
            draw_line(panel, rows(stored, rule=rule, **where), "degree", what, rule)
    if what not in _ANSWERS:
        log_axis(panel.yaxis)
    panel.set(xlabel=degree, ylabel=label, title=title)


_KEEPS = {
    "uncertainty kept": ("dense", "rank_1", "mesa", "diagonal", "mean_field", "palimpsa"),
    "none kept\n(dense for comparison)": ("dense", "reset", "gated", "kda", "longhorn_elementwise", "additive"),
}


def collision_page(result: dict[str, Any], output: Path) -> Path:
    measured, settings = result["measurements"], result["settings"]
    target, frequent, rho = settings["target"], settings["frequent"], settings["overlap"]
    report = Report("Two similar keys collide")
    text = (
        f"B is written {target} times, then the similar A {frequent} times (overlap {rho:g}). p_AB: how the answer to "
        "B's key is shared between the two values; 0.5 is a tie, 0.731 a perfect answer. Retrieved: the share of "
        "rotations in which the right value is the largest of all six; others are the four keys orthogonal to A and B. "
        f"Aligned: keys on the axes, as published. Rotated: mean over {settings['rotations']} random rotations of "
        "them, the same for every rule; ± and bands are one standard deviation. Open circles are closed forms, without "
        "simulation."
    )
    opening(report, settings, text)
    show_summary(report, measured["summary"])
    alike = [row | {"apart": round(1 - row["overlap"], 6)} for row in rows(measured["overlaps"])]
    last = max(row["step"] for row in rows(measured["course"]))
    views: dict[str, Any] = {
        "course": ("p_AB after every token", rows(measured["course"]), "step", "tokens"),
        "overlap": (f"p_AB after {frequent} writes of A", alike, "apart", "1 - rho (keys more alike to the right)"),
    }
    for few in settings["targets"]:
        title = f"p_AB after A is written again and again; B was written {few} times"
        views[f"repetitions-{few}"] = title, rows(measured["repetitions"], target=few), "frequent", "writes of A"
    for name, (title, data, x, label) in views.items():
        report.heading(title)
        figure, axes = grid(2, 2)
        for panels, (kept, shown) in zip(axes, _KEEPS.items(), strict=True):
            for panel, keys in zip(panels, ("aligned", "rotated"), strict=True):
                _collided(panel, [row for row in data if row["keys"] == keys], x, shown)
                panel.set(xlabel=label, ylabel="p_AB", ylim=(-0.03, 1.03), title=f"{keys} keys, {kept}")
                if x == "frequent":
                    log_axis(panel.xaxis, settings["repetitions"])
                elif x == "apart":
                    least = min(row["apart"] for row in data)
                    log_axis(panel.xaxis, [tick for tick in (1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01) if tick >= least])
                    panel.invert_xaxis()
                else:
                    _spans(panel, {"B": (last - frequent - target, last - frequent), "A": (last - frequent, last)})
        caption = f"{title}, with keys on the axes (left) and rotated (right). Dotted: a tie."
        add_figure(report, figure, axes, caption, output / f"{name}.png")
    report.heading("Every rule at the end")
    columns = ("rule", "keys", "p_AB", "p_AB_sd", "retrieved_B", "retrieved_others", "difference")
    show_table(report, [{name: row[name] for name in columns} for row in rows(measured["final"], frequent=frequent)])
    report.text(
        "Largest difference: of any answer from its closed form, over all rotations, relative to the largest answer; "
        "None where there is no closed form."
    )
    report.heading("The published numbers, and what the filter makes of the overlap")
    show_table(report, rows(measured["published"]))
    report.text(
        "Effective overlap: the share of A's error that reaches B's answer, once A has been written long enough. A "
        "reset has rho. First: as A's run begins; late: after it, when A changes its value. Gain: of A's next write."
    )
    show_table(report, rows(measured["protection"]))
    report.heading("A changes its value")
    figure, axes = grid(2, 3)
    errors = {
        "error_A": "distance of A's answer\nfrom its new value", "error_B": "distance of B's answer\nfrom its value",
        "error_others": "distance of the others'\nanswers from theirs",
    }  # fmt: skip
    for panels, (what, label) in zip(axes, errors.items(), strict=True):
        for panel, (when, title) in zip(panels, {"first": "before", "late": "after"}.items(), strict=True):
            for rule in ("dense", "rank_1", "mesa", "mesa_forgetting", "diagonal", "mean_field", "reset"):
                data = rows(measured["switch"], rule=rule, when=when, keys="rotated")
                draw_line(panel, data, "step", what, rule, marker="")
            panel.set(xlabel="writes of the new value", ylabel=label, title=f"A changes {title} its run")
            log_axis(panel.xaxis, [n for n in settings["repetitions"] if n <= frequent])
            panel.set(ylim=(-0.05, 1.65))
    caption = (
        "Distance of the answers from the values after A's value has changed, before or after its run; keys rotated. "
        "Palimpsa's distances are beyond this scale."
    )
    add_figure(report, figure, axes, caption, output / "switch.png")
    report.text(
        "The dense filter with other process noises, A's value changed after its run, keys rotated: distance of the "
        f"answers from the values after {frequent} writes of the new one:"
    )
    late = rows(measured["switch_by_drift"], when="late", keys="rotated", step=frequent)
    columns = ("process_noise", "error_A", "error_B", "error_others")
    show_table(report, [{name: row[name] for name in columns} for row in late])
    report.heading("Other key sizes and noise: p_AB at the end, keys rotated")
    columns = ("rule", "key_size", "noise", "p_AB", "p_AB_sd", "retrieved_B")
    others = rows(measured["other_sizes"], keys="rotated")
    show_table(report, [{name: row[name] for name in columns} for row in others])
    report.heading("A crowd of random keys")
    report.text(
        f"Random keys and values in {settings['crowd_key_size']} dimensions, {settings['crowd_passes']} passes. Error: "
        "of the answers, relative; retrieved: the share of keys whose nearest value by angle is the right one."
    )
    show_table(report, rows(measured["crowd"]))
    report.text("The dense filter with other process noises:")
    show_table(report, rows(measured["crowd_by_drift"]))
    show_facts(report, result)
    return report.write(output / "index.html")


def _collided(panel: Any, data: Rows, x: str, shown: Sequence[str]) -> None:
    """p_AB of these rules, closed forms as open circles, and the tie."""
    for rule in shown:
        ours = [row for row in data if row["rule"] == rule]
        draw_line(panel, ours, x, "p_AB", rule, marker="")
        known = [(row[x], row["closed_p_AB"]) for row in ours if row.get("closed_p_AB") is not None]
        if known:
            panel.plot(*zip(*known, strict=True), "o", color=COLOURS[rule], markerfacecolor="none")
        if known and rule == shown[-1]:
            panel.plot([], [], "o", color="#57606a", markerfacecolor="none", label="closed form")
    panel.axhline(0.5, color="#8c959f", linestyle=":", linewidth=1)


def _spans(panel: Any, runs: dict[str, tuple[int, int]]) -> None:
    """Shades what is written when."""
    for shade, (name, (begin, end)) in zip(("#f3f5f7", "#e4e8ed"), runs.items(), strict=True):
        panel.axvspan(begin + 0.5, end + 0.5, color=shade, zorder=0, linewidth=0)
        panel.text((begin + end) / 2, 1.07, f"{name} written", ha="center", fontsize=9, color="#57606a")
    panel.set(ylim=(-0.03, 1.16))
