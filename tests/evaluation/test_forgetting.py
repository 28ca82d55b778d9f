"""The study of geometric forgetting: what can be proven about windows, matchings and distances."""

import dataclasses
import json
import math
import re

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence
from typer.testing import CliRunner

from metaplastic import cli
from metaplastic.evaluation import beliefs, forgetting, study_pages
from metaplastic.evaluation.forgetting import ForgettingStudy
from metaplastic.report import Report
from metaplastic.rules import gaussian

F64 = torch.float64
SMALL = ForgettingStudy(draws=4, key_size=3, value_size=2)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def belief(*shape, key_size=3, seed=0):
    root = draw(*shape, key_size, key_size, seed=seed)
    return beliefs.Belief(draw(*shape, key_size, seed=seed + 1), root @ root.mT + torch.eye(key_size, dtype=F64))


# Distances


def test_the_divergence_is_torchs_own():
    a, b = belief(5, 2), belief(5, 2, seed=7)
    expected = kl_divergence(
        MultivariateNormal(a.mean, precision_matrix=a.precision),
        MultivariateNormal(b.mean, precision_matrix=b.precision),
    )
    torch.testing.assert_close(beliefs.divergence(a, b), expected, rtol=1e-10, atol=1e-10)
    assert beliefs.divergence(a, b).min() > 0.1


def test_equal_beliefs_are_no_distance_apart():
    a = belief(5, 2)
    found = forgetting.distance(a, a, prior=0.5)
    assert all(found[name].abs().max() < 1e-12 for name in ("divergence", "mean_distance", "log_precision"))
    torch.testing.assert_close(found["evidence"], torch.ones(5, dtype=F64))


def test_a_precision_shared_by_the_rows_is_the_same_as_one_each():
    keys, values, weights = draw(4, 9, 3), draw(4, 9, 2, seed=1), draw(4, 9, seed=2).square()
    shared = beliefs.weighted_posterior(keys, values, weights, 0.7)
    assert shared.precision.shape == (4, 1, 3, 3)
    apart = beliefs.Belief(shared.mean, shared.precision.expand(4, 2, 3, 3))
    other = belief(4, 2)
    torch.testing.assert_close(beliefs.divergence(shared, other), beliefs.divergence(apart, other))
    torch.testing.assert_close(beliefs.divergence(other, shared), beliefs.divergence(other, apart))


def test_quality_of_a_belief_that_knows():
    truth, queries = draw(4, 2, 3), draw(4, 6, 3, seed=1)
    sure = beliefs.Belief(truth, 1e12 * torch.eye(3, dtype=F64).expand(4, 1, 3, 3))
    found = forgetting.quality(sure, truth, queries, noise=0.5)
    assert found["error"].max() == 0 and found["excess_loss"].abs().max() < 1e-9
    # One that knows nothing: the log loss of N(0, q.q + noise^2), against its definition, averaged over values.
    blank = beliefs.Belief(torch.zeros_like(truth), torch.eye(3, dtype=F64).expand(4, 1, 3, 3))
    found = forgetting.quality(blank, truth, queries, noise=0.5)
    wide = queries.square().sum(-1)[:, None] + 0.25
    square = torch.einsum("svk,sqk->svq", truth, queries).square() + 0.25
    loss = 0.5 * ((2 * math.pi * wide).log() + square / wide) - 0.5 * math.log(2 * math.pi * math.e * 0.25)
    torch.testing.assert_close(found["excess_loss"], loss.mean((-2, -1)))


# Windows and gates


def test_the_three_meanings_of_a_window():
    size = torch.tensor([[4, 4, 4, 4, 4, 2, 2, 4, 4, 4]], dtype=F64)
    held = forgetting.lengths(size)
    assert held["asked"][0].tolist() == [1, 2, 3, 4, 4, 2, 2, 4, 4, 4]  # takes back what it dropped
    assert held["kept"][0].tolist() == [1, 2, 3, 4, 4, 2, 2, 3, 4, 4]
    weights = [1.0, 1.75, 2.3125, 2.734375, 3.05078125, 2.525390625, 2.2626953125, 2.697021484375]
    assert held["counted"][0, :8].tolist() == [round(w) for w in weights]


def test_what_is_counted_is_the_sum_of_the_geometric_weights():
    size = 1 + 5 * draw(3, 30).square()
    kept = (1 - 1 / size).log()
    sums = torch.stack([sum(kept[:, s + 1 : t + 1].sum(1).exp() for s in range(t + 1)) for t in range(30)], 1)
    torch.testing.assert_close(forgetting.lengths(size)["counted"], sums.round())


def test_with_a_fixed_gate_the_three_agree_in_the_end():
    held = forgetting.lengths(torch.full((1, 60), 5.0, dtype=F64))
    assert [held[name][0, -1].item() for name in forgetting.WINDOWS] == [5, 5, 5]


