"""Text that was tokenised once, in a folder: read through memory maps, in an order that is computed and never stored.

The format. `metaplastic data tokenise` (module `tokenising`) writes, for shard number n and each split that has
documents in it,

    n.SPLIT.tokens   the tokens of whole documents one after another, each ended by eos: little-endian uint8, uint16 or
                     uint32, the smallest that holds every id
    n.SPLIT.starts   where the documents begin in that file, in tokens: little-endian uint64
    tokenizer/       a copy of the tokenizer
    index.json       counts, and the SHA-256 of every file; it is written last, so a folder with it is whole

The shards of a split, one after another, are one stream of tokens, and blocks of any length are cut from it across the
borders of shards, exactly as `text.PackedText` cuts its own.

The order. Let n be the number of blocks, a = ceil(sqrt(n)) and b = ceil(n / a). Every place below a b is a pair
(l, r) = divmod(place, b), and for any functions F_k, G_k, each of

    (l, r) -> (l + F_k(r) mod a, r)        (l, r) -> (l, r + G_k(l) mod b)

is invertible (a Feistel network), so their composition is a permutation of the a b places. Where it leads to n or
beyond, it is applied again until it leads below n, which makes it a permutation of the n blocks; a b - n < a, so that
is rare. The functions are keyed hashes: place i of any pass over any amount of text costs microseconds and no memory.
"""

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from metaplastic.tasks.text import cut_block, load_tokenizer, vocabulary_size

INDEX, PROGRESS, TOKENIZER = "index.json", "progress.json", "tokenizer"
FORMAT, VERSION = "metaplastic shards", 1
SPLITS = ("train", "held_out")
STARTS = np.dtype("<u8")
ROUNDS = 4
MAPPED = 128  # shards of which a process holds the memory maps: each needs two file descriptors


def file_of(folder: Path, number: int, split: str, part: str) -> Path:
    """Of shard `number`, the file with the "tokens" or the "starts" of a split."""
    return folder / f"{number:05}.{split}.{part}"


def read_index(folder: str | Path) -> dict[str, Any]:
    """The index of a folder of shards that is whole.

    Raises FileNotFoundError for a folder that is not there, ValueError for one that is not finished or holds no shards,
    or an index that is not one.
    """
    folder, expected = Path(folder), "expected a folder written by `metaplastic data tokenise`"
    if not folder.is_dir():
        raise FileNotFoundError(f"data: {folder} is no folder, {expected}")
    if not (folder / INDEX).is_file():
        if (folder / PROGRESS).is_file():
            raise ValueError(f"data: {folder} is not finished: the same `metaplastic data tokenise` command goes on")
        raise ValueError(f"data: {folder} has no {INDEX}, {expected}")
    index = read_json(folder / INDEX)
    following = [file_of(folder, len(index["shards"]), split, "tokens") for split in SPLITS]
    if beyond := next((file for file in following if file.exists()), None):
        raise ValueError(f"data: {folder / INDEX} names {len(index['shards'])} shards, but there is {beyond.name}")
    return index


