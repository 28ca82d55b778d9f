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

    measured = {}
    for name, measure in speed.OPERATORS.items():
        with console.status(f"timing {name}"):
            measured[name] = measure()
        print_table(name, *speed.operator_rows(measured[name]))
    if decode:
        with console.status("timing a decode step of the 170M model"):
            measured["decode"] = speed.bench_decode()
        print_table("A decode step", *speed.decode_rows(measured["decode"]))
    path = results.write_json(output / "results.json", results.record("bench ops", measured, seeds=[0, 1], settings={}))
    console.print(f"results: {path}")


@bench.command("kernels")
def bench_kernels(
    output: Output = Path("runs/bench-kernels"),
    quick: Annotated[bool, typer.Option(help="One shape and a decode step.")] = False,
) -> None:
    """The kernels of a CUDA device beside their peers and their floors; minutes, most of them compilation."""
    make_folder(output)
    quiet_transformers()
    from . import results
    from .evaluation import kernel_speed

    measured, path = {}, output / "results.json"
    for name, found in kernel_speed.bench_kernels(quick):
        measured[name] = found
        print_table(name, *kernel_speed.kernel_rows(found))
        record = results.record("bench kernels", measured, seeds=[0], settings={"quick": quick})
        results.write_json(path, record)  # after every part: it may be cut short
        kernel_speed.kernel_page(record, output)
    console.print(f"results: {path}\nopen in a browser: {output / 'index.html'}")
