"""The demo: in minutes on two CPU cores, does a memory that knows how sure it is recall more? And can it write?

1. Multi-query associative recall with Palimpsa-D and its ablation (the same layer with the additive rule): same seeds,
   rows, order of rows, learning rate. 2. A byte language model on text every Python has. 3. Text from it, with the
   size of its memory before and after. It reports what it measured, whichever way it comes out.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, set_seed

from .. import results
from ..evaluation import Report
from ..training import TrainConfig, train
from ..training.saved import load_model
from .mqar import RecallRun, run_recall

MIXERS = {"palimpsa_d": "Palimpsa-D", "palimpsa_d_additive": "without metaplasticity"}
PROMPT = "The Python language "


@dataclasses.dataclass(frozen=True)
class DemoConfig:
    recall: RecallRun = dataclasses.field(default_factory=RecallRun)
    seeds: tuple[int, ...] = (0,)
    text: TrainConfig = dataclasses.field(
        default_factory=lambda: TrainConfig(
            hidden_size=128, layers=3, heads=4, key_size=16, value_size=32, intermediate_size=256,
            block_length=192, batch_size=8, steps=250, eval_every=125, save_every=125, learning_rate=4e-3, warmup=25,
            max_bytes=4_000_000,
        )
    )  # fmt: skip
    new_tokens: int = 300

    @staticmethod
    def quick() -> "DemoConfig":
        """A few steps of everything: shows that it runs, measures nothing worth reading."""
        recall = RecallRun(steps=10, train_rows=640, test_rows=100, measure_every=5)
        text = dataclasses.replace(
            DemoConfig().text, steps=6, eval_every=3, save_every=3, hidden_size=32, layers=1, intermediate_size=32,
            block_length=64, batch_size=2, max_bytes=200_000,
        )  # fmt: skip
        return DemoConfig(recall=recall, text=text, new_tokens=20)


def run_demo(config: DemoConfig, output: str | Path, *, say: Callable[[str], None]) -> tuple[dict[str, Any], Path]:
    """Runs everything into ``output``; returns the result record and the path of the HTML page."""
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    recalls: dict[str, list[dict[str, Any]]] = {mixer: [] for mixer in MIXERS}
    run = config.recall
    say(f"1/3 Recall: {run.pairs} key-value pairs in {run.sequence_length} tokens, each asked for once")
    for seed in config.seeds:
        for mixer, name in MIXERS.items():
            this = dataclasses.replace(run, mixer=mixer, seed=seed)
            result = run_recall(this, output / f"recall-{mixer}-{seed}", progress=sys.stderr.isatty())["measurements"]
            recalls[mixer].append(result)
            say(f"  {name}, seed {seed}: {result['accuracy']:.1%} of {result['queries']:,} queries right")
    say("2/3 Language: a byte model on Python's own documentation and sources")
    language = train(config.text, output / "text", overwrite=True)["measurements"]
    say(f"  held-out loss {language['eval_loss']:.3f} nats per byte ({language['eval_loss'] / 0.6931:.2f} bits)")
    say("3/3 Generation at constant memory:")
    written = _generate(output / "text" / "final", config)
    say(written["text"])
    summary = _summary(recalls, language, written) | {"seconds": round(time.perf_counter() - began, 1)}
    measurements = {"summary": summary, "recall": recalls, "language": language, "generation": written}
    result = results.record("demo", measurements, seeds=list(config.seeds), settings=dataclasses.asdict(config))
    results.write_json(output / "results.json", result)
    say(f'\nmore text: metaplastic generate {output / "text"} "def "')
    return result, _report(config, result, output)


def _summary(recalls: dict, language: dict, written: dict) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for mixer, name in MIXERS.items():
        accuracies = [r["accuracy"] for r in recalls[mixer]]
        summary[f"recall, {name}"] = statistics.mean(accuracies)
    summary["recall, chance"] = recalls["palimpsa_d"][0]["chance"]
    summary["language, held-out loss (nats/byte)"] = language["eval_loss"]
    summary["language, parameters"] = language["parameters"]
    summary["generation, tokens/s"] = written["tokens_per_second"]
    summary["memory after the prompt (bytes)"] = written["state_bytes"][0]
    summary["memory at the end (bytes)"] = written["state_bytes"][1]
    return summary


@torch.no_grad()
def _generate(model: Path, config: DemoConfig) -> dict[str, Any]:
    """Samples a continuation and measures the cache after the prompt and at the end."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    network: Any = load_model(model).eval()  # its generate() is written for a protocol that type checkers find unmet
    ids = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)["input_ids"].long()
    prefilled = network(input_ids=ids[:, :-1], use_cache=True).cache
    before = _bytes(prefilled)
    set_seed(0)
    began = time.perf_counter()
    out = network.generate(
        ids, cache=prefilled, max_new_tokens=config.new_tokens, do_sample=True, temperature=0.7, top_p=0.95,
        pad_token_id=tokenizer.pad_token_id, return_dict_in_generate=True,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    count = out.sequences.shape[1] - ids.shape[1]
    return {
        "text": tokenizer.decode(out.sequences[0], skip_special_tokens=True),
        "new_tokens": count,
        "tokens_per_second": count / seconds,
        "state_bytes": [before, _bytes(out.cache)],
    }


def _bytes(cache: Any) -> int:
    kept = [s for layer in cache.layers for d in (layer.conv_states, layer.recurrent_states) for s in d.values()]
    return sum(s.numel() * s.element_size() for s in kept if s is not None)


def _report(config: DemoConfig, result: dict[str, Any], output: Path) -> Path:
    from matplotlib.figure import Figure

    measured = result["measurements"]
    report = Report("metaplastic demo")
    report.table(["measured", "value"], list(measured["summary"].items()))
    run = config.recall
    report.heading("Recall")
    report.text(
        f"Each row holds {run.pairs} key-value pairs, then asks for every key once. Palimpsa-D and the same layer with "
        f"the additive rule saw the same rows in the same order ({run.steps} steps of {run.batch_size} rows, learning "
        f"rate {run.learning_rate:g} for both, seeds {', '.join(map(str, config.seeds))}). One setting and few seeds: "
        "an illustration, not a benchmark."
    )
    figure = Figure(figsize=(10, 3.4))
    curves, ages = figure.subplots(1, 2)
    for colour, (mixer, name) in zip(("#0969da", "#bf8700"), MIXERS.items(), strict=True):
        for number, r in enumerate(measured["recall"][mixer]):
            label = name if number == 0 else None
            curves.plot([p["step"] for p in r["curve"]], [p["accuracy"] for p in r["curve"]], color=colour, label=label)
            ages.plot(
                [p["distance"] for p in r["by_age"]],
                [p["accuracy"] for p in r["by_age"]],
                "o-",
                color=colour,
                label=label,
            )
    curves.axhline(measured["recall"]["palimpsa_d"][0]["chance"], color="#8c959f", linestyle=":", label="chance")
    curves.set(xlabel="training step", ylabel="queries answered right", ylim=(0, 1.04), title="Learning to recall")
    ages.set(xlabel="age of the pair when asked (tokens)", ylim=(0, 1.04), title="Recall by age")
    curves.legend()
    figure.tight_layout()
    report.figure(figure, save=output / "recall.png")
    report.heading("Language")
    history = measured["language"]["history"]
    figure = Figure(figsize=(6, 3.2))
    axes = figure.subplots()
    axes.plot(
        [e["step"] for e in history if "loss" in e], [e["loss"] for e in history if "loss" in e], label="training"
    )
    held = [e for e in history if "eval_loss" in e]
    axes.plot([e["step"] for e in held], [e["eval_loss"] for e in held], "o", label="held out")
    axes.set(xlabel="step", ylabel="nats per byte", title="Byte language model")
    axes.legend()
    figure.tight_layout()
    report.figure(figure, save=output / "language.png")
    report.heading("Generated text")
    written = measured["generation"]
    report.text(
        f"{written['new_tokens']} bytes sampled at temperature 0.7. The memory took {written['state_bytes'][0]:,} "
        f"bytes after the prompt and {written['state_bytes'][1]:,} at the end: it does not grow."
    )
    report.preformatted(written["text"])
    report.facts(result)
    return report.write(output / "index.html")
