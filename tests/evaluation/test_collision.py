"""The study of colliding keys: closed forms against simulation, the published digits, and what a rotation changes."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from metaplastic import cli
from metaplastic.evaluation import collision, collision_forms, study_pages
from metaplastic.evaluation.collision import A, B, CollisionStudy
from metaplastic.evaluation.collision_rules import closed_form, filter_memory, follow, memories
from metaplastic.report import Report

F64 = torch.float64
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "studies.md").read_text()
STUDY = CollisionStudy(rotations=12)
VALUES = torch.eye(6, dtype=F64)
BLIND = ("dense", "rank_1", "mesa", "mesa_forgetting", "gaussian", "reset", "gated", "longhorn", "additive")
BASIS = ("diagonal", "block_4", "mean_field", "palimpsa", "kda", "longhorn_elementwise")


def any_keys(seed=0):
    """Unit keys of which every two overlap, so that no term of a formula is zero."""
    keys = torch.randn(3, 6, 7, dtype=F64, generator=torch.Generator().manual_seed(seed))
    return keys / keys.norm(dim=-1, keepdim=True)


RUNS = [(0, 1), (3, 2), (1, 7), (5, 1), (0, 9), (2, 3), (1, 1), (4, 30)]
KNOWN = [rule for rule in memories(STUDY) if closed_form(rule, STUDY, any_keys(), RUNS) is not None]


@pytest.mark.parametrize("rule", KNOWN)
def test_closed_forms_are_the_simulation(rule):
    """Any schedule, any unit keys; and the collision itself, keys on the axes and rotated."""
    found = follow(memories(STUDY)[rule], any_keys(), VALUES, collision.tokens(RUNS), [54])[0]
    torch.testing.assert_close(found, closed_form(rule, STUDY, any_keys(), RUNS), rtol=1e-11, atol=1e-11)
    keys = collision.draw_keys(STUDY)
    order = collision.tokens(collision.schedule(40, 60))
    found = follow(memories(STUDY)[rule], keys, VALUES, order, [52, 53, 60, 112])
    for n, answers in zip((0, 1, 8, 60), found, strict=True):
        expected = closed_form(rule, STUDY, keys, collision.schedule(40, n))
        torch.testing.assert_close(answers, expected, rtol=1e-11, atol=1e-11)


def test_which_rules_have_a_closed_form():
    assert {"dense", "mesa", "palimpsa_forgetting", "gated", "longhorn_elementwise", "additive"} <= set(KNOWN)
    assert not {"diagonal", "rank_1", "mean_field", "kda"} & set(KNOWN)


@pytest.mark.parametrize("process_noise", [0.05, 0.0])
def test_the_filter_in_closed_form_is_a_gaussian_process(process_noise):
    """Third opinion: the memory is a random walk along every key, so the answers are one regression over all tokens."""
    keys, order = any_keys(), collision.tokens(RUNS)
    answers, ahead = collision_forms.bayesian(keys @ keys.mT, RUNS, 3.0, process_noise, 0.1)
    time = torch.arange(1, len(order) + 1, dtype=F64)
    shared = 3.0 + process_noise * torch.minimum(time[:, None], time)
    among = (keys @ keys.mT)[:, order][:, :, order] * shared + 0.1 * torch.eye(len(order), dtype=F64)
    across = (keys @ keys.mT)[:, :, order] * (3.0 + process_noise * time)
    solved = torch.linalg.solve(among, VALUES[order].expand(3, -1, -1))
    torch.testing.assert_close(answers, across @ solved, rtol=1e-10, atol=1e-10)
    total = (3.0 + process_noise * (len(order) + 1)) * (keys @ keys.mT)
    torch.testing.assert_close(ahead, total - across @ torch.linalg.solve(among, across.mT), rtol=1e-10, atol=1e-10)


def test_published_digits():
    """Sec. 2.5 and App. E, by closed form and by simulation, as the study reports them."""
    expected = {
        ("dense", 52): 0.73106, ("dense", 112): 0.72309, ("reset", 52): 0.73106, ("reset", 112): 0.35138,
        ("additive", 52): 1.0, ("additive", 112): 0.00054,
    }  # fmt: skip
    found = {(row["rule"], row["step"]): row for row in collision.published(STUDY)}
    assert set(found) == set(expected)
    for place, digits in expected.items():
        for how in ("closed", "simulated"):
            assert found[place][how] == pytest.approx(digits, abs=1e-4 if place == ("additive", 52) else 6e-6)
    gains = {(row["overlap"], row["when"]): row for row in collision.protection(STUDY)}
    for how in ("gain", "simulated_gain"):
        assert gains[0.92, "first"][how] == pytest.approx(0.90708, abs=6e-6)
        assert gains[0.92, "late"][how] == pytest.approx(0.61803, abs=6e-6)


def test_the_effective_overlap_is_what_reaches_b():
    """After endless writes of A the answer to B has moved by that share of A's error; at first little, later rho."""
    keys = collision.place_keys(0.92)
    gram = keys @ keys.mT
    settled = collision_forms.settled_variance(0.05, 0.05)
    assert settled == pytest.approx(0.05 * (math.sqrt(5) - 1) / 2)
    for frequent, low, high in ((0, 0.19, 0.21), (60, 0.9199, 0.9201)):
        runs = collision.schedule(40, frequent)
        before, ahead = collision_forms.bayesian(gram, runs, 3.0, 0.05, 0.05)
        after, _ = collision_forms.bayesian(gram, [*runs, (A, 5000)], 3.0, 0.05, 0.05)
        share = collision_forms.effective_overlap(gram, ahead, B, A, settled)
        assert low < share < high
        error = VALUES[A] - before[A]
        torch.testing.assert_close(after[B] - before[B], share * error, rtol=1e-10, atol=1e-12)


