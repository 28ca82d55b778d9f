"""Language modelling on text: documents from files, a byte tokenizer, and blocks of tokens that know their documents.

A document is a pair (name, text). `PackedText` writes all documents one after another, each ended by the tokenizer's
end-of-sequence token, and cuts the stream in blocks. Nothing is predicted from another document: labels are -100 at the
first token of every document and of every block, and the model shifts labels (labels[t + 1] is predicted from token t).
With `collate_packed` the state of a recurrent model does not cross documents either.

transformers and tokenizers are imported only by the functions that need them.
"""

import bz2
import importlib
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    import transformers

Document = tuple[str, str]
IGNORED = -100
END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
TEXT_FILES = ("*.txt", "*.md", "*.rst", "*.py", "*.jsonl")


def byte_tokenizer() -> "transformers.PreTrainedTokenizerFast":
    """A tokenizer whose ids 0..255 are the bytes of UTF-8 text: nothing is trained, downloaded or unknown.

    256 is "<|endoftext|>": end and beginning of sequence and the mark between documents. 257 is "<|padding|>", on its
    own because the usual collators hide padding from the loss: with one id for both, a model would never learn to end.
    It pads on the left, as generation from a batch needs. save_pretrained writes a folder that AutoTokenizer reads.
    One call takes about 200 bytes of memory for each byte of a text: give long text in pieces, or to `PackedText`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The characters by which byte-level tokenizers name bytes: the byte's own where it prints, else the next above 255.
    printable = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
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

    Raises OSError where there is no tokenizer.
    """
    if name_or_path is None or str(name_or_path) == "bytes":
        return byte_tokenizer()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(name_or_path), trust_remote_code=False)
    except (OSError, ValueError) as error:
        expected = "'bytes', a folder with a saved tokenizer, or the name of one on the Hugging Face hub"
        raise OSError(f"name_or_path: got {str(name_or_path)!r}, expected {expected} ({error})") from error


def read_documents(
    paths: str | Path | Sequence[str | Path],
    *,
    separator: str | None = None,
    pattern: str | Sequence[str] = TEXT_FILES,
) -> list[Document]:
    """Read text files in the order of `paths`, sorted by path inside a folder. A file reached twice is read once.

    paths       files and folders; of a folder, recursively, every file that is not hidden and whose name, less a final
                ".bz2", fits `pattern`
    separator   splits a file in documents, such as "\\x1e\\n"; None: a file is a document
    pattern     shell pattern or patterns for the files of folders

    A file is UTF-8 text (line ends stay as they are, a byte order mark is dropped) or ".jsonl" with an object and its
    string "text" in every line; either one may be ".bz2". Documents of nothing but white space are left out. Returns
    (name, text) pairs, where the name is the path, with "#number" if a file has several.

    Raises FileNotFoundError for a missing path, and ValueError for bytes that are not UTF-8, a broken archive, a line
    without "text", a file without any text, or a folder without a file that has some.
    """
    if separator == "":
        raise ValueError("separator: got an empty string, expected None or a string that stands between documents")
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    documents: dict[Path, list[Document]] = {}
    for path in [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]:
        if path.is_dir():
            wanted = (file for file in path.rglob("*") if _is_wanted(file.relative_to(path), patterns))
            files, expected = sorted(file for file in wanted if file.is_file()), f"text in {', '.join(patterns)} files"
        elif path.is_file():
            files, expected = [path], "a file with text"
        else:
            raise FileNotFoundError(f"paths: {path} does not exist, expected a file or folder")
        for file in files:
            if file.resolve() not in documents:
                documents[file.resolve()] = _read_file(file, separator)
        if not any(documents[file.resolve()] for file in files):
            raise ValueError(f"paths: {path} has no text, expected {expected}")
    if not documents:
        raise ValueError("paths: got none, expected at least one file or folder")
    return [document for pieces in documents.values() for document in pieces]


def split_documents(documents: Iterable[Document], held_out: float, seed: int) -> tuple[list[Document], list[Document]]:
    """Split documents at random into (train, validation), both in the given order and with no text in both.

    held_out    share of the documents, above 0 and below 1; either side gets at least one
    seed        of a local generator: the same documents, share and seed give the same split

    Documents of the same text stay together. Where there is one text only, the last `held_out` of its characters are
    for validation. Raises ValueError for no documents, a share out of range, or one text too short to cut.
    """
    documents = list(documents)
    if not 0 < held_out < 1:
        raise ValueError(f"held_out: got {held_out!r}, expected a share above 0 and below 1")
    texts = list(dict.fromkeys(text for _, text in documents))
    if not texts:
        raise ValueError("documents: got none, expected at least one")
    if len(texts) == 1:
        cut = len(texts[0]) - max(1, round(held_out * len(texts[0])))
        if cut < 1:
            raise ValueError(f"documents: got one text of {len(texts[0])} characters, expected enough to cut in two")
        return [(name, text[:cut]) for name, text in documents], [(name, text[cut:]) for name, text in documents]
    count = min(max(1, round(held_out * len(texts))), len(texts) - 1)
    chosen = set(random.Random(seed).sample(texts, count))
    return [pair for pair in documents if pair[1] not in chosen], [pair for pair in documents if pair[1] in chosen]


