import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from metaplastic.models import MetaplasticConfig, MetaplasticForCausalLM
from metaplastic.ops import dispatch
from metaplastic.tasks.text import collate_packed
from metaplastic.training import MetaplasticTrainer, TrainConfig, train, training_arguments

from .rows import packed_rows

SENTENCE = "the memory knows how sure it is of what it holds and forgets what it must when the next word comes"


@pytest.fixture(scope="package", autouse=True)
def _quiet_machine(tmp_path_factory):
    """One thread (tiny models gain nothing from more and lose much where cores are shared), nobody's block list."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METAPLASTIC_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("METAPLASTIC_PROGRESS", raising=False)
        dispatch._blocked.cache_clear()
        dispatch._choose.cache_clear()
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """A folder of small text files of unequal lengths."""
    folder = tmp_path_factory.mktemp("texts")
    generator = random.Random(0)
    for number in range(8):
        words = generator.choices(SENTENCE.split(), k=30 + 15 * number)
        (folder / f"{number}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="session")
def tiny(texts):
    """A run of seconds: ten steps of three batches, over two epochs, saved and evaluated out of step with the log."""

    def config(**changes) -> TrainConfig:
        settings = {
            "files": (str(texts),),
            "held_out": 0.2,
            "hidden_size": 16,
            "layers": 1,
            "heads": 2,
            "intermediate_size": 16,
            "block_length": 32,
            "batch_size": 3,
            "accumulation": 3,
            "steps": 10,
            "warmup": 2,
            "eval_every": 4,
            "save_every": 3,
        }
        return TrainConfig(**(settings | changes))

    return config


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder as a dataset on the hub: 60 short documents in three files, and a split for validation."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(1)
    for name in ("train-0", "train-1", "train-2", "validation-0"):
        lines = (" ".join(generator.choices(SENTENCE.split(), k=generator.randrange(3, 20))) for _ in range(20))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="session")
def streamed(tiny, corpus):
    """As ``tiny``, from a stream: ten steps of nine blocks are more than a pass, and no window ends with a step."""

    def config(**changes) -> TrainConfig:
        settings = {"files": (), "held_out": 0.05, "dataset": str(corpus), "shuffle_window": 16}
        return tiny(**(settings | {"held_out_documents": 10} | changes))

    return config


@pytest.fixture(scope="package")
def finished(_quiet_machine, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(tiny(), folder)
    return folder


@pytest.fixture
def undisturbed(finished, tmp_path) -> Path:
    """A copy of the finished run of ``tiny()``."""
    return Path(shutil.copytree(finished, tmp_path / "undisturbed"))


@pytest.fixture
def network():
    def build(vocab_size: int = 40, *, seed: int = 0, **changes) -> MetaplasticForCausalLM:
        torch.manual_seed(seed)
        settings = {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "mixers": ["palimpsa_d", "palimpsa_d_additive"],
            "mixer_options": {name: {"num_heads": 2} for name in ("palimpsa_d", "palimpsa_d_additive")},
            "intermediate_size": 16,
            "initializer_range": 0.3,  # far from the uniform guess, so that losses of tokens differ
        }
        return MetaplasticForCausalLM(MetaplasticConfig(vocab_size=vocab_size, **(settings | changes)))

    return build


@pytest.fixture
def build(network, tmp_path):
    def make(model=None, rows=None, eval_rows=None, collator=collate_packed, callbacks=None, **arguments):
        settings = {
            "max_steps": 6,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "train_sampling_strategy": "sequential",
            "disable_tqdm": True,
        }
        return MetaplasticTrainer(
            model=network() if model is None else model,
            args=training_arguments(tmp_path / "run", **(settings | arguments)),
            train_dataset=packed_rows(16) if rows is None else rows,
            eval_dataset=packed_rows(7, seed=2) if eval_rows is None else eval_rows,
            data_collator=collator,
            callbacks=callbacks,
        )

    return make


class Nursery:
    """A process that has imported everything and forks a child for each job, so that killing a run costs no import."""

    def __init__(self, log: Path):
        self.log = log  # what the children say
        root = Path(__file__).parents[2]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.training.nursery"],
                cwd=root, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip

    def run(self, *jobs: dict) -> list[int]:
        """Runs jobs side by side; their exit codes, negative for the signal that killed one."""
        self.process.stdin.write(json.dumps(jobs) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.log.read_text()
        return json.loads(answer)

    def close(self):
        with self.process:  # closes its pipes, which ends it
            pass


@pytest.fixture(scope="package")
def nursery(_quiet_machine, tmp_path_factory):
    nursery = Nursery(tmp_path_factory.mktemp("nursery") / "log.txt")
    yield nursery
    nursery.close()
