"""What tests of several processes compute: one start of Python, which forks every process from itself.

    python -m tests.training.parallel_jobs FOLDER quick|killed

leaves in FOLDER what the jobs of that name found. A job that fails ends it with an error.
"""

import contextlib
import os
import random
import signal
import socket
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from metaplastic.models import MetaplasticConfig, MetaplasticForCausalLM
from metaplastic.models.checkpointing import checkpoint_activations
from metaplastic.ops import cross_entropy
from metaplastic.tasks.text import collate_packed
from metaplastic.training import MetaplasticTrainer, TrainConfig, interrupt, saving, train, training_arguments
from metaplastic.training.context import context_group, parallelise_context, shard
from metaplastic.training.exchange import Line
from metaplastic.training.parallel import sharding

from .nursery import _warm_up
from .rows import packed_rows, weights_of

SENTENCE = "the memory knows how sure it is of what it holds and forgets what it must when the next word comes"
MEMORIES = ("palimpsa_d", "palimpsa_m", "palimpsa_d_additive", "mamba2", "gated_deltanet", "bayesian")
STEPPED = ("palimpsa_d", "bayesian")
FORMS = [(mixer, "plain") for mixer in STEPPED]  # of which steps are taken
if cross_entropy.choose("cpu", torch.float32) is not None:
    FORMS.append(("palimpsa_d", "fused"))
SIGNALS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}
LENGTH = 23
SHARDS = 3  # or no decay of a shard would matter
PACKINGS = {  # where sequences begin, cut at 7 and 15: across both, at one, empty ones, a tail of no sequence
    "rows": None,
    "across": [0, 3, LENGTH],
    "at a border": [0, 7, 7, LENGTH],
    "just before": [0, 6, 14, 16, 20],
}
RECOMPUTED = {"across": "selective", "at a border": "full"}


def tiny(texts: Path, **changes) -> TrainConfig:
    """Six steps of twelve rows over two epochs, the second of which ends in a step of fewer."""
    settings = {
        "files": (str(texts),), "held_out": 0.2, "hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 16,
        "block_length": 32, "batch_size": 3, "accumulation": 4, "steps": 6, "warmup": 2, "eval_every": 2,
        "save_every": 2,
    }  # fmt: skip
    return TrainConfig(**(settings | changes))


def small(mixer: str, dtype: torch.dtype = torch.float32) -> MetaplasticForCausalLM:
    torch.manual_seed(0)
    options = {mixer: {"num_heads": 2, "key_size": 4, "value_size": 6}}
    settings = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 8}
    settings |= {"initializer_range": 0.3}  # far from the uniform guess, so that losses of tokens differ
    return MetaplasticForCausalLM(MetaplasticConfig(mixers=mixer, mixer_options=options, **settings)).to(dtype).train()


