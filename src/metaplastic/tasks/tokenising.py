"""Tokenise documents once, to a folder of shards (`shards` says what is in it).

Every shard holds whole documents, of both splits, from one stretch of the source. It is written aside, renamed when
whole, and then entered in `progress.json` with the place of the source behind it; the last step makes that file the
index. So whatever kills the process, what is entered is whole, and the same command goes on behind it: the folder ends
with the bytes of an undisturbed run.

A document is held out if its hash says so: SHA-256 of its text, as a number from 0 to 1, is below the share. That needs
no memory, puts copies of a text on the same side, and holds out the same texts in whatever set they are.

Documents are tokenised in batches, here or in worker processes, and written in the order of the source. Memory holds a
few batches, however large a shard is; a document longer than a batch is one of its own.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout

from metaplastic.tasks.documents import Document
from metaplastic.tasks.shards import (
    FORMAT,
    INDEX,
    PROGRESS,
    SPLITS,
    STARTS,
    TOKENIZER,
    VERSION,
    check_content,
    check_tokenizer,
    counts,
    file_of,
    read_index,
    read_json,
    tokenizer_fingerprint,
)
from metaplastic.tasks.stream import Source
from metaplastic.tasks.text import batches, load_tokenizer, token_dtype, tokenise, vocabulary_size

CHARACTERS = 2**21  # of the documents that are tokenised together
STAGING, LOCK = ".staging", ".lock"
Tokens = tuple[np.ndarray, np.ndarray, np.ndarray]  # of a batch: ids, and of each document the length, and if held out


def write_shards(
    source: Source, origin: dict[str, Any], tokenizer: Any, output: str | Path, *, held_out: float = 0.01,
    shard_tokens: int = 2**27, workers: int = 1, report: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Tokenises the documents of `source` to the folder `output`; returns its index. Called again, it goes on.

    origin         of the source in JSON: where it is another, the folder is not gone on with
    tokenizer      any Hugging Face tokenizer with an eos token
    held_out       share of the documents for evaluation, from 0 to below 1
    shard_tokens   a shard ends with the document that reaches this, both splits together
    workers        processes that tokenise; 1: this one (fast tokenizers use several cores by themselves). It decides
                   nothing, so the command may go on with another number
    report         is called with the documents and tokens written so far

    Raises ValueError for a folder with other files, or with shards of another source or other settings, or that are
    damaged (before there is one, it begins anew); where another process writes in it; for a source without text.
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out: got {held_out!r}, expected a share of at least 0 and below 1")
    for name, value in (("shard_tokens", shard_tokens), ("workers", workers)):
        if value < 1:
            raise ValueError(f"{name}: got {value!r}, expected at least 1")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer: got a {type(tokenizer).__name__} without eos_token, expected one that has it")
    output = Path(output)
    with _alone(output), _swept(output / STAGING):
        settings = {"held_out": held_out, "shard_tokens": shard_tokens}
        index, place = _begin(output, origin, settings, tokenizer)
        if place is None:
            (output / PROGRESS).unlink(missing_ok=True)
            return index
        if place["source"] is not None:
            source.load_state_dict(place["source"])
        with _Tokenising(output / TOKENIZER, index["dtype"], held_out, workers) as tokenising:
            _write(output, index, tokenising.run(source, place["skip"]), report or (lambda documents, tokens: None))
        if not index["shards"]:
            raise ValueError("source: got no document with text, expected at least one")
        _write_json(output / INDEX, index)
        (output / PROGRESS).unlink()
    return index


@contextlib.contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Keeps other processes out of `output`, which is made if need be."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"output: {output} is a file, expected a folder")
    output.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output / LOCK, blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(f"output: another process is writing in {output}: wait for it, or choose another") from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _swept(staging: Path) -> Iterator[None]:
    """Deletes what was half written, by a killed process before and by this one after."""
    shutil.rmtree(staging, ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _begin(
    output: Path, origin: dict[str, Any], settings: dict[str, Any], tokenizer: Any
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The index so far, with what it holds checked, and the place to go on at; None: the folder is finished."""
    found = next((output / name for name in (INDEX, PROGRESS) if (output / name).is_file()), None)
    if found is None and (others := [file.name for file in output.iterdir() if not _may_be_ours(file)]):
        raise ValueError(f"output: {output} holds {min(others)} and no shards, expected a new or empty folder")
    tokenizer.save_pretrained(output / STAGING / TOKENIZER)
    tokenizer = load_tokenizer(output / STAGING / TOKENIZER)  # what training will read is what makes the tokens
    wanted = {"tokenizer": {"sha256": tokenizer_fingerprint(tokenizer)}, "origin": origin, "settings": settings}
    if found is not None:
        index = read_index(output) if found.name == INDEX else read_json(found)
        place = index.pop("place", None)
        changes = _changes(index, json.loads(json.dumps(wanted)))
        if not changes:
            check_tokenizer(output, index)
            check_content(output, index)
            return index, place
        if index["shards"]:
            raise ValueError(f"output: {output} holds other shards ({changes}): choose another output, or delete it")
        for split, part in product(SPLITS, ("tokens", "starts")):  # nothing is entered, so nothing is lost
            file_of(output, 0, split, part).unlink(missing_ok=True)
        found.unlink()
    index = {"format": FORMAT, "version": VERSION, **wanted}
    index |= {"dtype": token_dtype(tokenizer).name, "vocabulary": vocabulary_size(tokenizer), "shards": []}
    shutil.rmtree(output / TOKENIZER, ignore_errors=True)
    os.replace(output / STAGING / TOKENIZER, output / TOKENIZER)
    _write_json(output / PROGRESS, index | {"place": {"source": None, "skip": 0}})
    return index, {"source": None, "skip": 0}


