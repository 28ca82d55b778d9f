"""The page of a training run, and of several."""

import json
import re

import pytest

from metaplastic.evaluation.curves import curves_page, not_comparable, read_runs


def record(loss, *, mixer="palimpsa_d", memory=True, **measured):
    history = []
    for step in (10, 20):
        seen = {"step": step, "num_input_tokens_seen": 1000 * step}
        history.append(
            seen | {"loss": loss + 1, "grad_norm": 0.5, "learning_rate": 1e-3, "tokens_per_second": 100.0 * step}
        )
        layers = {"eval_layer_0_window": 3.0, "eval_layer_0_ratio": 0.1, "eval_layer_1_window": 9.0} if memory else {}
        history.append(seen | {"eval_loss": loss} | layers)
    history.append({"step": 20, "train_loss": loss})  # has no curve
    found = {"eval_loss": loss, "eval_perplexity": 9.5, "tokens_seen": 20_000, "parameters": 1234, "history": history}
    return {"measurements": found | measured, "settings": {"mixer": mixer, "recipe": None}}


def test_one_run_shows_its_numbers_its_curves_and_its_memories(tmp_path):
    page = curves_page({"first": record(1.25)}, tmp_path).read_text()
    cells = dict(re.findall(r"<tr><td>([^<]*)</td><td>([^<]*)</td></tr>", page))
    assert cells["held-out loss (nats per token)"] == "1.2500" and cells["parameters"] == "1,234"
    assert cells["tokens per second, median"] == "1,500" and cells["mixer"] == "palimpsa_d"
    assert not cells.keys() & {"recipe", "MFU, median", "seconds of the last call"}  # nobody has these
    assert page.count("<img") == 2
    assert {file.name for file in tmp_path.iterdir()} == {"index.html", "curves.png", "memory.png"}


def test_several_runs_stand_in_one_table_and_have_memories_of_their_own(tmp_path):
    records = {"a": record(1.0, seconds_this_call=60.0), "b/<c>": record(2.0, mixer="attention", memory=False)}
    other = {"data": "x/shards", "tokenizer": None, "layers": 4, "processes": 2, "parallel": "ddp", "data_sha256": "1"}
    records["a"]["settings"] |= other | {"context_parallel": 2}
    records["b/<c>"]["settings"] |= {"data": None, "files": ["y/z.txt"], "tokenizer": "w/t", "data_sha256": "2"}
    page = curves_page(records, tmp_path).read_text()
    assert "<td>data</td><td>shards</td><td>z.txt</td>" in page
    assert "<td>tokenizer</td><td>of the data</td><td>t</td>" in page
    assert "<td>layers</td><td>4</td><td>-</td>" in page
    assert "<td>processes</td><td>2 (ddp, 2 to a row)</td><td>-</td>" in page
    assert "Not the same data: losses cannot be compared." in page
    records["b/<c>"]["settings"]["data_sha256"] = "1"
    assert not_comparable(records) is None
    assert "<th>a</th><th>b/&lt;c&gt;</th>" in page
    assert "<td>seconds of the last call</td><td>60</td><td>-</td>" in page
    assert page.count("<img") == 2 and page.count("<details") == 2


def test_runs_are_found_by_folder_or_file_and_named_apart(tmp_path):
    for name in ("x/run", "y/run", "z", "rate-0.5"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "results.json").write_text(json.dumps(record(1.0)))
    (tmp_path / "kept-17M.json").write_text(json.dumps(record(2.0)))
    x, y, z = tmp_path / "x/run", tmp_path / "y/run", tmp_path / "z/results.json"
    found = read_runs([x, y, z, tmp_path / "kept-17M.json", tmp_path / "rate-0.5"])
    assert list(found) == [str(x), str(y), "z", "kept-17M", "rate-0.5"]


