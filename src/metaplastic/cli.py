"""The ``metaplastic`` command: verbs only, the work is elsewhere."""

import logging
import os
import sys
import time
import warnings
from collections import Counter
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .cli_bench import bench
from .cli_data import data
from .cli_recipes import plan, recipes
from .cli_train import compare, train
from .terminal import (
    Groups,
    KeySize,
    Mixer,
    Output,
    SavedTokenizer,
    ValueSize,
    check_text,
    console,
    make_folder,
    number,
    print_table,
)
from .terminal import quiet_transformers as _quiet_transformers

app = typer.Typer(
    help="Sequence layers whose fixed-size memory knows how sure it is of what it holds.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
study = typer.Typer(help="Studies of the mathematics, on exact models small enough to solve.", no_args_is_help=True)
app.add_typer(study, name="study")
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")
logger = logging.getLogger("metaplastic")


def _version(asked: bool) -> None:
    if asked:
        from . import __version__

        console.print(f"metaplastic {__version__}", markup=False, highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: errors a user can mend (bad values, missing files) are one line; anything else is a traceback."""
    logger.addHandler(logging.StreamHandler(sys.stderr))  # stdout is for what was asked for
    logger.setLevel(logging.INFO)
    # Waiting threads sleep instead of spinning: on cores that others use too, spinning costs far more than it saves.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when PyTorch is first imported, which is later
    warnings.showwarning = lambda message, *_, **__: logger.warning("warning: %s", message)
    try:
        app()
    except (ValueError, OSError) as error:
        if os.environ.get("METAPLASTIC_TRACEBACK"):
            raise
        if int(os.environ.get("RANK", 0)) > 0:
            time.sleep(5)  # of several processes the first says it, and its end is the end of all
        line = " ".join(f"error: {error}".split())
        Console(stderr=True).print(line, style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


for each in (train, compare, recipes, plan):
    app.command()(each)


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(help="A saved model or the output folder of `metaplastic train`.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "",
    max_new_tokens: int = 200,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    tokenizer: SavedTokenizer = None,
) -> None:
    """Continue a text, streaming it as it is generated, at constant memory."""
    _quiet_transformers()
    from .training.generation import stream

    sampling: Any = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    stream(model, prompt, tokenizer=tokenizer, **sampling)


@app.command()
def inspect(
    model: Annotated[Path, typer.Argument(help="A saved model or the output folder of `metaplastic train`.")],
    file: Annotated[Path | None, typer.Argument(help="A text file to read.")] = None,
    text: Annotated[str | None, typer.Option(help="A text to read, instead of a file.")] = None,
    output: Output = Path("runs/inspect"),
    max_tokens: Annotated[int, typer.Option(help="Read at most so many tokens of it.")] = 32768,
    tokenizer: SavedTokenizer = None,
) -> None:
    """How sure each memory grows on a text, how long it lasts, and how near each head is to Mamba2's rule."""
    _quiet_transformers()
    from .inspection import SUMMARY, inspect_text, legend, summary_row
    from .training.saved import find_model, load_model, load_reader

    source = text if file is None else file
    if source is None or None not in (file, text):
        raise ValueError("give a text file or --text, one of the two")
    make_folder(output)
    if file is not None:
        check_text(file, 16 * max_tokens)
    network = load_model(model)
    reader = load_reader(find_model(model), tokenizer, network.config)
    layers, page = inspect_text(network, reader, source, output, title=model.resolve().name, max_tokens=max_tokens)
    table = Table(title="Memory", title_justify="left")
    for column in SUMMARY:
        table.add_column(column, overflow="fold", no_wrap=column == "mixer")
    for layer in layers:
        table.add_row(*(number(cell) for cell in summary_row(layer)))
    console.print(table)
    if told := legend(layers):
        console.print(told, markup=False, highlight=False)
    console.print(f"results: {output / 'results.json'}\nopen in a browser: {page}")


@app.command()
def size(
    model: Annotated[
        Path | None,
        typer.Argument(help="A saved model or the output folder of `metaplastic train`. None: the options."),
    ] = None,
    mixer: Mixer = "palimpsa_d",
    vocab_size: int = 258,
    hidden_size: int = 128,
    layers: int = 4,
    heads: int = 4,
    key_size: KeySize = None,
    value_size: ValueSize = None,
    groups: Groups = None,
    intermediate_size: Annotated[int, typer.Option(help="Width of the MLP; 0 for none.")] = 384,
    tied: Annotated[bool, typer.Option(help="One matrix for embedding and output.")] = True,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32, bfloat16, float16 or float64.")] = "float32",
) -> None:
    """How large a model is and what a token costs: parameters, bytes of state, FLOPs."""
    options: dict[str, Any] = {k: v for k, v in locals().items() if k not in ("model", "dtype")}
    defaults = {name: parameter.default for name, parameter in signature(size).parameters.items()}
    _quiet_transformers()
    from .models.size import describe, from_options

    if model is None:
        config = from_options(**options)
    else:
        from .training.saved import read_config

        for name, value in options.items():
            if value != defaults[name]:
                raise ValueError(f"{name} is given by the saved model, got {value!r}: leave out one of them")
        config = read_config(model)
    print_table("Size", *describe(config, dtype))


@app.command()
def doctor() -> None:
    """What runs on this machine and why; checks every backend forward and backward."""
    from . import ops
    from .evaluation.doctor import check_backends
    from .ops.dispatch import block_list_path
    from .results import environment

    about = environment()
    print_table("This machine", *about["device"].items(), *about["versions"].items())
    table = Table(title="Backends", title_justify="left")
    for column in ("configuration", "status", "detail", "seconds"):
        table.add_column(column, overflow="fold", no_wrap=column == "configuration")
    counts = Counter[str]()
    with console.status("checking every backend, forward and backward") as status:
        for check in check_backends():
            status.update(f"checked {check.configuration}")
            styles = {"ok": "green", "unchecked": "yellow", "FAILED": "bold red", "unwritable": "bold red"}
            style = styles.get(check.status, "dim")
            seconds = "" if check.seconds is None else f"{check.seconds:.1f}"
            table.add_row(check.configuration, f"[{style}]{check.status}[/]", escape(check.detail), seconds)
            counts[check.status] += 1
    console.print(table)
    rows = [(f"{op}: {what}", how) for op, entries in ops.backends().items() for what, how in entries.items()]
    print_table("What runs", *rows)
    failed, checked = counts["FAILED"], counts["FAILED"] + counts["ok"]
    forgotten = counts["unwritable"] > 0
    if forgotten:
        console.print(f"[red]the list of what failed cannot be written: {escape(str(block_list_path()))}[/red]")
    if failed:
        then = "and this cannot be remembered" if forgotten else "and will not be used"
        line = f"{failed} of {checked} configurations failed {then} (list: {block_list_path()})"
        console.print(f"[red]{escape(line)}[/red]")
        raise typer.Exit(1)
    console.print(f"all {checked} configurations are right")


STUDIES = {  # NAME: module evaluation.NAME has NameStudy and run_NAME
    "forgetting": "How far is geometric forgetting from the sliding window it stands for, and which is better where?",
    "correlation": "What Palimpsa loses as keys grow correlated: against the exact posterior, mean-field and the "
    "additive rule.",
    "collision": "Two similar keys collide: which memories keep the rarer one, and does the keys' basis matter?",
}


def _add_study(name: str, question: str) -> None:
    @study.command(name, help=question)
    def run(
        output: Output = Path(f"runs/study-{name}"),
        quick: Annotated[bool, typer.Option(help="Small, to see that it runs.")] = False,
    ) -> None:
        make_folder(output)
        from rich.progress import track

        module, stderr = import_module(f"{__package__}.evaluation.{name}"), Console(stderr=True)
        settings = getattr(module, f"{name.title()}Study")
        run_study = partial(getattr(module, f"run_{name}"), settings.quick() if quick else settings(), output)
        result, page = run_study(track=lambda parts: track(parts, "studying", console=stderr))
        print_table(result["name"], *((k, number(v)) for k, v in result["measurements"]["summary"].items()))
        console.print(f"results: {output / 'results.json'}\nopen in a browser: {page}")


for each in STUDIES.items():
    _add_study(*each)


@app.command()
def demo(
    output: Output = Path("runs/demo"),
    quick: Annotated[bool, typer.Option(help="A few steps of everything, to see that it runs.")] = False,
) -> None:
    """Train, recall and generate on this machine in minutes; ends in a table, plots and one HTML page."""
    make_folder(output)
    _quiet_transformers()
    from .recipes.demo import DemoConfig, run_demo

    config = DemoConfig.quick() if quick else DemoConfig()
    result, page = run_demo(config, output, say=lambda line: console.print(line, markup=False, highlight=False))
    print_table("Demo", *((k, number(v)) for k, v in result["measurements"]["summary"].items()))
    console.print(f"results: {output / 'results.json'}\nopen in a browser: {page}")


if __name__ == "__main__":
    main()
