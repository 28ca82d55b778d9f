"""Text from the Hugging Face hub, read as a stream with a place to come back to.

`HubText` wraps `datasets` in streaming mode: nothing is downloaded whole, no remote code runs, and the place in the
stream is a small value of JSON. A local folder of JSONL or parquet files, as a dataset on the hub would hold them, goes
the same way. `unreachable` asks the hub once: its own client would try for most of a minute where there is no network.

datasets and huggingface_hub are imported only by what needs them.
"""

import copy
import os
from collections.abc import Iterator
from typing import Any

from metaplastic.tasks.documents import Document


def unreachable(timeout: float = 5.0) -> str | None:
    """Why the Hugging Face hub cannot be asked (offline mode, or no answer within `timeout` seconds); None: it can."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=timeout)
    except Exception as error:  # the errors are those of whatever HTTP library the client is built on
        return f"{constants.ENDPOINT} does not answer: {error}"
    return None


class HubText:
    """The documents of one split of a dataset, in its order: iterating gives (name, text) pairs from the state on.

    name       a dataset on the Hugging Face hub, or a local folder of .jsonl, .parquet, ... files
    config     which of the dataset's configurations, where it has several
    split      such as "train"
    column     the one that holds the text; rows without a value (null) are left out, as are those of white space alone
    revision   branch, tag or commit on the hub: a commit pins the data; None for a local folder

    `state_dict` is the place after the document last given, and `load_state_dict` goes there. Raises ValueError for
    a dataset, configuration, split or column that is not there, for one that cannot be read, and, while reading, for
    values that are not strings; OSError where the hub cannot be reached.
    """

    def __init__(
        self, name: str, config: str | None = None, *, split: str = "train", column: str = "text",
        revision: str | None = None,
    ) -> None:  # fmt: skip
        if os.path.isfile(name):
            raise ValueError(f"dataset: {name} is a file, expected a folder of .jsonl, .parquet, ... files, or a name")
        if revision is not None and os.path.isdir(name):
            raise ValueError(
                f"dataset_revision: got {revision!r}, but {name} is a local folder, which has no revisions"
            )
        try:
            import datasets
            from datasets.exceptions import DatasetsError
        except ImportError as error:
            raise ValueError("dataset: needs the package datasets: pip install 'metaplastic[hub]'") from error
        if not os.path.exists(name) and (reason := unreachable()):
            raise OSError(f"dataset: got {name!r}, which is no local folder, and the hub cannot be asked ({reason})")
        self.name, self.column = str(name), column
        self._options = {"configuration": config, "revision": revision, "split": split, "column": column}
        self._where = f"{name}{f', {config}' if config else ''}, split {split!r}"
        self._failures = (OSError, ValueError, RuntimeError, DatasetsError)
        try:
            self._data: Any = datasets.load_dataset(self.name, config, split=split, revision=revision, streaming=True)
        except StopIteration as error:  # what datasets makes of a file without a line
            raise ValueError(f"dataset: {self._where} is empty") from error
        except self._failures as error:
            raise ValueError(f"dataset: {self._where} cannot be read: {_in_one_line(error)}") from error
        if (columns := self._data.column_names) is not None:
            self._check_column(columns)
            self._data = self._data.select_columns([column])  # the others need not be decoded
        self._state = copy.deepcopy(self._data.state_dict())

    def __iter__(self) -> Iterator[Document]:
        self._data.load_state_dict(self._state)
        rows = iter(self._data)
        while True:
            try:
                row = next(rows, None)
            except self._failures as error:
                raise ValueError(f"dataset: {self._where} cannot be read further: {_in_one_line(error)}") from error
            if row is None:
                return
            self._state = self._data.state_dict()
            self._check_column(row)
            text = row[self.column]
            if text is None:
                continue
            if not isinstance(text, str):
                got = f"{type(text).__name__} {str(text)[:40]!r}"
                raise ValueError(f"text_column: {self.column!r} of {self._where} holds {got}, expected strings")
            if text.strip():
                yield self.name, text

    @property
    def origin(self) -> dict[str, Any]:
        """What is read, in words without paths."""
        local = os.path.exists(self.name)
        return {"dataset": os.path.basename(os.path.abspath(self.name)) if local else self.name, **self._options}

    @property
    def progress(self) -> tuple[int, None]:
        """As of `FileText`, but nobody knows how much there is."""
        return 0, None

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = copy.deepcopy(state)

    def _check_column(self, columns: Any) -> None:
        if self.column not in columns:
            found = ", ".join(map(repr, columns))
            raise ValueError(f"text_column: {self._where} has no column {self.column!r}, expected one of {found}")


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{error or type(error).__name__}".split())