def test_the_gates():
    keys = torch.nn.functional.normalize(draw(500, 400, 8), dim=-1)
    generator = torch.Generator().manual_seed(0)
    step = forgetting.memory("step", 8, keys, 100, generator)[0]
    assert step[99] == 8 and step[100:108].tolist() == [2.0] * 8 and step[108:116].tolist() == [8.0] * 8
    size = forgetting.memory("random", 16, keys, 100, generator)
    assert 4 <= size.min() < 6 and 40 < size.max() <= 64
    # A random gate holds the harmonic mean of N_t: E[n] = E[1 / (1/N_t)] in the stationary state.
    harmonic = 1 / (1 / size).mean()
    counted = forgetting.lengths(size)["counted"][:, 200:].mean()
    assert counted == pytest.approx(harmonic.item(), rel=0.02)
    assert size.mean() > 1.3 * harmonic
    with pytest.raises(ValueError, match="kind: got 'open', expected one of fixed, step, random"):
        forgetting.memory("open", 8, keys, 0, generator)


def test_the_worlds():
    study = dataclasses.replace(SMALL, draws=300, noise=0.5, drift_time=20)
    keys, truth, values = forgetting.draw_world("switch", study, 60, 40, torch.Generator().manual_seed(0))
    torch.testing.assert_close(keys.norm(dim=-1), torch.ones(300, 60, dtype=F64))
    assert torch.equal(truth[:, :40], truth[:, :1].expand(-1, 40, -1, -1))
    assert torch.equal(truth[:, 40:], truth[:, -1:].expand(-1, 20, -1, -1))
    assert (truth[:, 39] - truth[:, 40]).abs().mean() > 0.5
    residual = values - torch.einsum("stvk,stk->stv", truth, keys)
    assert residual.std().item() == pytest.approx(0.5, rel=0.02)
    same = forgetting.draw_world("stationary", study, 60, 40, torch.Generator().manual_seed(0))
    assert torch.equal(same[0], keys) and torch.equal(same[1][:, :40], truth[:, :40])
    _, drift, _ = forgetting.draw_world("drift", study, 60, 40, torch.Generator().manual_seed(0))
    assert drift[:, -1].std().item() == pytest.approx(1, rel=0.05)
    assert (drift[:, 40] * drift[:, 20]).mean().item() == pytest.approx((1 - 1 / 20) ** 20, rel=0.15)
    with pytest.raises(ValueError, match="expected one of stationary, switch, drift"):
        forgetting.draw_world("calm", study, 5, 0, torch.Generator())


# Beliefs against windows


