"""Recipes against what is published, against each other, and against the run that they make."""

import dataclasses
import doctest
import math
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from metaplastic import cli_recipes
from metaplastic.recipes import language
from metaplastic.recipes.checks import begin
from metaplastic.recipes.language import ABLATIONS, MODELS, RECIPES, SCALES, counted, find, recipe
from metaplastic.training import TrainConfig, train
from metaplastic.training.flops import model_flops

# arXiv 2602.09075, Table 5: width, layers, heads, K, V, MLP, groups; and App. A.9: peak, warm-up, tokens.
PUBLISHED = {
    "palimpsa_d-170M": (768, 19, 16, 48, 48, 2048, None),
    "palimpsa_d-760M": (1536, 19, 16, 96, 192, 4096, None),
    "palimpsa_m-170M": (768, 30, 16, 48, 96, 0, 16),
    "palimpsa_m-760M": (1536, 38, 16, 96, 192, 0, 16),
}
TRAINED = {"170M": (3e-3, 2000, 15e9), "760M": (1.25e-3, 2000, 30e9)}


@pytest.fixture(scope="module")
def parameters():
    return {each.name: counted(each.name).parameters for each in RECIPES.values() if not each.continues}


def test_published_sizes_and_settings(parameters):
    for name, expected in PUBLISHED.items():
        run = recipe(name)
        found = (
            run.hidden_size,
            run.layers,
            run.heads,
            run.key_size,
            run.value_size,
            run.intermediate_size,
            run.groups,
        )
        assert found == expected
        scale = name.split("-")[1]
        assert (run.learning_rate, run.warmup) == TRAINED[scale][:2]
        assert run.steps == math.ceil(TRAINED[scale][2] / 2**19)
        assert parameters[name] == pytest.approx(float(scale[:-1]) * 1e6, rel=0.04)
    for scale, (rate, _, tokens) in TRAINED.items():
        for model in ABLATIONS:
            tuned = recipe(f"{model}-{scale}-from-ablation", model="runs/ablation")
            assert tuned.learning_rate == pytest.approx(rate / 10) and tuned.warmup == 200
            assert tuned.steps == math.ceil(tokens / 15 / 2**19)
            assert tuned.plasticity == 1.0


@pytest.mark.parametrize("scale", [scale for scale in SCALES if scale != "debug"])
def test_models_are_matched_in_parameters(scale, parameters):
    """To Palimpsa-D; an ablation is its metaplastic form without the projections of the evidence."""
    palimpsa = parameters[f"palimpsa_d-{scale}"]
    for model in MODELS:
        near = parameters[f"palimpsa_m-{scale}"] if model == "mamba2" else palimpsa
        assert parameters[f"{model}-{scale}"] == pytest.approx(near, rel=0.03), model
    for model, ablation in ABLATIONS.items():
        one, other = recipe(f"{model}-{scale}"), recipe(f"{ablation}-{scale}")
        assert dataclasses.replace(one, mixer=ablation, recipe=other.recipe) == other


def test_every_step_has_the_tokens_of_its_recipe():
    assert len(RECIPES) == len(MODELS) * len(SCALES) + len(ABLATIONS) * len(SCALES) + len(MODELS) * (len(SCALES) - 1)
    for each in RECIPES.values():
        run = each.config(**({"model": "runs/saved"} if each.continues else {}))
        tokens = run.batch_size * run.accumulation * run.block_length
        assert tokens == each.scale.tokens_per_step, each.name
        assert 0 <= run.steps * tokens - each.tokens < tokens
        assert run.block_length == (32_768 if each.name.endswith("-32k") else each.scale.block_length)
    run = recipe("palimpsa_d-170M", block_length=2048, batch_size=16)
    assert run.batch_size * run.accumulation == 256
    assert recipe("palimpsa_d-170M", accumulation=3).accumulation == 3  # what is given is given
    large = recipe("palimpsa_d-170M", tokens_per_step=2**22)
    assert large.accumulation == 8 * recipe("palimpsa_d-170M").accumulation
    assert large.steps == math.ceil(15e9 / 2**22)
    tuned = recipe("palimpsa_d-17M-32k", model="runs/saved", tokens_per_step=2**20)
    assert (tuned.steps, tuned.warmup, tuned.accumulation) == (33, 6, 32)
    assert recipe("palimpsa_d-170M", tokens_per_step=2**22, steps=5, warmup=1).steps == 5


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("palimpsa", {}, "recipe: unknown recipe 'palimpsa'; did you mean .*palimpsa_d-17M.* lists all"),
        ("mamba2-17M", {"heds": 4}, "recipe mamba2-17M: unknown field heds; known: .*heads"),
        (
            "mamba2-17M",
            {"batch_size": 3},
            "batch_size: got 3 rows of block_length 2,048, but recipe mamba2-17M has 131,0",
        ),
        ("mamba2-17M", {"block_length": 2**18}, "batch_size: got 64 rows of block_length 262,144, but"),
        ("palimpsa_m-17M-from-ablation", {}, "model: recipe .* goes on from a saved mamba2-17M, got none"),
        ("attention-17M", {}, "unknown recipe 'attention-17M'; did you mean transformer-17M or "),
        ("palimpsa_d-17M-from_ablation", {}, "did you mean palimpsa_d-17M-from-ablation or "),
        (
            "mamba2-debug-32k",
            {},
            "no 'mamba2-debug-32k', as rows of 32,768 tokens .* train --recipe mamba2-debug, then",
        ),
        ("zzz", {}, "unknown recipe 'zzz'; `metaplastic recipes` lists all"),
        ("mamba2-17M", {"tokens_per_step": 2**15, "accumulation": 2}, "tokens_per_step: got 32,768, and accumulation"),
        (
            "mamba2-17M",
            {"tokens_per_step": 5000},
            "batch_size: got 64 rows .* recipe mamba2-17M has 5,000 tokens a step",
        ),
        ("mamba2-17M", {"tokens_per_step": 0}, "tokens_per_step must be >= 1, got 0"),
        ("mamba2-17M", {"tokens_per_step": 2**21}, "warmup: got 200 steps of 163 with 2,097,152 tokens a step"),
    ],
)
def test_what_does_not_fit_is_named(name, changes, expected):
    with pytest.raises(ValueError, match=expected):
        recipe(name, **changes)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_recipe_runs(tmp_path):
    """Its model is the one that was counted."""
    for number in (1, 2):
        (tmp_path / f"{number}.txt").write_text("the memory knows how sure it is of what it holds. " * 12)
    small = {"files": (str(tmp_path),), "held_out": 0.5, "block_length": 64, "batch_size": 2, "accumulation": 1}
    run = recipe("palimpsa_d_additive-debug", **small, steps=2, warmup=1, eval_every=0, save_every=0)
    assert isinstance(run, TrainConfig)
    measured = train(run, tmp_path / "run")["measurements"]
    assert measured["parameters"] == counted("palimpsa_d_additive-debug").parameters
    assert measured["tokens_seen"] == 2 * 2 * 64


