"""What a run leaves behind: where its model is, how to read it, how to write it whole."""

import logging
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedTokenizerBase

from ..models import MetaplasticConfig, MetaplasticForCausalLM
from ..tasks import text
from .trainer import STAGING, MetaplasticTrainer, clear_staging, last_checkpoint, remove

FINAL = "final"
logger = logging.getLogger("metaplastic")


def find_model(path: str | os.PathLike) -> Path:
    """The folder to load from: ``path`` itself, or for a run its ``final`` model, else its last checkpoint."""
    path = Path(path)
    for folder in (path, path / FINAL):
        if (folder / "config.json").is_file():
            return folder
    if checkpoint := last_checkpoint(path):
        return Path(checkpoint)
    state = "holds no model" if path.exists() else "does not exist"
    raise FileNotFoundError(f"model: {path} {state}, expected a saved model or a run of `metaplastic train`")


def load_model(path: str | os.PathLike) -> MetaplasticForCausalLM:
    """The model that :func:`find_model` finds, in float32; raises ValueError if its files do not fit together."""
    folder = find_model(path)
    if (kind := AutoConfig.from_pretrained(folder).model_type) != MetaplasticConfig.model_type:
        raise ValueError(f"model: {folder} holds a {kind!r} model, expected {MetaplasticConfig.model_type!r}")
    try:
        model, info = MetaplasticForCausalLM.from_pretrained(
            folder, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
        )
    except SafetensorError as error:
        raise ValueError(f"model: the weights in {folder} cannot be read ({error})") from error
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        sizes = f"{name} is {list(found)}, expected {list(expected)} ({len(mismatched)} such weights)"
        raise ValueError(f"model: the weights in {folder} do not fit its configuration: {sizes}")
    return model


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """As :func:`metaplastic.tasks.text.load_tokenizer`, with an error of one line."""
    if str(source) != "bytes" and not os.path.exists(source):
        logger.info("asking the Hugging Face hub for the tokenizer %s", source)
    try:
        return text.load_tokenizer(source)
    except OSError as error:
        expected = "'bytes', a folder with a saved tokenizer, or a name on the Hugging Face hub (needs a network once)"
        raise OSError(f"tokenizer: got {str(source)!r}, expected {expected}") from error


def save_final(trainer: MetaplasticTrainer, output: Path) -> None:
    """The model, its tokenizer and its card as ``output/final``, whole or not at all."""
    staged = output / STAGING / FINAL
    trainer.save_model(str(staged))
    if trainer.args.should_save:
        if (output / FINAL).exists():
            remove(output / FINAL)
        os.replace(staged, output / FINAL)
        clear_staging(output)
