"""A language-model run from text to a saved model: what ``metaplastic train`` does."""

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, set_seed

from .. import results
from ..models import MetaplasticConfig, MetaplasticForCausalLM, metaplastic_form
from ..models.checkpointing import checkpoint_activations
from ..models.loss import backend
from ..models.size import layer_mixers, mixer_options
from ..tasks import shards, stream, text
from .card import write_card
from .checkpoint import check_seal, last_checkpoint, step_of
from .compiled import compile_blocks
from .config import TrainConfig
from .context import mixers_to_cut
from .data import Data, announce, load_data
from .divergence import Divergence
from .flops import least_seconds
from .folder import (
    DATA,
    MODEL,
    RESULTS,
    TOKENIZER,
    TRACKED,
    alone,
    check_hashes,
    claim,
    finished,
    holds_this_run,
    identity,
    read_run,
)
from .interrupt import Interruption
from .memory import rows_to_watch
from .messages import shown
from .parallel import first_comes_first, in_processes, is_first, one_voice, sharding, share
from .saved import find_model, hash_of_model, load_model, load_tokenizer, read_config, save_final
from .schedule import scheduler_arguments
from .trackers import check_trackers, put_tensorboard
from .trainer import MetaplasticTrainer, training_arguments

logger = logging.getLogger("metaplastic")


def train(config: TrainConfig, output: str | os.PathLike, *, overwrite: bool = False) -> dict[str, Any]:
    """Trains, evaluates and saves to ``output``; resumes a run of the same configuration from its last checkpoint.

    Writes ``run.json`` (the configuration), ``checkpoint-N`` folders and ``final`` (each a model, its tokenizer and its
    card) and ``results.json``. Returns the content of the latter; a finished run is not run again. An ``output`` that
    holds another run is refused unless ``overwrite``, which starts afresh. Ctrl-C (KeyboardInterrupt) and SIGTERM
    (SystemExit, code 143) save a checkpoint after the step. Messages go to the logger "metaplastic", and to stderr
    where no logging is set up.
    """
    with shown(), one_voice():
        return _train(config, Path(output), overwrite)


def _train(config: TrainConfig, output: Path, overwrite: bool) -> dict[str, Any]:
    # Everything that can be wrong with the input is found before the folder is claimed or anything computed.
    share(config)
    if is_first():
        holds_this_run(config, output, overwrite)
    check_trackers(config.report_to)
    if config.model:
        read_config(config.model)
    if config.data:
        tokenizer = shards.tokenizer_of(config.data)
    else:
        tokenizer = load_tokenizer(config.tokenizer or (find_model(config.model) if config.model else "bytes"))
    data = load_data(config, tokenizer)
    hashes = {DATA: data.fingerprint, TOKENIZER: shards.tokenizer_fingerprint(tokenizer)}
    if config.model:
        hashes[MODEL] = hash_of_model(find_model(config.model))
    set_seed(config.seed)
    model = _model(config, tokenizer)
    model.loss_form = config.loss
    checkpoint_activations(model, config.checkpointing)
    _fused_by(config, model)
    if config.context_parallel > 1:
        mixers_to_cut(model)
    if config.compile:
        compile_blocks(model, pieces=config.context_parallel > 1)
    with alone(output):
        with first_comes_first():
            if same := holds_this_run(config, output, overwrite and is_first()):
                check_hashes(config, output, hashes, data.changed())
                if result := finished(output):
                    logger.warning("%s holds this run, finished: nothing to do", output)
                    return result
            if not same:
                claim(config, output, hashes)
        announce(config, data)
        if config.compile:
            logger.info("compiling in the first steps: they take minutes, seconds where PyTorch's cache has their code")
        if config.warmup >= config.steps:
            start = config.minimum_rate if config.schedule == "wsd" else 0.0
            reached = config.learning_rate * (start + (1 - start) * (config.steps - 1) / config.warmup)
            logger.warning(
                "warning: the warm-up is not over when the run is: warmup is %g of %d steps, and the learning rate "
                "rises to %.2g, not %g", config.warmup, config.steps, reached, config.learning_rate,
            )  # fmt: skip
        return _fit(config, output, data, model, tokenizer)


