"""Associative recall: the same small model with each mixer, on the same rows, in the same order.

The setting is multi-query associative recall (zoology's MQAR) scaled down for two CPU cores.
"""

import dataclasses
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, default_data_collator, set_seed

from .. import results
from ..evaluation import recall
from ..models import MetaplasticConfig, MetaplasticForCausalLM
from ..tasks import mqar
from ..training import MetaplasticTrainer, training_arguments


@dataclasses.dataclass(frozen=True)
class RecallRun:
    """One model trained on MQAR. Learning rate: warm-up over a tenth of the steps, then cosine to zero."""

    mixer: str = "palimpsa_d"
    sequence_length: int = 64
    pairs: int = 16
    vocabulary: int = 64
    train_rows: int = 40_000
    test_rows: int = 1_000
    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    key_size: int = 16
    value_size: int = 16
    steps: int = 1_000
    batch_size: int = 64
    learning_rate: float = 1e-2
    measure_every: int = 100
    seed: int = 0

    def model(self) -> MetaplasticForCausalLM:
        """A fresh model of this run, with the published MQAR initialisation (weak decay, wide weights)."""
        options: dict[str, Any] = {
            "num_heads": self.heads,
            "key_size": self.key_size,
            "value_size": self.value_size,
            "decay_range": (0.01, 0.16),
        }
        return MetaplasticForCausalLM(
            MetaplasticConfig(
                vocab_size=self.vocabulary,
                hidden_size=self.hidden_size,
                num_hidden_layers=self.layers,
                mixers=self.mixer,
                mixer_options={self.mixer: options},
                initializer_range=self.hidden_size**-0.5,
            )
        )

    def data(self) -> tuple[mqar.MQARDataset, mqar.MQARDataset]:
        """Training and test rows; they depend on the seed, not on the mixer."""
        config = mqar.MQARConfig(self.sequence_length, self.pairs, vocabulary=self.vocabulary)
        return (
            mqar.generate(config, self.train_rows, seed=2 * self.seed),
            mqar.generate(config, self.test_rows, seed=2 * self.seed + 1),
        )


class _Measure(TrainerCallback):
    """Recall on a slice of the test rows while training: the learning curve."""

    def __init__(self, test: mqar.MQARDataset, every: int):
        self.test, self.every = test, every
        self.curve: list[dict[str, float]] = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0 and model is not None:
            measured = recall(model, self.test)
            self.curve.append({"step": state.global_step, "accuracy": measured["accuracy"]})


def run_recall(run: RecallRun, output: str | Path, *, progress: bool = True) -> dict[str, Any]:
    """Trains one model; returns and writes (``results.json``) its accuracy, learning curve and accuracy by pair age."""
    set_seed(run.seed)
    model = run.model()
    training, test = run.data()
    config = test.config
    slice_of_test = mqar.generate(config, min(200, run.test_rows), seed=2 * run.seed + 1)
    measure = _Measure(slice_of_test, run.measure_every)
    arguments = training_arguments(
        output,
        max_steps=run.steps,
        per_device_train_batch_size=run.batch_size,
        learning_rate=run.learning_rate,
        warmup_steps=run.steps // 10,
        lr_scheduler_type="cosine",
        save_strategy="no",
        logging_steps=max(1, run.steps // 50),
        seed=run.seed,
        data_seed=run.seed,
        disable_tqdm=not progress,
    )
    trainer = MetaplasticTrainer(
        model=model, args=arguments, train_dataset=training, data_collator=default_data_collator, callbacks=[measure]
    )
    seconds = trainer.train().metrics["train_runtime"]
    measured = recall(model, test)
    losses = [{"step": e["step"], "loss": e["loss"]} for e in trainer.state.log_history if "loss" in e]
    measurements = measured | {
        "curve": measure.curve,
        "losses": losses,
        "chance": 1 / (run.vocabulary - run.vocabulary // 2),
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_seconds": seconds,
    }
    settings = dataclasses.asdict(run) | {"learning_rates_tried": [run.learning_rate]}
    result = results.record("mqar", measurements, seeds=[run.seed], settings=settings)
    results.write_json(Path(output) / "results.json", result)
    return result
