"""Data that comes with its own scoring: associative recall (`mqar`) and language modelling on text (`text`, `stream`).

Every task draws from a local seeded generator, so that the same seed gives the same rows whatever else the program
draws, and every synthetic task has a solver that reads the row alone. Datasets are torch datasets of `input_ids` and
`labels`, as the Hugging Face Trainer takes them: the model shifts the labels, and -100 marks what is not scored.
`PackedStream` is the iterable one; the others are map-style. `ShardedText` reads what `write_shards` tokenised once.
This room imports nothing else of the package.
"""

from metaplastic.tasks import documents, hub, mqar, shards, stream, text, tokenising
from metaplastic.tasks.documents import FileText, read_documents, split_documents, standard_library_documents
from metaplastic.tasks.hub import HubText
from metaplastic.tasks.mqar import MQARConfig, MQARDataset, Score, score
from metaplastic.tasks.shards import ShardedText
from metaplastic.tasks.stream import PackedStream, set_aside
from metaplastic.tasks.text import (
    PackedText,
    byte_tokenizer,
    collate_packed,
    load_tokenizer,
    train_tokenizer,
)
from metaplastic.tasks.tokenising import write_shards

__all__ = [
    "FileText",
    "HubText",
    "MQARConfig",
    "MQARDataset",
    "PackedStream",
    "PackedText",
    "Score",
    "ShardedText",
    "byte_tokenizer",
    "collate_packed",
    "documents",
    "hub",
    "load_tokenizer",
    "mqar",
    "read_documents",
    "score",
    "set_aside",
    "shards",
    "split_documents",
    "standard_library_documents",
    "stream",
    "text",
    "tokenising",
    "train_tokenizer",
    "write_shards",
]
