"""Language models: Palimpsa at its published sizes, everything that it is compared with, as run configurations.

A recipe is a run but for its data: ``recipe("palimpsa_d-170M", data="shards/")`` is a ``TrainConfig``. There is one for
every model and size, and two that go on from a saved model: ``-from-ablation`` turns an ablation into its metaplastic
form and trains it on, ``-32k`` trains on rows of 32,768 tokens.

What decides a step is its number of tokens: it stays what the recipe says however long the rows are and however many of
them are taken at once, as ``accumulation`` follows, unless it is given. Of several processes each takes its share of
``batch_size x accumulation`` rows. Where each number comes from: ``docs/recipes.md``. What is checked before a run,
its data and the saved model that it goes on from: ``recipes/checks.py``.
"""

import dataclasses
import difflib
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..models import MetaplasticConfig, ModelSize, size
from ..models.size import from_options
from ..training import TrainConfig
from ..training.flops import model_flops, seen_in_a_row

# Model: its name here, and the mixer of every layer.
MODELS = {
    "palimpsa_d": "palimpsa_d",
    "palimpsa_d_additive": "palimpsa_d_additive",
    "palimpsa_m": "palimpsa_m",
    "mamba2": "mamba2",
    "bayesian": "bayesian",
    "gated_deltanet": "gated_deltanet",
    "transformer": "attention",
}
ABLATIONS = {"palimpsa_d": "palimpsa_d_additive", "palimpsa_m": "mamba2"}
FROM_ABLATION, LONG = "from-ablation", "32k"  # what a recipe's name ends with
LONG_BLOCK = 32_768


@dataclasses.dataclass(frozen=True)
class Scale:
    """What the models of one size have in common."""

    vocabulary: int  # of the tokenizer that parameters are counted with
    tokens: float
    tokens_per_step: int
    block_length: int
    batch_size: int  # rows that a device takes at once
    learning_rate: float
    warmup: int
    tuning_tokens: float  # of a run that goes on from a saved model
    every: int  # steps between evaluations and between checkpoints
    bf16: bool = True


SCALES = {
    "debug": Scale(258, 300 * 2048, 2048, 256, 8, 3e-3, 20, 100 * 2048, 100, bf16=False),
    "17M": Scale(32_000, 340e6, 2**17, 2048, 64, 3e-3, 200, 34e6, 200),
    "170M": Scale(32_000, 15e9, 2**19, 4096, 4, 3e-3, 2000, 1e9, 1000),
    "760M": Scale(32_000, 30e9, 2**19, 4096, 2, 1.25e-3, 2000, 2e9, 1000),
}
TUNING_WARMUP, TUNING_SHARE = 200, 0.1  # of the peak learning rate


def _shape(hidden: int, layers: int, heads: int, key: int, value: int, mlp: int, groups: int | None = None) -> dict:
    return {
        "hidden_size": hidden, "layers": layers, "heads": heads, "key_size": key, "value_size": value,
        "intermediate_size": mlp, "groups": groups,
    }  # fmt: skip


