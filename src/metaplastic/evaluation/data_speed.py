"""How fast text becomes tokens, and shards become batches: both should keep ahead of what trains on them."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import results
from ..tasks import ShardedText, collate_packed, standard_library_documents, tokenising, train_tokenizer
from ..tasks.stream import Source

ROWS = 16  # of a batch
SECONDS = 3.0  # of each measurement of reading


class StandardLibrary:
    """The texts that come with Python, as a source."""

    origin = {"files": "texts of the Python standard library"}

    def __init__(self) -> None:
        self._documents, self._place = standard_library_documents(), 0

    def __iter__(self):
        while self._place < len(self._documents):
            self._place += 1
            yield self._documents[self._place - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = state["place"]


def bench_data(
    source: Source, origin: dict[str, Any], tokenizer: Any, output: Path, *, vocab_size: int, workers: int
) -> dict[str, Any]:
    """Tokenises a source to ``output / "shards"`` and reads batches of it; writes ``output / "results.json"``.

    Without a tokenizer, one of ``vocab_size`` entries is trained on the source first. Reading is on one thread, in the
    shuffled order, from files that are in the machine's file cache by then. Each rate of reading is the
    median of five, each over ``SECONDS`` / 5.
    """
    found: dict[str, Any] = {}
    start = source.state_dict()
    if tokenizer is None:
        began = time.perf_counter()
        tokenizer = train_tokenizer((text for _, text in source), vocab_size)
        found["training the tokenizer"] = {"seconds": time.perf_counter() - began, "entries": len(tokenizer)}
        source.load_state_dict(start)
    folder = output / "shards"
    if folder.exists():
        raise ValueError(f"output: {folder} is there already, expected none: what is there would not be tokenised")
    began = time.perf_counter()
    index = tokenising.write_shards(source, origin, tokenizer, folder, held_out=0.0, workers=workers)
    elapsed = time.perf_counter() - began
    counts = tokenising.counts(index)["train"]
    found["tokenising"] = counts | {"seconds": elapsed, "tokens per second": counts["tokens"] / elapsed}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for block_length in (1024, 4096):
            dataset = ShardedText(folder, block_length, seed=0)
            found[f"reading blocks of {block_length}"] = _rate(dataset, lambda rows: rows)
            found[f"reading batches of {ROWS} blocks of {block_length}"] = _rate(dataset, collate_packed)
    finally:
        torch.set_num_threads(threads)
    settings = {"origin": origin, "tokenizer": index["tokenizer"]["sha256"], "vocabulary": index["vocabulary"]}
    settings |= {"workers": workers, "seconds": SECONDS, "shard_tokens": index["settings"]["shard_tokens"]}
    result = results.record("bench data", found, seeds=[0], settings=settings)
    results.write_json(output / "results.json", result)
    return result


def _rate(dataset: ShardedText, collate: Callable[[list[Any]], Any]) -> dict[str, float]:
    rates, place = [], 0
    for _ in range(5):
        began, tokens = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < SECONDS / 5:
            collate([dataset[(place + row) % len(dataset)] for row in range(ROWS)])
            place, tokens = place + ROWS, tokens + ROWS * dataset.block_length
        rates.append(tokens / elapsed)
    return {"tokens per second": statistics.median(rates), "least": min(rates), "most": max(rates)}