def one_step(folder: Path, name: str, parallel: str | None) -> None:
    """A step of plain gradient descent with rate 1 on seven rows, which two processes cannot share evenly."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    found, calls, fused = {}, [], cross_entropy.summed_cross_entropy
    cross_entropy.summed_cross_entropy = lambda *given: calls.append(tuple(given[1].shape)) or fused(*given)
    for mixer, loss_form in FORMS:
        arguments = training_arguments(
            folder / name, max_steps=1, per_device_train_batch_size=4 // processes, gradient_accumulation_steps=2,
            optim="sgd", learning_rate=1.0, weight_decay=0.0, max_grad_norm=0.0, lr_scheduler_type="constant",
            train_sampling_strategy="sequential", save_strategy="no", logging_steps=1, disable_tqdm=True, use_cpu=True,
            per_device_eval_batch_size=2, **sharding(TrainConfig(parallel=parallel)),
        )  # fmt: skip
        model = small(mixer)
        model.loss_form = loss_form
        before = weights_of(model)
        trainer = MetaplasticTrainer(
            model, arguments, collate_packed, packed_rows(7), eval_dataset=packed_rows(5, seed=2)
        )
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            trainer.train()
        sharded = [isinstance(weight, DTensor) for weight in trainer.model.parameters()]
        evaluation = trainer.evaluate()
        after = {
            name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in weights_of(trainer.model).items()
        }
        gradients = {name: before[name] - weight for name, weight in after.items()}
        loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        of_one = {"gradients": gradients, "loss": loss, "evaluation": evaluation, "sharded": set(sharded)}
        of_one |= {"heard": [str(warning.message) for warning in heard]}
        of_one |= {"tokens": trainer.state.num_input_tokens_seen, "fused": calls.copy()}
        found[mixer, loss_form] = of_one
        calls.clear()
    if int(os.environ.get("RANK", 0)) == 0:
        torch.save(found, folder / f"{name}.pt")


def context(folder: Path) -> None:
    """The gradients of all shards together, in float64, and the loss, in float32, beside those of one process."""
    dist.init_process_group("gloo")
    group, found = context_group(SHARDS), {}
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 40, (2, LENGTH), generator=generator)
    weights = torch.randn(LENGTH, 40, dtype=torch.float64, generator=generator)
    own = shard(LENGTH, Line(group))
    for mixer in MEMORIES:
        for packing, offsets in PACKINGS.items():
            if packing != "rows" and mixer not in STEPPED:  # one that exchanges its state, one that hands it on
                continue
            batch = {"input_ids": ids} if offsets is None else {"input_ids": ids[:1]}
            batch |= {} if offsets is None else {"cu_seqlens": torch.tensor(offsets, dtype=torch.int32)}
            labels = batch["input_ids"].clone()
            labels[0, :15] = -100
            whole, cut = (small(mixer, torch.float64) for _ in range(2))
            (whole(**batch, use_cache=False).logits * weights).sum().backward()
            parallelise_context(cut, group)
            checkpoint_activations(cut, RECOMPUTED.get(packing, "none"))
            with exchanges() as counted:
                (cut(**batch).logits * weights[own]).sum().backward()
            one, two = (_gradients(model) for model in (whole, cut))
            cut.zero_grad()
            logits = cut(**batch).logits
            with torch.no_grad():  # other sequences, before the backward pass of these
                cut(ids[:1], cu_seqlens=torch.tensor([0, 11, LENGTH], dtype=torch.int32))
            (logits * weights[own]).sum().backward()
            between = all(torch.equal(x, two[name]) for name, x in _gradients(cut).items())
            for gradient in two.values():
                dist.all_reduce(gradient)
            whole, cut = whole.float(), cut.float()
            expected, loss = (model(**batch, labels=labels).loss.detach() for model in (whole, cut))
            dist.all_reduce(loss)
            losses = (float(expected), float(loss))
            every: list[Any] = [None] * SHARDS
            dist.all_gather_object(every, dict(counted) | {"the same with a call between": between})
            found[mixer, packing] = {"one": one, "two": two, "losses": losses, "exchanges": every}
    refused = {}
    for name, call in {
        "attention": lambda: parallelise_context(small("attention"), group),
        "padding": lambda: cut(ids, attention_mask=torch.arange(LENGTH).expand(2, -1) > 2),
        "short": lambda: cut(ids[:, :5]),
        "cache": lambda: cut(ids, use_cache=True),
    }.items():
        try:
            call()
        except ValueError as error:
            refused[name] = str(error)
    apart = sharded_apart(ids)
    if dist.get_rank() == 0:
        torch.save({"found": found, "refused": refused, "apart": apart}, folder / "context.pt")
    dist.barrier()


@contextlib.contextmanager
def exchanges():
    """How often this process exchanges something, by how."""
    counted, names = Counter(), ("all_gather", "isend", "recv")
    originals = {name: getattr(dist, name) for name in names}

    def counting(name):
        def exchange(*args, **kwargs):
            counted[name] += 1
            return originals[name](*args, **kwargs)

        return exchange

    try:
        for name in names:
            setattr(dist, name, counting(name))
        yield counted
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def sharded_apart(ids: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Gradients with a fused loss: of a whole model, and of one whose output layer is a group of FSDP2's by itself."""
    found = []
    for apart in (False, True) if len(FORMS) > len(STEPPED) else ():
        model = small("palimpsa_d")
        model.loss_form = "fused"
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # no longer tied
        if apart:
            fully_shard(model.lm_head, mesh=init_device_mesh("cpu", (SHARDS,)))
        model(ids, labels=ids).loss.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        found.append({name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in gradients.items()})
    return found


