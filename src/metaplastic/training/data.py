"""From a configuration to blocks of tokens: files read whole, a dataset read as a stream, or shards."""

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from ..tasks import documents, hub, shards, stream, text, tokenising
from .config import TrainConfig

logger = logging.getLogger("metaplastic")


class Data(NamedTuple):
    """What is trained on and what is held out, and what they are in words and in a hash."""

    train: text.PackedText | stream.PackedStream | shards.ShardedText
    held_out: text.PackedText | shards.ShardedText
    description: str  # without paths: it is published with the model
    fingerprint: str

    def changed(self) -> str:
        """What to say if the fingerprint is not that of an earlier call."""
        if isinstance(self.train, shards.ShardedText):
            return "data: the shards have changed"
        streamed = isinstance(self.train, stream.PackedStream)
        return "dataset: its first documents have changed" if streamed else "files: their text has changed"


def load_data(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Data:
    if config.data is not None:
        return _shards(config, config.data)
    return _files(config, tokenizer) if config.dataset is None else _stream(config, config.dataset, tokenizer)


@contextlib.contextmanager
def _named(theirs: str, ours: str) -> Iterator[None]:
    """In errors of the text room, the name of our argument instead of its own."""
    try:
        yield
    except (ValueError, OSError) as error:
        error.args = (str(error).replace(theirs, ours, 1),)
        raise


def _files(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Data:
    if config.files:
        with _named("paths", "files"):
            found = documents.read_documents(config.files, separator=config.separator)
        names = ", ".join(Path(file).resolve().name for file in config.files[:5])
        description = f"{len(found):,} documents of {names}{', ...' if len(config.files) > 5 else ''}"
    else:
        found = documents.standard_library_documents(max_bytes=config.max_bytes)
        description = f"{len(found):,} texts of the Python standard library"
    training, held_out = documents.split_documents(found, config.held_out, config.seed)
    train_blocks = text.PackedText(training, tokenizer, config.block_length)
    with _named("documents", "held-out documents"):
        eval_blocks = text.PackedText(held_out, tokenizer, config.block_length)
    description += f"; {_share(train_blocks, eval_blocks):.1%} of the tokens held out"
    return Data(train_blocks, eval_blocks, description, train_blocks.fingerprint + eval_blocks.fingerprint)


def _shards(config: TrainConfig, folder: str) -> Data:
    training = shards.ShardedText(folder, config.block_length, seed=config.seed)
    held_out = shards.ShardedText(folder, config.block_length, split="held_out")
    counts = tokenising.counts(training.index)
    origin = training.index["origin"]
    source = f"dataset {origin['dataset']}" if "dataset" in origin else str(origin.get("files"))
    documents, tokens = (sum(count[kind] for count in counts.values()) for kind in ("documents", "tokens"))
    share = _share(training, held_out)
    description = f"{documents:,} documents of {source}, tokenised to {tokens:,} tokens; {share:.1%} of them held out"
    fingerprint = hashlib.sha256((training.fingerprint + held_out.fingerprint).encode()).hexdigest()
    return Data(training, held_out, description, fingerprint)


def _share(training: text.PackedText | shards.ShardedText, held_out: text.PackedText | shards.ShardedText) -> float:
    """Of tokens: documents are held out whole, so it is rarely the share of documents that was asked for."""
    return len(held_out) / (len(training) + len(held_out))


def _stream(config: TrainConfig, dataset: str, tokenizer: PreTrainedTokenizerBase) -> Data:
    def source(split: str) -> hub.HubText:
        options = {"column": config.text_column, "revision": config.dataset_revision}
        return hub.HubText(dataset, config.dataset_config, split=split, **options)

    training = source(config.split)
    held_out = stream.set_aside(source(config.eval_split) if config.eval_split else training, config.held_out_documents)
    if not config.eval_split and not stream.goes_on(training):
        found = f"dataset {dataset} has {len(held_out)} documents with text"
        raise ValueError(f"held_out_documents: got {config.held_out_documents}, but {found}: none is left to train on")
    with _named("documents", f"held-out documents ({len(held_out)} of {dataset})"):
        eval_blocks = text.PackedText(held_out, tokenizer, config.block_length)
    options = {"window": config.shuffle_window, "seed": config.seed, "without": (each for _, each in held_out)}
    train_blocks = stream.PackedStream(training, tokenizer, config.block_length, **options)
    fingerprint = hashlib.sha256((train_blocks.fingerprint + eval_blocks.fingerprint).encode()).hexdigest()
    name = Path(dataset).resolve().name if os.path.exists(dataset) else dataset
    description = ", ".join(
        [
            f"dataset {name}",
            *([f"configuration {config.dataset_config}"] if config.dataset_config else []),
            *([f"revision {config.dataset_revision}"] if config.dataset_revision else []),
            f"split {config.split}, column {config.text_column}",
        ]
    )
    description += f", streamed; held out: the first {len(held_out):,} documents of {config.eval_split or config.split}"
    return Data(train_blocks, eval_blocks, description, fingerprint)


def announce(config: TrainConfig, data: Data) -> None:
    """Says how much text is on either side: documents are split whole, so few or uneven ones miss the share."""
    held_out = len(data.held_out) * config.block_length
    if isinstance(data.train, stream.PackedStream):
        logger.info("%s, %s tokens", data.description, f"{held_out:,}")
        return
    size, share = len(data.train) * config.block_length, _share(data.train, data.held_out)
    logger.info("%s tokens to train on, %s held out (%.1f%%)", f"{size:,}", f"{held_out:,}", 100 * share)
    if config.data is None and not config.held_out / 3 < share < 3 * config.held_out:
        logger.warning(
            "warning: %.1f%% of the tokens are held out where %.1f%% were asked for: documents are held out whole; "
            "give more files, or --separator to split them into documents", 100 * share, 100 * config.held_out,
        )  # fmt: skip
