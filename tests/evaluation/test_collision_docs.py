"""What docs/studies.md says of the colliding keys, against the results file beside it: every table, and the text."""

import json
import re
from pathlib import Path

import pytest

from metaplastic.evaluation.drawing import NAMES, readable
from metaplastic.evaluation.study_pages import rows

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULT = json.loads((DOCS / "results" / "study-collision.json").read_text())
MEASURED = RESULT["measurements"]
PAGE = (DOCS / "studies.md").read_text()
SECTION = PAGE.split("## Two similar keys collide")[1].split("\n## ")[0]
TEXT = " ".join(SECTION.split())
RULES = {readable(row["rule"]): row["rule"] for row in rows(MEASURED["final"])} | {"Mesa": "mesa"}


def at(part, **where):
    (row,) = rows(MEASURED[part], **where)
    return row


def final(rule, keys="rotated"):
    return at("final", rule=rule, keys=keys, frequent=60)


def sized(rule, key_size):  # of 16 there are two the same: once among the sizes, once among the noises
    return rows(MEASURED["other_sizes"], rule=rule, keys="rotated", key_size=key_size, noise=0.05)[0]["p_AB"]


def documented(*begins):
    """The table whose header begins so: its other headings, and its rows by their first cell."""
    for block in re.findall(r"(?:^\|.*\n)+", SECTION, re.M):
        head, _, *lines = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines())
        if head[: len(begins)] == [*begins]:
            return head[1:], {name: cells for name, *cells in lines}
    raise AssertionError(f"no table {begins}")


def test_the_table_of_rules():
    _, table = documented("rule", "p_AB aligned")
    assert len(table) >= 15
    for name, cells in table.items():
        rule = name.split("`")[1]
        aligned, turned = final(rule, "aligned"), final(rule)
        shares = (f"{turned[share]:.2f}" for share in ("retrieved_B", "retrieved_others"))
        assert cells == [f"{aligned['p_AB']:.3f}", f"{turned['p_AB']:.3f} ± {turned['p_AB_sd']:.3f}", *shares], rule
        assert aligned["retrieved_A"] == turned["retrieved_A"] == 1  # and so has no column
    known = [name for name in table if final(name.split("`")[1])["closed_p_AB"] is not None]
    assert len(known) == 10 and "Ten of the rules below have a closed form" in TEXT


def test_the_table_of_overlaps():
    overlaps, table = documented("rho", "0.6", "0.8", "0.9")
    for name, cells in table.items():
        found = [at("overlaps", rule=RULES[name], keys="rotated", overlap=float(rho)) for rho in overlaps]
        spread = [f" ± {row['p_AB_sd']:.3f}" if row["p_AB_sd"] > 1e-6 else "" for row in found]
        assert cells == [f"{row['p_AB']:.3f}{sd}" for row, sd in zip(found, spread, strict=True)], name
    assert len(table) == 8
    for rule, above, below in (
        ("reset", 0.7, 0.8), ("palimpsa", 0.8, 0.9), ("diagonal", 0.9, 0.95), ("mean_field", 0.9, 0.95)
    ):  # fmt: skip
        ours = {row["overlap"]: row["p_AB"] for row in rows(MEASURED["overlaps"], rule=rule, keys="rotated")}
        assert ours[above] > 0.5 > ours[below], rule
    assert min(row["p_AB"] for row in rows(MEASURED["overlaps"], rule="dense")) > 0.5


def test_the_tables_of_a_changed_value():
    overlaps, table = documented("rho", "0.6", "0.8", "0.92")
    for name, when in (("as A's run begins", "first"), ("after it", "late")):
        found = [at("protection", overlap=float(rho), when=when)["effective_overlap"] for rho in overlaps]
        assert table[name] == [f"{each:.3f}" for each in found]
    _, table = documented("A's value changes")
    assert len(table) == 8
    for name, cells in table.items():
        where = {"rule": RULES[name], "keys": "rotated"}
        for cell, when in zip(cells, ("first", "late"), strict=True):
            once, long = (at("switch", when=when, step=step, **where) for step in (1, 60))
            assert cell == f"{once['error_A']:.2f}, {long['error_B']:.2f}", name
    noises, table = documented("process noise")
    for noise, *cells in zip(noises, *table.values(), strict=True):
        late = at("switch_by_drift", process_noise=float(noise), when="late", step=60, keys="rotated")
        held = at("crowd_by_drift", process_noise=float(noise), load=128)["retrieved"]
        assert cells == [f"{late['error_A']:.2f}", f"{late['error_B']:.2f}", f"{held:.2f}"], noise


def test_the_table_of_the_crowd():
    (*loads, _), table = documented("keys", "16")
    assert len(table) == 11
    for name, cells in table.items():
        found = [at("crowd", rule=RULES[name], load=int(load)) for load in loads]
        assert cells == [*(f"{row['error']:.3f}" for row in found), f"{found[-1]['retrieved']:.2f}"], name


