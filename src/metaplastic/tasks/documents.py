"""Documents from local files: plain text, bz2, JSON lines and Parquet, and what every Python brings along.

A document is a pair (name, text). `FileText` reads them one after another, in memory for one document, and knows its
place; `read_documents` reads them all. The order is fixed, splitting is seeded, and bad files are errors that name the
file. pyarrow is imported only to read Parquet.
"""

import bz2
import codecs
import hashlib
import importlib
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from itertools import chain, islice
from pathlib import Path
from typing import Any

Document = tuple[str, str]
TEXT_FILES = ("*.txt", "*.md", "*.rst", "*.py", "*.jsonl", "*.parquet")
CHUNK = 2**24  # bytes of a file that are decoded together


class FileText:
    """The documents of text files, read one after another: iterating gives (name, text) pairs from the state on.

    paths       files and folders; of a folder, recursively, every file that is not hidden and whose name, less a final
                ".bz2", fits `pattern`, sorted by path. A file reached twice is read once
    separator   splits a file in documents, such as "\\x1e\\n"; None: a file is a document
    pattern     shell pattern or patterns for the files of folders
    column      of ".jsonl" and ".parquet" files: what holds the text

    A file is UTF-8 text (line ends stay as they are, a byte order mark is dropped); ".jsonl" with an object and its
    string `column` in every line; either one may be ".bz2". Or ".parquet", whose rows without a value (null) are left
    out, as are all documents of nothing but white space. The name is the path, with "#number" if a file has several.

    `state_dict` is the place after the document last given, and `load_state_dict` goes there: the file it is in is read
    from its beginning, files before are not.

    Raises FileNotFoundError for a missing path, and ValueError, when it comes there, for bytes that are not UTF-8, a
    broken archive, a line or column without text, a file without any, or a folder without a file that has some.
    """

    def __init__(
        self, paths: str | Path | Sequence[str | Path], *, separator: str | None = None,
        pattern: str | Sequence[str] = TEXT_FILES, column: str = "text",
    ) -> None:  # fmt: skip
        if separator == "":
            raise ValueError("separator: got an empty string, expected None or a string that stands between documents")
        patterns = [pattern] if isinstance(pattern, str) else list(pattern)
        self.separator, self.column = separator, column
        paths = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
        self._words = ", ".join(path.resolve().name for path in paths[:5]) + (", ..." if len(paths) > 5 else "")
        numbers: dict[Path, int] = {}  # of the files, in their order
        self.files: list[Path] = []
        self._groups: list[tuple[set[int], str]] = []  # files of which one must have text, and what to say if none has
        for path in paths:
            if path.is_dir():
                wanted = (file for file in path.rglob("*") if _is_wanted(file.relative_to(path), patterns))
                files = sorted(file for file in wanted if file.is_file())
                expected = f"text in {', '.join(patterns)} files"
            elif path.is_file():
                files, expected = [path], "a file with text"
            else:
                raise FileNotFoundError(f"paths: {path} does not exist, expected a file or folder")
            for file in files:
                if numbers.setdefault(file.resolve(), len(self.files)) == len(self.files):
                    self.files.append(file)
            self._groups.append(
                ({numbers[file.resolve()] for file in files}, f"{path} has no text, expected {expected}")
            )
            if not files:
                raise ValueError(f"paths: {self._groups[-1][1]}")
        if not self.files:
            raise ValueError("paths: got none, expected at least one file or folder")
        self._sizes = [file.stat().st_size for file in self.files]
        self._has_text = [True] * len(self.files)
        self._file, self._document, self._open = 0, 0, None

    def __iter__(self) -> Iterator[Document]:
        while (number := self._file) < len(self.files):
            documents = _numbered(self.files[number], self._texts(self.files[number]))
            self._has_text[number] = self._document > 0
            for document in islice(documents, self._document, None):
                self._has_text[number] = True
                self._document += 1
                yield document
            for group, what in self._groups:
                if max(group) == number and not any(self._has_text[each] for each in group):
                    raise ValueError(f"paths: {what}")
            self._file, self._document, self._open = number + 1, 0, None

    def state_dict(self) -> dict[str, Any]:
        return {"file": self._file, "document": self._document}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._file, self._document, self._open = state["file"], state["document"], None

    @property
    def origin(self) -> dict[str, Any]:
        """What is read, in words without paths and in a hash of names and sizes: the same for a copy elsewhere."""
        names = [f"{file.name} {size}" for file, size in zip(self.files, self._sizes, strict=True)]
        sha256 = hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()
        settings = {"separator": self.separator, "column": self.column}
        return {"files": self._words, "names and sizes": sha256, **settings}

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of the files that have been read, and of all. (A Parquet file counts when it has been read whole.)"""
        inside = 0 if self._open is None or self._open.closed else self._open.tell()
        return sum(self._sizes[: self._file]) + inside, sum(self._sizes)

    def _texts(self, file: Path) -> Iterator[str]:
        if file.suffix == ".parquet":
            texts = _of_parquet(file, self.column)
        else:
            texts = self._of_bytes(file)
        if self.separator is not None:
            texts = (piece for text in texts for piece in text.split(self.separator))
        return (text for text in texts if text.strip())

    def _of_bytes(self, file: Path) -> Iterator[str]:
        packed = file.suffix == ".bz2"
        with file.open("rb") as self._open, bz2.BZ2File(self._open) if packed else self._open as data:
            try:
                if file.name.removesuffix(".bz2").endswith(".jsonl"):
                    yield from _of_lines(data, file, self.column)
                else:
                    yield from _of_text(data, file, self.separator)
            except (OSError, EOFError) as error:
                if not packed:
                    raise
                raise ValueError(f"{file}: expected a whole bz2 archive ({error})") from error


def read_documents(
    paths: str | Path | Sequence[str | Path], *, separator: str | None = None,
    pattern: str | Sequence[str] = TEXT_FILES, column: str = "text",
) -> list[Document]:  # fmt: skip
    """All documents of `FileText`, which says what is read and in which order."""
    return list(FileText(paths, separator=separator, pattern=pattern, column=column))


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


def few_documents(source: object, share: float) -> str:
    """In words, before anything is read, that probably no document is held out, if so; else "".

    Only where every file is a document (no separator, neither JSON lines nor Parquet) is their number known by then.
    """
    if not isinstance(source, FileText) or source.separator is not None or not 0 < share < 1:
        return ""
    if any(file.name.removesuffix(".bz2").endswith((".jsonl", ".parquet")) for file in source.files):
        return ""
    count = len(source.files)
    words = "1 file is 1 document" if count == 1 else f"{count:,} files are as many documents"
    return f"{words}, of which {share:.3g} are for evaluation" if (1 - share) ** count > 0.5 else ""


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


def _numbered(file: Path, texts: Iterator[str]) -> Iterator[Document]:
    first = list(islice(texts, 2))
    if len(first) == 1:
        yield str(file), first[0]
    else:
        for number, text in enumerate(chain(first, texts)):
            yield f"{file}#{number}", text


def _of_text(data: Any, file: Path, separator: str | None) -> Iterator[str]:
    """The text of a file, or with a separator its pieces, each as soon as it has been read."""
    decoder, read, rest = codecs.getincrementaldecoder("utf-8-sig")(), 0, []
    while True:
        chunk = data.read(CHUNK)
        read += len(chunk)
        try:
            rest.append(decoder.decode(chunk, final=not chunk))
        except UnicodeDecodeError as error:
            raise _not_text(file, str(file), error, read - len(error.object)) from error
        if not chunk:
            break
        if separator is not None:
            *whole, last = "".join(rest).split(separator)
            yield from whole
            rest = [last]
    yield "".join(rest)


def _of_lines(data: Any, file: Path, column: str) -> Iterator[str]:
    read = 0
    for number, line in enumerate(data, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\n")
        except UnicodeDecodeError as error:
            raise _not_text(file, f"{file}, line {number}", error, read) from error
        read += len(line)
        if text.strip():
            yield _text_of_line(text, column, f"{file}, line {number}")


def _text_of_line(line: str, column: str, where: str) -> str:
    try:
        text = json.loads(line)[column]
        text.encode()  # half of a surrogate pair is valid JSON and no text
    except RecursionError as error:  # valid JSON, but deeper than Python follows
        raise ValueError(f"{where}: expected a JSON object nested less deeply, got {line[:80]}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: expected a JSON object with a string {column!r}, got {line[:80]}") from error
    return text


def _of_parquet(file: Path, column: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{file}: Parquet needs the package pyarrow: pip install 'metaplastic[hub]'") from error
    try:
        table = pyarrow.parquet.ParquetFile(file)
        if column not in (names := table.schema_arrow.names):
            found = ", ".join(map(repr, names))
            raise ValueError(f"{file}: has no column {column!r}, expected one of {found}")
        batches = table.iter_batches(batch_size=1024, columns=[column])
        for row, value in enumerate(chain.from_iterable(batch.column(0) for batch in batches)):
            try:
                text = value.as_py()
            except UnicodeDecodeError as error:  # Parquet does not check what it calls a string
                where = f"{file}, row {row}, column {column!r}"
                raise ValueError(f"{where}: expected UTF-8 text, got {error.object[error.start]:#04x}") from error
            if text is not None and not isinstance(text, str):
                got = f"{type(text).__name__} {str(text)[:40]!r}"
                raise ValueError(f"{file}: column {column!r} holds {got}, expected strings")
            if text is not None:
                yield text
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}: expected a whole Parquet file ({' '.join(str(error).split())})") from error


def _not_text(file: Path, where: str, error: UnicodeDecodeError, offset: int) -> ValueError:
    place = f"{'decompressed ' if file.suffix == '.bz2' else ''}byte {offset + error.start}"
    return ValueError(f"{where}: expected UTF-8 text, got {error.object[error.start]:#04x} at {place}")


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
