"""``metaplastic recipes`` and ``metaplastic plan``: which runs there are, and what one needs of every GPU."""

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .terminal import console, print_table, quiet_transformers


def recipes() -> None:
    """The runs that have a name: `metaplastic train --recipe NAME --data SHARDS`."""
    quiet_transformers()
    from .recipes import language

    table = Table(title="Recipes", title_justify="left", box=SIMPLE_HEAD, padding=0)
    for column in language.COLUMNS:
        table.add_column(column, no_wrap=True, justify="left" if column == "recipe" else "right")
    with console.status("counting"):
        for row in language.rows():
            table.add_row(*row)
    console.print(table)
    console.print("state: of a sequence in bf16. FLOPs: of a token, forward and backward. metaplastic train --recipe:")
    console.print("  NAME: as above, from scratch")
    from_ablation, long = ", ".join(language.ABLATIONS), f"{language.LONG_BLOCK:,}"
    console.print(f"  NAME-{language.FROM_ABLATION} of {from_ablation}: a saved ablation into its metaplastic form")
    console.print(f"  NAME-{language.LONG} of any but debug: a saved model on rows of {long} tokens")


def plan(
    recipe: Annotated[str, typer.Option(help="`metaplastic recipes` lists them.")],
    gpus: int = 8,
    tokens_per_step: Annotated[int | None, typer.Option(help="None: the recipe's.")] = None,
    block_length: Annotated[int | None, typer.Option(help="Tokens of a row. None: the recipe's.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Rows that a process takes at once, at most, as in train. None: the recipe's.")
    ] = None,
    parallel: Annotated[str, typer.Option(help="ddp or fsdp2.")] = "ddp",
    context_parallel: Annotated[int, typer.Option(help="GPUs that share a row.")] = 1,
    checkpointing: Annotated[str | None, typer.Option(help="none, full or selective. None: the recipe's.")] = None,
    loss: Annotated[
        str,
        typer.Option(help="auto, fused or plain. auto: what train does on a CUDA device with flash-linear-attention."),
    ] = "auto",
    memory: Annotated[float, typer.Option(help="GB of a GPU: an H100 has 80, an H200 141.")] = 80,
    peak: Annotated[float, typer.Option(help="Dense bf16 TFLOP/s of a GPU: 989 for an H100 or H200.")] = 989,
    efficiency: Annotated[
        float,
        typer.Option(
            help="Share of the peak, assumed. Measured of Palimpsa-D 760M on an H200: 0.26 compiled, else 0.21."
        ),
    ] = 0.26,
    node: Annotated[int, typer.Option(help="GPUs of a machine.")] = 8,
    inside: Annotated[float, typer.Option(help="GB/s from a GPU to others of its machine.")] = 450,
    between: Annotated[float, typer.Option(help="GB/s from a GPU to other machines.")] = 50,
) -> None:
    """What a run of a recipe needs of every GPU: memory, communication, time."""
    quiet_transformers()
    from .evaluation.plan import Cluster, Step, plan_rows
    from .recipes.language import find

    found = find(recipe)
    length = found.settings["block_length"] if block_length is None else block_length
    if length < 1:
        raise ValueError(f"block_length must be >= 1, got {length}")
    tokens = found.scale.tokens_per_step if tokens_per_step is None else tokens_per_step
    rows, left = divmod(tokens, length)
    if left or rows < 1:
        raise ValueError(f"tokens_per_step: expected a multiple of rows of {length:,} tokens, got {tokens:,}")
    cluster = Cluster(gpus, node, inside * 1e9, between * 1e9, memory * 1e9, peak * 1e12, efficiency)
    at_once = found.settings["batch_size"] if batch_size is None else batch_size
    if at_once < 1:
        raise ValueError(f"batch_size must be >= 1, got {at_once}")
    found.accumulation(length, at_once, tokens)  # train would refuse what does not divide it
    again = found.settings.get("checkpointing", "none") if checkpointing is None else checkpointing
    step = Step(rows, length, at_once, parallel, context_parallel, again, loss)
    planned = plan_rows(found.network(), cluster, step, found.tokens)
    print_table(f"{recipe} on {gpus:,} GPU{'' if gpus == 1 else 's'}", *planned)
