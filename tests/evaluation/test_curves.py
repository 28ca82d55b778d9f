"""The page of a training run, and of several."""

import json
import re

import pytest

from metaplastic.evaluation.curves import curves_page, read_runs


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
    page = curves_page(records, tmp_path).read_text()
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
    labels = [text.get_text() for text in legends[0].get_texts()]
    assert labels == [r"\$\run\$", r"\$\run\$, held out", " _second", " _second, held out"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "is no finished training run: .*results.json is missing"),
        ("{", "results.json is not a results file"),
        ("\x00\xff", "results.json is not a results file"),
        ("[1]", "is not the results file of a training run"),
        ('{"measurements": {"accuracy": 1}}', "is not the results file of a training run"),
        ('{"measurements": null}', "is not the results file of a training run"),
        ('{"measurements": "history"}', "is not the results file of a training run"),
        ('{"measurements": {"eval_loss": 1.0, "history": [1]}}', "is not the results file of a training run"),
        ('{"measurements": {"eval_loss": null, "history": []}}', "is not the results file of a training run"),
    ],
)
def test_what_is_no_run_is_named(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "results.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=expected):
        read_runs([tmp_path])


def test_a_run_is_compared_with_others_only(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(record(1.0)))
    with pytest.raises(ValueError, match="expected different ones"):
        read_runs([tmp_path, tmp_path / "results.json"])