def test_the_recursion_is_a_posterior_with_geometric_weights():
    keys, values, size = draw(2, 20, 3), draw(2, 20, 2, seed=1), 1 + 4 * draw(2, 20, seed=2).square()
    beta = draw(2, 20, seed=3).exp()
    kept = (1 - 1 / size).log()
    for t, state in forgetting.recursions([size], [beta], keys, values, {0, 7, 19}):
        found = beliefs.from_information(
            state.information[:, 0], gaussian.precision(state, torch.tensor(0.7, dtype=F64))[:, 0]
        )
        weights = torch.stack([kept[:, s + 1 : t + 1].sum(1).exp() for s in range(t + 1)], 1) * beta[:, : t + 1]
        expected = beliefs.weighted_posterior(keys[:, : t + 1], values[:, : t + 1], weights, 0.7)
        torch.testing.assert_close(found.mean, expected.mean, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(found.precision, expected.precision.expand(-1, 2, -1, -1), rtol=1e-11, atol=1e-11)


def test_a_window_of_one_token_is_exact():
    for world in forgetting.WORLDS:
        distances, _, tokens = forgetting.run_case(SMALL, world, "fixed", 1, times=range(5))
        for found, held in zip(distances, tokens, strict=True):
            assert held["asked"].tolist() == [1] * 4
            for name in ("geometric", "matched", "rescaled"):
                assert found[name, "asked"]["divergence"].abs().max() < 1e-12
            assert found["palimpsa", "asked"]["divergence"].min() > 1e-3  # one key is not one axis


def test_without_forgetting_there_is_nothing_to_approximate():
    """N beyond all tokens: the geometric posterior tends to the batch posterior, and so does the window."""
    study = dataclasses.replace(SMALL, burn_in=0)
    distances, _, _ = forgetting.run_case(study, "stationary", "fixed", 10**9, times=[50])
    assert distances[0]["geometric", "asked"]["divergence"].max() < 1e-9


def test_one_key_dimension_has_nothing_to_drop():
    study = dataclasses.replace(SMALL, key_size=1)
    distances, qualities, _ = forgetting.run_case(study, "drift", "random", 4)
    for found, quality in zip(distances, qualities, strict=True):
        for window in forgetting.WINDOWS:
            torch.testing.assert_close(found["palimpsa", window], found["geometric", window])
        torch.testing.assert_close(quality["palimpsa"], quality["geometric"])


@pytest.mark.parametrize("window", [5, 40])
def test_the_matched_forgetting_has_the_windows_sample_size_and_age(window):
    size, beta = forgetting.standard(torch.tensor(float(window)), torch.tensor(4.0))["rescaled"]
    ages = torch.arange(5000, dtype=F64)
    weights = (1 - 1 / size.to(F64)) ** ages
    assert (weights.sum() ** 2 / weights.square().sum()).item() == pytest.approx(window)
    assert ((weights * ages).sum() / weights.sum()).item() == pytest.approx((window - 1) / 2)
    assert (beta * weights.sum()).item() == pytest.approx(4 * window)


def test_the_distance_of_a_long_window_is_that_of_the_theory():
    """Few key dimensions, many tokens: KL per dimension as the asymptotic formula has it, least a bit below N' = N."""
    study = dataclasses.replace(
        SMALL, draws=256, key_size=2, value_size=4, measured=8, ratios=(0.5, 0.7, 0.9, 1.0, 2.0)
    )
    found = forgetting.search_matching(study, 120)["matching"]
    assert len(found) == 10
    for row in found:
        assert row["divergence_per_dimension"] == pytest.approx(row["many_tokens"], rel=0.15), row
    for evidence, best in (("as is", 0.9), ("rescaled", 0.7)):
        rows = [row for row in found if row["evidence"] == evidence]
        assert min(rows, key=lambda row: row["divergence_per_dimension"])["ratio"] == best
    assert forgetting.asymptotic_divergence(1.0) == pytest.approx(math.exp(-1) - 0.25)


def test_the_exact_window_of_a_stationary_world_is_calibrated():
    study = dataclasses.replace(SMALL, draws=300, measured=4)
    _, qualities, _ = forgetting.run_case(study, "stationary", "fixed", 24)
    missed, claimed = (
        torch.stack([q["window_asked"][name] for q in qualities]).mean() for name in ("missed", "claimed")
    )
    assert (missed / claimed).item() == pytest.approx(1, abs=0.05)
    # Geometric weights average twice as many tokens as they claim.
    missed, claimed = (torch.stack([q["geometric"][name] for q in qualities]).mean() for name in ("missed", "claimed"))
    assert 0.45 < missed / claimed < 0.75


# The whole


def test_tables_come_back_as_rows():
    rows = [{"a": 1, "b": None}, {"a": 2, "c": 0.5}]
    assert study_pages.rows(study_pages.table(rows)) == [{"a": 1, "b": None, "c": None}, {"a": 2, "b": None, "c": 0.5}]
    assert study_pages.rows(study_pages.table(rows), a=2) == [{"a": 2, "b": None, "c": 0.5}]


def test_the_command_writes_results_plots_and_a_page(tmp_path):
    outcome = CliRunner().invoke(cli.app, ["study", "forgetting", "--quick", "-o", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    result = json.loads((tmp_path / "results.json").read_text())
    assert "its numbers are not the findings" in " ".join(outcome.output.split())
    assert result["name"] == "study forgetting --quick (its numbers are not the findings)" and result["seeds"] == [
        16,
        17,
        18,
        64,
        65,
        66,
    ]
    study, measured = ForgettingStudy.quick(), result["measurements"]
    cases = len(forgetting.WORLDS) * (len(study.windows) + 2 * 3 * len(study.varying)) * len(forgetting.BELIEFS)
    assert len(measured["distances"]["rows"]) == cases
    again = forgetting.summarise(study, "drift", "step", 4)["distances"]
    assert study_pages.rows(measured["distances"], world="drift", gate="step", N=4) == again
    assert all(row["divergence"] >= 0 for row in study_pages.rows(measured["distances"]))
    for name in ("distance", "quality", "course", "matching"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "index.html").read_text()
    assert page.count("data:image/png") == len(set(re.findall('<img alt="(.*?)"', page))) == 4
    assert "its numbers are not the findings" in page and measured and result["settings"]["quick"] is True
    assert "KL from a window of 16, stationary: Palimpsa" in page


def test_the_figures_say_which_line_is_which(tmp_path, monkeypatch):
    """Every style of the distances has an entry of its own in the legend, and the ticks are the windows themselves."""
    figures = {}
    monkeypatch.setattr(Report, "figure", lambda _, figure, caption, save: figures.update({save.stem: figure}))
    forgetting.run_forgetting(ForgettingStudy.quick(), tmp_path)
    drawing = figures["distance"]
    drawing.canvas.draw()
    (legend,) = drawing.legends
    told = {text.get_text(): line for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True)}
    styles = {(line.get_linestyle(), line.get_marker(), line.get_color()) for line in told.values()}
    drawn = {(x.get_linestyle(), x.get_marker(), x.get_color()) for axes in drawing.axes for x in axes.get_lines()}
    assert styles == drawn and len(styles) == len(told) == 6
    assert told["Palimpsa, from the last N_t tokens"].get_linestyle() == "--"
    assert told["Palimpsa"].get_linestyle() == "-"
    for axes, expected in zip(drawing.axes, [["4", "16"], ["4"], ["4"]] * 3, strict=True):
        assert [label.get_text() for label in axes.get_xticklabels()] == expected
    for axes in drawing.axes:  # and any axis names at least two of its values
        low, high = axes.get_ylim()
        shown = [label for label in axes.get_yticklabels() if low <= label.get_position()[1] <= high]
        assert sum(bool(label.get_text()) for label in shown) >= 2
