"""The demo: in minutes on two CPU cores, does a memory that knows how sure it is recall more? And can it write?

1. Multi-query associative recall with Palimpsa-D and its ablation (the same layer with the additive rule): same seeds,
   rows, order of rows, learning rate. 2. A byte language model on text every Python has. 3. How sure its memory
   grows on a held-out text. 4. Text from it, with the size of its memory before and after. It reports what it measured,
   whichever way it comes out.
"""

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, set_seed

from .. import inspection, results
from ..evaluation import Report, steps_until
from ..tasks import documents
from ..training import TrainConfig, train
from ..training.saved import load_model, load_tokenizer
from .mqar import RecallRun, run_recall

MIXERS = {"palimpsa_d": "Palimpsa-D", "palimpsa_d_additive": "without metaplasticity"}
PROMPT = "The Python language "
LEARNT = 0.9  # of the queries answered right


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
    read_tokens: int = 2048  # of a held-out text, to see how sure the memory grows
    new_tokens: int = 300

    @staticmethod
    def quick() -> "DemoConfig":
        """A few steps of everything: shows that it runs, measures nothing worth reading."""
        recall = RecallRun(steps=10, train_rows=640, test_rows=100, measure_every=5)
        text = dataclasses.replace(
            DemoConfig().text, steps=6, eval_every=3, save_every=3, hidden_size=32, layers=1, intermediate_size=32,
            block_length=64, batch_size=2, max_bytes=200_000,
        )  # fmt: skip
        return DemoConfig(recall=recall, text=text, read_tokens=200, new_tokens=20)


def run_demo(config: DemoConfig, output: str | Path, *, say: Callable[[str], None]) -> tuple[dict[str, Any], Path]:
    """Runs everything into ``output``; returns the result record and the path of the HTML page."""
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    recalls: dict[str, list[dict[str, Any]]] = {mixer: [] for mixer in MIXERS}
    run = config.recall
    say(f"1/4 Recall: {run.pairs} key-value pairs in {run.sequence_length} tokens, each asked for once")
    for seed in config.seeds:
        for mixer, name in MIXERS.items():
            this = dataclasses.replace(run, mixer=mixer, seed=seed)
            result = run_recall(this, output / f"recall-{mixer}-{seed}", progress=sys.stderr.isatty())["measurements"]
            recalls[mixer].append(result)
            say(f"  {name}, seed {seed}: {result['accuracy']:.1%} of {result['queries']:,} queries right")
    say(f"  {_sooner(recalls, run.steps)}")
    say("2/4 Language: a byte model on Python's own documentation and sources")
    language = train(config.text, output / "text", overwrite=True)["measurements"]
    say(f"  held-out loss {language['eval_loss']:.3f} nats per byte ({language['eval_loss'] / 0.6931:.2f} bits)")
    say("3/4 Certainty: it reads a held-out text")
    memory = _read(output / "text" / "final", config, output / "memory")
    say(f"  {_certainty(memory)}")
    say("4/4 Generation at constant memory:")
    written = _generate(output / "text" / "final", config)
    say(written["text"])
    summary = _summary(recalls, language, memory, written) | {"seconds": round(time.perf_counter() - began, 1)}
    measurements = {"summary": summary, "recall": recalls, "language": language, "generation": written}
    measurements["memory"] = [inspection.as_dict(layer) for layer in memory]
    settings = dataclasses.asdict(config) | {"quick": config == DemoConfig.quick()}
    result = results.record("demo", measurements, seeds=list(config.seeds), settings=settings)
    results.write_json(output / "results.json", result)
    say(f'\nmore text: metaplastic generate {output / "text"} "def "')
    return result, _report(config, result, memory, output)


def _sooner(recalls: dict[str, list[dict[str, Any]]], steps: int) -> str:
    """What was found in one sentence: which memory learnt sooner, by these numbers (means over seeds)."""
    names = {"palimpsa_d": "Palimpsa-D", "palimpsa_d_additive": "the layer without metaplasticity"}
    found = {m: steps_until([r["curve"] for r in recalls[m]], LEARNT) for m in MIXERS}
    reached = {names[m]: step for m, step in found.items() if step is not None}
    right = [f"{name} answered {statistics.mean(r['accuracy'] for r in recalls[m]):.1%}" for m, name in names.items()]
    end = f"at the end {' and '.join(right)}."
    if not reached:
        return f"Neither memory answered {LEARNT:.0%} of the queries within {steps:,} steps; {end}"
    told = [f"{n} after {reached[n]:,} steps" if n in reached else f"{n} not at all" for n in names.values()]
    first = [name for name, step in reached.items() if step == min(reached.values())]
    verdict = "both learned equally soon" if len(first) > 1 else f"{first[0]} learned sooner"
    return f"{LEARNT:.0%} of the queries right, {' and '.join(told)}: {verdict}; {end}"


def _read(model: Path, config: DemoConfig, output: Path) -> tuple[inspection.LayerMemory, ...]:
    """The longest of the texts that were held out from training, with the model watched; a page of its own."""
    found = documents.standard_library_documents(max_bytes=config.text.max_bytes)
    _, held_out = documents.split_documents(found, config.text.held_out, config.text.seed)
    text = max((text for _, text in held_out), key=len)
    title, tokens = "the demo's language model", config.read_tokens
    layers, _ = inspection.inspect_text(
        load_model(model), load_tokenizer(model), text, output, title=title, max_tokens=tokens
    )
    return layers


