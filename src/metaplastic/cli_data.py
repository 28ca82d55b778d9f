"""``metaplastic data``: tokenise once, train a tokenizer, look at what was tokenised."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .terminal import console, make_folder, print_table, quiet_transformers

if TYPE_CHECKING:
    from .tasks import FileText, HubText

data = typer.Typer(help="Tokenise text once, to train on it many times; train a tokenizer.", no_args_is_help=True)
logger = logging.getLogger("metaplastic")

Paths = Annotated[list[str] | None, typer.Argument(help="Files (text, JSON lines, Parquet; bz2) or folders of them.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for everything the command writes.")]
Tokenizer = Annotated[str, typer.Option(help='"bytes", a folder or a Hugging Face name.')]
Separator = Annotated[str | None, typer.Option(help="What separates documents within a file.")]
Dataset = Annotated[
    str | None, typer.Option(help="Instead of files: a dataset on the Hugging Face hub or a local one, streamed.")
]
Configuration = Annotated[str | None, typer.Option(help="Its configuration, if it has several.")]
Revision = Annotated[str | None, typer.Option(help="Its branch, tag or commit.")]
Split = Annotated[str, typer.Option(help="Its split.")]
Column = Annotated[str, typer.Option(help="What holds the text, in a dataset, JSON lines and Parquet.")]


@data.command()
def tokenise(
    output: Output,
    paths: Paths = None,
    tokenizer: Tokenizer = "bytes",
    separator: Separator = None,
    dataset: Dataset = None,
    dataset_config: Configuration = None,
    dataset_revision: Revision = None,
    split: Split = "train",
    text_column: Column = "text",
    held_out: Annotated[float, typer.Option(help="Share of documents kept for evaluation, by their hash.")] = 0.01,
    shard_tokens: Annotated[int, typer.Option(help="Tokens after which a shard ends.")] = 2**27,
    workers: Annotated[int, typer.Option(help="Processes that tokenise.")] = 1,
) -> None:
    """Tokenise text to a folder of shards. Run it again to go on after an interruption."""
    quiet_transformers()
    from .tasks import documents, shards, tokenising

    source = _source(paths, separator, dataset, dataset_config, dataset_revision, split, text_column)
    settings: dict[str, Any] = {"held_out": held_out, "shard_tokens": shard_tokens, "workers": workers}
    finished = (output / shards.INDEX).is_file()
    more = "give more documents or a larger --held-out"
    if dataset is None and separator is None:
        more = "give more files, --separator to split them into documents, or a larger --held-out"
    reads_by = _tokenizer(tokenizer)  # what is wrong with it is found first
    if not finished and (few := documents.few_documents(source, held_out)):
        logger.warning("warning: %s: probably none will be held out; %s", few, more)
    with _bar() as bar:
        task, first = bar.add_task("tokenising", total=None, said=""), []

        def report(written: int, tokens: int) -> None:
            now, (done, total) = time.perf_counter(), source.progress
            said = f"{written:,} documents, {tokens:,} tokens"
            if first:  # what was there before this call is no speed of it
                said += f", {(tokens - first[1]) / max(now - first[0], 1e-9):,.0f} tokens/s"
            else:
                first.extend((now, tokens))
            bar.update(task, completed=done, total=total, said=said)

        try:
            index = tokenising.write_shards(source, source.origin, reads_by, output, report=report, **settings)
        except KeyboardInterrupt:
            logger.warning("interrupted: the same command goes on from the last whole shard in %s", output)
            raise
    counts = tokenising.counts(index)
    train, held = (counts[split]["documents"] for split in ("train", "held_out"))
    if not held:
        logger.warning("warning: no document is held out: to train on this, %s", more)
    elif train < held:
        left = f"{train:,} of {train + held:,} documents are" if train else "no document is"
        logger.warning("warning: %s left to train on: a smaller --held-out leaves more", left)
    if finished:
        logger.warning("%s holds these shards, finished: nothing to do", output)
    print_table("Shards" if finished else "Tokenised", *_rows(index, counts), ("folder", str(output)))


@data.command("tokenizer")
def train_tokenizer(
    output: Output,
    vocab_size: Annotated[int, typer.Option(help="Entries, bytes and special tokens included.")],
    paths: Paths = None,
    separator: Separator = None,
    dataset: Dataset = None,
    dataset_config: Configuration = None,
    dataset_revision: Revision = None,
    split: Split = "train",
    text_column: Column = "text",
    max_bytes: Annotated[int, typer.Option(help="Read so much text at most.")] = 2**30,
) -> None:
    """Train a byte-level BPE tokenizer, to be used as --tokenizer FOLDER."""
    quiet_transformers()
    from .tasks import train_tokenizer

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"output: {output} is there already, expected a new or empty folder")
    source = _source(paths, separator, dataset, dataset_config, dataset_revision, split, text_column)
    read = 0

    def texts(bar: Progress) -> Iterator[str]:
        nonlocal read
        task = bar.add_task("reading", total=None, said="")
        for _, text in source:
            if read and read + len(text.encode()) > max_bytes:
                return
            read += len(text.encode())
            done, total = source.progress
            bar.update(task, completed=done, total=total, said=f"{read:,} bytes of text")
            yield text

    with _bar() as bar:
        tokenizer = train_tokenizer(texts(bar), vocab_size)
    tokenizer.save_pretrained(output)
    if len(tokenizer) < vocab_size:
        logger.warning("warning: the text has pairs for %d entries only, of %d asked for", len(tokenizer), vocab_size)
    print_table(
        "Tokenizer", ("entries", f"{len(tokenizer):,}"), ("bytes of text", f"{read:,}"), ("folder", str(output))
    )


@data.command()
def show(
    folder: Annotated[Path, typer.Argument(help="A folder of `metaplastic data tokenise`.")],
    split: Annotated[str, typer.Option(help="train or held_out.")] = "train",
    documents: Annotated[int, typer.Option(help="How many documents to show the beginnings of.")] = 3,
    check: Annotated[bool, typer.Option(help="Compare every byte with what was written (SHA-256).")] = False,
) -> None:
    """What is in a folder of shards: counts, lengths of documents, how some begin."""
    quiet_transformers()
    from .tasks import ShardedText, shards, tokenising

    index = shards.read_index(folder)
    counts = tokenising.counts(index)
    (shards.check_content if check else shards.check_sizes)(folder, index)
    tokenizer = shards.tokenizer_of(folder)
    checked = [("checked", "every byte is what was written")] if check else []
    print_table("Shards", *_rows(index, counts), *checked)
    text = ShardedText(folder, 2, split=split)
    histogram = text.histogram()
    most = max(histogram.values())
    bars = ((f"{n:,} to {2 * n - 1:,}", f"{'█' * -(-32 * count // most)} {count:,}") for n, count in histogram.items())
    print_table("Documents by their tokens", *bars)
    total = counts[split]["documents"]
    numbers = sorted({place * total // documents for place in range(documents)}) if documents > 0 else []
    for number in numbers:
        beginning = tokenizer.decode(text.document(number, 64).tolist())
        console.print(f"\n[bold]Document {number:,}[/bold]")
        console.print(beginning, markup=False, highlight=False)


@data.command()
def bench(
    output: Output = Path("runs/bench-data"),
    paths: Paths = None,
    separator: Separator = None,
    tokenizer: Annotated[str | None, typer.Option(help="A folder or a name. None: one is trained on the text.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Entries of the one that is trained.")] = 8192,
    workers: Annotated[int, typer.Option(help="Processes that tokenise.")] = 1,
) -> None:
    """How fast this machine tokenises and reads: PATHS, or the Python standard library's texts."""
    make_folder(output)
    quiet_transformers()
    from .evaluation.data_speed import StandardLibrary, bench_data
    from .tasks import FileText

    source = FileText(paths, separator=separator) if paths else StandardLibrary()
    given = None if tokenizer is None else _tokenizer(tokenizer)
    with Console(stderr=True).status("tokenising and reading"):
        result = bench_data(source, source.origin, given, output, vocab_size=vocab_size, workers=workers)
    rates = {what: found.get("tokens per second") for what, found in result["measurements"].items()}
    print_table("Data", *((what, f"{rate:,.0f} tokens/s") for what, rate in rates.items() if rate is not None))
    console.print(f"results: {output / 'results.json'}")


