"""What the verbs of the ``metaplastic`` command share: options, tables, and checks before anything is computed."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

# Spelled out, so that help needs no PyTorch; a test compares it with metaplastic.layers.MIXERS.
MIXER_NAMES = ("palimpsa_d", "palimpsa_d_additive", "palimpsa_m", "mamba2", "bayesian", "gated_deltanet", "attention")
Mixer = Annotated[
    str,
    typer.Option(
        help=f"The layer that mixes tokens: {', '.join(MIXER_NAMES)}. Several with commas take turns up the layers."
    ),
]
SavedTokenizer = Annotated[
    str | None,
    typer.Option("--tokenizer", help='"bytes", a folder or a Hugging Face name. None: the one saved with the model.'),
]
KeySize = Annotated[int | None, typer.Option(help="Of a head. None: hidden size / heads.")]
ValueSize = Annotated[
    int | None, typer.Option(help="Of a head. None: hidden size / heads (palimpsa_m, mamba2: twice).")
]
Groups = Annotated[int | None, typer.Option(help="Of heads that share keys (palimpsa_m, mamba2). None: 1.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for everything the command writes.")]

console = Console()


def quiet_transformers() -> None:
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # read when datasets is imported, which is later, if at all
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    hub_logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # of loading and writing files; training has its own


def make_folder(output: Path) -> None:
    """Makes the output folder first: a place that cannot be written to is found before anything is computed."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"output: {output} is a file, expected a folder")
    output.mkdir(parents=True, exist_ok=True)
    if not os.access(output, os.W_OK):
        raise ValueError(f"output: {output} cannot be written to, expected a folder that can")


def check_text(file: Path, characters: int) -> None:
    """Of the beginning, which is what will be read: UTF-8 or an error, as `metaplastic train` has it."""
    try:
        with file.open(encoding="utf-8") as text:
            text.read(characters)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected UTF-8 text, got {error.object[error.start]:#04x}") from error


def number(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def print_table(title: str, *rows: tuple[str, object]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a path that is cut short cannot be copied
    for name, value in rows:
        table.add_row(escape(str(name)), escape(str(value)))
    console.print(table)
