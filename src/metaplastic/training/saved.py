"""What a run leaves behind: where its model is, how to read it, how to write it whole."""

import hashlib
import json
import logging
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from ..models import MetaplasticConfig, MetaplasticForCausalLM
from ..tasks import text
from .checkpoint import STAGING, clear_staging, last_checkpoint, remove, saving, sha256_of
from .trainer import MetaplasticTrainer

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


def holds_weights(folder: Path) -> bool:
    """Whether a model has been saved there; a folder alone is none."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def hash_of_model(folder: Path) -> str:
    """SHA-256 of a saved model: its configuration and its weights."""
    files = sorted(file for kind in ("config.json", "*.safetensors", "*.bin") for file in folder.glob(kind))
    return hashlib.sha256("".join(f"{file.name} {sha256_of(file)}\n" for file in files).encode()).hexdigest()


def read_config(path: str | os.PathLike) -> MetaplasticConfig:
    """The configuration of the model that :func:`find_model` finds; raises ValueError if it is none of ours."""
    folder = find_model(path)
    file, expected = folder / "config.json", f"expected {MetaplasticConfig.model_type!r}"
    try:
        kind = json.loads(file.read_text()).get("model_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"model: {file} is no configuration of a model ({error})") from error
    if kind is None:
        raise ValueError(f"model: {file} names no model_type, {expected}")
    if kind != MetaplasticConfig.model_type:
        raise ValueError(f"model: {folder} holds a {kind!r} model, {expected}")
    return MetaplasticConfig.from_pretrained(folder)


def load_model(path: str | os.PathLike) -> MetaplasticForCausalLM:
    """The model that :func:`find_model` finds, in float32; raises ValueError if its files do not fit together."""
    folder = find_model(path)
    read_config(folder)
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
        files = ("tokenizer_config.json", "tokenizer.json")
        if os.path.isdir(source) and not any(os.path.exists(os.path.join(source, file)) for file in files):
            raise OSError(f"tokenizer: none is saved in {str(source)!r}, expected {expected}") from error
        reason = " ".join(f" ({error.__cause__})".split()) if os.path.exists(source) else ""
        raise OSError(f"tokenizer: got {str(source)!r}, expected {expected} {reason}".rstrip()) from error


def load_reader(folder: Path, tokenizer: str | None, config: MetaplasticConfig) -> PreTrainedTokenizerBase:
    """The tokenizer given, or the one saved with the model; raises ValueError if the model lacks some of its tokens."""
    reader = load_tokenizer(tokenizer or folder)
    if (needed := text.vocabulary_size(reader)) > config.vocab_size:
        raise ValueError(f"tokenizer: {tokenizer or folder} has {needed} tokens, the model {config.vocab_size}")
    return reader


def save_final(trainer: MetaplasticTrainer, output: Path) -> None:
    """The model, its tokenizer and its card as ``output/final``, whole or not at all."""
    with saving("the final model", output):
        staged = output / STAGING / FINAL
        trainer.save_model(str(staged))
        if trainer.args.should_save:
            if (output / FINAL).exists():
                remove(output / FINAL)
            os.replace(staged, output / FINAL)
            clear_staging(output)