def _changes(index: dict[str, Any], wanted: dict[str, Any]) -> str:
    """In words, what of `wanted` is otherwise in the index; "": nothing."""
    kinds = (("tokenizer", "tokenizer: "), ("origin", ""), ("settings", ""))
    keys = [(kind, said, key) for kind, said in kinds for key in sorted({*index[kind], *wanted[kind]})]
    pairs = [(f"{said}{key}", index[kind].get(key), wanted[kind].get(key)) for kind, said, key in keys]
    return ", ".join(f"{what} was {old!r} and is {new!r}" for what, old, new in pairs if old != new)


def _may_be_ours(file: Path) -> bool:
    """Hidden files, and what a process leaves that was killed before it wrote down its progress."""
    return file.name.startswith(".") or (file.name == TOKENIZER and file.is_dir())


class _Tokenising:
    """Batches of documents to tokens, in order, in this process or in others."""

    def __init__(self, tokenizer: Path, dtype: str, held_out: float, workers: int) -> None:
        self._workers, self._pool, self._call = workers, None, partial(_tokenise, dtype=dtype, held_out=held_out)
        if workers == 1:
            self._call = partial(self._call, tokenizer=load_tokenizer(tokenizer))
        else:
            context = multiprocessing.get_context("spawn")  # threads of PyTorch and tokenizers do not survive a fork
            self._pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(tokenizer,))

    def __enter__(self) -> "_Tokenising":
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, source: Source, skip: int) -> Iterator[tuple[dict[str, Any], int, Tokens]]:
        """Of each batch: the source's state before it and how many documents after that come first; its tokens."""
        if self._pool is None:
            for state, skipped, batch in _batches(source, skip):
                yield state, skipped, self._call(batch)
            return
        pending: deque[tuple[dict[str, Any], int, Any]] = deque()
        try:
            for state, skipped, batch in _batches(source, skip):
                pending.append((state, skipped, self._pool.submit(self._call, batch)))
                if len(pending) > 2 * self._workers:
                    yield (*pending[0][:2], pending.popleft()[2].result())
            while pending:
                yield (*pending[0][:2], pending.popleft()[2].result())
        except BrokenProcessPool as error:
            raise OSError(
                "workers: a process that tokenised was ended from outside (no memory left?): the same command goes on, "
                "with fewer workers if need be"
            ) from error


def _batches(source: Source, skip: int) -> Iterator[tuple[dict[str, Any], int, list[Document]]]:
    state, documents = source.state_dict(), iter(source)
    deque(islice(documents, skip), maxlen=0)
    for batch in batches(documents, CHARACTERS):
        yield state, skip, batch
        state, skip = source.state_dict(), 0


_tokenizer: Any = None  # of a worker process