def test_rotations_are_uniform_and_keep_every_angle():
    keys = collision.place_keys(0.6, 5 + 3)
    turned = collision.rotate(keys, 2000, torch.Generator().manual_seed(0))
    assert torch.equal(turned[0], keys)
    torch.testing.assert_close(turned @ turned.mT, (keys @ keys.mT).expand(2001, 6, 6), rtol=0, atol=1e-13)
    assert turned[1:].mean(0).abs().max() < 5 * (8 * 2000) ** -0.5  # signs are even, too
    torch.testing.assert_close(turned[1:].square().mean(0), torch.full((6, 8), 1 / 8, dtype=F64), rtol=0, atol=0.02)


@pytest.mark.parametrize("rule", [*BLIND, *BASIS])
def test_what_depends_on_the_basis_of_the_keys(rule):
    keys = collision.draw_keys(STUDY)
    order = collision.tokens(collision.schedule(5, 6))
    (answers,) = follow(memories(STUDY)[rule], keys, VALUES, order, [len(order)])
    away = (answers[1:] - answers[0]).abs().amax()
    assert away < 1e-11 if rule in BLIND else away > 0.05


def test_rules_that_are_the_same():
    """Longhorn of one strength is the reset, blocks of one the diagonal, and Mesa the exact model behind Palimpsa."""
    keys, order = any_keys(), collision.tokens(RUNS)
    answers = {
        rule: follow(memories(STUDY)[rule], keys, VALUES, order, [len(order)])
        for rule in ("longhorn", "reset", "block_1", "diagonal", "mesa", "gaussian", "block_16", "dense")
    }
    for one, other in (("longhorn", "reset"), ("block_1", "diagonal"), ("mesa", "gaussian"), ("block_16", "dense")):
        torch.testing.assert_close(answers[one], answers[other], rtol=1e-11, atol=1e-11)
    still = dataclasses.replace(STUDY, process_noise=0.0)
    found = follow(memories(still)["dense"], keys, VALUES, order, [len(order)])
    torch.testing.assert_close(found, answers["mesa"], rtol=1e-10, atol=1e-10)


def test_rank_1_beats_the_dense_filter_because_it_claims_to_know_less():
    """docs/studies.md: what A and B do not share counts as unknown, so writes go there; idle directions add to it."""
    order = collision.tokens(collision.schedule(40, 60))

    def told(memory, key_size=16):
        """p_AB at the end, A's error as its run begins, and the share of it that B takes."""
        before, after = follow(memory, collision.place_keys(0.92, key_size)[None], VALUES, order, [52, 112])[:, 0]
        error = 1 - before[A, A]
        return collision.recall(after)["p_AB"].item(), error.item(), ((after[B, A] - before[B, A]) / error).item()

    def supposed(variance):
        """Rank 1 with this variance in place of the average."""

        def project(covariance):
            variances, directions = torch.linalg.eigh(covariance)
            variances[..., 1:] = variance
            return (directions * variances[..., None, :]) @ directions.mT

        return told(filter_memory(STUDY, project))[0]

    every = memories(STUDY)
    dense, rank_1 = told(every["dense"]), told(every["rank_1"])
    assert (
        f"B takes {rank_1[2]:.2f} of the error that A's run begins with, not {dense[2]:.2f}, and that error is smaller "
        f"({rank_1[1]:.2f}, not {dense[1]:.2f})"
    ) in " ".join(PAGE.split())
    assert rank_1[1] < dense[1] and rank_1[2] < dense[2]
    idle = [told(every["rank_1"], key_size)[0] for key_size in (6, 8, 16, 64)]  # 0, 2, 10 and 58 idle directions
    assert idle == sorted(idle) and idle[-1] - idle[0] > 0.005
    assert supposed(0.5) < supposed(1.0) < supposed(2.0) < supposed(6.0) and supposed(1.0) < dense[0]


