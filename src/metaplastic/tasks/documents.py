"""Documents from local files: plain text, bz2 and JSON lines, and what every Python brings along.

A document is a pair (name, text). Reading is in a fixed order, splitting is seeded, and bad files are errors that name
the file.
"""

import bz2
import importlib
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

Document = tuple[str, str]
TEXT_FILES = ("*.txt", "*.md", "*.rst", "*.py", "*.jsonl")


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
