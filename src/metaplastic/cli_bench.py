"""``metaplastic bench``: speed and memory, measured here."""

from pathlib import Path
from typing import Annotated

import typer

from .terminal import Output, console, make_folder, print_table, quiet_transformers

bench = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)


@bench.command("ops")
def bench_ops(
    output: Output = Path("runs/bench-ops"),
    decode: Annotated[bool, typer.Option(help="Also time a decode step of a 170M model (needs 2 GB).")] = True,
) -> None:
    """The operators against their token loops, and a 170M decode step against the additive rule."""
    make_folder(output)
    quiet_transformers()
    from . import results
    from .evaluation import speed

    measured, path = {}, output / "results.json"

    def keep(name: str, found: dict) -> None:
        measured[name] = found
        record = results.record("bench ops", measured, seeds=[0, 1], settings={})
        results.write_json(path, record)  # after every part: it may be cut short

    def tell(row: str, value: str) -> None:
        console.print(f"  {row}: {value}", highlight=False, soft_wrap=True)

    for name, measure in speed.OPERATORS.items():
        console.print(name)
        with console.status(f"timing {name}"):
            keep(name, measure(tell=tell))
    if decode:
        with console.status("timing a decode step of the 170M model"):
            keep("decode", speed.bench_decode())
        print_table("A decode step", *speed.decode_rows(measured["decode"]))
    console.print(f"results: {path}")


