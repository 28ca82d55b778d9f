"""A language-model run from files to a saved model: what ``metaplastic train`` does."""

import dataclasses
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from .. import results
from ..models import MetaplasticConfig, MetaplasticForCausalLM
from ..tasks import text
from .trainer import PICKLED_ARGUMENTS, MetaplasticTrainer, last_checkpoint, training_arguments

FINAL = "final"
logger = logging.getLogger("metaplastic")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides what a text run computes. Two runs with equal configurations are the same run.

    Data: ``files`` (text files or folders; empty: the Python standard library's texts), ``separator`` between
    documents of one file, ``tokenizer`` (a name, a folder, or "bytes"), ``held_out`` share of documents for evaluation.
    Model: ``model`` continues from a saved one; otherwise sizes and ``mixer`` make a new one. ``intermediate_size`` 0
    leaves the MLP out. Optimisation: AdamW, ``warmup`` steps, then cosine to zero at ``steps``.
    """

    files: tuple[str, ...] = ()
    separator: str | None = None
    tokenizer: str = "bytes"
    held_out: float = 0.05
    max_bytes: int = 8_000_000
    model: str | None = None
    mixer: str = "palimpsa_d"
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    key_size: int | None = None
    value_size: int | None = None
    intermediate_size: int = 384
    block_length: int = 256
    batch_size: int = 16
    accumulation: int = 1
    steps: int = 300
    learning_rate: float = 3e-3
    warmup: int = 20
    weight_decay: float = 0.1
    eval_every: int = 100
    save_every: int = 100
    seed: int = 0
    bf16: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "layers", "heads", "block_length", "batch_size", "accumulation", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("warmup", "eval_every", "save_every", "intermediate_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be > 0, got {self.learning_rate}")


def train(config: TrainConfig, output: str | os.PathLike, *, overwrite: bool = False) -> dict[str, Any]:
    """Trains, evaluates and saves to ``output``; resumes a run of the same configuration from its last checkpoint.

    Writes ``run.json`` (the configuration), ``checkpoint-N`` folders, ``final`` (model and tokenizer) and
    ``results.json``. Returns the content of the latter. An ``output`` that holds another run is refused unless
    ``overwrite``.
    """
    output = Path(output)
    _claim(config, output, overwrite)
    # Everything that can be wrong with the input is found before anything is computed.
    tokenizer = text.load_tokenizer(config.tokenizer)
    train_blocks, eval_blocks = _blocks(config, tokenizer)
    set_seed(config.seed)
    model = _model(config, tokenizer)
    arguments = training_arguments(
        output,
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulation,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        warmup_steps=config.warmup,
        lr_scheduler_type="cosine",
        eval_strategy="steps" if config.eval_every else "no",
        eval_steps=config.eval_every or None,
        save_strategy="steps" if config.save_every else "no",
        save_steps=config.save_every or 500,
        seed=config.seed,
        data_seed=config.seed,
        bf16=config.bf16,
        torch_compile=config.compile,
        disable_tqdm=not sys.stderr.isatty() and "METAPLASTIC_PROGRESS" not in os.environ,
    )
    trainer = MetaplasticTrainer(
        model=model,
        args=arguments,
        train_dataset=train_blocks,
        eval_dataset=eval_blocks,
        data_collator=text.collate_packed,
        processing_class=tokenizer,
    )
    checkpoint = last_checkpoint(output)
    if checkpoint:
        logger.warning("resuming from %s", checkpoint)
    began = time.perf_counter()
    trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.perf_counter() - began
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    fresh = evaluations and evaluations[-1]["step"] == trainer.state.global_step
    metrics = evaluations[-1] if fresh else trainer.evaluate()
    save_final(trainer, output)
    measured = {
        "eval_loss": metrics["eval_loss"],
        "eval_perplexity": metrics["eval_perplexity"],
        "eval_tokens": metrics["eval_tokens"],
        "tokens_seen": int(trainer.state.num_input_tokens_seen),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds_this_call": round(seconds, 2),
        "steps_this_call": trainer.state.global_step - (int(checkpoint.rsplit("-", 1)[1]) if checkpoint else 0),
        "dropped_tokens": train_blocks.dropped_tokens + eval_blocks.dropped_tokens,
        "history": trainer.state.log_history,
    }
    settings = dataclasses.asdict(config) | {"learning_rates_tried": [config.learning_rate]}
    result = results.record("train", measured, seeds=[config.seed], settings=settings)
    results.write_json(output / "results.json", result)
    return result


def save_final(trainer: MetaplasticTrainer, output: Path) -> None:
    """The model and its tokenizer as ``output/final``, whole or not at all."""
    staging = output / f".{FINAL}"
    if trainer.args.should_save:
        shutil.rmtree(staging, ignore_errors=True)
    trainer.save_model(str(staging))
    if trainer.args.should_save:
        (staging / PICKLED_ARGUMENTS).unlink(missing_ok=True)
        if (output / FINAL).exists():
            shutil.rmtree(output / FINAL)
        os.replace(staging, output / FINAL)


def find_model(path: str | os.PathLike) -> Path:
    """The folder to load from: ``path`` itself, or for a run its ``final`` model, else its last checkpoint."""
    path = Path(path)
    if (path / "config.json").is_file():
        return path
    if (path / FINAL / "config.json").is_file():
        return path / FINAL
    if checkpoint := last_checkpoint(path):
        return Path(checkpoint)
    raise FileNotFoundError(f"no model at {path}: expected a folder with config.json, or a run of `metaplastic train`")


def _claim(config: TrainConfig, output: Path, overwrite: bool) -> None:
    """Makes ``output`` this run's folder, or refuses if it holds another run or foreign files."""
    wanted = json.loads(json.dumps(dataclasses.asdict(config)))
    file = output / "run.json"
    if file.is_file() and not overwrite:
        found = json.loads(file.read_text())
        if different := sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k)):
            changes = ", ".join(f"{k}: {found.get(k)!r} there, {wanted.get(k)!r} now" for k in different)
            raise ValueError(f"output {output} holds another run ({changes}): choose another folder or overwrite it")
        return
    if output.exists() and not output.is_dir():
        raise ValueError(f"output {output} is a file, expected a folder")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise ValueError(f"output {output} is not empty and holds no run of ours: choose another folder")
        if not file.is_file():
            raise ValueError(f"output {output} holds no run of ours and is not overwritten: choose another folder")
        for old in (*output.glob("checkpoint-*"), output / FINAL):
            shutil.rmtree(old, ignore_errors=True)
    results.write_json(file, wanted)


def _blocks(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[text.PackedText, text.PackedText]:
    documents: Sequence[text.Document]
    if config.files:
        documents = text.read_documents(config.files, separator=config.separator)
    else:
        documents = text.standard_library_documents(max_bytes=config.max_bytes)
    training, held_out = text.split_documents(documents, config.held_out, config.seed)
    return tuple(text.PackedText(part, tokenizer, config.block_length) for part in (training, held_out))


def _model(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    if config.model is not None:
        model = AutoModelForCausalLM.from_pretrained(find_model(config.model))
        if model.config.vocab_size < len(tokenizer):
            raise ValueError(
                f"model {config.model} has a vocabulary of {model.config.vocab_size} tokens, "
                f"tokenizer {config.tokenizer!r} has {len(tokenizer)}: give the tokenizer it was trained with"
            )
        return model
    options = {"num_heads": config.heads, "key_size": config.key_size, "value_size": config.value_size}
    return MetaplasticForCausalLM(
        MetaplasticConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            num_hidden_layers=config.layers,
            mixers=config.mixer,
            mixer_options={config.mixer: {k: v for k, v in options.items() if v is not None}},
            intermediate_size=config.intermediate_size or None,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
