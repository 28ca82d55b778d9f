"""What decides a text run."""

import dataclasses
import math
import os
from typing import Any

_OF_THE_MODEL = ("mixer", "hidden_size", "layers", "heads", "key_size", "value_size", "groups", "intermediate_size")
_OF_FILES = ("files", "separator", "held_out", "max_bytes")
_OF_A_DATASET = (
    "dataset_config", "dataset_revision", "split", "text_column", "eval_split", "held_out_documents", "shuffle_window",
)  # fmt: skip
_NOT_OF_SHARDS = ("dataset", *_OF_FILES, *_OF_A_DATASET, "tokenizer")
_OF_NO_CONSEQUENCE = ("report_to", "eval_every", "save_every")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides what a text run computes. Two runs with equal decisions are the same run.

    Data: ``files`` (text files or folders; empty: the Python standard library's texts, up to ``max_bytes``),
    ``separator`` between documents of one file, ``held_out`` share of documents for evaluation. Or ``dataset``, which
    is streamed (a name on the Hugging Face hub, or a local folder that ``datasets`` reads): its ``split`` and
    ``text_column``; for evaluation the first ``held_out_documents`` of ``eval_split``, or without one of the stream
    itself, which then begins after them; blocks are shuffled in windows of ``shuffle_window``. Or ``data``, a folder of
    ``metaplastic data tokenise``, with its own held-out documents and tokenizer. ``tokenizer``: "bytes", a folder or a
    name; None: the one of ``data``, the one saved with ``model``, or bytes.

    Model: ``model`` continues from a saved one, whose sizes it has; with ``plasticity``, in its metaplastic form, of
    which this is the dial (:func:`metaplastic.models.metaplastic_form`). Otherwise sizes and ``mixer`` make a new one:
    one name for all layers, or several with commas, which take turns up the layers. ``groups``: of heads that share
    keys, for the mixers that have them. ``intermediate_size`` 0 leaves the MLP out.

    Optimisation: AdamW, ``warmup`` steps, then cosine to zero at ``steps``.

    What decides nothing, so that a run may go on with others: ``eval_every`` and ``save_every``, in steps, 0 for never
    (a run is always evaluated and saved at its end), and ``report_to``, trackers of the Hugging Face Trainer.
    """

    files: tuple[str, ...] = ()
    separator: str | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_revision: str | None = None
    split: str = "train"
    text_column: str = "text"
    eval_split: str | None = None
    held_out_documents: int = 200
    shuffle_window: int = 2048
    data: str | None = None
    tokenizer: str | None = None
    held_out: float = 0.05
    max_bytes: int = 8_000_000
    model: str | None = None
    plasticity: float | None = None
    mixer: str = "palimpsa_d"
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    key_size: int | None = None
    value_size: int | None = None
    groups: int | None = None
    intermediate_size: int = 384
    block_length: int = 256
    batch_size: int = 16
    accumulation: int = 1
    steps: int = 300
    learning_rate: float = 3e-3
    warmup: int = 20
    weight_decay: float = 0.1
    eval_every: int = 100
    save_every: int = 100
    seed: int = 0
    bf16: bool = False
    compile: bool = False
    report_to: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("files", "report_to"):
            given = getattr(self, name)
            given = (given,) if isinstance(given, (str, os.PathLike)) else given
            object.__setattr__(self, name, tuple(str(each) for each in given))
        if not isinstance(self.mixer, str):
            raise ValueError(f"mixer must be a name, or several with commas between, got {self.mixer!r}")
        for name in (
            "hidden_size", "layers", "heads", "block_length", "batch_size", "accumulation", "steps",
            "held_out_documents", "shuffle_window",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("warmup", "weight_decay", "eval_every", "save_every", "intermediate_size"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be > 0 and finite, got {self.learning_rate}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be >= 0 and < 2**32, got {self.seed}")
        if self.data is not None:
            object.__setattr__(self, "data", str(self.data))
            self._leave_out(_NOT_OF_SHARDS, "does not go with data, which is given")
        elif self.dataset is not None:
            object.__setattr__(self, "dataset", str(self.dataset))
            self._leave_out(_OF_FILES, "is for files, and dataset is given")
            if self.eval_split == self.split:
                raise ValueError(f"eval_split is {self.split!r}, which is trained on: leave it out or give another")
        else:
            self._leave_out(_OF_A_DATASET, "is for dataset, which is not given")
        if self.model is not None:
            object.__setattr__(self, "model", str(self.model))
            self._leave_out(_OF_THE_MODEL, "is given by the saved model")
        elif self.plasticity is not None:
            raise ValueError(f"plasticity is for model, which is not given, got {self.plasticity}")

    def decisions(self) -> dict[str, Any]:
        """All that makes this run another one than that."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _OF_NO_CONSEQUENCE}

    def _leave_out(self, names: tuple[str, ...], why: str) -> None:
        for field in dataclasses.fields(self):
            if field.name in names and (given := getattr(self, field.name)) != field.default:
                raise ValueError(f"{field.name} {why}, got {given!r}: leave out one of them")