def test_names_are_no_formulae_and_none_is_hidden(tmp_path, monkeypatch):
    """matplotlib sets what is between dollars, and leaves names that begin with _ out of the legend, with a warning."""
    from matplotlib.axes import Axes

    legends, legend = [], Axes.legend
    monkeypatch.setattr(Axes, "legend", lambda *args, **options: legends.append(legend(*args, **options)))
    curves_page({r"$\run$": record(1.0, memory=False), "_second": record(1.0, memory=False)}, tmp_path)
    norms = [drawn for drawn in legends[0].get_figure().axes if drawn.get_yscale() == "log"]
    assert norms and not any("$" in tick.get_text() for axis in norms for tick in axis.get_yticklabels(which="both"))
    labels = [text.get_text() for text in legends[0].get_texts()]
    assert labels == [r"\$\run\$", r"\$\run\$, held out", " _second", " _second, held out"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "is no finished training run: .*results.json is missing"),
        ("{", "results.json is not a results file"),
        ("\x00\xff", "results.json is not a results file"),
        ("9" * 5000, "results.json is not a results file"),
        ("[" * 100_000, "results.json is not a results file"),
        ("[1]", r"results.json is not .* of a training run: it holds \[1\], expected an object"),
        ('{"measurements": {"accuracy": 1}}', "measurements.history is nothing, expected a list"),
        ('{"measurements": null}', "measurements is nothing, expected an object"),
        ('{"measurements": "history"}', "measurements is 'history', expected an object"),
        ('{"measurements": {}, "settings": 3}', "settings is 3, expected an object"),
        ('{"measurements": {"eval_loss": 1.0, "history": [{}, 1]}}', r"measurements.history\[1\] is 1, expected an ob"),
        (
            '{"measurements": {"eval_loss": null, "history": []}}',
            "measurements.eval_loss is nothing, expected a finite",
        ),
    ],
)
def test_what_is_no_run_is_named(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "results.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=expected):
        read_runs([tmp_path])


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("eval_loss", float("nan"), "nan, expected a finite number"),
        ("eval_loss", True, "True, expected a finite number"),
        ("eval_perplexity", "9", "'9', expected a finite number"),
        ("tokens_seen", 1.5, "1.5, expected a whole number"),
        ("tokens_seen", "x" * 999, f"'{'x' * 55} ..., expected a whole number"),
        ("parameters", 10**400, "a number beyond 1e100, expected a whole number"),
        ("seconds_this_call", [], r"\[\], expected a finite number"),
    ],
)
def test_numbers_that_cannot_be_tabulated_are_named_with_their_file(tmp_path, key, value, said):
    (tmp_path / "results.json").write_text(json.dumps(record(1.0, **{key: value})))
    with pytest.raises(ValueError, match=rf"{tmp_path}/results\.json is not .*: measurements\.{key} is {said}"):
        read_runs([tmp_path])


ODD = (float("nan"), float("-inf"), "3", None, [1], True, 10**400, 1e300)
DRAWN = ("loss", "eval_loss", "grad_norm", "learning_rate", "tokens_per_second", "eval_layer_0_window")


def test_odd_points_are_left_out_with_a_note(tmp_path):
    """Whatever they are, in every curve; of a whole curve too. Not positive ones on logarithmic axes alone."""
    odd = record(1.0, tokens_seen=3.0, parameters=10**30)
    history = odd["measurements"]["history"]
    for value in ODD:
        history += [{"num_input_tokens_seen": 1, name: value} for name in DRAWN]
        history.append({"num_input_tokens_seen": value, "loss": 2.0})
    history += [{"num_input_tokens_seen": 1, name: 0} for name in DRAWN]
    history += [{"learning_rate": 1.0}, {"eval_layer_x_window": 1.0, f"eval_layer_{'9' * 5000}_ratio": 1.0}]
    odd["settings"]["mixer"] = "\ud800"
    (tmp_path / "results.json").write_text(json.dumps(odd))
    page = curves_page(read_runs([tmp_path]), tmp_path).read_text().split("<details>")[0]
    notes = dict(re.findall(rf"<tr><td>{tmp_path.name}, (\w+)</td><td>(\d+): .*?</td></tr>", page))
    each = len(ODD)
    extra = {"loss": each, "learning_rate": 1, "grad_norm": 1, "eval_layer_0_window": 1}
    assert notes == {name: str(each + extra.get(name, 0)) for name in DRAWN}
    assert "<td>learning_rate is nan ...</td>" not in page and ": learning_rate is nan ...</td>" in page
    assert "<td>tokens seen</td><td>3</td>" in page and "<td>parameters</td><td>1e+30</td>" in page
    for entry in history:
        entry |= {"num_input_tokens_seen": "many"}
    assert "num_input_tokens_seen is &#x27;many&#x27;" in curves_page({"run": odd}, tmp_path).read_text()
    assert "Left out" not in curves_page({"run": record(1.0)}, tmp_path).read_text()


def test_a_run_is_compared_with_others_only(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(record(1.0)))
    with pytest.raises(ValueError, match="expected different ones"):
        read_runs([tmp_path, tmp_path / "results.json"])
