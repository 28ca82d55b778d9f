"""The study of correlated keys: where all rules agree, what separates them, and that it measures what it says."""

import dataclasses
import json
import math
import re

import pytest
import torch
from typer.testing import CliRunner

from metaplastic import cli
from metaplastic.evaluation import beliefs, correlation, study_pages
from metaplastic.evaluation.correlation import CorrelationStudy

F64 = torch.float64
SMALL = CorrelationStudy(draws=6, key_size=5, value_size=3)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_axis_aligned_keys_leave_nothing_to_lose():
    axes = torch.randint(5, (6, 20), generator=torch.Generator().manual_seed(0))
    found = correlation.remember(torch.eye(5, dtype=F64)[axes], draw(6, 20, 3), 4.0, window=7)
    for rule in ("mean_field", "palimpsa"):
        assert beliefs.divergence(found[rule], found["exact"]).abs().max() < 1e-12
    assert beliefs.divergence(found["additive"], found["exact"]).min() > 0.1


def test_one_key_dimension_leaves_nothing_to_lose():
    found = correlation.remember(draw(6, 20, 1), draw(6, 20, 3, seed=1), 4.0, window=7)
    for rule in ("mean_field", "palimpsa"):
        assert beliefs.divergence(found[rule], found["exact"]).abs().max() < 1e-12


def test_without_evidence_all_are_the_additive_rule():
    found = correlation.remember(draw(6, 20, 5), draw(6, 20, 3, seed=1), 1e-9)
    for rule in ("exact", "mean_field", "palimpsa"):
        assert beliefs.relative_distance(found[rule].mean, found["additive"].mean).max() < 1e-6


def test_the_exact_rule_is_the_batch_posterior():
    keys, values = draw(6, 20, 5), draw(6, 20, 3, seed=1)
    found = correlation.remember(keys, values, 4.0, window=8)["exact"]
    weights = 4 * (1 - 1 / 8) ** torch.arange(19, -1, -1, dtype=F64).expand(6, -1)
    expected = beliefs.weighted_posterior(keys, values, weights, 1.0)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found.precision, expected.precision.expand(-1, 3, -1, -1), rtol=1e-11, atol=1e-11)


def test_palimpsa_differs_from_mean_field_in_the_mean_alone():
    """And the divergence of either is that of the best diagonal belief plus half the squared distance of the means."""
    keys, values = draw(6, 20, 5), draw(6, 20, 3, seed=1)
    order = torch.arange(20).expand(6, 20)
    found = correlation.remember(keys, values, 4.0)
    torch.testing.assert_close(found["palimpsa"].precision, found["mean_field"].precision, rtol=1e-13, atol=1e-13)
    for rule in ("palimpsa", "mean_field"):
        measured = correlation.measure(found[rule], found["exact"], keys, values, order)
        away = found[rule].mean - found["exact"].mean
        square = torch.einsum("svk,svkl,svl->sv", away, found["exact"].precision, away).mean(-1)
        torch.testing.assert_close(measured["divergence"], measured["divergence_of_spread"] + square / 2)
    # No diagonal belief is closer than the exact mean with the diagonal of the precision.
    best = beliefs.Belief(found["exact"].mean, found["palimpsa"].precision)
    least = beliefs.divergence(best, found["exact"])
    for seed in range(5):
        other = beliefs.Belief(best.mean, best.precision * (0.1 * draw(5, seed=seed)).exp())
        assert (beliefs.divergence(other, found["exact"]) > least).all()


@pytest.mark.parametrize(("repeats", "beta"), [(1, 0.25), (3, 4.0), (1000, 4.0)])
def test_a_repeated_key_is_answered_many_times_over(repeats, beta):
    """The formula in the docs: Palimpsa answers with up to K times the value, the exact rule with at most the value."""
    keys = torch.full((1, repeats, 5), 5**-0.5, dtype=F64)
    values = torch.ones(1, repeats, 1, dtype=F64)
    found = correlation.remember(keys, values, beta)
    answers = {rule: (belief.mean @ keys[0, 0]).item() for rule, belief in found.items()}
    many, one = correlation.overshoot(repeats, beta, 5)
    assert answers["palimpsa"] == pytest.approx(many, rel=1e-9)
    assert answers["exact"] == pytest.approx(one, rel=1e-9)
    if repeats == 1000:
        assert many > 4.99 and one < 1
        assert answers["mean_field"] == pytest.approx(1, abs=0.01)


def test_the_keys_are_as_correlated_as_they_say():
    study = dataclasses.replace(SMALL, draws=400, key_size=64)
    keys, order = correlation.draw_keys("shared", 0.6, study, 0.5, torch.Generator().manual_seed(0))
    cosine = keys @ keys.mT
    torch.testing.assert_close(keys.norm(dim=-1), torch.ones(400, 32, dtype=F64))
    apart = ~torch.eye(32, dtype=torch.bool)
    assert cosine[:, apart].mean().item() == pytest.approx(0.6, abs=0.02)
    assert torch.equal(order[0], torch.arange(32))
    keys, _ = correlation.draw_keys("neighbouring", 0.8, study, 0.5, torch.Generator().manual_seed(0))
    for lag in (1, 3):
        found = (keys[:, lag:] * keys[:, :-lag]).sum(-1).mean().item()
        assert found == pytest.approx(0.8**lag, abs=0.02)
    keys, _ = correlation.draw_keys("activated", 100.0, study, 0.5, torch.Generator().manual_seed(0))  # nearly ReLU:
    assert (keys @ keys.mT)[:, apart].mean().item() == pytest.approx(1 / math.pi, abs=0.02)  # (2 pi)^-1 / (1/2)
    with pytest.raises(ValueError, match="kind: got 'odd', expected one of shared, neighbouring, repeated, activated"):
        correlation.draw_keys("odd", 0.5, study, 1, torch.Generator())


