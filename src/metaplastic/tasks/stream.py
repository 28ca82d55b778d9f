"""Blocks of tokens from a stream of documents that need not fit in memory or ever end, shuffled, with exact resume.

Documents are tokenised and packed as in `text.PackedText`: without shuffling, the first pass gives its blocks.

The shuffle: blocks are gathered in windows of `window` blocks one after another, and each window is put in an order
drawn from (seed, pass, number of the window). So memory holds one window, and a place in the shuffled stream is where
its window begins plus how many of its blocks are spent. That beginning is the state of the source before the batch of
documents in which it lies, and how many tokens of that batch come before it: a value of a few numbers, without tokens.
To resume, that window is tokenised again and nothing before it. Every pass over the data has another order.
"""

import dataclasses
import hashlib
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from metaplastic.tasks.documents import Document
from metaplastic.tasks.text import batches, check_packing, cut_block, token_dtype, tokenise

CHARACTERS = 2**20  # of the documents that are tokenised together
PROBED = 64  # blocks in the fingerprint


@runtime_checkable
class Source(Protocol):
    """What gives documents from its state on, and whose state is the place after the document last given (JSON)."""

    def __iter__(self) -> Iterator[Document]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class _Window:
    """Where a window begins."""

    epoch: int  # passes over the data before it
    number: int  # windows of this pass before it
    first: int  # blocks of all passes before it
    source: dict[str, Any]  # the source before the batch of documents in which it begins
    skip: int = 0  # tokens of that batch before it
    dropped: int = 0  # tokens left out so far, at the ends of passes
    sha256: str | None = None  # of its tokens and document borders; None only of one that has not been read


def set_aside(source: Source, count: int) -> list[Document]:
    """The next `count` documents (fewer where the source ends); its state is then the place after them."""
    documents: list[Document] = []
    for document in source:
        documents.append(document)
        if len(documents) == count:
            break
    return documents


def goes_on(source: Source) -> bool:
    """Whether `source` has another document; its state is not moved."""
    state = source.state_dict()
    document = next(iter(source), None)
    source.load_state_dict(state)
    return document is not None


