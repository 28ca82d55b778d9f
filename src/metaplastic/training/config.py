"""What decides a text run."""

import dataclasses
import math
import numbers
import os
from collections.abc import Iterator
from typing import Any

from ..models.checkpointing import KINDS as CHECKPOINTING
from ..models.loss import FORMS as LOSSES

_OF_THE_MODEL = ("mixer", "hidden_size", "layers", "heads", "key_size", "value_size", "groups", "intermediate_size")
_OF_FILES = ("files", "separator", "held_out", "max_bytes")
_OF_A_DATASET = (
    "dataset_config", "dataset_revision", "split", "text_column", "eval_split", "held_out_documents", "shuffle_window",
)  # fmt: skip
_NOT_OF_SHARDS = ("dataset", *_OF_FILES, *_OF_A_DATASET, "tokenizer")
_OF_NO_CONSEQUENCE = (
    "report_to", "eval_every", "save_every", "parallel", "context_parallel", "asynchronous_saves", "checkpointing",
    "peak_flops", "recipe",
)  # fmt: skip
PARALLEL = ("ddp", "fsdp2")
_CHOICES = {
    "schedule": ("cosine", "constant", "wsd", "linear"),
    "loss": LOSSES,
    "checkpointing": CHECKPOINTING,
}

_KINDS: dict[str, Any] = {
    "int": numbers.Integral, "float": numbers.Real, "bool": bool, "str": (str, os.PathLike),
}  # fmt: skip
_WORDS = {"int": "a whole number", "float": "a number", "bool": "True or False", "str": "a string"}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides what a text run computes. Runs of equal decisions on the same data are the same run.

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

    Optimisation: AdamW, gradients clipped to the norm ``max_grad_norm`` (0: not at all), ``warmup`` steps, then
    ``schedule`` down to ``minimum_rate`` of ``learning_rate`` at ``steps``; ``cooldown``: how many of them "wsd" takes
    (:mod:`metaplastic.training.schedule`). ``loss``: "fused" with the output layer, "plain" over its logits, or "auto"
    (:mod:`metaplastic.models.loss`). ``compile``: torch.compile of every block (:mod:`metaplastic.training.compiled`).

    What decides nothing, so that a run may go on with others: ``eval_every`` and ``save_every``, in steps, 0 for never
    (a run is always evaluated and saved at its end), and ``report_to``, trackers of the Hugging Face Trainer. Also how
    it is computed, up to rounding: of several processes (torchrun) ``parallel`` says what they share, "ddp" (None) or
    "fsdp2", and ``context_parallel`` how many of them cut a row between them. ``batch_size`` times ``accumulation``
    rows make a step, whatever their number. ``asynchronous_saves``: checkpoints are written while the training goes
    on; None: on accelerators. ``checkpointing``: which activations are computed again
    (:mod:`metaplastic.models.checkpointing`). ``peak_flops`` of a device, of which the MFU is a share (None: that of
    its bf16 products, if known).
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
    schedule: str = "cosine"
    minimum_rate: float = 0.0
    cooldown: int | None = None
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    loss: str = "auto"
    checkpointing: str = "none"
    eval_every: int = 100
    save_every: int = 100
    seed: int = 0
    bf16: bool = False
    compile: bool = False
    report_to: tuple[str, ...] = ()
    parallel: str | None = None
    context_parallel: int = 1
    asynchronous_saves: bool | None = None
    peak_flops: float | None = None
    recipe: str | None = None

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("files", "report_to"):
            given = getattr(self, name)
            given = (given,) if isinstance(given, (str, os.PathLike)) else given
            object.__setattr__(self, name, tuple(str(each) for each in given))
        if not isinstance(self.mixer, str):
            raise ValueError(f"mixer must be a name, or several with commas between, got {self.mixer!r}")
        for name in (
            "hidden_size", "layers", "heads", "block_length", "batch_size", "accumulation", "steps",
            "held_out_documents", "shuffle_window", "context_parallel",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("warmup", "weight_decay", "max_grad_norm", "eval_every", "save_every", "intermediate_size"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {getattr(self, name)}")
        if self.parallel not in (None, *PARALLEL):
            raise ValueError(f"parallel must be one of {', '.join(map(repr, PARALLEL))} or None, got {self.parallel!r}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be > 0 and finite, got {self.learning_rate}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be >= 0 and < 2**32, got {self.seed}")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        self._check_schedule()
        if self.peak_flops is not None and not 0 < self.peak_flops < math.inf:
            raise ValueError(f"peak_flops must be > 0 and finite, got {self.peak_flops}")
        if self.data is not None:
            object.__setattr__(self, "data", str(self.data))
            for name, given in self._given(_NOT_OF_SHARDS):
                said = ", ".join(given) if isinstance(given, tuple) else given
                raise ValueError(f"{name} ({said}) and data ({self.data}) were both given: leave out one of them")
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

    def _check_schedule(self) -> None:
        if not 0 <= self.minimum_rate < 1:
            raise ValueError(f"minimum_rate must be >= 0 and < 1, a share of learning_rate, got {self.minimum_rate}")
        if self.minimum_rate and self.schedule == "constant":
            raise ValueError(f"minimum_rate is for a schedule that falls, got {self.minimum_rate} with 'constant'")
        if self.cooldown is None:
            return
        if self.schedule != "wsd":
            raise ValueError(f"cooldown is for schedule 'wsd', got {self.cooldown} with {self.schedule!r}")
        if not 1 <= self.cooldown <= self.steps - self.warmup:
            after = f"{self.steps - self.warmup}, the steps after the warm-up"
            raise ValueError(f"cooldown must be >= 1 and <= {after}, got {self.cooldown}")

    def _check_types(self) -> None:
        """Before anything is made of them: to Hugging Face 0.5 steps would be half of all."""
        for field in dataclasses.fields(self):
            declared = field.type.__name__ if isinstance(field.type, type) else str(field.type)
            given, expected = getattr(self, field.name), declared.removesuffix(" | None")
            if (given is None and expected != declared) or expected not in _KINDS:
                continue
            if not isinstance(given, _KINDS[expected]) or (isinstance(given, bool) and expected != "bool"):
                raise ValueError(f"{field.name} must be {_WORDS[expected]}, got {given!r}")
        for name in ("files", "report_to"):
            given = getattr(self, name)
            each = [given] if isinstance(given, (str, os.PathLike)) else given
            if not isinstance(each, (list, tuple)) or not all(isinstance(x, (str, os.PathLike)) and x for x in each):
                raise ValueError(f"{name} must be names or a list of them, got {given!r}")

    def decisions(self) -> dict[str, Any]:
        """What is in its run.json: all that can make this run another one than that."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _OF_NO_CONSEQUENCE}

    def applied(self) -> dict[str, Any]:
        """For results: all settings, None for those of other kinds of data and for what the saved model decides."""
        if self.data is not None:
            others = _NOT_OF_SHARDS
        elif self.dataset is not None:
            others = _OF_FILES
        else:
            others = (*_OF_A_DATASET, *(("max_bytes",) if self.files else ()))
        others += _OF_THE_MODEL if self.model is not None else ()
        return {name: None if name in others else value for name, value in dataclasses.asdict(self).items()}

    def _given(self, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for field in dataclasses.fields(self):
            if field.name in names and (given := getattr(self, field.name)) != field.default:
                yield field.name, given

    def _leave_out(self, names: tuple[str, ...], why: str) -> None:
        for name, given in self._given(names):
            raise ValueError(f"{name} {why}, got {given!r}: leave out one of them")