def _source(
    paths: list[str] | None, separator: str | None, dataset: str | None, config: str | None, revision: str | None,
    split: str, column: str,
) -> "FileText | HubText":  # fmt: skip
    from .tasks import FileText, HubText

    if dataset is None:
        for name, value, default in (
            ("dataset_config", config, None), ("dataset_revision", revision, None), ("split", split, "train"),
        ):  # fmt: skip
            if value != default:
                raise ValueError(f"{name} is for dataset, which is not given, got {value!r}: leave out one of them")
        return FileText(paths or [], separator=separator, column=column)
    for name, value in (("paths", paths), ("separator", separator)):
        if value:
            raise ValueError(f"{name} is for files, and dataset is given, got {value!r}: leave out one of them")
    return HubText(dataset, config, split=split, column=column, revision=revision)


def _tokenizer(name: str) -> Any:
    from .tasks import load_tokenizer

    try:
        return load_tokenizer(name)
    except OSError as error:
        raise OSError(str(error).replace("name_or_path", "tokenizer", 1)) from error


def _rows(index: dict[str, Any], counts: dict[str, dict[str, int]]) -> list[tuple[str, str]]:
    origin = {key: value for key, value in index["origin"].items() if value is not None and key != "names and sizes"}
    rows = [("from", ", ".join(f"{key} {value!r}" for key, value in origin.items()))]
    for split, count in counts.items():
        rows.append((split, f"{count['documents']:,} documents, {count['tokens']:,} tokens"))
    rows.append(("vocabulary", f"{index['vocabulary']:,} ({index['dtype']})"))
    return [*rows, ("shards", f"{len(index['shards']):,}")]


def _bar() -> Progress:
    """On the terminal's standard error, and nothing where that is a file."""
    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn())
    return Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)