def _surest(memory: tuple[inspection.LayerMemory, ...]) -> tuple[float, float]:
    """|I - prior| / prior: of the surest element, and the median over heads of their median element."""
    limits = torch.cat([m.limit for m in memory if m.limit is not None])
    middles = torch.cat([m.limit_median for m in memory if m.limit_median is not None])
    return float(limits.max()), float(middles.median())


def _certainty(memory: tuple[inspection.LayerMemory, ...]) -> str:
    surest, middle = _surest(memory)
    windows = torch.cat([m.window.median for m in memory if m.window is not None])
    return (
        f"Reading {memory[0].tokens:,} bytes, the surest element of the memory gathered {_short(surest)} times the "
        f"prior's evidence (its standard deviation fell to {1 / math.sqrt(1 + surest):.0%} of the prior's), the median "
        f"one {_short(middle)} times; heads forget over {_short(windows.min())} to {_short(windows.max())} bytes."
    )


def _short(value: torch.Tensor | float) -> str:
    """Three digits, without an exponent for a thousand."""
    return f"{float(f'{float(value):.3g}'):,g}"


def _summary(recalls: dict, language: dict, memory: tuple, written: dict) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for mixer, name in MIXERS.items():
        accuracies = [r["accuracy"] for r in recalls[mixer]]
        summary[f"recall, {name}"] = statistics.mean(accuracies)
    summary["recall, chance"] = recalls["palimpsa_d"][0]["chance"]
    summary["language, held-out loss (nats/byte)"] = language["eval_loss"]
    summary["language, parameters"] = language["parameters"]
    surest, middle = _surest(memory)
    summary["certainty, surest element (evidence / prior)"] = surest
    summary["certainty, median element (evidence / prior)"] = middle
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


def _report(config: DemoConfig, result: dict[str, Any], memory: tuple, output: Path) -> Path:
    measured = result["measurements"]
    report = Report("metaplastic demo")
    if result["settings"]["quick"]:
        report.text("This is a run with --quick, a few steps of everything: its numbers are not the findings.")
    report.table(["measured", "value"], list(measured["summary"].items()))
    _report_recall(report, config, measured["recall"], output)
    _report_language(report, config, measured["language"], output)
    report.heading("Certainty")
    report.text(
        "Every element of the memory carries a precision I, which grows with evidence and decays to its prior. "
        + _certainty(memory)
        + " An element far above the prior resists change; where all stay near it, the memory is the additive rule, "
        "Mamba2's, which never gets surer. All about it: memory/index.html beside this page."
    )
    report.figure(inspection.figure(memory), inspection.CAPTION, save=output / "memory.png")
    report.table(inspection.SUMMARY, [inspection.summary_row(layer) for layer in memory])
    for line in inspection.legend(memory).splitlines():
        report.text(line)
    report.heading("Generated text")
    written = measured["generation"]
    report.text(
        f"{written['new_tokens']} bytes sampled at temperature 0.7. The memory took {written['state_bytes'][0]:,} "
        f"bytes after the prompt and {written['state_bytes'][1]:,} at the end: it does not grow."
    )
    report.preformatted(written["text"])
    report.facts(result)
    return report.write(output / "index.html")


def _report_recall(report: Report, config: DemoConfig, recalls: dict[str, list[dict[str, Any]]], output: Path) -> None:
    from matplotlib.figure import Figure

    run, seeds = config.recall, config.seeds
    report.heading("Recall")
    report.text(_sooner(recalls, run.steps))
    report.text(
        f"Each row holds {run.pairs} key-value pairs, then asks for every key once. Palimpsa-D and the same layer with "
        f"the additive rule saw the same rows in the same order ({run.steps} steps of {run.batch_size} rows, learning "
        f"rate {run.learning_rate:g} for both, {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}). "
        f"One setting and {'one seed' if len(seeds) == 1 else 'few seeds'}: an illustration, not a benchmark."
    )
    figure = Figure(figsize=(10, 3.4))
    curves, ages = figure.subplots(1, 2)
    for (colour, marker), (mixer, name) in zip((("#0969da", "o"), ("#bf8700", "s")), MIXERS.items(), strict=True):
        for number, r in enumerate(recalls[mixer]):
            style = {"marker": marker, "markersize": 4, "color": colour, "label": name if number == 0 else None}
            curves.plot([p["step"] for p in r["curve"]], [p["accuracy"] for p in r["curve"]], **style)
            ages.plot([p["distance"] for p in r["by_age"]], [p["accuracy"] for p in r["by_age"]], **style)
    curves.axhline(recalls["palimpsa_d"][0]["chance"], color="#8c959f", linestyle=":", label="chance")
    curves.set(xlabel="training step", ylabel="queries answered right", ylim=(0, 1.04), title="Learning to recall")
    ages.set(xlabel="age of the pair when asked (tokens)", ylim=(0, 1.04), title="Recall by age, at the end")
    ages.set(ylabel="queries answered right")
    curves.legend()
    figure.tight_layout()
    caption = "Share of queries answered right: against the training step, and at the end against the age of the pair."
    report.figure(figure, caption, save=output / "recall.png")


def _report_language(report: Report, config: DemoConfig, language: dict[str, Any], output: Path) -> None:
    from matplotlib.figure import Figure

    report.heading("Language")
    loss = language["eval_loss"]
    report.text(
        f"After {config.text.steps:,} steps a byte model of {language['parameters']:,} parameters needs "
        f"{loss / math.log(2):.2f} bits ({loss:.3f} nats) for a byte of held-out text, where guessing evenly needs 8."
    )
    history = language["history"]
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
    caption = "Loss in nats per byte against the training step, on the training and on the held-out text."
    report.figure(figure, caption, save=output / "language.png")