def _fit(
    config: TrainConfig, output: Path, data: Data, model: MetaplasticForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """From the last checkpoint in ``output``, if there is one, to the results."""
    written = read_run(output) or {}
    interruption, run = Interruption(), identity(written)
    if checkpoint := last_checkpoint(output):
        check_seal(checkpoint, run)
    trainer = MetaplasticTrainer(
        model=model,
        args=_arguments(config, output),
        train_dataset=data.train,
        eval_dataset=data.held_out,
        data_collator=text.collate_packed,
        processing_class=tokenizer,
        callbacks=[interruption, Divergence()],
        context=config.context_parallel,
        asynchronous=config.asynchronous_saves,
    )
    trainer.beside, trainer.run = lambda folder: write_card(folder, trainer, config, data), run
    if config.context_parallel == 1 and config.parallel != "fsdp2":  # a process must have whole rows and weights
        trainer.watched = rows_to_watch(data.held_out, config.block_length)
    if config.bf16 or config.peak_flops is not None:  # a device's peak is known for bf16 alone
        options = (model.config, config.block_length, trainer.args.device, config.peak_flops)
        trainer.least_seconds = least_seconds(*options)
    first = step_of(checkpoint) if checkpoint else 0
    if checkpoint:
        logger.warning("resuming from %s", checkpoint)
    put_tensorboard(trainer, output / TRACKED, first)
    began = time.perf_counter()
    with interruption:
        trainer.train(resume_from_checkpoint=checkpoint)
    seconds = time.perf_counter() - began
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    # Of a run that was killed after its last step nothing has run here, and the results say what did.
    measured_last = evaluations and evaluations[-1]["step"] == trainer.state.global_step
    metrics = evaluations[-1] if measured_last and trainer.state.global_step > first else trainer.evaluate()
    if measured_last and metrics is not evaluations[-1]:
        trainer.state.log_history.remove(evaluations[-1])  # measured again: that entry is the one that holds
    save_final(trainer, output)
    place = trainer.place()
    left_out = (place or {})["dropped"] if isinstance(data.train, stream.PackedStream) else data.train.dropped_tokens
    measured = {
        "eval_loss": metrics["eval_loss"],
        "eval_perplexity": metrics["eval_perplexity"],
        "eval_tokens": metrics["eval_tokens"],
        "tokens_seen": int(trainer.state.num_input_tokens_seen),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds_this_call": round(seconds, 2),
        "steps_this_call": trainer.state.global_step - first,
        "loss_fused_by": _fused_by(config, model),
        "dropped_tokens": left_out + data.held_out.dropped_tokens,
        "history": trainer.state.log_history,
    }
    settings = config.applied() | {"learning_rates_tried": [config.learning_rate]} | in_processes(config)
    if config.model:  # what it is decides here
        kinds = model.config.mixers if len(set(model.config.mixers)) > 1 else model.config.mixers[:1]
        settings |= {"mixer": ",".join(kinds), "layers": model.config.num_hidden_layers}
        settings |= {"hidden_size": model.config.hidden_size}
    settings |= {name: written[name] for name in (DATA, TOKENIZER, MODEL) if name in written}
    result = results.record("train", measured, seeds=[config.seed], settings=settings)
    if is_first():
        results.write_json(output / RESULTS, result)
    return result


def _arguments(config: TrainConfig, output: Path):
    own = share(config)
    return training_arguments(
        output,
        max_steps=config.steps,
        per_device_train_batch_size=own.rows,
        per_device_eval_batch_size=own.rows,
        gradient_accumulation_steps=own.accumulation,
        **sharding(config),
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        **scheduler_arguments(config),
        eval_strategy="steps" if config.eval_every else "no",
        eval_steps=config.eval_every or None,
        save_strategy="steps" if config.save_every else "no",
        save_steps=config.save_every or 500,
        seed=config.seed,
        data_seed=config.seed,
        train_sampling_strategy="sequential" if config.data else "random",  # shards bring an order of their own
        bf16=config.bf16,
        report_to=list(config.report_to),
        disable_tqdm=not sys.stderr.isatty() and "METAPLASTIC_PROGRESS" not in os.environ,
    )


def _fused_by(config: TrainConfig, model: MetaplasticForCausalLM) -> str | None:
    """What fuses the loss with the output layer, here; raises ValueError where it was asked for and nothing can."""
    accelerator = torch.accelerator.current_accelerator()
    device = "cpu" if accelerator is None else accelerator.type
    return backend(config.loss, model.lm_head, device, torch.bfloat16 if config.bf16 else model.dtype)


def _model(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> MetaplasticForCausalLM:
    if config.model is not None:
        folder = find_model(config.model)
        model = load_model(folder)
        advice = "leave tokenizer out, or give the one it was trained with"
        given = f"data: the tokenizer of {config.data}" if config.data else f"tokenizer: {config.tokenizer!r}"
        advice = "tokenise with the one it was trained with (--tokenizer)" if config.data else advice
        own = load_tokenizer(folder) if (folder / "tokenizer_config.json").is_file() else tokenizer
        if own.get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"{given} is not the one saved with model {folder}: {advice}")
        if model.config.vocab_size < (needed := text.vocabulary_size(tokenizer)):
            sizes = f"has {needed} tokens, model {folder} {model.config.vocab_size}"
            raise ValueError(f"{given} {sizes}: {advice}")
        return model if config.plasticity is None else metaplastic_form(model, plasticity=config.plasticity)
    mixers = layer_mixers(config.mixer, config.layers)
    options = mixer_options(mixers, config.heads, config.key_size, config.value_size, config.groups)
    special: Any = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return MetaplasticForCausalLM(
        MetaplasticConfig(
            vocab_size=text.vocabulary_size(tokenizer),
            hidden_size=config.hidden_size,
            num_hidden_layers=config.layers,
            mixers=mixers,
            mixer_options=options,
            intermediate_size=config.intermediate_size or None,
            **special,
        )
    )
