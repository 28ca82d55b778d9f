"""A language-model run from files to a saved model: what ``metaplastic train`` does."""

import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase, set_seed

from .. import results
from ..models import MetaplasticConfig, MetaplasticForCausalLM
from ..tasks import documents, text
from .saved import FINAL, find_model, load_model, load_tokenizer, save_final
from .trainer import MetaplasticTrainer, checkpoints, last_checkpoint, remove, step_of, training_arguments

RUN, RESULTS = "run.json", "results.json"
DATA = "data_sha256"  # in run.json: what the files held
_OF_THE_MODEL = ("mixer", "hidden_size", "layers", "heads", "key_size", "value_size", "intermediate_size")
logger = logging.getLogger("metaplastic")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides what a text run computes. Two runs with equal configurations are the same run.

    Data: ``files`` (text files or folders; empty: the Python standard library's texts, up to ``max_bytes``),
    ``separator`` between documents of one file, ``held_out`` share of documents for evaluation, ``tokenizer`` ("bytes",
    a folder or a name; None: the one saved with ``model``, or bytes). Model: ``model`` continues from a saved one,
    whose sizes it has; otherwise sizes and ``mixer`` make a new one. ``intermediate_size`` 0 leaves the MLP out.
    Optimisation: AdamW, ``warmup`` steps, then cosine to zero at ``steps``. ``eval_every`` and ``save_every`` are in
    steps, 0 for never (a run is always evaluated and saved at its end).
    """

    files: tuple[str, ...] = ()
    separator: str | None = None
    tokenizer: str | None = None
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
        files = (self.files,) if isinstance(self.files, (str, os.PathLike)) else self.files
        object.__setattr__(self, "files", tuple(str(file) for file in files))
        for name in ("hidden_size", "layers", "heads", "block_length", "batch_size", "accumulation", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("warmup", "weight_decay", "eval_every", "save_every", "intermediate_size"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be > 0, got {self.learning_rate}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be >= 0 and < 2**32, got {self.seed}")
        if self.model is not None:
            object.__setattr__(self, "model", str(self.model))
            for field in dataclasses.fields(self):
                if field.name in _OF_THE_MODEL and (given := getattr(self, field.name)) != field.default:
                    raise ValueError(f"{field.name} is given by the saved model, got {given!r}: leave out one of them")


def train(config: TrainConfig, output: str | os.PathLike, *, overwrite: bool = False) -> dict[str, Any]:
    """Trains, evaluates and saves to ``output``; resumes a run of the same configuration from its last checkpoint.

    Writes ``run.json`` (the configuration), ``checkpoint-N`` folders, ``final`` (model and tokenizer) and
    ``results.json``. Returns the content of the latter; a finished run is not run again. An ``output`` that holds
    another run is refused unless ``overwrite``, which starts afresh.
    """
    output = Path(output)
    same = _holds_this_run(config, output, overwrite)
    # Everything that can be wrong with the input is found before the folder is claimed or anything computed.
    tokenizer = load_tokenizer(config.tokenizer or (find_model(config.model) if config.model else "bytes"))
    train_blocks, eval_blocks = _blocks(config, tokenizer)
    data = train_blocks.fingerprint + eval_blocks.fingerprint
    if same and (_read_run(output / RUN) or {}).get(DATA) != data:
        raise ValueError(
            f"files: their text has changed since {output} was started: choose another output, or overwrite"
        )
    if same and (output / RESULTS).is_file() and (output / FINAL).is_dir():
        logger.warning("%s holds this run, finished: nothing to do", output)
        return json.loads((output / RESULTS).read_text())
    set_seed(config.seed)
    model = _model(config, tokenizer)
    if not same:
        _claim(config, output, data)
    _announce(config, train_blocks, eval_blocks)
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
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except SafetensorError as error:
        advice = "delete that folder to go on from the checkpoint before it"
        raise ValueError(f"output: the weights in {checkpoint} cannot be read ({error}): {advice}") from error
    seconds = time.perf_counter() - began
    first = step_of(checkpoint) if checkpoint else 0
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    # Of a run that was killed after its last step nothing has run here, and the results say what did.
    fresh = evaluations and evaluations[-1]["step"] == trainer.state.global_step > first
    metrics = evaluations[-1] if fresh else trainer.evaluate()
    save_final(trainer, output)
    measured = {
        "eval_loss": metrics["eval_loss"],
        "eval_perplexity": metrics["eval_perplexity"],
        "eval_tokens": metrics["eval_tokens"],
        "tokens_seen": int(trainer.state.num_input_tokens_seen),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds_this_call": round(seconds, 2),
        "steps_this_call": trainer.state.global_step - first,
        "dropped_tokens": train_blocks.dropped_tokens + eval_blocks.dropped_tokens,
        "history": trainer.state.log_history,
    }
    settings = dataclasses.asdict(config) | {"learning_rates_tried": [config.learning_rate]}
    result = results.record("train", measured, seeds=[config.seed], settings=settings)
    results.write_json(output / RESULTS, result)
    return result


def _holds_this_run(config: TrainConfig, output: Path, overwrite: bool) -> bool:
    """Whether ``output`` is this run's folder already; raises if it must not become so."""
    advice = "choose another output, or overwrite (--overwrite)"
    if output.exists() and not output.is_dir():
        raise ValueError(f"output: {output} is a file, expected a folder")
    found = _read_run(output / RUN)
    if found is None:
        if output.is_dir() and any(not file.name.startswith(".") for file in output.iterdir()):
            raise ValueError(f"output: {output} has files but no run of ours, expected a new or empty folder")
        return False
    if overwrite:
        return False
    wanted = json.loads(json.dumps(dataclasses.asdict(config)))
    if different := sorted(k for k in (wanted.keys() | found.keys()) - {DATA} if wanted.get(k) != found.get(k)):
        changes = ", ".join(f"{k} was {found.get(k)!r} and is {wanted.get(k)!r}" for k in different)
        raise ValueError(f"output: {output} holds another run ({changes}): {advice}")
    return True


def _read_run(file: Path) -> dict[str, Any] | None:
    """The configuration of the run in a folder, or None if there is none (or another program's file of that name)."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.keys() >= {"mixer", "block_length", "steps"} else None


def _claim(config: TrainConfig, output: Path, data: str) -> None:
    """Makes ``output`` this run's folder. Of what is there, only what a run writes is deleted."""
    (output / RESULTS).unlink(missing_ok=True)
    for old in (*checkpoints(output), output / FINAL):
        if old.is_dir():
            remove(old)
    results.write_json(output / RUN, dataclasses.asdict(config) | {DATA: data})


@contextlib.contextmanager
def _named(theirs: str, ours: str) -> Iterator[None]:
    """In errors of the text room, the name of our argument instead of its own."""
    try:
        yield
    except (ValueError, OSError) as error:
        error.args = (str(error).replace(theirs, ours, 1),)
        raise


def _blocks(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[text.PackedText, text.PackedText]:
    if config.files:
        with _named("paths", "files"):
            found = documents.read_documents(config.files, separator=config.separator)
    else:
        found = documents.standard_library_documents(max_bytes=config.max_bytes)
    training, held_out = documents.split_documents(found, config.held_out, config.seed)
    train_blocks = text.PackedText(training, tokenizer, config.block_length)
    with _named("documents", "held-out documents"):
        return train_blocks, text.PackedText(held_out, tokenizer, config.block_length)


def _announce(config: TrainConfig, train_blocks: text.PackedText, eval_blocks: text.PackedText) -> None:
    """Says how much text is on either side: documents are split whole, so few or uneven ones miss the share."""
    sizes = [len(blocks) * config.block_length for blocks in (train_blocks, eval_blocks)]
    share = sizes[1] / sum(sizes)
    logger.info("%s tokens to train on, %s held out (%.1f%%)", f"{sizes[0]:,}", f"{sizes[1]:,}", 100 * share)
    if not config.held_out / 3 < share < 3 * config.held_out:
        logger.warning(
            "warning: %.1f%% of the tokens are held out where %.1f%% were asked for: documents are held out whole; "
            "give more files, or --separator to split them into documents", 100 * share, 100 * config.held_out,
        )  # fmt: skip


def _model(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> MetaplasticForCausalLM:
    if config.model is not None:
        folder = find_model(config.model)
        model = load_model(folder)
        advice = "leave tokenizer out, or give the one it was trained with"
        own = load_tokenizer(folder) if (folder / "tokenizer_config.json").is_file() else tokenizer
        if own.get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"tokenizer: {config.tokenizer!r} is not the one saved with model {folder}: {advice}")
        if model.config.vocab_size < len(tokenizer):
            sizes = f"has {len(tokenizer)} tokens, model {folder} {model.config.vocab_size}"
            raise ValueError(f"tokenizer: {config.tokenizer!r} {sizes}: {advice}")
        return model
    options = {"num_heads": config.heads, "key_size": config.key_size, "value_size": config.value_size}
    special: Any = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return MetaplasticForCausalLM(
        MetaplasticConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            num_hidden_layers=config.layers,
            mixers=config.mixer,
            mixer_options={config.mixer: {k: v for k, v in options.items() if v is not None}},
            intermediate_size=config.intermediate_size or None,
            **special,
        )
    )
