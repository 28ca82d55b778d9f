"""Language modelling on text: tokenizers of our own, and blocks of tokens that know their documents.

A document is a pair (name, text). `PackedText` writes all documents one after another, each ended by the tokenizer's
end-of-sequence token, and cuts the stream in blocks. Nothing is predicted from another document: labels are -100 at the
first token of every document and of every block, and the model shifts labels (labels[t + 1] is predicted from token t).
With `collate_packed` the state of a recurrent model does not cross documents either.

transformers and tokenizers are imported only by the functions that need them.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from metaplastic.tasks.documents import Document
from metaplastic.tasks.hub import unreachable

if TYPE_CHECKING:
    import transformers

IGNORED = -100
END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"


def byte_tokenizer() -> "transformers.PreTrainedTokenizerFast":
    """A tokenizer whose ids 0..255 are the bytes of UTF-8 text: nothing is trained, downloaded or unknown.

    256 is "<|endoftext|>": end and beginning of sequence and the mark between documents. 257 is "<|padding|>", on its
    own because the usual collators hide padding from the loss: with one id for both, a model would never learn to end.
    It pads on the left, as generation from a batch needs. save_pretrained writes a folder that AutoTokenizer reads.
    One call takes about 200 bytes of memory for each byte of a text: give long text in pieces, or to `PackedText`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The characters by which byte-level tokenizers name bytes: the byte's own where it prints, else the next above 255.
    printable = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _with_special_tokens(backend)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "transformers.PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer of at most `vocab_size` entries: the same texts give the same one.

    Nothing is unknown to it, as all bytes are in it. "<|endoftext|>" is id 0, "<|padding|>" id 1, for what they are for
    in `byte_tokenizer`. Pairs that occur once are not merged, so little text gives fewer entries. Memory grows with the
    number of different words. Raises ValueError for a size below 258, all bytes and those two.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 258:
        raise ValueError(f"vocab_size: got {vocab_size}, expected at least 258: 256 bytes and two special tokens")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=[END_OF_TEXT, PADDING], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    backend.train_from_iterator(texts, trainer)
    return _with_special_tokens(backend)


def _with_special_tokens(backend: Any) -> "transformers.PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        padding_side="left",
        clean_up_tokenization_spaces=False,  # it would drop the space before a full stop
    )


def load_tokenizer(name_or_path: str | Path | None) -> "transformers.PreTrainedTokenizerBase":
    """None or "bytes": `byte_tokenizer`. Else a folder, or a name on the Hugging Face hub, without remote code.

    Where the hub cannot be reached, the name must be in the local cache. Raises OSError where there is no tokenizer.
    """
    if name_or_path is None or str(name_or_path) == "bytes":
        return byte_tokenizer()
    from transformers import AutoTokenizer

    offline = None if os.path.exists(name_or_path) else unreachable()
    try:
        return AutoTokenizer.from_pretrained(
            str(name_or_path), trust_remote_code=False, local_files_only=offline is not None
        )
    except Exception as error:  # of a broken file, tokenizers and transformers make errors of many kinds
        expected = "'bytes', a folder with a saved tokenizer, or the name of one on the Hugging Face hub"
        reason = error if offline is None else f"not in the local cache, and {offline}"
        raise OSError(f"name_or_path: got {str(name_or_path)!r}, expected {expected} ({reason})") from error