def test_repeated_keys_repeat_their_value_or_their_map():
    study = dataclasses.replace(SMALL, noise=0.0)
    generator = torch.Generator().manual_seed(0)
    keys, order = correlation.draw_keys("repeated", 4, study, 1.0, generator)
    assert keys.shape == (6, 20, 5)
    assert all((order == number).sum(1).eq(4).all() for number in range(5))
    assert not torch.equal(order[0], order[1])
    for kind in correlation.VALUES:
        values, truth = correlation.draw_values(kind, keys, order, study, generator)
        for row in range(6):
            for number in range(5):
                same = order[row] == number
                assert keys[row, same].std(0).max() < 1e-12 and values[row, same].std(0).max() < 1e-12
        assert (truth is None) == (kind == "random")


def test_recall_measures():
    keys = torch.eye(5, dtype=F64).expand(6, 5, 5)
    values, order = draw(6, 5, 3), torch.arange(5).expand(6, 5)
    perfect = beliefs.Belief(values.mT.contiguous(), torch.eye(5, dtype=F64).expand(6, 3, 5, 5))
    found = correlation.measure(perfect, perfect, keys, values, order)
    torch.testing.assert_close(found["retrieved"], torch.ones(6, dtype=F64))
    torch.testing.assert_close(found["recall_cosine"], torch.ones(6, dtype=F64))
    assert found["recall_error"].max() < 1e-12
    loud = beliefs.Belief(3 * perfect.mean, perfect.precision)
    louder = correlation.measure(loud, perfect, keys, values, order)
    torch.testing.assert_close(louder["recall_error"], torch.full((6,), 4.0, dtype=F64))
    assert louder["recall_error_rescaled"].abs().max() < 1e-12
    torch.testing.assert_close(louder["recall_cosine"], found["recall_cosine"])
    twice = torch.tensor([[4, 3, 2, 1, 0, 0, 1, 2, 3, 4]]).expand(6, 10)
    keys, values = (x.gather(1, twice[..., None].expand(-1, -1, x.shape[-1])) for x in (keys, values))
    assert correlation.measure(perfect, perfect, keys, values, twice)["retrieved"].min() == 1
    keys, values = keys[:, 5:], values[:, 5:]
    shifted = beliefs.Belief(perfect.mean.roll(1, -1), perfect.precision)
    assert correlation.measure(shifted, perfect, keys, values, order)["retrieved"].max() == 0


def test_the_exact_rule_is_calibrated_and_palimpsa_is_not():
    study = dataclasses.replace(SMALL, draws=300)
    rows = correlation.run_case(study, "shared", 0.9, 2.0, math.inf)
    found = {row["rule"]: row for row in rows if row["values"] == "map"}
    for name in ("calibration_stored", "calibration_fresh"):
        assert found["exact"][name] == pytest.approx(1, abs=0.1)
    assert found["palimpsa"]["calibration_stored"] > 10
    assert found["exact"]["divergence"] == 0 or abs(found["exact"]["divergence"]) < 1e-9


def test_the_command_writes_results_plots_and_a_page(tmp_path):
    outcome = CliRunner().invoke(cli.app, ["study", "correlation", "--quick", "-o", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    result = json.loads((tmp_path / "results.json").read_text())
    assert "its numbers are not the findings" in " ".join(outcome.output.split())
    assert result["name"] == "study correlation --quick (its numbers are not the findings)" and result["seeds"] == [0]
    cases = result["measurements"]["cases"]
    study = CorrelationStudy.quick()
    degrees = 2 * len(study.correlations) + len(study.repeats) + len(study.scales)
    assert len(cases["rows"]) == degrees * (len(study.loads) + 2) * len(correlation.VALUES) * len(correlation.RULES)
    again = correlation.run_case(study, "repeated", 4, 1.0, math.inf)
    where = {"keys": "repeated", "degree": 4, "load": 1.0, "N": None, "noise": study.noise}
    kept = [
        {name: row[name] for name in whole} for row, whole in zip(study_pages.rows(cases, **where), again, strict=True)
    ]
    assert kept == again
    for name in ("recall", "belief", "loads"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "index.html").read_text()
    assert page.count("data:image/png") == len(set(re.findall('<img alt="(.*?)"', page))) == 3
    assert "its numbers are not the findings" in page and result["settings"]["quick"] is True
    result |= {"name": "study correlation", "settings": result["settings"] | {"quick": False}}
    study_pages.correlation_page(result, tmp_path)
    assert "not the findings" not in (tmp_path / "index.html").read_text()