class PackedStream(IterableDataset[dict[str, Tensor]]):
    """Blocks of `block_length` tokens without end: pass after pass over the documents of `source`.

    source         documents from its present state on; every pass begins there
    tokenizer      any Hugging Face tokenizer with an eos token
    block_length   tokens in a block, at least 2
    window         blocks that are shuffled together; 1: the order of the source
    seed           of the order
    without        documents with one of these texts are left out: held-out text stays held out if it comes again

    Rows are those of `PackedText`; `collate_packed` makes batches. The end of a pass that does not fill a block is left
    out. Iterating begins at the state. `state_dict(n)` is the place after n blocks, counted from the very first, n
    never falling: a reader that fetches ahead asks for what it has used. After `load_state_dict`, iteration gives what
    it would have given.

    A place is one in the window of the block before it, also at that window's end, so that there is always text to
    compare. Raises ValueError for a tokenizer without eos, for a source without text for one block, and where the text
    of that window is not what it was. Text before and after that window is not compared.
    """

    def __init__(
        self, source: Source, tokenizer: Any, block_length: int, *, window: int = 2048, seed: int = 0,
        without: Iterable[str] = (),
    ) -> None:  # fmt: skip
        check_packing(tokenizer, block_length)
        if not isinstance(window, int) or window < 1:
            raise ValueError(f"window: got {window!r}, expected an integer of at least 1")
        self.block_length, self.window, self.seed = block_length, window, seed
        self._source, self._tokenizer, self._dtype = source, tokenizer, token_dtype(tokenizer)
        self._without = {_digest(text) for text in without}
        self._start = source.state_dict()
        self._begin, self._position = _Window(0, 0, 0, self._start), 0
        self._windows = deque([self._begin])  # those that hold blocks given and not yet known to be used, and the next

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the first blocks of a pass, in the order of the source: reads that much of it."""
        window, *_ = next(self._read(_Window(0, 0, 0, self._start), PROBED))
        return str(window.sha256)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        position = self._position
        self._windows = deque([self._begin])
        for window, tokens, starts, following in self._read(self._begin, self.window):
            if (expected := self._windows[-1].sha256) not in (None, window.sha256):
                raise ValueError(
                    f"dataset: its text has changed where this run goes on (block {window.first} of the stream: "
                    f"SHA-256 {str(window.sha256)[:12]}, expected {str(expected)[:12]})"
                )
            self._windows[-1] = window
            self._windows.append(following)
            order = list(range(len(tokens) // self.block_length))
            random.Random(f"{self.seed} {window.epoch} {window.number}").shuffle(order)
            for index in order[position:]:
                yield cut_block(tokens, starts, index, self.block_length)
            position = max(position - len(order), 0)

    def state_dict(self, used: int) -> dict[str, Any]:
        """The place after `used` blocks, counted from the very first. Earlier places are forgotten.

        "epoch" and "dropped" are the passes completed, and the tokens left out at their ends, before its window.
        """
        while len(self._windows) > 1 and self._windows[1].first < used:
            self._windows.popleft()
        if used < (first := self._windows[0].first):
            raise ValueError(f"used: got {used} blocks, expected at least {first}: places before that are forgotten")
        return dataclasses.asdict(self._windows[0]) | {"position": used - first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self._position = state.pop("position")
        self._begin = _Window(**state)
        self._windows = deque([self._begin])

    def share(self, batch_size: int, index: int, count: int) -> "IterableDataset[dict[str, Tensor]]":
        """For process `index` of `count`: of batches of so many blocks, every `count`-th from its own on."""
        return _Share(self, batch_size, index, count)

    def _read(self, window: _Window, blocks: int) -> Iterator[tuple[_Window, np.ndarray, np.ndarray, _Window]]:
        """Windows of `blocks` blocks from one on, each with its tokens, document starts, and the window after it."""
        wanted = blocks * self.block_length
        while True:
            skip = window.skip
            tokens, starts = np.empty(0, dtype=self._dtype), np.empty(0, dtype=np.int64)
            for before, batch, borders in self._batches(window.source):
                starts = np.append(starts, borders[borders >= skip] - skip + len(tokens))
                tokens = np.append(tokens, batch[skip:])
                skip = 0
                while len(tokens) >= wanted:  # so what is left over is always the end of this batch
                    left = len(tokens) - wanted
                    place = (window.epoch, window.number + 1, window.first + blocks)
                    following = _Window(*place, before, len(batch) - left, window.dropped)
                    yield _read(window, tokens[:wanted], starts, following)
                    window, tokens, starts = following, tokens[wanted:], starts[starts >= wanted] - wanted
            full = len(tokens) // self.block_length
            if full == 0 and window.number == 0:
                needed = f"at least block_length = {self.block_length}"
                raise ValueError(f"dataset: got {len(tokens)} tokens of text to train on, expected {needed}")
            rest = len(tokens) - full * self.block_length
            following = _Window(window.epoch + 1, 0, window.first + full, self._start, 0, window.dropped + rest)
            if full:
                yield _read(window, tokens[: full * self.block_length], starts, following)
            window = following

    def _batches(self, state: dict[str, Any]) -> Iterator[tuple[dict[str, Any], np.ndarray, np.ndarray]]:
        """To the end of the pass: the source's state before each batch of documents, its tokens, where they start."""
        self._source.load_state_dict(state)
        for batch in batches(self._wanted(), CHARACTERS):
            pieces = [ids for _, ids in tokenise(batch, self._tokenizer, self._dtype)]
            yield state, np.concatenate(pieces), np.cumsum([0, *(len(piece) for piece in pieces[:-1])])
            state = self._source.state_dict()

    def _wanted(self) -> Iterator[Document]:
        for name, text in self._source:
            if not self._without or _digest(text) not in self._without:
                yield name, text


class _Share(IterableDataset[dict[str, Tensor]]):
    def __init__(self, stream: PackedStream, batch_size: int, index: int, count: int) -> None:
        self.stream, self.batch_size, self.index, self.count = stream, batch_size, index, count

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number, row in enumerate(self.stream):
            if number // self.batch_size % self.count == self.index:
                yield row


def _read(window: _Window, tokens: np.ndarray, starts: np.ndarray, following: _Window):
    starts = starts[starts < len(tokens)]
    sha256 = hashlib.sha256(tokens.tobytes() + starts.tobytes()).hexdigest()
    return dataclasses.replace(window, sha256=sha256), tokens, starts, following


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()