def test_a_saved_model_is_the_one_that_is_gone_on_from(tmp_path, caplog):
    """By its configuration alone: there are no weights here."""
    small = {name: str(tmp_path / name) for name in ("mamba2", "transformer", "palimpsa_d_additive")}
    for name, folder in small.items():
        find(f"{name}-debug").network().save_pretrained(folder)
    given = {"data": "shards"}
    fits = begin("palimpsa_d-debug-from-ablation", {"model": small["palimpsa_d_additive"], **given})
    assert fits.model == small["palimpsa_d_additive"] and fits.plasticity == 1.0
    with pytest.raises(
        ValueError, match="mamba2 has mamba2 layers, expected palimpsa_d_additive: recipe palimpsa_d-deb"
    ):
        begin("palimpsa_d-debug-from-ablation", {"model": small["mamba2"], **given})
    with pytest.raises(ValueError, match=r"hidden_size 64 \(expected 256\), .*--hidden-size 64 --layers 2 .*") as error:
        begin("transformer-17M-32k", {"model": small["transformer"], **given})
    options = str(error.value).split("; give ")[1].split(" if that")[0].split()
    sizes = {name[2:].replace("-", "_"): int(value) for name, value in zip(options[::2], options[1::2], strict=True)}
    with pytest.raises(ValueError, match=r"has heads 4 \(expected 3\): recipe"):
        begin("transformer-17M-32k", {"model": small["transformer"], **given, **sizes, "heads": 3})
    assert not caplog.records
    assert begin("transformer-17M-32k", {"model": small["transformer"], **given, **sizes}).block_length == 32_768
    assert "rotary angles it has not seen" in caplog.text
    with pytest.raises(ValueError, match="model: recipe mamba2-17M begins from scratch, got .* and mamba2-17M-32k go"):
        begin("mamba2-17M", {"model": small["mamba2"], **given})
    with pytest.raises(FileNotFoundError, match="model: .*nowhere does not exist"):
        begin("mamba2-17M-32k", {"model": str(tmp_path / "nowhere")})


def test_only_debug_brings_data(caplog):
    with pytest.raises(
        ValueError, match="data: got none, and recipe mamba2-17M brings none: expected a folder of shards"
    ):
        begin("mamba2-17M", {})
    for given in ({"data": "shards"}, {"files": ("a.txt",)}, {"dataset": "a"}):
        begin("mamba2-17M", given)
        begin("mamba2-debug", given)
    assert not caplog.records
    begin("mamba2-debug", {})
    assert "mamba2-debug trains on the Python standard library's texts" in caplog.text


def test_one_count_of_flops():
    for name in ("palimpsa_d-debug", "mamba2-debug"):
        found = counted(name)
        assert model_flops(found, 0) == found.training_flops


def test_the_page_has_the_table():
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    for name, *numbers in language.rows():
        assert f"| `{name}` | {' | '.join(numbers)} |" in page


def test_the_docstring_runs():
    assert doctest.testmod(language).failed == 0


def test_the_commands():
    app = typer.Typer()
    app.command()(cli_recipes.recipes)
    app.command()(cli_recipes.plan)
    shown = CliRunner().invoke(app, ["recipes"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    for name in RECIPES:
        assert (f"{name} " in shown.output) == (RECIPES[name].continues is None)
    assert "172.3 M" in shown.output and "-from-ablation" in shown.output
    shown = CliRunner().invoke(app, ["plan", "--recipe", "palimpsa_d-17M", "--gpus", "16"], env={"COLUMNS": "160"})
    assert shown.exit_code == 0, shown.output
    assert "64 rows of 2,048 = 131,072 tokens" in shown.output and "gradients (all-reduce)" in shown.output
    shown = CliRunner().invoke(app, ["plan", "--recipe", "palimpsa_d-17M", "--batch-size", "3"])
    assert "batch_size: got 3 rows of block_length 2,048, but recipe palimpsa_d-17M has 131,072" in str(shown.exception)
    shown = CliRunner().invoke(app, ["plan", "--recipe", "palimpsa_d-17M", "--tokens-per-step", "1000"])
    assert "tokens_per_step: expected a multiple of rows of 2,048 tokens" in str(shown.exception)