def read_json(file: Path) -> dict[str, Any]:
    """An index or the beginnings of one; raises ValueError for anything else."""
    try:
        index = json.loads(file.read_text())
        if index["format"] != FORMAT:
            raise ValueError(f"format {index['format']!r}, expected {FORMAT!r}")
        if index["version"] != VERSION:
            raise ValueError(f"version {index['version']!r}, expected {VERSION}, which this program reads")
        for part in (index["tokenizer"]["sha256"].encode(), index["origin"].keys(), index["settings"].keys()):
            len(part)
        if file.name == PROGRESS:
            len((index["place"]["source"], index["place"]["skip"]))
        size, dtype = index["vocabulary"], index["dtype"]
        if type(size) is not int or not 0 < size <= 2**32 or dtype != np.min_scalar_type(size - 1).name:
            raise ValueError(f"vocabulary {size!r} and dtype {dtype!r}, which do not fit")
        for number, shard in enumerate(index["shards"]):
            for split in SPLITS:
                _check_entry(shard[split], f"shard {number}, {split}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"data: {file} is no index of shards ({type(error).__name__}: {error})") from error
    return index


def _check_entry(entry: dict[str, Any], where: str) -> None:
    """What the index says of one split of a shard: counts that can be, and a hash of each file they speak of."""
    documents, tokens, sha256 = entry["documents"], entry["tokens"], entry["sha256"]
    if not all(type(count) is int and count >= 0 for count in (documents, tokens)):
        raise ValueError(f"{where}: {documents!r} documents of {tokens!r} tokens, expected numbers")
    if documents > tokens or (tokens and not documents):  # each ends in a token
        raise ValueError(f"{where}: {documents} documents of {tokens} tokens, which cannot be")
    if set(sha256) != ({"tokens", "starts"} if tokens else set()):
        raise ValueError(f"{where}: hashes of {sorted(sha256)} for {tokens} tokens")
    if not all(re.fullmatch("[0-9a-f]{64}", each) for each in sha256.values()):
        raise ValueError(f"{where}: a SHA-256 that is none")


def counts(index: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Of each split, the number of documents and tokens."""
    kinds = ("documents", "tokens")
    return {split: {kind: sum(shard[split][kind] for shard in index["shards"]) for kind in kinds} for split in SPLITS}


def tokenizer_of(folder: str | Path) -> Any:
    """The tokenizer that made the shards; raises ValueError if the copy in the folder is another one."""
    return check_tokenizer(Path(folder), read_index(folder))


def check_tokenizer(folder: Path, index: dict[str, Any]) -> Any:
    """The folder's copy of the tokenizer; raises ValueError if it is not the one that `index` speaks of."""
    expected, place = index["tokenizer"]["sha256"], folder / TOKENIZER
    try:
        tokenizer = load_tokenizer(place)
    except OSError as error:
        raise ValueError(f"data: {place} holds no tokenizer that can be read ({error})") from error
    if (found := tokenizer_fingerprint(tokenizer)) != expected:
        raise ValueError(f"data: {place} is not the tokenizer of these shards (SHA-256 {found}, expected {expected})")
    if (size := vocabulary_size(tokenizer)) != index["vocabulary"]:
        raise ValueError(f"data: {folder / INDEX} names {index['vocabulary']} ids, but its tokenizer has {size}")
    return tokenizer


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of what decides the tokens of a text: the same for a copy, wherever it was saved."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = {"class": type(tokenizer).__name__} if backend is None else json.loads(backend.to_str())
    whole = {name: part for name, part in whole.items() if name not in ("truncation", "padding", "decoder")}
    whole |= {"vocabulary": tokenizer.get_vocab(), "eos": tokenizer.eos_token_id}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def check_sizes(folder: Path, index: dict[str, Any]) -> None:
    """Raises ValueError, with the name of the file, where one is missing, too many or not as long as it was written."""
    for number, shard in enumerate(index["shards"]):
        for split in (split for split in SPLITS if not shard[split]["tokens"]):
            if (file := file_of(folder, number, split, "tokens")).exists():
                raise ValueError(f"data: {file} is there, expected none: the index names no document of it")
    for file, bytes_, _ in _files(folder, index):
        if not file.is_file():
            raise ValueError(f"data: {file} is missing")
        if (found := file.stat().st_size) != bytes_:
            raise ValueError(f"data: {file} has {found:,} bytes, expected {bytes_:,}: it is damaged or of another set")


def check_content(folder: Path, index: dict[str, Any]) -> None:
    """Reads everything; raises ValueError, with the name of the file, where one is not what was written."""
    check_sizes(folder, index)
    for file, _, expected in _files(folder, index):
        with file.open("rb") as data:
            found = hashlib.file_digest(data, "sha256").hexdigest()
        if found != expected:
            raise ValueError(f"data: {file} is damaged: SHA-256 {found}, expected {expected}")


def _files(folder: Path, index: dict[str, Any]) -> Iterator[tuple[Path, int, str]]:
    for number, shard in enumerate(index["shards"]):
        for split in SPLITS:
            sizes = {"tokens": shard[split]["tokens"] * np.dtype(index["dtype"]).itemsize}
            sizes["starts"] = shard[split]["documents"] * STARTS.itemsize
            for part, sha256 in shard[split]["sha256"].items():  # none where the split has no document in this shard
                yield file_of(folder, number, split, part), sizes[part], sha256


class Permutation:
    """`permutation(i)` for i below `size`: a permutation of range(size), drawn from `key` (module docstring)."""

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._rows = math.isqrt(max(size - 1, 0)) + 1
        self._columns = -(-size // self._rows)
        self._key = hashlib.blake2b(key.encode(), digest_size=32).digest()

    def __call__(self, place: int) -> int:
        while True:
            left, right = divmod(place, self._columns)
            for number in range(ROUNDS):
                left = (left + self._hash(2 * number, right)) % self._rows
                right = (right + self._hash(2 * number + 1, left)) % self._columns
            place = left * self._columns + right
            if place < self.size:
                return place

    def _hash(self, function: int, value: int) -> int:
        data = function.to_bytes(1, "little") + value.to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(data, key=self._key, digest_size=8).digest(), "little")


class ShardedText(Dataset[dict[str, Tensor]]):
    """The blocks of `block_length` tokens of a folder of shards, cut across documents and shards.

    folder         of `metaplastic data tokenise`
    block_length   tokens in a block, at least 2: any, whatever was tokenised before
    split          "train" or "held_out"
    seed           of the order of the blocks, which is another one in every pass (`set_epoch`, which the Hugging Face
                   Trainer calls; its sampler should then be sequential); None: the order of the text

    `dataset[i]` is as of `text.PackedText`: input_ids, labels with -100 at document starts, starts. Memory does not
    grow with the text. A pickled one (for the workers of a DataLoader) holds the folder's name, not the data; workers
    that outlive a pass (persistent_workers) do not hear of the next one and keep its order.

    Raises ValueError for files that are missing or not as long as they should be, and for text that does not fill one
    block; when a block is read, for an id beyond the vocabulary. `check_content` compares every byte.
    """

    def __init__(self, folder: str | Path, block_length: int, *, split: str = "train", seed: int | None = None) -> None:
        if not isinstance(block_length, int) or block_length < 2:
            raise ValueError(f"block_length: got {block_length!r}, expected an integer of at least 2")
        if split not in SPLITS:
            raise ValueError(f"split: got {split!r}, expected one of {', '.join(map(repr, SPLITS))}")
        self.folder, self.block_length, self.split, self.seed = Path(folder), block_length, split, seed
        self.index = read_index(folder)
        check_sizes(self.folder, self.index)
        found = [(number, shard[split]["tokens"]) for number, shard in enumerate(self.index["shards"])]
        self._numbers = [number for number, tokens in found if tokens]
        self._offsets = np.cumsum([0, *(tokens for _, tokens in found if tokens)])  # where shards begin in the stream
        self.tokens = int(self._offsets[-1])
        if self.tokens < block_length:
            needed = f"expected at least block_length = {block_length}"
            share = "larger" if split == "held_out" else "" if self.tokens else "smaller"
            needed += f": tokenise with a {share} share held out (--held-out)" if share else ""
            raise ValueError(f"data: {self.folder} has {self.tokens} tokens in its split {split!r}, {needed}")
        self.dropped_tokens = self.tokens % block_length
        self._open = functools.lru_cache(MAPPED)(self._map)
        self.set_epoch(0)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what the index says of the tokens, the document borders and the tokenizer: no token is read."""
        parts = [shard[self.split] for shard in self.index["shards"]]
        whole = [self.index["tokenizer"]["sha256"], self.index["dtype"], parts]
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()

    def set_epoch(self, epoch: int) -> None:
        """Takes the order of pass number `epoch`."""
        self.epoch = epoch
        self._order = None if self.seed is None else Permutation(len(self), f"{self.seed} {epoch}")

    def __len__(self) -> int:
        return self.tokens // self.block_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index: got {index}, expected a block number below {len(self)}")
        index = int(index) % len(self)
        begin = (index if self._order is None else self._order(index)) * self.block_length
        end = begin + self.block_length
        pieces, starts = [], []
        shard = int(np.searchsorted(self._offsets, begin, side="right")) - 1
        while begin < end:
            offset, tokens, borders = int(self._offsets[shard]), *self._open(shard)
            piece = tokens[begin - offset : end - offset]
            if (largest := int(piece.max())) >= self.index["vocabulary"]:
                expected = f"expected ids below {self.index['vocabulary']}"
                raise ValueError(
                    f"data: {self._file(shard, 'tokens')} is damaged: it holds the id {largest}, {expected}"
                )
            first, last = np.searchsorted(borders, np.array([begin - offset, begin - offset + len(piece)], STARTS))
            inside = borders[first:last].astype(np.int64) + (offset - end + self.block_length)
            if len(inside) and not (inside[0] >= 0 and inside[-1] < self.block_length and (np.diff(inside) > 0).all()):
                raise ValueError(f"data: {self._file(shard, 'starts')} is damaged: its positions do not rise")
            pieces.append(piece)
            starts.append(inside)
            begin, shard = begin + len(piece), shard + 1
        return cut_block(np.concatenate(pieces), np.concatenate(starts), 0, self.block_length)

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild = functools.partial(ShardedText, split=self.split, seed=self.seed)
        return rebuild, (str(self.folder), self.block_length), {"epoch": self.epoch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.set_epoch(state["epoch"])

    def lengths(self) -> Iterator[np.ndarray]:
        """Of each shard, how many tokens its documents have, eos included."""
        for shard in range(len(self._numbers)):
            tokens, borders = self._open(shard)
            yield np.diff(np.append(borders.astype(np.int64), len(tokens)))

    def histogram(self) -> dict[int, int]:
        """How many documents have from n to below 2 n tokens, for n = 1, 2, 4, ..."""
        total = np.zeros(64, dtype=np.int64)
        for lengths in self.lengths():
            total += np.bincount(np.frexp(lengths)[1] - 1, minlength=64)
        filled = np.flatnonzero(total)
        return {2**n: int(total[n]) for n in range(filled[0], filled[-1] + 1)}

    def document(self, number: int, tokens: int) -> np.ndarray:
        """The first `tokens` ids of the document of that number, in the order of the text."""
        for shard, lengths in enumerate(self.lengths()):
            if number < len(lengths):
                ids, borders = self._open(shard)
                return ids[int(borders[number]) :][: min(tokens, int(lengths[number]))]
            number -= len(lengths)
        raise IndexError(f"number: got {number} beyond the last document")

    def _file(self, shard: int, part: str) -> Path:
        return file_of(self.folder, self._numbers[shard], self.split, part)

    def _map(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and document starts of the shard of that number, among those that have some."""
        tokens = np.memmap(self._file(shard, "tokens"), np.dtype(self.index["dtype"]).newbyteorder("<"), mode="r")
        starts = np.memmap(self._file(shard, "starts"), STARTS, mode="r")
        if starts[0] != 0 or starts[-1] >= len(tokens):
            raise ValueError(f"data: {self._file(shard, 'starts')} is damaged: its ends are not those of its text")
        return tokens.view(np.ndarray), starts.view(np.ndarray)  # slices of a memmap object are slow to make
