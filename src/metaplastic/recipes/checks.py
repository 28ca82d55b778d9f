"""What a recipe's run needs before it begins: its data, and the saved model that it goes on from.

``recipe(...)`` describes a run and reads nothing; ``metaplastic train --recipe`` asks ``begin`` for it, which reads the
saved model's configuration before anything else:

* its mixers must be those of the recipe that comes before (of ``-from-ablation`` the ablation's);
* its sizes must be that recipe's, except those that are given: ``hidden_size=64`` says that the saved model has 64;
* without data there is nothing to train on, but for debug, which takes the Python standard library's texts and says so.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ..models import MetaplasticConfig, MetaplasticForCausalLM
from ..training import TrainConfig
from ..training.parallel import is_first
from ..training.saved import read_config
from .language import LONG, RECIPES, Recipe, find

SIZES = ("hidden_size", "layers", "heads", "key_size", "value_size", "groups", "intermediate_size")
logger = logging.getLogger("metaplastic")


def begin(name: str, changes: Mapping[str, Any], tokens_per_step: int | None = None) -> TrainConfig:
    """The run of a recipe as :func:`recipe`, checked.

    Raises:
        ValueError: as ``recipe``; no data; a saved model of other mixers or sizes, or one where none is gone on from.
        FileNotFoundError: a saved model that is not there.
    """
    found, changes = find(name), dict(changes)
    saved = changes.get("model")
    if found.continues is None and saved is not None:
        others = [each.name for each in RECIPES.values() if each.continues == name]
        on = f"{' and '.join(others)} go on from one" if others else "leave the recipe out to train a saved model on"
        raise ValueError(f"model: recipe {name} begins from scratch, got {str(saved)!r}: {on}")
    if found.continues is not None and saved is not None:
        config = read_config(saved)
        given = {size: changes.pop(size) for size in SIZES if size in changes}
        _check_model(found, config, given, str(saved))
        if found.name.endswith(f"-{LONG}") and "attention" in config.mixers and is_first():
            logger.warning(
                "warning: attention on longer rows than it was trained on meets rotary angles it has not seen"
            )
    run = found.config(tokens_per_step=tokens_per_step, **changes)
    _check_data(found, run)
    return run


def _check_model(recipe: Recipe, config: MetaplasticConfig, given: Mapping[str, Any], saved: str) -> None:
    assert recipe.continues is not None
    expected = find(recipe.continues).network()
    where = f"recipe {recipe.name} goes on from a {recipe.continues}"
    mixers, wanted = (sorted(set(each.mixers)) for each in (config, expected))
    if mixers != wanted:
        raise ValueError(f"model: {saved} has {', '.join(mixers)} layers, expected {', '.join(wanted)}: {where}")
    found, sizes = sizes_of(config), {**sizes_of(expected), **given}
    if wrong := [name for name in SIZES if found[name] != sizes[name]]:
        differ = ", ".join(f"{name} {found[name]} (expected {sizes[name]})" for name in wrong)
        options = " ".join(f"--{name.replace('_', '-')} {found[name]}" for name in SIZES if name in wrong)
        raise ValueError(f"model: {saved} has {differ}: {where}; give {options} if that is what you mean")


def sizes_of(config: MetaplasticConfig) -> dict[str, int | None]:
    """The sizes of a model whose layers are all of one kind, by the names of ``TrainConfig``."""
    with torch.device("meta"):
        mixer: Any = MetaplasticForCausalLM(config).model.layers[0].mixer
    return {
        "hidden_size": config.hidden_size, "layers": config.num_hidden_layers, "heads": mixer.num_heads,
        "key_size": mixer.key_size, "value_size": mixer.value_size, "groups": getattr(mixer, "num_groups", None),
        "intermediate_size": config.intermediate_size or 0,
    }  # fmt: skip


def _check_data(recipe: Recipe, run: TrainConfig) -> None:
    if run.files or run.data or run.dataset:
        return
    if recipe.size != "debug":
        expected = "expected a folder of shards (`metaplastic data tokenise`), files, or a dataset"
        raise ValueError(f"data: got none, and recipe {recipe.name} brings none: {expected}")
    if is_first():
        logger.warning("no data, files or dataset given: %s trains on the Python standard library's texts", recipe.name)
