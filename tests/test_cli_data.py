"""`metaplastic data`, and training on what it makes."""

import json
import random
import re

import pytest

from metaplastic.tasks import ShardedText, tokenising

from .test_cli import SIZES, _leave_no_trace, command, one_line  # noqa: F401 (fixtures)


@pytest.fixture
def lines(tmp_path):
    """JSON lines of 60 documents, two of them long."""
    generator = random.Random(0)
    texts = [" ".join(generator.choices(["the", "memory", "knows", "what", "it", "holds"], k=8)) for _ in range(60)]
    texts[7] = texts[41] = " ".join(texts[:20])
    file = tmp_path / "data" / "train.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    return file


def test_from_text_to_a_model(command, lines, tmp_path):  # noqa: F811
    body = ["--text-column", "body"]
    code, out, err = command("data", "tokenizer", lines, *body, "--vocab-size", 280, "-o", tmp_path / "tokenizer")
    assert (code, err) == (0, "") and re.search(r"entries +│ 280 ", out)
    arguments = ["data", "tokenise", lines, *body, "--tokenizer", tmp_path / "tokenizer", "--held-out", 0.3]
    code, out, err = command(*arguments, "--shard-tokens", 400, "-o", tmp_path / "shards")
    assert (code, err) == (0, "")
    index = json.loads((tmp_path / "shards" / "index.json").read_text())
    counts = tokenising.counts(index)
    for split in ("train", "held_out"):
        assert re.search(rf"{split} +│ {counts[split]['documents']} documents, {counts[split]['tokens']:,} tokens", out)
    assert sum(count["documents"] for count in counts.values()) == 60 and len(index["shards"]) > 1
    code, again, err = command(*arguments, "--shard-tokens", 400, "-o", tmp_path / "shards")
    assert code == 0 and one_line(err).endswith("shards holds these shards, finished: nothing to do")
    assert "Tokenised" in out and again.splitlines() == [
        "Shards".ljust(len(again.splitlines()[0])),
        *out.splitlines()[1:],
    ]

    code, out, err = command("data", "show", tmp_path / "shards", "--documents", 2, "--check")
    assert (code, err) == (0, "")
    assert "every byte is what was written" in out
    bars = re.findall(r"│ ([\d,]+) to [\d,]+ +│ █* (\d+) ", out)
    assert {int(low): int(count) for low, count in bars} == ShardedText(tmp_path / "shards", 2).histogram()
    assert re.findall(r"^Document (\d+)$", out, re.M) == ["0", str(counts["train"]["documents"] // 2)]
    assert re.search(r"^Document 0\n(the|memory|knows|what|it|holds) ", out, re.M)

    sizes = [*SIZES.split(), "--block-length", 16, "--warmup", 1, "--steps", 2, "-o", tmp_path / "run"]
    code, out, err = command("train", "--data", tmp_path / "shards", *sizes)
    assert code == 0, err
    assert "held-out loss" in out
    code, out, err = command("generate", tmp_path / "run", "the memory", "--max-new-tokens", 3)
    assert code == 0 and out.startswith("the memory")


def test_a_dataset_is_tokenised(command, lines, tmp_path):  # noqa: F811
    arguments = ["data", "tokenise", "--dataset", lines.parent, "-o", tmp_path / "shards"]
    code, _, err = command(*arguments)
    assert code == 2 and "has no column 'text', expected one of 'body'" in one_line(err)
    code, out, err = command(*arguments, "--text-column", "body", "--held-out", 0)
    assert code == 0 and "dataset 'data'" in out
    assert one_line(err) == (
        "warning: no document is held out: to train on this, give more documents or a larger --held-out"
    )
    for share, left in ((0.9, r"[1-9] of 60 documents are"), (0.999999, "no document is")):
        much = ["--text-column", "body", "--held-out", share]
        code, _, err = command(*arguments[:-1], tmp_path / f"much {share}", *much)
        warned = rf"warning: {left} left to train on: a smaller --held-out leaves more"
        assert code == 0 and re.fullmatch(warned, one_line(err))
    text = (tmp_path / "shards" / "00000.train.tokens").read_bytes()[::2].decode("latin-1")
    assert text.startswith(json.loads(lines.read_text().splitlines()[0])["body"] + "\0")  # 256 ends a document
    assert str(tmp_path) not in (tmp_path / "shards" / "index.json").read_text()


def test_few_documents_are_noticed_before_the_work(command, tmp_path, monkeypatch):  # noqa: F811
    """By their number alone, where every file is one: what can be done has a name."""
    (tmp_path / "large.txt").write_text("the memory knows what it holds\n" * 9)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    arguments = ["data", "tokenise", tmp_path / "large.txt", "-o", tmp_path / "shards"]
    with monkeypatch.context() as patch:
        patch.setattr(tokenising, "_tokenise", interrupt)
        code, _, err = command(*arguments)
    assert code == 130 and err.startswith(
        "warning: 1 file is 1 document, of which 0.01 are for evaluation: probably none will be held out; "
        "give more files, --separator to split them into documents, or a larger --held-out\n"
    )
    code, _, err = command(*arguments)
    early, late = err.splitlines()
    assert code == 0 and early.startswith("warning: 1 file is 1 document")
    assert late == (
        "warning: no document is held out: to train on this, "
        "give more files, --separator to split them into documents, or a larger --held-out"
    )
    code, _, err = command(*arguments[:-1], tmp_path / "lines", "--separator", "\n", "--held-out", 0.99)
    assert "1 file is 1 document" not in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tokenise"], "paths: got none, expected at least one file or folder"),
        (["tokenise", "nowhere.txt"], "paths: nowhere.txt does not exist, expected a file or folder"),
        (["tokenise", "nowhere.txt", "--split", "test"], "split is for dataset, which is not given, got 'test'"),
        (["tokenise", "a.txt", "--dataset", "b"], "paths is for files, and dataset is given, got ['a.txt']"),
        (["tokenise", __file__, "--tokenizer", "/nowhere"], "tokenizer: got '/nowhere', expected 'bytes', a folder"),
        (["tokenise", __file__, "--held-out", "1.5"], "held_out: got 1.5, expected a share of at least 0 and below 1"),
        (["tokenizer", __file__, "--vocab-size", "100"], "vocab_size: got 100, expected at least 258"),
        (["show", "nowhere"], "data: nowhere is no folder, expected a folder written by `metaplastic data tokenise`"),
    ],
)
def test_bad_input_is_one_line_and_code_2(command, tmp_path, monkeypatch, arguments, expected):  # noqa: F811
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    output = [] if arguments[0] == "show" else ["-o", tmp_path / "out"]
    code, out, err = command("data", *arguments, *output)
    lines = [line for line in err.splitlines() if not line.startswith("asking the Hugging Face hub")]
    assert (code, out, len(lines)) == (2, "", 1), err
    assert lines[0].startswith("error: ") and expected in lines[0]
    assert not (tmp_path / "out").exists()


