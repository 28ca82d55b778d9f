"""Hugging Face's own Trainer, as it is: it trains, evaluates, keeps the best model, with its usual collators."""

import math

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.utils import find_labels
from transformers.utils import logging as transformers_logging

from metaplastic.models import MetaplasticForCausalLM

from .conftest import VOCABULARY, make, tokens

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def tokenizer():
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="w1"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w2")


def rows(lengths, seed=0):
    ids = [tokens(1, length, seed=seed + i)[0].tolist() for i, length in enumerate(lengths)]
    return Dataset.from_dict({"input_ids": ids})


def trainer(model, folder, train, collator, **options):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 0.01,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 0,
    }
    arguments = TrainingArguments(**(settings | options))
    return Trainer(model, arguments, train_dataset=train, eval_dataset=train, data_collator=collator)


def test_what_the_trainer_asks_for():
    assert find_labels(MetaplasticForCausalLM) == ["labels"]


COLLATORS = {
    "equal lengths": (default_data_collator, (8, 8, 8, 8)),
    "padded": (None, (8, 5, 3, 7)),
    "flattened": (DataCollatorWithFlattening(), (8, 5, 3, 7)),
}


@pytest.mark.parametrize("name", COLLATORS)
def test_evaluation_and_the_best_model(name, tmp_path):
    collator, lengths = COLLATORS[name]
    if collator is None:
        collator = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    data, model = rows(lengths), make()
    if name != "padded":
        data = data.map(lambda row: {"labels": row["input_ids"]})
    run = trainer(
        model, tmp_path, data, collator, eval_strategy="steps", eval_steps=1, save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss",
    )  # fmt: skip
    before = run.evaluate()["eval_loss"]
    with torch.no_grad():  # the mean over batches of two, each the mean over its tokens
        losses = []
        for pair in (data[:2]["input_ids"], data[2:]["input_ids"]):
            each = [(model(x, labels=x, num_items_in_batch=1).loss.item(), x.shape[1] - 1)
                    for x in (torch.tensor([ids]) for ids in pair)]  # fmt: skip
            losses.append(sum(loss for loss, _ in each) / sum(count for _, count in each))
    assert before == pytest.approx(sum(losses) / 2, rel=1e-4)
    run.train()
    found = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    assert len(found) == 4
    assert all(map(math.isfinite, found))
    assert min(found) < before
    assert run.state.best_metric == min(found)
    assert run.evaluate()["eval_loss"] == pytest.approx(min(found), rel=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_loading_the_best_model_misses_nothing(tied, tmp_path, caplog, monkeypatch):
    """A tied output layer is not in the files, and not missing either; what really is missing is still told of."""
    monkeypatch.setattr(transformers_logging.get_logger("transformers"), "propagate", True)
    data, model = rows((8, 8)).map(lambda row: {"labels": row["input_ids"]}), make(tie_word_embeddings=tied)
    run = trainer(
        model, tmp_path, data, default_data_collator, eval_strategy="steps", eval_steps=2, save_steps=2,
        load_best_model_at_end=True,
    )  # fmt: skip
    run.train()
    assert "missing keys" not in caplog.text
    saved = load_file(next(tmp_path.glob("checkpoint-*")) / "model.safetensors")
    assert ("lm_head.weight" in saved) is not tied
    wrapped = torch.nn.ModuleDict({"module": model})
    inside = {f"module.{name}": x for name, x in saved.items()}
    assert not model.load_state_dict(saved).missing_keys and not wrapped.load_state_dict(inside).missing_keys
    del saved["model.norm.weight"], saved["model.embed_tokens.weight"]
    lost = ["model.embed_tokens.weight", "model.norm.weight", *["lm_head.weight"] * tied]
    assert model.load_state_dict(saved, strict=False).missing_keys == lost
    assert make(tie_word_embeddings=not tied).load_state_dict(saved, strict=False).missing_keys


def test_predictions_are_logits_alone(tmp_path):
    """No cache and no hidden states among what the Trainer gathers."""
    data = rows((8, 8, 8)).map(lambda row: {"labels": row["input_ids"]})
    out = trainer(make(), tmp_path, data, default_data_collator).predict(data)
    assert out.predictions.shape == (3, 8, VOCABULARY)
    assert out.label_ids.shape == (3, 8)
    assert "test_loss" in out.metrics
