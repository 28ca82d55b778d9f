"""Recall of a trained model on associative-recall rows: accuracy over all queries and by the age of the pair."""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..tasks.mqar import MQARDataset


@torch.no_grad()
def recall(model: PreTrainedModel, dataset: MQARDataset, *, batch_size: int = 64, age_bins: int = 8) -> dict[str, Any]:
    """Greedy accuracy of a causal language model on every query of ``dataset``.

    Returns ``accuracy`` and ``queries``, and ``by_age``: for equal slices of the distance in tokens between a pair's
    key and its query, the mean distance, the accuracy and the number of queries. The result does not depend on
    ``batch_size``.
    """
    training = model.training
    model.eval()
    positions, pairs = dataset.query_positions, dataset.config.pairs
    answers = dataset.input_ids[:, 1 : 2 * pairs : 2].long()
    hits, head = [], model.get_output_embeddings()
    if head is None:
        raise ValueError(f"model must be a causal language model with output embeddings, got {type(model).__name__}")
    for start in range(0, len(dataset), batch_size):
        rows = slice(start, start + batch_size)
        hidden = model.base_model(input_ids=dataset[rows]["input_ids"].to(model.device), use_cache=False)[0]
        asked = positions[rows, :, None].to(model.device).expand(-1, -1, hidden.shape[-1])
        predicted = head(hidden.gather(1, asked)).argmax(-1).cpu()
        hits.append(predicted == answers[rows])
    model.train(training)
    hit, age = torch.cat(hits).flatten().float(), dataset.distance.flatten().float()
    edges = torch.linspace(float(age.min()), float(age.max()) + 1, age_bins + 1)
    by_age = []
    for low, high in itertools.pairwise(edges):
        inside = (age >= low) & (age < high)
        if inside.any():
            by_age.append(
                {
                    "distance": float(age[inside].mean()),
                    "accuracy": float(hit[inside].mean()),
                    "queries": int(inside.sum()),
                }
            )
    return {"accuracy": float(hit.mean()), "queries": len(hit), "by_age": by_age}


def steps_until(curves: Sequence[Sequence[dict[str, float]]], accuracy: float) -> int | None:
    """The first step at which the mean over ``curves`` (one per seed) reaches ``accuracy``; None if it never does.

    A curve is a list of ``{"step": ..., "accuracy": ...}``; all are measured at the same steps.
    """
    for points in zip(*curves, strict=True):
        if len(steps := {int(p["step"]) for p in points}) != 1:
            raise ValueError(f"curves must be measured at the same steps, got steps {sorted(steps)} side by side")
        if statistics.mean(p["accuracy"] for p in points) >= accuracy:
            return steps.pop()
    return None
