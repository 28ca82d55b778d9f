"""``metaplastic train`` and ``compare``: a language model from text, and its curves beside those of others."""

import logging
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .terminal import Groups, KeySize, Mixer, Output, ValueSize, console, make_folder, print_table, quiet_transformers

logger = logging.getLogger("metaplastic")


def train(
    context: typer.Context,
    files: Annotated[
        list[str] | None, typer.Argument(help="Text files or folders. None: the standard library.")
    ] = None,
    output: Output = Path("runs/train"),
    recipe: Annotated[
        str | None, typer.Option(help="A run by its name (`metaplastic recipes`); other options change it.")
    ] = None,
    mixer: Mixer = "palimpsa_d",
    model: Annotated[str | None, typer.Option(help="Continue from this saved model instead of a new one.")] = None,
    plasticity: Annotated[
        float | None, typer.Option(help="Turn its ablation layers into their metaplastic form, with this dial.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help='"bytes", a folder or a Hugging Face name. None: the saved model\'s, or bytes.')
    ] = None,
    separator: Annotated[str | None, typer.Option(help="What separates documents within a file.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Instead of files: a dataset on the Hugging Face hub or a local one, streamed.")
    ] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Its configuration, if it has several.")] = None,
    dataset_revision: Annotated[str | None, typer.Option(help="Its branch, tag or commit.")] = None,
    split: Annotated[str, typer.Option(help="Its split to train on.")] = "train",
    text_column: Annotated[str, typer.Option(help="Its column with the text.")] = "text",
    eval_split: Annotated[str | None, typer.Option(help="Its split to evaluate on. None: set some aside.")] = None,
    held_out_documents: Annotated[int, typer.Option(help="Documents of the dataset kept for evaluation.")] = 200,
    shuffle_window: Annotated[int, typer.Option(help="Blocks of the dataset that are shuffled together.")] = 2048,
    data: Annotated[
        str | None, typer.Option(help="Instead of files: a folder of shards (`metaplastic data tokenise`).")
    ] = None,
    held_out: Annotated[float, typer.Option(help="Share of documents kept for evaluation.")] = 0.05,
    hidden_size: int = 128,
    layers: int = 4,
    heads: int = 4,
    key_size: KeySize = None,
    value_size: ValueSize = None,
    groups: Groups = None,
    intermediate_size: Annotated[int, typer.Option(help="Width of the MLP; 0 for none.")] = 384,
    block_length: Annotated[int, typer.Option(help="Tokens of one row of a batch.")] = 256,
    batch_size: int = 16,
    accumulation: Annotated[int, typer.Option(help="Batches per optimiser step.")] = 1,
    tokens_per_step: Annotated[
        int | None, typer.Option(help="Instead of accumulation: tokens of an optimiser step; a recipe's steps follow.")
    ] = None,
    steps: int = 300,
    learning_rate: float = 3e-3,
    warmup: Annotated[int, typer.Option(help="Steps of rising learning rate.")] = 20,
    schedule: Annotated[
        Literal["cosine", "constant", "wsd", "linear"],
        typer.Option(help="Of the learning rate after the warm-up; wsd: constant, then falling."),
    ] = "cosine",
    minimum_rate: Annotated[float, typer.Option(help="Share of the learning rate at which the schedule ends.")] = 0.0,
    cooldown: Annotated[int | None, typer.Option(help="Falling steps of wsd. None: a fifth of all.")] = None,
    weight_decay: float = 0.1,
    max_grad_norm: Annotated[float, typer.Option(help="Gradients are clipped to it; 0: not.")] = 1.0,
    loss: Annotated[
        Literal["auto", "fused", "plain"],
        typer.Option(help="fused: with the output layer, without logits; auto: so on a GPU where it pays."),
    ] = "auto",
    checkpointing: Annotated[
        Literal["none", "full", "selective"],
        typer.Option(help="Activations computed again: whole blocks, or all but memories and products of matrices."),
    ] = "none",
    eval_every: Annotated[int, typer.Option(help="Steps; 0: only at the end.")] = 100,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: none.")] = 100,
    seed: int = 0,
    bf16: Annotated[bool, typer.Option(help="Matrix products in bfloat16.")] = False,
    compile: Annotated[bool, typer.Option(help="Use torch.compile.")] = False,
    report_to: Annotated[
        list[str] | None, typer.Option(help="A tracker, such as tensorboard; may be repeated.")
    ] = None,
    parallel: Annotated[
        Literal["ddp", "fsdp2"] | None,
        typer.Option(help="Of several processes (torchrun): whole models (ddp, the default) or parts of one (fsdp2)."),
    ] = None,
    context_parallel: Annotated[int, typer.Option(help="How many processes cut a row between them.")] = 1,
    asynchronous_saves: Annotated[
        bool | None,
        typer.Option(help="Write checkpoints while training goes on. None: on a GPU."),
    ] = None,
    peak_flops: Annotated[
        float | None, typer.Option(help="FLOP/s of the device, for the MFU. None: of its bf16 products, if known.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace another run in the output folder.")] = False,
) -> None:
    """Train a language model on text. Run it again to resume after an interruption (Ctrl-C saves a checkpoint)."""
    arguments: dict[str, Any] = dict(locals())
    quiet_transformers()
    from .training import TrainConfig, last_checkpoint, train

    output, overwrite = arguments.pop("output"), arguments.pop("overwrite")
    del arguments["context"], arguments["recipe"], arguments["tokens_per_step"]
    arguments["files"], arguments["report_to"] = tuple(files or ()), tuple(report_to or ())
    given = {name for name in arguments if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    if recipe is not None:
        from .recipes.checks import begin

        config = begin(recipe, {name: arguments[name] for name in given}, tokens_per_step)
    else:
        if tokens_per_step is not None:
            from .recipes.language import accumulation as often

            if "accumulation" in given:
                raise ValueError(
                    f"tokens_per_step: got {tokens_per_step:,}, and accumulation too: leave out one of them"
                )
            arguments["accumulation"] = often(tokens_per_step, block_length, batch_size)
        config = TrainConfig(**arguments)
    try:
        result = train(config, output, overwrite=overwrite)["measurements"]
    except KeyboardInterrupt:
        if checkpoint := last_checkpoint(output):
            logger.warning("interrupted: the same command goes on from %s", checkpoint)
        else:
            logger.warning("interrupted before there was a checkpoint in %s: the same command begins again", output)
        raise
    if int(os.environ.get("RANK", 0)) == 0:
        from .evaluation.curves import curves_page, read_runs
        from .training.folder import CURVES

        record = read_runs([output])
        make_folder(output / CURVES)
        page = curves_page(record, output / CURVES)
        print_table(
            "Trained",
            ("held-out loss (nats/token)", f"{result['eval_loss']:.4f}"),
            ("perplexity", f"{result['eval_perplexity']:.2f}"),
            ("tokens seen", f"{result['tokens_seen']:,}"),
            ("parameters", f"{result['parameters']:,}"),
            ("model", str(output / "final")),
            ("results", str(output / "results.json")),
            ("curves", str(page)),
        )


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Output folders of `metaplastic train`, or their results files.")],
    output: Output = Path("runs/compare"),
) -> None:
    """Finished training runs beside each other: curves and numbers on one page."""
    from .evaluation.curves import curves_page, not_comparable, read_runs

    records = read_runs(runs)
    make_folder(output)
    page = curves_page(records, output)
    rows = [(name, f"{record['measurements']['eval_loss']:.4f}") for name, record in records.items()]
    print_table("Held-out loss (nats per token)", *rows, ("page", str(page)))
    if said := not_comparable(records):
        console.print(said)