def _gradients(model: MetaplasticForCausalLM) -> dict[str, torch.Tensor]:
    """Copies: a model that is cast casts its gradients in place."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def interrupted(folder: Path, name: str, number: int) -> None:
    """A run in whose third step a signal comes to the second process alone, and which looks at every step for it."""
    original = MetaplasticTrainer.training_step

    def training_step(self, *args):
        if self.state.global_step == 2 and self.args.process_index == 1:
            os.kill(os.getpid(), number)
        return original(self, *args)

    MetaplasticTrainer.training_step, interrupt.SECONDS = training_step, 0.0
    train(tiny(folder / "texts", save_every=0), folder / name)


class Stopped(Exception):
    pass


def run(folder: Path, name: str, stop: int | None = None, kill: str | None = None, **changes) -> None:
    """A run that ends before step ``stop``, of which one process is killed in a "step" or a "save"; None: neither."""
    original, first = MetaplasticTrainer.training_step, int(os.environ.get("RANK", 0)) == 0

    def training_step(self, *args):
        if self.state.global_step == stop:
            raise Stopped
        if kill == "step" and self.state.global_step == 3 and not first:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args)

    def seal(staged, *args):
        if staged.name == "checkpoint-4" and first:
            os.kill(os.getpid(), signal.SIGKILL)
        return sealing(staged, *args)

    MetaplasticTrainer.training_step, sealing = training_step, saving.seal
    if kill == "save":
        saving.seal = seal
    try:
        train(tiny(folder / "texts", **changes), folder / name)
    except Stopped:
        if stop is None:
            raise
    else:
        assert stop is None and kill is None, f"{name} went on"


def fork(function, *arguments, environment: dict[str, str] | None = None, **options) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.alarm(100)  # a child that hangs dies of it
        os.environ.update(environment or {})
        function(*arguments, **options)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(*children: int) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def pair(function, *arguments, count: int = 2, **options) -> list[int]:
    """Two processes that work together, or ``count``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return wait(*(fork(function, *arguments, environment=environment, **options) for environment in ranks))


def well(codes: list[int]) -> None:
    assert set(codes) == {0}, codes


def quick(folder: Path) -> None:
    undisturbed = fork(run, folder, "one")
    well(wait(fork(one_step, folder, "alone", None), undisturbed))
    well(pair(one_step, folder, "ddp", "ddp"))
    well(pair(one_step, folder, "fsdp2", "fsdp2"))
    well(pair(context, folder, count=SHARDS))
    stopped = fork(run, folder, "one, then two", stop=3)
    well(pair(run, folder, "two, then one", stop=3, parallel="fsdp2", asynchronous_saves=True))
    ended = fork(run, folder, "two, then one")
    well(wait(stopped, ended))
    well(pair(run, folder, "one, then two", parallel="fsdp2"))
    well(pair(run, folder, "context", context_parallel=2))
    for name, number in SIGNALS.items():
        (folder / f"{name}.codes").write_text(repr(pair(interrupted, folder, name, number)))


def killed(folder: Path) -> None:
    for parallel, asynchronous in (("ddp", True), ("fsdp2", False), ("fsdp2", True)):
        settings = {"parallel": parallel, "asynchronous_saves": asynchronous}
        name = f"{parallel} {asynchronous}"
        well(pair(run, folder, name, **settings))
        for kill in ("step", "save"):
            codes = pair(run, folder, f"{name} killed in a {kill}", kill=kill, **settings)
            assert sorted(codes) == [-signal.SIGKILL, 1], codes
            well(pair(run, folder, f"{name} killed in a {kill}", **settings))


def main(folder: Path, jobs: str) -> None:
    torch.set_num_threads(1)
    generator, words = random.Random(0), SENTENCE.split()
    (folder / "texts").mkdir()
    for number in range(8):
        text = " ".join(generator.choices(words, k=30 + 15 * number))
        (folder / "texts" / f"{number}.txt").write_text(text)
    _warm_up()
    {"quick": quick, "killed": killed}[jobs](folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