def test_an_interrupted_command_says_how_to_go_on(command, lines, tmp_path, monkeypatch):  # noqa: F811
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokenising, "_tokenise", interrupt)
        arguments = ["data", "tokenise", lines, "--text-column", "body", "-o", tmp_path / "shards"]
        code, _, err = command(*arguments)
    assert code == 130
    assert one_line(err).startswith("interrupted: the same command goes on from the last whole shard in ")
    code, _, err = command("data", "show", tmp_path / "shards")
    assert code == 2 and "is not finished: the same `metaplastic data tokenise` command goes on" in one_line(err)
    assert command(*arguments)[0] == 0


def test_little_text_gives_a_small_tokenizer(command, tmp_path):  # noqa: F811
    (tmp_path / "a.txt").write_text("abab abab")
    code, out, err = command("data", "tokenizer", tmp_path / "a.txt", "--vocab-size", 1000, "-o", tmp_path / "out")
    assert code == 0 and re.search(r"entries +│ 26\d ", out)
    assert re.fullmatch(r"warning: the text has pairs for 26\d entries only, of 1000 asked for", one_line(err))
    code, _, err = command("data", "tokenizer", tmp_path / "a.txt", "--vocab-size", 1000, "-o", tmp_path / "out")
    assert code == 2 and "out is there already, expected a new or empty folder" in one_line(err)


def test_speed_is_measured_and_written_down(command, tmp_path, monkeypatch):  # noqa: F811
    words = random.Random(0).choices(["the", "memory", "knows", "what", "it", "holds"], k=9000)
    (tmp_path / "a.txt").write_text(" ".join(words))
    monkeypatch.setattr("metaplastic.evaluation.data_speed.SECONDS", 0.05)
    code, out, _ = command("data", "bench", tmp_path / "a.txt", "--vocab-size", 270, "-o", tmp_path / "out")
    assert code == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    measured = found["measurements"]
    assert measured["training the tokenizer"]["entries"] == found["settings"]["vocabulary"] == 270
    rates = {
        name: f"{each['tokens per second']:,.0f}" for name, each in measured.items() if "tokens per second" in each
    }
    assert len(rates) == 5 and all(re.search(rf"{name} +│ {rate} tokens/s", out) for name, rate in rates.items())
    reading = [each for name, each in measured.items() if name.startswith("reading")]
    assert all(0 < each["least"] <= each["tokens per second"] <= each["most"] for each in reading)
    assert measured["tokenising"]["tokens"] == ShardedText(tmp_path / "out" / "shards", 2).tokens
    code, _, err = command("data", "bench", tmp_path / "a.txt", "--vocab-size", 270, "-o", tmp_path / "out")
    assert code == 2 and "shards is there already" in one_line(err)