def standard_library_documents(*, max_bytes: int = 8_000_000) -> list[Document]:
    """Text that comes with Python, to try a model with no download: topics of its manual, then its library's source.

    Sorted by name; it stops before the document that would take it beyond `max_bytes` of UTF-8. Tests, installed
    packages and unreadable files are left out; a zipped library leaves only topics. Deterministic on one installation.
    Raises FileNotFoundError where there is neither, and ValueError for a `max_bytes` below the first document.
    """
    documents: list[Document] = []
    size = 0
    for name, text in _standard_library():
        size += len(text.encode())
        if size > max_bytes:
            if not documents:
                raise ValueError(f"max_bytes: got {max_bytes}, expected at least {size}, the size of {name}")
            break
        documents.append((name, text))
    if not documents:
        raise FileNotFoundError(
            "this Python comes without pydoc_data and library sources: read_documents takes other text"
        )
    return documents


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
        if not isinstance(block_length, int) or block_length < 2:
            raise ValueError(f"block_length: got {block_length!r}, expected an integer of at least 2")
        if tokenizer.eos_token_id is None:
            raise ValueError(f"tokenizer: got a {type(tokenizer).__name__} without eos_token, expected one that has it")
        dtype = np.min_scalar_type(max(tokenizer.get_vocab().values()))
        names: list[str] = []
        pieces: list[np.ndarray] = []
        for name, ids in _tokenise(documents, tokenizer):
            names.append(name)
            pieces.append(np.append(ids, tokenizer.eos_token_id).astype(dtype))
        lengths = [len(piece) for piece in pieces]
        if sum(lengths) < block_length:
            source = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" or "no documents"
            needed = f"at least block_length = {block_length}"
            raise ValueError(f"documents: got {sum(lengths)} tokens ({source}), expected {needed}")
        self.block_length = block_length
        self.dropped_tokens = sum(lengths) % block_length
        self._stream = np.concatenate(pieces)
        self._starts = np.cumsum([0, *lengths[:-1]])

    def __len__(self) -> int:
        return len(self._stream) // self.block_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index: got {index}, expected a block number below {len(self)}")
        first = index % len(self) * self.block_length
        input_ids = torch.from_numpy(self._stream[first : first + self.block_length].astype(np.int64))
        inside = slice(*np.searchsorted(self._starts, (first + 1, first + self.block_length)))
        starts = torch.from_numpy(np.append(0, self._starts[inside] - first))
        return {"input_ids": input_ids, "labels": input_ids.index_fill(0, starts, IGNORED), "starts": starts}


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


def _tokenise(documents: Iterable[Document], tokenizer: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The name and the ids of each document; a few million characters at a time bound the memory."""
    if _reads_bytes(tokenizer):
        for name, text in documents:  # the ids of the tokenizer, without Python objects for every byte
            yield name, np.frombuffer(text.encode(), dtype=np.uint8)
        return
    for batch in _batches(documents, characters=2**21):
        texts = [text for _, text in batch]
        ids = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        for (name, _), row in zip(batch, ids, strict=True):
            yield name, np.array(row, dtype=np.int64)


def _batches(documents: Iterable[Document], characters: int) -> Iterator[list[Document]]:
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


def _is_wanted(file: Path, patterns: Sequence[str]) -> bool:
    hidden = any(part.startswith(".") for part in file.parts)
    return not hidden and any(fnmatch(file.name.removesuffix(".bz2"), pattern) for pattern in patterns)


def _read_file(file: Path, separator: str | None) -> list[Document]:
    data, packed = file.read_bytes(), file.suffix == ".bz2"
    try:
        data = bz2.decompress(data) if packed else data
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: expected a whole bz2 archive ({error})") from error
    try:
        text = data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        where = f"{'decompressed ' if packed else ''}byte {error.start}"
        raise ValueError(f"{file}: expected UTF-8 text, got {data[error.start]:#04x} at {where}") from error
    texts = [text]
    if file.name.removesuffix(".bz2").endswith(".jsonl"):
        lines = enumerate(text.split("\n"), 1)
        texts = [_text_of_line(line, f"{file}, line {number}") for number, line in lines if line.strip()]
    if separator is not None:
        texts = [piece for text in texts for piece in text.split(separator)]
    texts = [text for text in texts if text.strip()]
    return [(str(file) if len(texts) == 1 else f"{file}#{number}", text) for number, text in enumerate(texts)]


def _text_of_line(line: str, where: str) -> str:
    try:
        text = json.loads(line)["text"]
        text.encode()  # half of a surrogate pair is valid JSON and no text
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: expected a JSON object with a string 'text', got {line[:80]}") from error
    return text


def _standard_library() -> Iterator[Document]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions leave it out
        topics = {}
    yield from ((f"pydoc_data/topics/{name}", topics[name]) for name in sorted(topics))
    folder = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder)
        if skipped.isdisjoint(name.parts):
            try:
                text = file.read_bytes().decode()
            except (OSError, UnicodeDecodeError):
                continue
            if text.strip():
                yield name.as_posix(), text