@bench.command("kernels")
def bench_kernels(
    output: Output = Path("runs/bench-kernels"),
    quick: Annotated[bool, typer.Option(help="One shape and a decode step.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="bayesian, decode, shapes, filter shapes, one head or training step; may be repeated. Default: all."
        ),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Also time flash-linear-attention, if installed.")] = True,
) -> None:
    """The kernels of a CUDA device beside their peers and their floors; minutes, most of them compilation."""
    make_folder(output)
    quiet_transformers()
    from . import results
    from .evaluation import kernel_page, kernel_speed

    measured, path = {}, output / "results.json"
    parts = only or list(kernel_speed.PARTS)

    def keep(complete: bool) -> None:
        settings = {"quick": quick, "only": parts, "peers": peers, "complete": complete}
        record = results.record("bench kernels", measured, seeds=[0], settings=settings)
        results.write_json(path, record)
        kernel_page.kernel_page(record, output)

    for name, found in kernel_speed.bench_kernels(quick, parts, peers):
        measured[name] = measured.get(name, {}) | found
        print_table(name, *kernel_page.kernel_rows(found))
        keep(complete=False)  # after every part: it may be cut short
    keep(complete=True)
    console.print(f"results: {path}\nopen in a browser: {output / 'index.html'}")


def _needs_a_gpu(instead: str) -> None:
    """Of recipes that nobody named: a machine without one may have too little memory for them, and ends the process."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"recipe: got none, and the usual ones, up to 760M, need a GPU: name others, {instead}")


TRAINED = ("palimpsa_d-170M", "palimpsa_d_additive-170M", "gated_deltanet-170M", "transformer-170M", "palimpsa_d-760M")
TRAINED += ("palimpsa_d_additive-760M", "gated_deltanet-760M", "transformer-760M")


@bench.command("training")
def bench_training(
    recipe: Annotated[list[str] | None, typer.Option(help="May be repeated (`metaplastic recipes`).")] = None,
    output: Output = Path("runs/bench-training"),
    batch: Annotated[int, typer.Option(help="Rows of a step.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 2048,
    repetitions: Annotated[int, typer.Option(help="Steps that are timed.")] = 10,
    layout: Annotated[list[str] | None, typer.Option(help="packed or rows; may be repeated. None: both.")] = None,
    checkpointing: Annotated[str, typer.Option(help="none, full or selective.")] = "none",
    loss: Annotated[str, typer.Option(help="auto, plain or fused.")] = "auto",
    bf16: Annotated[bool, typer.Option(help="Matrix products in bfloat16.")] = True,
    data: Annotated[str | None, typer.Option(help="Shards to read. None: the standard library's texts.")] = None,
    peers: Annotated[bool, typer.Option(help="On flash-linear-attention's kernels too, where they run.")] = True,
    peak_flops: Annotated[
        float | None, typer.Option(help="FLOP/s of the device, for the MFU. None: of its bf16 products, if known.")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile, block by block.")] = False,
    kernels: Annotated[int, typer.Option(help="So many of the largest kernels in the terminal (the page has 20).")] = 0,
) -> None:
    """An optimiser step of the real Trainer: tokens per second, MFU, peak memory, and what makes the host wait."""
    if not recipe:
        _needs_a_gpu("such as --recipe palimpsa_d-debug")
    make_folder(output)
    settings = {name: value for name, value in locals().items() if name not in ("output", "data")}
    quiet_transformers()
    from . import results
    from .evaluation import training_page, training_speed
    from .recipes.language import find

    models = {name: find(name).network() for name in recipe or TRAINED}
    models = training_speed.with_peers(models) if peers and bf16 else models
    step = training_speed.Setting(batch, length, repetitions, bf16, checkpointing, loss, peak_flops, compiled)
    measured, path = {}, output / "results.json"
    layouts = tuple(layout or training_speed.LAYOUTS)
    for name, found in training_speed.bench_training(models, output, step, layouts=layouts, data=data):
        measured[name] = found
        print_table(name, *training_page.training_rows(found), *training_page.kernel_rows(found, kernels))
        settings |= {"recipe": list(models), "layout": list(layouts), "own shards": data is None}
        record = results.record("bench training", measured, seeds=[0], settings=settings)
        results.write_json(path, record)  # after every part: it may be cut short
        training_page.training_page(record, output)
    console.print(f"results: {path}\nopen in a browser: {output / 'index.html'}")


@bench.command("parallel")
def bench_parallel(
    context: typer.Context,
    recipe: Annotated[list[str] | None, typer.Option(help="What is timed, a recipe; may be repeated.")] = None,
    alike: Annotated[list[str] | None, typer.Option(help="Of which steps are compared alone; may be repeated.")] = None,
    resume: Annotated[list[str] | None, typer.Option(help="A run that is left and goes on; may be repeated.")] = None,
    output: Output = Path("runs/bench-parallel"),
    processes: Annotated[int, typer.Option(help="One GPU each; without GPUs, processes of this CPU.")] = 2,
    batch: Annotated[int, typer.Option(help="Rows that a GPU takes at once.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 2048,
    long: Annotated[int, typer.Option(help="Tokens of the row that is cut (context parallelism).")] = 65_536,
    repetitions: Annotated[int, typer.Option(help="Steps that are timed.")] = 6,
    way: Annotated[list[str] | None, typer.Option(help="ddp, one, fsdp2, context; may be repeated. None: all.")] = None,
    waits: Annotated[bool, typer.Option(help="Look for what makes the host wait.")] = True,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile of the blocks.")] = False,
    seconds: Annotated[float, typer.Option(help="A way that takes longer is ended.")] = 1800.0,
    quick: Annotated[bool, typer.Option(help="Models and steps of a toy: does it work here?")] = False,
) -> None:
    """The same run in one process and in several (DDP, FSDP2, context parallelism): equal steps, speed, memory."""
    if not (recipe or quick):
        _needs_a_gpu("such as --recipe palimpsa_d-17M, or try --quick")
    make_folder(output)
    quiet_transformers()
    from . import results
    from .evaluation import parallel_page, parallel_speed
    from .recipes.language import find

    size, small = ("debug", "debug") if quick else ("760M", "17M")
    names = [recipe or [f"palimpsa_d-{size}"], alike or [f"bayesian-{small}"], resume or [f"palimpsa_d-{small}"]]
    models = [{name: (find(name).network(), find(name).config(accumulation=1)) for name in each} for each in names]
    chosen: dict = {"processes": processes, "batch": batch, "length": length, "long": long, "repetitions": repetitions}
    chosen |= {"compile": compiled, "profiled": waits, "seconds": seconds}
    if quick:  # but for what was asked for by name
        toy = {"batch": 1, "length": 32, "long": 64, "few": 16, "alike": (1, 16), "repetitions": 2, "part": 2}
        given = (name for name in toy if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE")
        chosen = chosen | toy | {name: chosen[name] for name in set(given) & chosen.keys()}
    setting = parallel_speed.Setting(**chosen)
    measured, path, ways = {}, output / "results.json", way or list(parallel_speed.WAYS)
    timed, compared, resumed = models
    for name, found in parallel_speed.bench_parallel(timed, compared, resumed, output, setting, ways):
        measured[name] = found
        if name != "compared":  # that is one table, at the end
            print_table(name, *parallel_page.way_rows(found))
        settings = dict(zip(("recipe", "alike", "resume"), names, strict=True)) | chosen | {"ways": ways}
        record = results.record("bench parallel", measured, seeds=[0], settings=settings)
        results.write_json(path, record)  # after every part: it may be cut short
        parallel_page.parallel_page(record, output)
    rows = parallel_page.compared_rows(measured.get("compared", {}))
    print_table("compared with one process", *(rows or [("nothing", "one process has not run (--way one)")]))
    console.print(f"results: {path}\nopen in a browser: {output / 'index.html'}")