def claims():
    """Sentences of the text with their numbers put in from the results."""
    told = {(row["rule"], row["step"]): f"{row['closed']:.5f}" for row in rows(MEASURED["published"])}
    before, after = (at("protection", overlap=0.92, when=when)["gain"] for when in ("first", "late"))
    assert told["dense", 52] == told["reset", 52]
    yield (
        f"{told['dense', 52]} for the dense filter and the reset before A's run, {told['dense', 112]} and "
        f"{told['reset', 112]} after it, {told['additive', 112]} for the additive rule; gains {before:.5f} "
        f"and {after:.5f}"
    )
    yield f"retrieves B in {final('mean_field')['retrieved_B']:.0%} of the rotations"
    yield "(K = 8, 16, 64: " + ", ".join(f"{sized('rank_1', k):.3f}" for k in (8, 16, 64)) + ")"
    best = {
        rule: max(row["p_AB"] for row in rows(MEASURED["other_sizes"], rule=rule, keys="rotated", key_size=16))
        for rule in ("diagonal", "palimpsa")
    }
    yield f"at most {best['diagonal']:.3f} (diagonal) and {best['palimpsa']:.3f} (Palimpsa)"

    def after_writes(rule, target, n, keys="rotated"):
        return at("repetitions", rule=rule, target=target, frequent=n, keys=keys)

    few, many = (f"{after_writes('dense', 4, n)['p_AB']:.3f}" for n in (4, 256))
    assert few == many
    yield f"{few} after 4 and after 256"
    loud = {n: after_writes("palimpsa", 4, n) for n in (1, 8, 64)}
    yield (
        f"({loud[1]['p_AB']:.3f} after one write) and falls to {loud[8]['p_AB']:.3f} after 8 and "
        f"{loud[64]['p_AB']:.3f} after 64; B is retrieved in all, {loud[8]['retrieved_B']:.0%} and none"
    )
    assert loud[1]["retrieved_B"] == 1 and loud[64]["retrieved_B"] == 0
    aligned = after_writes("palimpsa", 4, 256, "aligned")
    assert aligned["retrieved_B"] == 1
    yield f"retrieves B up to 256 writes ({aligned['p_AB']:.3f})"
    longer = [f"{after_writes('palimpsa', 40, n)['p_AB']:.3f}" for n in (32, 256)]
    yield f"({longer[0]} after 32 writes) and goes the same way ({longer[1]} after 256)"
    late = {"when": "late", "keys": "rotated"}
    yield f"learns the new value in four writes ({at('switch', rule='dense', step=4, **late)['error_A']:.2f})"
    wrong = [f"{at('switch', rule=rule, step=60, **late)['error_A']:.2f}" for rule in ("mesa", "mesa_forgetting")]
    yield f"after 60 writes ({wrong[0]}; forgetting: {wrong[1]})"
    yield f"it retrieves {at('crowd', rule='palimpsa', load=128)['retrieved']:.2f}, with the additive rule"
    yield (
        f"Quote {final('diagonal', 'aligned')['p_AB']:.3f} for the diagonal covariance only together with "
        f"{final('diagonal')['p_AB']:.3f}"
    )


@pytest.mark.parametrize("claim", claims())
def test_a_sentence_of_the_text(claim):
    assert claim in TEXT


def test_larger_heads():
    """The file has four digits, so the third of the text may be off by one where the fourth is a 5."""
    diagonal, others = (
        r"for the diagonal \(K = (.+?): (.+?)\)",
        r" and for Palimpsa \((.+?)\), not for mean-field \((.+?)\)",
    )
    sizes, *lists = ([float(x) for x in each.split(", ")] for each in re.findall(diagonal + others, TEXT)[0])
    for rule, told in zip(("diagonal", "palimpsa", "mean_field"), lists, strict=True):
        assert told == pytest.approx([sized(rule, size) for size in sizes], abs=5.1e-4), rule
    assert {f"{sized('dense', size):.3f}" for size in sizes} == {"0.723"} and "the dense filter (0.723)" in TEXT


def test_words_for_numbers():
    assert "p_AB is a tie, but B is retrieved in only a third" in TEXT
    assert abs(final("diagonal")["p_AB"] - 0.5) < 0.02 and abs(final("diagonal")["retrieved_B"] - 1 / 3) < 0.02
    assert "keeps half of what the dense filter adds to the reset" in TEXT
    mean, reset, dense = (final(rule)["p_AB"] for rule in ("mean_field", "reset", "dense"))
    assert abs((mean - reset) / (dense - reset) - 0.5) < 0.05
    assert "by more than 6e-13 of the largest" in TEXT
    assert MEASURED["summary"]["largest relative difference from a closed form"] < 6e-13
    assert "in a crowd it does not beat the diagonal" in TEXT
    for row in rows(MEASURED["crowd"], rule="rank_1"):
        assert row["error"] > 0.9 * at("crowd", rule="diagonal", load=row["load"])["error"]


def test_the_setting_is_that_of_the_results():
    settings = RESULT["settings"]
    assert settings["quick"] is False and RESULT["name"] == "study collision"
    for claim in (
        f"B {settings['target']} times, A {settings['frequent']} times", f"rho = {settings['overlap']}",
        f"in {settings['key_size']} dimensions", f"same {settings['rotations']} random rotations",
        f"prior variance {settings['prior_variance']:g}, noise {settings['observation_noise']}",
        f"process noise {settings['process_noise']}", f"gain {settings['gain']}", f"alpha = 1 - 1/{settings['window']}",
    ):  # fmt: skip
        assert claim in TEXT


def test_every_figure_has_a_caption():
    figures = re.findall(r"^!\[.*?\]\(figures/(.+?)\)\n\n?(.)", PAGE, re.M)
    assert len(figures) >= 11 and all(mark == "*" for _, mark in figures)


def test_every_rule_of_the_study_has_a_name_to_read():
    """On the page and in the terminal; no underscore reaches them."""
    assert all("_" not in name for name in [*RULES, *NAMES.values()])
    assert all("_" not in name.replace("p_AB", "") for name in MEASURED["summary"])