def test_a_changed_value_and_a_crowd_measure_what_they_say():
    rows = collision.switch(STUDY, "reset")
    found = {(row["when"], row["step"]): row for row in rows if row["keys"] == "aligned"}
    keys, new = collision.place_keys(0.92), torch.eye(7, dtype=F64)
    for when, frequent in (("first", 0), ("late", 60)):
        # By hand: each write takes half of A's error, and rho of what is taken reaches B.
        before = collision_forms.delta(keys @ keys.mT, collision.schedule(40, frequent), 0.5)
        held = torch.cat([before, torch.zeros(6, 1, dtype=F64)], 1)
        error = new[6] - held[A]
        for step, taken in ((1, 0.5), (60, 1.0)):
            row, answer = found[when, step], held[B] + 0.92 * taken * error
            assert row["error_A"] == pytest.approx(((1 - taken) * error).norm().item(), abs=1e-4)
            assert row["error_B"] == pytest.approx((answer - new[B]).norm().item(), abs=1e-3)
    study = dataclasses.replace(STUDY, loads=(3,), crowd_key_size=200, process_noise=0.0, observation_noise=1e-6)
    (row,) = collision.crowd(study, "dense")
    assert row["error"] < 1e-4 and row["retrieved"] == 1
    (row,) = collision.crowd(dataclasses.replace(study, loads=(64,), crowd_key_size=8), "dense")
    assert row["error"] > 0.5 and row["retrieved"] < 0.9  # eight times as many keys as dimensions


def test_the_basis_decides_what_a_diagonal_protects():
    """The study's finding, at a size that a test can afford: dense as published, diagonal a tie when rotated."""
    study = CollisionStudy(rotations=199)
    every = [row for rule in ("dense", "diagonal", "palimpsa") for row in collision.final(study, rule)]
    rows = {(row["rule"], row["keys"]): row for row in every if row["frequent"] == 60}
    assert rows["dense", "rotated"]["p_AB"] == rows["dense", "aligned"]["p_AB"] == pytest.approx(0.7231)
    assert rows["diagonal", "aligned"]["p_AB"] == pytest.approx(0.6904)
    assert rows["diagonal", "rotated"]["p_AB"] == pytest.approx(0.488, abs=0.006)
    assert rows["palimpsa", "rotated"]["p_AB"] == pytest.approx(0.417, abs=0.03)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A run of the command: its folder, what the terminal shows, the result."""
    folder = tmp_path_factory.mktemp("quick")
    outcome = CliRunner().invoke(cli.app, ["study", "collision", "--quick", "-o", str(folder)])
    assert outcome.exit_code == 0, outcome.output
    return folder, outcome.output, json.loads((folder / "results.json").read_text())


def test_the_command_writes_results_plots_and_a_page(quick):
    folder, told, result = quick
    assert result["name"] == "study collision --quick (its numbers are not the findings)" and result["seeds"] == [0]
    assert "its numbers are not the findings" in " ".join(told.split())
    study, measured = CollisionStudy.quick(), result["measurements"]
    assert len(measured["final"]["rows"]) == len(memories(study)) * 2 * 2
    assert len(measured["overlaps"]["rows"]) == len(collision.SHOWN) * len(study.overlaps) * 2
    again = collision.overlaps(study, "palimpsa")
    assert study_pages.rows(measured["overlaps"], rule="palimpsa") == again
    assert measured["summary"]["largest relative difference from a closed form"] < 1e-12
    for name in ("course", "overlap", "repetitions-2", "switch"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "index.html").read_text()
    assert page.count("data:image/png") == len(set(re.findall('<img alt="(.*?)"', page))) == 4
    assert "its numbers are not the findings" in page and result["settings"]["quick"] is True
    tables = re.findall(r"<table>.*?</table>", page)
    assert len(tables) == 8 and "Bayesian, blocks of 4" in page and "Mesa (exact model), forgetting" not in page
    assert not [cell for each in tables for cell in re.findall(r">([^<]+)<", each) if "_" in cell.replace("p_AB", "")]


def test_the_figures_say_what_they_show(quick, tmp_path, monkeypatch):
    """The overlap against 1 - rho, alike to the right; what is written when; no two rules in one colour."""
    figures = {}
    monkeypatch.setattr(Report, "figure", lambda _, figure, caption, save: figures.update({save.stem: figure}))
    study_pages.collision_page(quick[2], tmp_path)
    for drawing in figures.values():
        drawing.canvas.draw()
    panel = figures["overlap"].axes[0]
    left, right = panel.get_xlim()
    assert panel.get_xscale() == "log" and left > 1 > 0.08 > right
    assert sorted(panel.get_lines()[0].get_xdata()) == pytest.approx([0.08, 1])
    titles = [each.get_title() for each in figures["overlap"].axes]
    assert titles[1::2] == ["rotated keys, uncertainty kept", "rotated keys, none kept\n(dense for comparison)"]
    panel, spans = figures["course"].axes[0], {}
    for words, box in zip(panel.texts, panel.patches, strict=True):
        spans[words.get_text()] = (box.get_x(), box.get_x() + box.get_width())
    assert spans == {"B written": (12.5, 17.5), "A written": (17.5, 23.5)}
    titles = [each.get_title() for each in figures["switch"].axes]
    assert titles == ["A changes before its run", "A changes after its run"] * 3
    (legend,) = figures["course"].legends
    lines = legend.get_lines()
    assert len({line.get_color() for line in lines}) == len(lines) == 11
    dashed = {text.get_text() for text, line in zip(legend.get_texts(), lines, strict=True) if line.is_dashed()}
    assert dashed == {"Bayesian, rank 1", "Mesa (exact model)", "gated delta", "KDA"}