# Of all models on Palimpsa-D's backbone (its own are the published sizes), of those on Mamba2's, of the Transformer.
_DELTA = {
    "debug": _shape(64, 2, 4, 16, 16, 192),
    "17M": _shape(256, 10, 8, 32, 32, 704),
    "170M": _shape(768, 19, 16, 48, 48, 2048),
    "760M": _shape(1536, 19, 16, 96, 192, 4096),
}
_MAMBA = {
    "debug": _shape(64, 3, 4, 16, 32, 0, groups=4),
    "17M": _shape(256, 16, 8, 32, 64, 0, groups=8),
    "170M": _shape(768, 30, 16, 48, 96, 0, groups=16),
    "760M": _shape(1536, 38, 16, 96, 192, 0, groups=16),
}
_TRANSFORMER = {
    "debug": _shape(64, 2, 4, 16, 16, 224),
    "17M": _shape(256, 11, 4, 64, 64, 704),
    "170M": _shape(768, 21, 12, 64, 64, 2048),
    "760M": _shape(1536, 26, 12, 128, 128, 4096),
}
_SHAPES = {"palimpsa_m": _MAMBA, "mamba2": _MAMBA, "transformer": _TRANSFORMER}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A run but for its data. ``settings``: those fields of ``TrainConfig`` that it decides."""

    name: str
    model: str
    size: str
    settings: Mapping[str, Any]
    tokens: float
    continues: str | None = None  # the recipe of the saved model that it goes on from

    @property
    def scale(self) -> Scale:
        return SCALES[self.size]

    def network(self, **options: Any) -> MetaplasticConfig:
        """The model's configuration, with the vocabulary that its parameters are counted with.

        ``options`` are of the mixer, such as ``backend``.
        """
        shape = _SHAPES.get(self.model, _DELTA)[self.size]
        config = from_options(mixer=MODELS[self.model], vocab_size=self.scale.vocabulary, tied=True, **shape)
        for given in (config.mixer_options or {}).values():
            given.update(options)
        return config

    def config(self, *, tokens_per_step: int | None = None, **changes: Any) -> TrainConfig:
        """The run, with any field of it changed.

        With other ``tokens_per_step`` the steps follow, so that the run has the tokens of the recipe, unless they are
        given. The learning rate does not: what a larger step needs has to be found.

        Raises:
            ValueError: an unknown field, a saved model that is missing, rows that do not make up a step, or steps that
                end within the warm-up.
        """
        known = {field.name for field in dataclasses.fields(TrainConfig)}
        if unknown := sorted(set(changes) - known):
            raise ValueError(
                f"recipe {self.name}: unknown field {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        if self.continues and changes.get("model") is None:
            raise ValueError(
                f"model: recipe {self.name} goes on from a saved {self.continues}, got none: give its folder"
            )
        settings = {**self.settings, "recipe": self.name}
        if tokens_per_step is not None:
            if tokens_per_step < 1:
                raise ValueError(f"tokens_per_step must be >= 1, got {tokens_per_step}")
            if "accumulation" in changes:
                raise ValueError(
                    f"tokens_per_step: got {tokens_per_step:,}, and accumulation too: leave out one of them"
                )
            settings |= _steps(self.tokens, tokens_per_step)
            settings |= {"warmup": _tuning_warmup(settings["steps"])} if self.continues else {}
        settings |= changes
        if tokens_per_step is not None and settings["steps"] <= settings["warmup"]:
            few = f"got {settings['warmup']:,} steps of {settings['steps']:,} with {tokens_per_step:,} tokens a step"
            raise ValueError(f"warmup: {few}, expected fewer: give it, or more steps")
        if "accumulation" not in changes:
            settings["accumulation"] = self.accumulation(
                settings["block_length"], settings["batch_size"], tokens_per_step
            )
        return TrainConfig(**settings)

    def accumulation(self, length: int, batch: int, tokens_per_step: int | None = None) -> int:
        """How often so many rows at once, of that length, have the tokens of a step (None: of the recipe's)."""
        return accumulation(tokens_per_step or self.scale.tokens_per_step, length, batch, f"recipe {self.name} has")


def accumulation(tokens_per_step: int, length: int, batch: int, who: str = "there are") -> int:
    """How often ``batch`` rows of ``length`` tokens have those of a step; raises ValueError where they never do."""
    for name, value in (("tokens_per_step", tokens_per_step), ("block_length", length), ("batch_size", batch)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    often, left = divmod(tokens_per_step, length * batch)
    if left or not often:
        raise ValueError(
            f"batch_size: got {batch} rows of block_length {length:,}, but {who} "
            f"{tokens_per_step:,} tokens a step: give numbers that divide it, or accumulation too"
        )
    return often


def pretraining(model: str, scale: str) -> Recipe:
    """From scratch."""
    each = SCALES[scale]
    settings = _settings(each) | _SHAPES.get(model, _DELTA)[scale] | {"mixer": MODELS[model]}
    settings |= {"learning_rate": each.learning_rate, "warmup": each.warmup, "block_length": each.block_length}
    steps = _steps(each.tokens, each.tokens_per_step)
    return Recipe(f"{model}-{scale}", model, scale, settings | steps, each.tokens)


def from_ablation(model: str, scale: str) -> Recipe:
    """A saved ablation in its metaplastic form, as published: a tenth of the peak, 200 steps of warm-up."""
    each, name = SCALES[scale], f"{model}-{scale}-{FROM_ABLATION}"
    settings = _settings(each) | _tuning(each) | {"plasticity": 1.0, "block_length": each.block_length}
    return Recipe(name, model, scale, settings, each.tuning_tokens, f"{ABLATIONS[model]}-{scale}")


def long_context(model: str, scale: str) -> Recipe:
    """A saved model on rows of 32,768 tokens, with as many tokens a step as before."""
    each, name = SCALES[scale], f"{model}-{scale}-{LONG}"
    settings = _settings(each) | _tuning(each) | {"block_length": LONG_BLOCK, "batch_size": 1}
    settings |= {"checkpointing": "selective" if scale == "17M" else "full"}  # a row of so many tokens has to fit
    return Recipe(name, model, scale, settings, each.tuning_tokens, f"{model}-{scale}")


def _settings(scale: Scale) -> dict[str, Any]:
    return {
        "batch_size": scale.batch_size, "bf16": scale.bf16, "eval_every": scale.every, "save_every": scale.every,
        "weight_decay": 0.1,
    }  # fmt: skip


def _tuning(scale: Scale) -> dict[str, Any]:
    steps = _steps(scale.tuning_tokens, scale.tokens_per_step)
    return {"learning_rate": TUNING_SHARE * scale.learning_rate, "warmup": _tuning_warmup(steps["steps"])} | steps


def _tuning_warmup(steps: int) -> int:
    return min(TUNING_WARMUP, steps // 5)  # a short run would end before it had begun


def _steps(tokens: float, tokens_per_step: int) -> dict[str, int]:
    return {"steps": math.ceil(tokens / tokens_per_step)}


def _all() -> Iterator[Recipe]:
    for scale in SCALES:
        yield from (pretraining(model, scale) for model in MODELS)
    for scale in SCALES:
        yield from (from_ablation(model, scale) for model in ABLATIONS)
        if scale != "debug":
            yield from (long_context(model, scale) for model in MODELS)


RECIPES = {each.name: each for each in _all()}


def find(name: str) -> Recipe:
    """Raises ValueError for a name that there is not, with those that are most like it."""
    if name in RECIPES:
        return RECIPES[name]
    if name in (f"{model}-debug-{LONG}" for model in MODELS):
        base, small = name.removesuffix(f"-{LONG}"), "--block-length 2048 --batch-size 1 --steps 100"
        raise ValueError(
            f"recipe: there is no {name!r}, as rows of {LONG_BLOCK:,} tokens are nothing to try on a CPU; longer rows "
            f"at that size: train --recipe {base}, then train --model ITS_FOLDER {small}"
        )
    near = difflib.get_close_matches(name.replace("attention", "transformer"), RECIPES, n=3, cutoff=0.5)
    words = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"recipe: unknown recipe {name!r}; {words}`metaplastic recipes` lists all")


@functools.cache
def counted(name: str) -> ModelSize:
    """The size of a recipe's model."""
    return size(find(name).network())


def recipe(name: str, **changes: Any) -> TrainConfig:
    """The run of a recipe, with its data and whatever else is to be changed.

    >>> run = recipe("palimpsa_d-170M", data="shards/", batch_size=8)
    >>> run.batch_size * run.accumulation * run.block_length
    524288
    """
    return find(name).config(**changes)


COLUMNS = ("recipe", "weights", "state", "tokens", "a step", "peak", "FLOPs")


def rows() -> Iterator[tuple[str, ...]]:
    """Of every recipe that begins from scratch, under :data:`COLUMNS`.

    The state of a sequence in bf16, tokens in all and of a step, the peak of the learning rate, the model's FLOPs of a
    token, forward and backward.
    """
    for each in RECIPES.values():
        if each.continues:
            continue
        found, scale = counted(each.name), each.scale
        growing = f"{_short(found.bytes_per_token(torch.bfloat16))}B/token"
        state = f"{_short(found.state_bytes(torch.bfloat16))}B"
        yield (
            each.name,
            _short(found.parameters, digits=4),
            growing if found.activations_per_token else state,
            _short(each.tokens),
            _short(scale.tokens_per_step),
            f"{scale.learning_rate:g}",
            _short(model_flops(found, seen_in_a_row(scale.block_length))),
        )


def _short(number: float, digits: int = 3) -> str:
    for unit in (" ", " K", " M"):
        if number < 999.5:
            return f"{number:.{digits}g}{unit}"
        number /= 1000
    return f"{number:.{digits}g} G"