def _start_worker(tokenizer: Path) -> None:
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are what uses the cores
    _tokenizer = load_tokenizer(tokenizer)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)  # a killed parent cannot end its workers


def _tokenise(batch: list[Document], dtype: str, held_out: float, tokenizer: Any = None) -> Tokens:
    pieces = [ids for _, ids in tokenise(batch, _tokenizer if tokenizer is None else tokenizer, np.dtype(dtype))]
    held = [is_held_out(text, held_out) for _, text in batch]
    return np.concatenate(pieces), np.array([len(piece) for piece in pieces]), np.array(held)


def is_held_out(text: str, share: float) -> bool:
    """Whether the hash of a text puts it among the share of texts that are for evaluation."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < share * 2**64


def _write(
    output: Path,
    index: dict[str, Any],
    tokenised: Iterator[tuple[dict[str, Any], int, Tokens]],
    report: Callable[[int, int], None],
) -> None:
    """Writes shards and enters each in `index` and in the folder's progress."""
    dtype, wanted = np.dtype(index["dtype"]).newbyteorder("<"), index["settings"]["shard_tokens"]
    shard, so_far = _Shard(output, len(index["shards"]), dtype), counts(index)
    documents, tokens = (sum(count[kind] for count in so_far.values()) for kind in ("documents", "tokens"))
    try:
        for state, skip, (ids, lengths, held) in tokenised:
            end = 0
            for number, (length, is_held) in enumerate(zip(lengths.tolist(), held.tolist(), strict=True), skip + 1):
                shard.add(SPLITS[is_held], ids[end : end + length])
                end += length
                if shard.tokens >= wanted:
                    index["shards"].append(shard.finish())
                    _write_json(output / PROGRESS, index | {"place": {"source": state, "skip": number}})
                    shard = _Shard(output, len(index["shards"]), dtype)
            documents, tokens = documents + len(lengths), tokens + len(ids)
            report(documents, tokens)
        if shard.tokens:
            index["shards"].append(shard.finish())
    finally:
        shard.close()


class _Shard:
    """The files of a shard that is being written."""

    def __init__(self, output: Path, number: int, dtype: np.dtype) -> None:
        self._output, self._number, self._dtype = output, number, dtype
        self._splits = {
            split: {part: _File(self._staged(split, part)) for part in ("tokens", "starts")} for split in SPLITS
        }
        self.tokens = 0

    def add(self, split: str, ids: np.ndarray) -> None:
        files = self._splits[split]
        files["starts"].write(np.array([files["tokens"].size], STARTS))
        files["tokens"].write(ids.astype(self._dtype, copy=False))
        self.tokens += len(ids)

    def finish(self) -> dict[str, Any]:
        """Gives the files their names; what the index says of them."""
        entry = {}
        for split, files in self._splits.items():
            entry[split] = {"documents": files["starts"].size, "tokens": files["tokens"].size, "sha256": {}}
            for part, file in files.items():
                entry[split]["sha256"] |= {part: file.finish()} if file.size else {}
        for split in SPLITS:
            for part in entry[split]["sha256"]:
                os.replace(self._staged(split, part), file_of(self._output, self._number, split, part))
        return entry

    def close(self) -> None:
        for files in self._splits.values():
            for file in files.values():
                file.close()

    def _staged(self, split: str, part: str) -> Path:
        return file_of(self._output / STAGING, self._number, split, part)


class _File:
    """A file of numbers that is made when the first is written, and hashed on the way."""

    def __init__(self, path: Path) -> None:
        self._path, self._hash, self.size = path, hashlib.sha256(), 0
        self._file: BinaryIO | None = None

    def write(self, numbers: np.ndarray) -> None:
        if self._file is None:
            self._path.parent.mkdir(exist_ok=True)
            self._file = self._path.open("wb")
        data = numbers.tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.size += len(numbers)

    def finish(self) -> str:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        return self._hash.hexdigest()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _write_json(file: Path, content: dict[str, Any]) -> None:
    """Readers see the old file or the whole new one."""
    staged = file.parent / STAGING / file.name
    staged.parent.mkdir(exist_ok=True)
    with staged.open("w") as data:
        data.write(json.dumps(content, indent=1) + "\n")
        data.flush()
        os.fsync(data.fileno())
    os.replace(staged, file)
