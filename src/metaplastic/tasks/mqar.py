"""Multi-query associative recall: read key-value pairs, then name the value of each key when it comes again.

A row of length L holds P pairs at positions 0 .. 2P-1, each key followed by its value, and then one query for each key:

    k_1 v_1 k_2 v_2 ... k_P v_P | . . k_2 . . . k_1 . k_P . ...

Queries sit at positions 2P + 2 * slot. The slots of a row are distinct and drawn one after another, the first pair
first, with weight (slot + 1) ** (power - 1): a power near 0 puts most queries early, a power of 1 spreads them evenly.
Everything else after the pairs is filler; the value is not written after the query. Labels follow the Hugging Face
convention, in which the model shifts them: where input_ids[t] is a query, labels[t + 1] is its value, and every other
label is -100.

With a vocabulary of size N, keys are tokens 1 .. N//2 - 1 and values are tokens N//2 .. N - 1; keys are distinct in a
row, and so are values. Filler:

    "zero"     token 0, which is neither a key nor a value
    "random"   tokens drawn evenly from the vocabulary without the row's own keys, so that questions stay well posed
    "legacy"   tokens drawn evenly from the whole vocabulary, as the published generator does; one may equal a key of
               the row that is still to be queried, and then the last token seen after that key is not its value.
               For comparison with published numbers only.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Integer
from torch import Tensor
from torch.utils.data import Dataset

IGNORED = -100
FILLERS = ("zero", "random", "legacy")


@dataclass(frozen=True)
class MQARConfig:
    """The shape of the task.

    sequence_length  even, at least 4 * pairs
    pairs            key-value pairs in a row, at least 1 and at most vocabulary // 2 - 1
    vocabulary       number of tokens, the filler token 0 included
    power            exponent of the query slots, above 0; 1 is uniform
    filler           "zero", "random" or "legacy" (see the module)

    Raises ValueError, naming the argument, for anything else.
    """

    sequence_length: int
    pairs: int
    vocabulary: int = 8192
    power: float = 0.01
    filler: str = "zero"

    def __post_init__(self) -> None:
        for name in ("sequence_length", "pairs", "vocabulary"):
            _check_count(name, getattr(self, name))
        if self.sequence_length % 2:
            raise ValueError(f"sequence_length: got {self.sequence_length}, expected an even number")
        if self.sequence_length < 4 * self.pairs:
            needed = f"at least {4 * self.pairs} for {self.pairs} pairs (2 tokens for a pair and 2 for its query)"
            raise ValueError(f"sequence_length: got {self.sequence_length}, expected {needed}")
        if self.pairs > self.vocabulary // 2 - 1:
            needed = f"at least {2 * self.pairs + 2} for {self.pairs} distinct keys (half of the tokens, without 0)"
            raise ValueError(f"vocabulary: got {self.vocabulary}, expected {needed}")
        if not (math.isfinite(self.power) and self.power > 0):
            raise ValueError(f"power: got {self.power!r}, expected a finite number above 0")
        if self.filler not in FILLERS:
            raise ValueError(f"filler: got {self.filler!r}, expected one of {', '.join(FILLERS)}")


class MQARDataset(Dataset[dict[str, Tensor]]):
    """Rows of the task, as `generate` makes them.

    config      the MQARConfig
    input_ids   [rows, L]      int16 where the vocabulary allows, else int32
    labels      [rows, L]      the same dtype; -100 everywhere but one position after each query
    distance    [rows, P]      int32, in the order of the pairs: position of a pair's query minus position of its key,
                               which is the age of the pair when it is asked for

    `dataset[i]` is dict(input_ids [L], labels [L]), int64; a slice or an index tensor gives a batch, int64 too.
    """

    def __init__(self, config: MQARConfig, input_ids: Tensor, labels: Tensor, distance: Tensor) -> None:
        self.config = config
        self.input_ids = input_ids
        self.labels = labels
        self.distance = distance

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: Any) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids[index].long(), "labels": self.labels[index].long()}

    @property
    def query_positions(self) -> Integer[Tensor, "rows pairs"]:
        """[rows, P] int64, in the order of the pairs: where each key is asked for, and so where the model answers.

        To score by age, set beside `distance`:  predictions.gather(1, query_positions) == input_ids[:, 1 : 2 * P : 2]
        """
        return self.distance.long() + 2 * torch.arange(self.config.pairs)


def generate(config: MQARConfig, rows: int, seed: int) -> MQARDataset:
    """Draw rows (at least 1). The same config, rows and seed give the same dataset; no global random state is touched.

    seed is at least 0. Raises ValueError for fewer rows or a negative seed.
    """
    _check_count("rows", rows)
    if seed < 0:
        raise ValueError(f"seed: got {seed}, expected an integer of at least 0")
    rng = np.random.default_rng(seed)
    length, pairs, vocabulary = config.sequence_length, config.pairs, config.vocabulary
    dtype = torch.int16 if vocabulary <= 2**15 else torch.int32
    input_ids = torch.zeros(rows, length, dtype=dtype)
    labels = torch.full((rows, length), IGNORED, dtype=dtype)
    distance = torch.empty(rows, pairs, dtype=torch.int32)

    # In pieces: their tables fit the processor's cache, and peak memory is little more than the result.
    piece = max(1, min(rows, 1024, 2**24 // vocabulary, 2**22 // length))
    tokens = torch.arange(vocabulary, dtype=dtype)[:, None].expand(-1, piece).contiguous().numpy()
    key_table, value_table = tokens[1 : vocabulary // 2], tokens[vocabulary // 2 :]
    for first in range(0, rows, piece):
        ids, targets, ages = (tensor[first : first + piece].numpy() for tensor in (input_ids, labels, distance))
        keys, values = (_draw_distinct(rng, table[:, : len(ids)], pairs) for table in (key_table, value_table))
        queries = 2 * pairs + 2 * _draw_slots(rng, len(ids), (length - 2 * pairs) // 2, pairs, config.power)
        ids[:, 0 : 2 * pairs : 2] = keys
        ids[:, 1 : 2 * pairs : 2] = values
        np.put_along_axis(ids, queries, keys, axis=1)
        np.put_along_axis(targets, queries + 1, values, axis=1)
        ages[:] = queries - 2 * np.arange(pairs)
        if config.filler != "zero":
            tail = ids[:, 2 * pairs :]
            filler = _draw_filler(rng, tail.shape, vocabulary, keys if config.filler == "random" else None)
            np.copyto(tail, filler, where=tail == 0, casting="same_kind")
    return MQARDataset(config, input_ids, labels, distance)


def solve(input_ids: Int[Tensor, "rows length"]) -> Int[Tensor, "rows length"]:
    """Answer by reading: for each token, the one that followed its last earlier occurrence; -1 where it is new.

    input_ids [rows, L]. Returns int64 [rows, L]; entry t is the answer to the token at t, as an argmax of logits is.
    It knows nothing of how rows are made, and is right at every query with "zero" and "random" filler.
    """
    ids = input_ids.long()
    order = ids.argsort(dim=1, stable=True)  # groups equal tokens and keeps each group in order of position
    grouped = ids.gather(1, order)
    earlier = torch.where(grouped[:, 1:] == grouped[:, :-1], order[:, :-1], -1)
    previous = torch.full_like(ids, -1).scatter_(1, order[:, 1:], earlier)
    return torch.where(previous >= 0, ids.gather(1, (previous + 1).clamp(min=0)), -1)


@dataclass(frozen=True)
class Score:
    """Right answers and questions. Scores of batches add up, so a total does not depend on how rows were batched."""

    correct: int = 0
    total: int = 0

    @property
    def accuracy(self) -> float:
        """correct / total, or NaN where nothing was asked."""
        return self.correct / self.total if self.total else math.nan

    def __add__(self, other: "Score") -> "Score":
        return Score(self.correct + other.correct, self.total + other.total)


def score(predictions: Tensor, labels: Integer[Tensor, "rows length"]) -> Score:
    """Count right answers where labels are not -100. Entry t of the predictions is compared with labels[t + 1].

    predictions   token ids, integer [rows, L], or logits, floating point [rows, L, V]
    labels        [rows, L], not shifted

    Raises ValueError where the shapes do not fit.
    """
    logits = predictions.is_floating_point()
    if predictions.ndim != labels.ndim + logits or predictions.shape[: labels.ndim] != labels.shape:
        expected = f"{'logits [rows, L, V]' if logits else 'token ids [rows, L]'} for labels {list(labels.shape)}"
        raise ValueError(f"predictions: got {predictions.dtype} {list(predictions.shape)}, expected {expected}")
    targets = labels[:, 1:]
    asked = targets != IGNORED
    answers = predictions[:, :-1][asked]
    if logits:
        answers = answers.argmax(dim=-1)
    return Score(int((answers == targets[asked]).sum()), int(asked.sum()))


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: got {value!r}, expected an integer of at least 1")


def _draw_distinct(rng: np.random.Generator, table: np.ndarray, count: int) -> np.ndarray:
    """Draw `count` choices without replacement from each column of a table [choices, rows] -> [rows, count].

    The first steps of a Fisher-Yates shuffle, in place. They are uniform whatever order a column starts in, so a table
    is used again as it is left.
    """
    columns = np.arange(table.shape[1])
    for step in range(count):
        chosen = rng.integers(step, len(table), size=len(columns))
        drawn = table[chosen, columns]
        table[chosen, columns] = table[step]
        table[step] = drawn
    return table[:count].T


def _draw_slots(rng: np.random.Generator, rows: int, slots: int, count: int, power: float) -> np.ndarray:
    """Draw `count` distinct slots one after another with weight (slot + 1) ** (power - 1) -> [rows, count].

    Exponential clocks with the weights as rates ring in just that order. In logarithms: steep weights underflow.
    """
    with np.errstate(divide="ignore"):
        alarm = np.log(rng.standard_exponential((rows, slots), dtype=np.float32))
    alarm += ((1 - power) * np.log(np.arange(1, slots + 1))).astype(np.float32)
    return alarm.argsort(axis=1)[:, :count]


def _draw_filler(
    rng: np.random.Generator, shape: tuple[int, ...], vocabulary: int, keys: np.ndarray | None
) -> np.ndarray:
    """Tokens [rows, n] drawn evenly from the vocabulary, without the keys [rows, P] of the same row if given."""
    filler = rng.integers(0, vocabulary, size=shape, dtype=np.int32)
    if keys is not None:
        taken = np.zeros((shape[0], vocabulary), dtype=bool)
        np.put_along_axis(taken, keys.astype(np.int64), True, axis=1)
        row, column = np.nonzero(np.take_along_axis(taken, filler.astype(np.int64), axis=1))
        while len(row):  # fewer than half of the tokens are taken: a round settles most of what is left
            filler[row, column] = rng.integers(0, vocabulary, size=len(row))
            again = taken[row, filler[row, column]]
            row, column = row[again], column[again]
    return filler
