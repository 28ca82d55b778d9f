"""Forks a child for every job read from standard input (a line: a list of jobs) and answers with their exit codes.

A job: ``function``, a name in this file; ``arguments`` for it; ``environment`` to add.
"""

import importlib
import json
import os
import shutil
import signal
import sys
import traceback

import torch

from metaplastic.models import MetaplasticConfig, MetaplasticForCausalLM
from metaplastic.tasks import HubText, PackedStream, byte_tokenizer
from metaplastic.training import MetaplasticTrainer, TrainConfig, train, training_arguments

DEADLY = ((torch, "save"), (os, "replace"), (shutil, "rmtree"), (os, "fsync"), (MetaplasticTrainer, "training_step"))


def train_and_die(config: dict, output: str, at: int | None = None) -> None:
    """A run that is killed at its ``at``-th step, file or folder written, renamed or deleted; None: it lives."""
    count = 0

    def deadly(original, name):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == at:
                _leave_half(name, args)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for where, name in DEADLY:
        setattr(where, name, deadly(getattr(where, name), name))
    train(TrainConfig(**config), output)
    if at is not None:
        sys.exit(f"the run ended after {count} dangers, before number {at}")


def _leave_half(name: str, args: tuple) -> None:
    """What a process leaves that is killed within a call, not before it."""
    if name == "save" and isinstance(args[1], str):
        with open(args[1], "wb") as file:
            file.write(b"half of a file")
    if name == "rmtree" and os.path.isdir(args[0]) and (names := sorted(os.listdir(args[0]))):
        half = os.path.join(args[0], names[len(names) // 2])
        if os.path.isfile(half):
            os.unlink(half)


def one_step(
    rows: str, output: str, per_device: int, model: str, accumulation: int = 1, dataset: str | None = None,
    steps: int = 1,
) -> None:  # fmt: skip
    """SGD steps (one unless told) and an evaluation; process 0 saves the weights and what was measured."""
    from metaplastic.tasks.text import collate_packed
    from metaplastic.training.saved import load_model

    data = torch.load(rows)
    if dataset:
        data["train"] = PackedStream(HubText(dataset), byte_tokenizer(), 16, window=5)
    arguments = training_arguments(
        output, max_steps=steps, per_device_train_batch_size=per_device, per_device_eval_batch_size=2, optim="sgd",
        gradient_accumulation_steps=accumulation, learning_rate=1.0, weight_decay=0.0, max_grad_norm=0.0,
        lr_scheduler_type="constant", train_sampling_strategy="sequential", save_strategy="no", logging_steps=1,
        disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = MetaplasticTrainer(
        model=load_model(model), args=arguments, train_dataset=data["train"], eval_dataset=data["eval"],
        data_collator=collate_packed,
    )  # fmt: skip
    before = trainer.evaluate()
    trainer.train()
    if trainer.is_world_process_zero():
        loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
        found = {"weights": weights, "loss": loss, "evaluation": before, "processes": trainer.args.world_size}
        torch.save(found, os.path.join(output, "found.pt"))


def _child(job: dict) -> None:
    code = 1
    try:
        os.dup2(2, 1)  # standard output is for the answers
        signal.alarm(120)  # a child that hangs dies of it
        os.environ.update(job.get("environment", {}))
        globals()[job["function"]](**job["arguments"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _warm_up() -> None:
    """What every child would load again. (On one thread: threads do not survive a fork.)"""
    importlib.import_module("datasets")
    torch.set_num_threads(1)
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "vocab_size": 4,
        "mixer_options": {"palimpsa_d": {"num_heads": 2}},
    }
    model = MetaplasticForCausalLM(MetaplasticConfig(**sizes))
    ids = torch.zeros(1, 4, dtype=torch.long)
    model(ids, labels=ids, cu_seqlens=torch.tensor([0, 4])).loss.backward()


def main() -> None:
    _warm_up()
    for line in sys.stdin:
        children = []
        for job in json.loads(line):
            child = os.fork()
            if child == 0:
                _child(job)
            children.append(child)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)


if __name__ == "__main__":
    main()