class PackedText(Dataset[dict[str, Tensor]]):
    """Documents as blocks of `block_length` tokens, across document borders and with the borders known.

    documents      (name, text) pairs; each is tokenised without the tokenizer's own beginning or end and followed by
                   its eos token. Text that spells a special token is text, so that it cannot fake a border
    tokenizer      any Hugging Face tokenizer with an eos token
    block_length   tokens in a block, at least 2

    `dataset[i]` is a dict of int64 tensors: input_ids [block_length]; starts [n], the positions where a document
    starts, 0 always among them; labels [block_length], the same as input_ids but -100 at `starts`. The end of the
    stream that does not fill a block is left out and counted in `dropped_tokens`. `collate_packed` makes batches; other
    collators must drop `starts`, whose length differs from row to row (the Hugging Face Trainer does).

    Raises ValueError for a tokenizer without eos, or for text that does not fill one block.
    """

    def __init__(self, documents: Iterable[Document], tokenizer: Any, block_length: int) -> None:
        check_packing(tokenizer, block_length)
        names: list[str] = []
        pieces: list[np.ndarray] = []
        for name, ids in tokenise(documents, tokenizer, token_dtype(tokenizer)):
            names.append(name)
            pieces.append(ids)
        lengths = [len(piece) for piece in pieces]
        if sum(lengths) < block_length:
            source = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" or "no documents"
            needed = f"at least block_length = {block_length}"
            raise ValueError(f"documents: got {sum(lengths)} tokens ({source}), expected {needed}")
        self.block_length = block_length
        self.dropped_tokens = sum(lengths) % block_length
        self._stream = np.concatenate(pieces)
        self._starts = np.cumsum([0, *lengths[:-1]])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokens and the document borders: the same for the same training data."""
        return hashlib.sha256(self._stream.tobytes() + self._starts.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._stream) // self.block_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index: got {index}, expected a block number below {len(self)}")
        return cut_block(self._stream, self._starts, index % len(self), self.block_length)


def cut_block(tokens: np.ndarray, starts: np.ndarray, index: int, block_length: int) -> dict[str, Tensor]:
    """Block number `index` of a sequence of tokens whose documents begin at the (sorted) positions `starts`."""
    first = index * block_length
    input_ids = torch.from_numpy(tokens[first : first + block_length].astype(np.int64))
    inside = slice(*np.searchsorted(starts, (first + 1, first + block_length)))
    borders = torch.from_numpy(np.append(0, starts[inside] - first))
    return {"input_ids": input_ids, "labels": input_ids.index_fill(0, borders, IGNORED), "starts": borders}


def collate_packed(rows: Sequence[dict[str, Tensor]]) -> dict[str, Int[Tensor, "..."]]:
    """Lay the rows of a batch end to end, as one packed row of independent sequences.

    rows   dicts of input_ids [L], labels [L] and, where documents start in the row, starts [n]; lengths may differ

    Returns input_ids [1, total], labels [1, total] and cu_seqlens, int32 [N + 1] from 0 to total: a sequence starts
    wherever a row or a document does, and its first label is -100. Raises ValueError for no rows or starts outside.
    """
    if not rows:
        raise ValueError("rows: got none, expected at least one")
    labels, cu_seqlens, total = [], [], 0
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        starts = torch.cat([torch.zeros(1).long(), row.get("starts", torch.zeros(0)).long()]).unique()
        if starts[0] < 0 or starts[-1] >= length:
            raise ValueError(f"rows: got starts {starts.tolist()} in row {number}, expected positions below {length}")
        labels.append(row["labels"].index_fill(0, starts, IGNORED))
        cu_seqlens.append(starts + total)
        total += length
    return {
        "input_ids": torch.cat([row["input_ids"] for row in rows])[None],
        "labels": torch.cat(labels)[None],
        "cu_seqlens": torch.cat([*cu_seqlens, torch.tensor([total])]).int(),
    }


def check_packing(tokenizer: Any, block_length: int) -> None:
    """Raises ValueError for a tokenizer that cannot end documents, or blocks in which nothing is predicted."""
    if not isinstance(block_length, int) or block_length < 2:
        raise ValueError(f"block_length: got {block_length!r}, expected an integer of at least 2")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer: got a {type(tokenizer).__name__} without eos_token, expected one that has it")


def token_dtype(tokenizer: Any) -> np.dtype:
    """The smallest that holds every id."""
    return np.min_scalar_type(vocabulary_size(tokenizer) - 1)


def vocabulary_size(tokenizer: Any) -> int:
    """Rows that an embedding needs: the largest id + 1, which is more than there are tokens if some ids are unused."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenise(documents: Iterable[Document], tokenizer: Any, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """The name of each document and its ids with eos; a few million characters at a time bound the memory."""
    if _reads_bytes(tokenizer):
        for name, text in documents:  # the ids of the tokenizer, without Python objects for every byte
            yield (
                name,
                np.append(
                    np.frombuffer(text.encode(), dtype=np.uint8).astype(dtype), dtype.type(tokenizer.eos_token_id)
                ),
            )
        return
    for batch in batches(documents, characters=2**21):
        texts = [text for _, text in batch]
        ids = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        for (name, _), row in zip(batch, ids, strict=True):
            yield name, np.array([*row, tokenizer.eos_token_id], dtype=dtype)


def batches(documents: Iterable[Document], characters: int) -> Iterator[list[Document]]:
    """Documents in groups of at least so many characters, but for the last; reads no document beyond a group."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document[1])
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _reads_bytes(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.get_vocab_size() != 258:
        return False
    given, own = (json.loads(each.to_str()) for each in (backend, byte_tokenizer().backend_tokenizer))
    return all(given[part] == own[part] for part in ("normalizer", "pre_tokenizer", "model"))
