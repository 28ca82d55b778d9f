"""The model card (README.md) of a checkpoint: what the model is, how it was trained so far, and how to load it."""

import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers.training_args import OptimizerNames

from .. import results
from ..layers import MIXERS
from ..models import MetaplasticForCausalLM
from .checkpoint import CARD
from .config import TrainConfig
from .data import Data
from .parallel import in_processes
from .schedule import in_words
from .trainer import MetaplasticTrainer

_TEXT = """\
# {title}

{what} It was trained with metaplastic {version}.

## The model

{model}

## How it was trained

{training}

## How well it does

{evaluation}

## How to use it

```python
import metaplastic.models  # registers the architecture with transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # the one with this file
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
prompt = tokenizer("The memory", return_tensors="pt", add_special_tokens=False)
print(tokenizer.decode(model.generate(prompt["input_ids"], max_new_tokens=40)[0]))
```

Or in a terminal: `metaplastic generate FOLDER "The memory"`.

## Licence

Not stated: it is for the author of the model to choose one.
"""


def write_card(folder: Path, trainer: MetaplasticTrainer, config: TrainConfig, data: Data) -> None:
    """``folder/README.md`` for the model as it is now. Nothing in it names a path of this machine."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    mixers = sorted(set(model.config.mixers))
    hub_dataset = config.dataset if config.dataset and not os.path.exists(config.dataset) else None
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["metaplastic", *mixers],
        datasets=[hub_dataset] if hub_dataset else None,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    text = _TEXT.format(
        title=f"{_number(parameters)} parameters of {', '.join(mixers)}",
        what="A causal language model whose layers keep a memory of fixed size.",
        version=results.environment()["versions"].get("metaplastic", "from source"),
        model=_table(_of_the_model(model, parameters)),
        training=_table(_of_the_training(trainer, config, data)),
        evaluation=_evaluation(trainer),
    )
    ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}").save(folder / CARD)


def state_bytes(model: MetaplasticForCausalLM) -> int:
    """What one sequence keeps from token to token, whatever its length."""

    def size(state: Any) -> int:
        return state.numel() * state.element_size() if isinstance(state, torch.Tensor) else sum(map(size, state))

    with torch.device("meta"):  # the model itself may be spread over several devices
        empty: Any = MetaplasticForCausalLM(model.config)
        layers: Any = empty.to(model.dtype).model.layers
    return sum(size(layer.mixer.init_state(1)) for layer in layers)


def _of_the_model(model: MetaplasticForCausalLM, parameters: int) -> dict[str, object]:
    config: Any = model.config
    grows = any(MIXERS[name].growing_state for name in config.mixers)
    counts = {name: config.mixers.count(name) for name in dict.fromkeys(config.mixers)}
    sizes = {name: config.mixer_arguments(config.mixers.index(name)) for name in counts}
    return {
        "layers": ", ".join(f"{count} x {name}" for name, count in counts.items()),
        "width": f"{config.hidden_size}, MLP {config.intermediate_size or 'none'}",
        **{f"heads of {name}": _heads(size) for name, size in sizes.items()},
        "vocabulary": f"{config.vocab_size:,} tokens",
        "parameters": f"{parameters:,}",
        "state of one sequence": f"{state_bytes(model):,} bytes, {'and more per token' if grows else 'at any length'}",
    }


def _heads(size: dict[str, Any]) -> str:
    groups = f" in {size['num_groups']} groups" if "num_groups" in size else ""
    return f"{size['num_heads']}{groups}, key size {size['key_size']}, value size {size['value_size']}"


def _of_the_training(trainer: MetaplasticTrainer, config: TrainConfig, data: Data) -> dict[str, object]:
    args, state = trainer.args, trainer.state
    clipping = f"clipped at {args.max_grad_norm:g}" if args.max_grad_norm else "not clipped"
    versions = results.environment()["versions"]
    begun = f"the model {Path(config.model).resolve().name}" if config.model else "random weights"
    if config.plasticity is not None:
        begun += f", in its metaplastic form, with plasticity {config.plasticity:g}"
    shared = in_processes(config)
    processes = f"{shared['processes']} ({shared['parallel']})" if shared["parallel"] else "1"
    if config.context_parallel > 1:
        processes += f", {config.context_parallel} to a row"
    return {
        **({"recipe": config.recipe} if config.recipe else {}),
        "begun from": begun,
        "data": data.description,
        f"SHA-256 of {'its first documents' if config.dataset else 'the text'}": f"`{data.fingerprint}`",
        "so far": f"step {state.global_step:,} of {state.max_steps:,}, {state.num_input_tokens_seen:,} tokens",
        "batch": f"{config.batch_size * config.accumulation} rows of {config.block_length} tokens",
        "optimiser": (
            f"{OptimizerNames(args.optim).value}, betas {args.adam_beta1:g} and {args.adam_beta2:g}, "
            f"weight decay {args.weight_decay:g}, gradients {clipping}"
        ),
        "learning rate": in_words(config),
        "seed": args.seed,
        "processes": processes,
        "precision": f"weights in float32, products in {'bfloat16' if args.bf16 else 'float32'}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def _evaluation(trainer: MetaplasticTrainer) -> str:
    """The last measurement of this run, with its step; a number is never carried over from elsewhere."""
    measured = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    if not measured:
        return "Not measured so far."
    last = measured[-1]
    tokens = f"{last['eval_tokens']:,} predicted tokens"
    found = f"On {tokens} of held-out text, loss {last['eval_loss']:.4f} nats per token"
    found += f" (perplexity {last['eval_perplexity']:.2f})"
    if last["step"] == trainer.state.global_step:
        return f"{found}."
    return f"{found} at step {last['step']:,}; not measured since, at step {trainer.state.global_step:,}."


def _table(rows: dict[str, object]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows.items())])


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _number(count: int) -> str:
    for size, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{name}"
    return str(count)
