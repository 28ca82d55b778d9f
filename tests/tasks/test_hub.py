import json
import os
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from metaplastic.tasks import HubText, byte_tokenizer

FILES = [["one", "  ", "two"], ["three"], [None, "four", "five", "six", "seven", "eight", "\n", "nine"]]
TEXTS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.fixture(params=["jsonl", "parquet"])
def dataset(request, tmp_path):
    """Three files of one split and one of another, as a dataset on the hub would have them."""
    for number, texts in enumerate([*FILES, ["ten"]]):
        rows = [{"id": each, "text": text} for each, text in enumerate(texts)]
        file = tmp_path / f"{'train' if number < 3 else 'validation'}-{number:05}-of-00004.{request.param}"
        if request.param == "jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=3)
    return str(tmp_path)


def test_documents_come_in_order_without_blank_ones(dataset):
    source = HubText(dataset)
    assert list(source) == [(dataset, text) for text in TEXTS]
    assert list(source) == []  # the place is the end
    assert list(HubText(dataset, split="validation")) == [(dataset, "ten")]
    assert not [name for name in os.listdir(dataset) if "cache" in name]


def test_it_goes_on_from_every_place(dataset):
    source = HubText(dataset)
    start = source.state_dict()
    states = [start, *(json.loads(json.dumps(source.state_dict())) for _ in source)]
    for place, state in enumerate(states):
        again = HubText(dataset)
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert [text for _, text in again] == TEXTS[place:]
    source.load_state_dict(start)
    assert [text for _, text in source] == TEXTS


def write(folder, *lines):
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return str(folder)


@pytest.mark.parametrize(
    ("lines", "options", "expected"),
    [
        (['{"text": "a"}'], {"split": "test"}, r"dataset: .*split 'test' cannot be read: .*'train'"),
        (['{"text": "a"}'], {"config": "de"}, r"dataset: .*, de, split 'train' cannot be read: .*'de' not found"),
        (['{"body": "a"}'], {}, r"text_column: .* has no column 'text', expected one of 'body'"),
        (['{"text": 3}'], {}, r"text_column: 'text' of .* holds int '3', expected strings"),
        (['{"text": ["a"]}'], {}, r"text_column: 'text' of .* holds list "),
        ([], {}, "dataset: .* is empty"),
        (['{"text": "a"}', '{"text'], {}, "dataset: .* cannot be read.*: JSON parse error"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_in_one_line(tmp_path, lines, options, expected):
    with pytest.raises(ValueError, match=expected) as error:
        list(HubText(write(tmp_path / "data", *lines), options.pop("config", None), **options))
    assert "\n" not in str(error.value)


def test_a_file_that_is_broken_further_on_is_named(tmp_path):
    folder = write(tmp_path / "data", '{"text": "a"}')
    (tmp_path / "data" / "train-2.jsonl").write_text('{"text": "b"}\n{"tex\n')
    (tmp_path / "data" / "train.jsonl").rename(tmp_path / "data" / "train-1.jsonl")
    source = iter(HubText(folder))
    assert next(source)[1] == "a"
    with pytest.raises(ValueError, match="dataset: .* cannot be read further: JSON parse error"):
        list(source)


def test_folders_that_hold_no_dataset(tmp_path):
    with pytest.raises(ValueError, match=r"dataset: .* cannot be read: .* any data files"):
        HubText(str(tmp_path))


def test_a_file_is_no_dataset(tmp_path, monkeypatch):
    write(tmp_path / "data", '{"text": "a"}')
    monkeypatch.setattr("metaplastic.tasks.hub.unreachable", None)  # the hub is not asked
    with pytest.raises(ValueError, match=r"dataset: .*train.jsonl is a file, expected a folder of .jsonl"):
        HubText(str(tmp_path / "data" / "train.jsonl"))


def test_a_local_folder_has_no_revisions(tmp_path):
    folder = write(tmp_path / "data", '{"text": "a"}')
    with pytest.raises(ValueError, match=r"dataset_revision: got 'v1', but .*data is a local folder, which has no rev"):
        HubText(folder, revision="v1")


def test_a_folder_of_txt_is_read_line_by_line(tmp_path):
    """As docs/training.md says."""
    (tmp_path / "a.txt").write_text("one line\nanother\n\n")
    assert [text for _, text in HubText(str(tmp_path))] == ["one line", "another"]


def test_without_datasets_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"dataset: needs the package datasets: pip install 'metaplastic\[hub\]'"):
        HubText(str(tmp_path))


# Run where no hub answers: what is asked for by name fails within seconds, or comes from the cache. Then the same in
# offline mode, by the constant that HF_HUB_OFFLINE sets when it is imported.
OFFLINE = """
import time
from metaplastic.tasks import HubText, load_tokenizer
import datasets, transformers
from huggingface_hub import constants
for constants.HF_HUB_OFFLINE in (False, True):
    for ask, what in (
        (load_tokenizer, "no-one/nothing"), (HubText, "no-one/nothing"), (load_tokenizer, "some-one/cached")
    ):
        began = time.perf_counter()
        try:
            print(ask(what)("a").input_ids, end=" ")
        except OSError as error:
            print(" ".join(str(error).split()), end=" ")
        print("| quick" if time.perf_counter() - began < 5 else "| slow")
"""


def test_a_hub_that_does_not_answer_is_not_waited_for(tmp_path):
    cached = tmp_path / "hub" / "models--some-one--cached"
    byte_tokenizer().save_pretrained(cached / "snapshots" / "0123")
    (cached / "snapshots" / "0123" / "config.json").write_text('{"model_type": "gpt2"}')
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", OFFLINE], env=environment, capture_output=True, text=True, check=True)
    lines = found.stdout.splitlines()
    for how, (tokenizer, dataset, from_cache) in (("refused", lines[:3]), ("offline mode is enabled", lines[3:])):
        assert tokenizer.startswith("name_or_path: got 'no-one/nothing', expected 'bytes', a folder")
        assert "not in the local cache" in tokenizer and how in tokenizer
        assert dataset.startswith(
            "dataset: got 'no-one/nothing', which is no local folder, and the hub cannot be asked"
        )
        assert from_cache == "[97] | quick"
        assert tokenizer.endswith("| quick") and dataset.endswith("| quick")
