"""A run on shards of tokens: the same bits however often it was stopped, in a new order in every pass."""

import dataclasses
import json
import shutil
import signal
import socket

import pytest
import torch
from safetensors.torch import load_file

from metaplastic.tasks import FileText, ShardedText, byte_tokenizer, train_tokenizer, write_shards
from metaplastic.training import TrainConfig, train
from metaplastic.training.checkpoint import checkpoints, step_of

from .test_run import Stop, assert_same_run, logged
from .test_streaming import stop_at


@pytest.fixture(scope="module")
def folder(texts, tmp_path_factory):
    """Shards of the texts of the other tests, in words of a tokenizer trained on them."""
    documents = [text for _, text in FileText(texts)]
    lines = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    pieces = [text[at : at + 150] for text in documents for at in range(0, len(text), 150)]
    lines.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    source, output = FileText(lines), tmp_path_factory.mktemp("shards") / "shards"
    index = write_shards(source, source.origin, train_tokenizer(documents, 300), output, held_out=0.2, shard_tokens=500)
    assert len(index["shards"]) > 2
    return output


@pytest.fixture(scope="module")
def sharded(tiny, folder):
    """As ``tiny``, from shards: ten steps of nine blocks of 16 tokens are more than a pass."""

    def config(**changes) -> TrainConfig:
        settings = {"files": (), "held_out": 0.05, "data": str(folder), "block_length": 16}
        return tiny(**(settings | changes))

    return config


@pytest.fixture(scope="module")
def finished_shards(_quiet_machine, sharded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded") / "run"
    train(sharded(), folder)
    return folder


def test_the_run_of_these_tests_is_not_too_easy(finished_shards, folder):
    result = json.loads((finished_shards / "results.json").read_text())
    entries = logged(result)
    assert entries[-1]["epoch"] > 1.2  # so that it is stopped in the second pass, too
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1
    held_out = ShardedText(folder, 16, split="held_out")
    predicted = sum(int((row["labels"][1:] != -100).sum()) for row in held_out)
    assert result["measurements"]["eval_tokens"] == predicted
    dropped = ShardedText(folder, 16).dropped_tokens + held_out.dropped_tokens
    assert result["measurements"]["dropped_tokens"] == dropped > 0


def test_shards_may_lie_elsewhere(sharded, folder, finished_shards, tmp_path):
    moved, run = (shutil.copytree(each, tmp_path / each.name) for each in (folder, finished_shards))
    for data in (f"{folder}/", moved):
        assert train(sharded(data=str(data)), run)["measurements"]["steps_this_call"] == 10
    with pytest.raises(ValueError, match=r"another run \(data was .* and is None, files was \[\] and is .*\)"):
        train(sharded(data=None, files=("elsewhere",)), run)


@pytest.mark.parametrize("stops", [[7], [1, 4, 6, 9]])
def test_a_stopped_run_on_shards_resumes_to_the_same_bits(sharded, tmp_path, monkeypatch, finished_shards, stops):
    for stop in stops:
        with monkeypatch.context() as patch:
            stop_at(patch, stop)
            with pytest.raises(Stop):
                train(sharded(), tmp_path / "stopped")
    result = train(sharded(), tmp_path / "stopped")
    assert result["measurements"]["steps_this_call"] == 10 - (stops[-1] // 3) * 3
    assert_same_run(tmp_path / "stopped", finished_shards)


def test_a_run_on_shards_killed_anywhere_resumes_to_the_same_bits(sharded, tmp_path, nursery, finished_shards):
    job = {"function": "train_and_die", "arguments": {"config": dataclasses.asdict(sharded())}}
    dangers = (45, 70)  # after the first checkpoint and after the second
    outputs = [tmp_path / f"killed at {at}" for at in dangers]
    first = [
        job | {"arguments": job["arguments"] | {"output": str(output), "at": at}}
        for output, at in zip(outputs, dangers, strict=True)
    ]
    assert set(nursery.run(*first)) == {-signal.SIGKILL}, nursery.log.read_text()
    reached = {max(step_of(checkpoint) for checkpoint in checkpoints(output)) for output in outputs}
    assert len(reached) == 2 and max(reached) < 10, reached
    second = [job | {"arguments": job["arguments"] | {"output": str(output)}} for output in outputs]
    assert set(nursery.run(*second)) == {0}, nursery.log.read_text()
    for output in outputs:
        assert_same_run(output, finished_shards)


def test_every_pass_takes_all_blocks_in_the_order_of_its_seed(sharded, folder, tmp_path, monkeypatch):
    dataset = ShardedText(folder, 16, seed=5)
    count = len(dataset)
    assert count < 60
    taken = stop_at(monkeypatch, 2 * -(-count // 2))
    config = sharded(seed=5, batch_size=2, accumulation=1, steps=2 * -(-count // 2), eval_every=0, save_every=0)
    train(config, tmp_path / "run")
    rows = torch.cat([ids.view(-1, 16) for ids in taken])
    passes = []
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        passes.append(torch.stack([row["input_ids"] for row in dataset]))
    assert torch.equal(rows, torch.cat(passes)) and not torch.equal(*passes)


def test_the_tokenizer_is_that_of_the_shards_and_goes_with_the_model(finished_shards, folder):
    from transformers import AutoTokenizer

    from metaplastic.tasks.shards import tokenizer_of

    saved, own = AutoTokenizer.from_pretrained(finished_shards / "final"), tokenizer_of(folder)
    assert saved.get_vocab() == own.get_vocab() != byte_tokenizer().get_vocab()
    config = json.loads((finished_shards / "final" / "config.json").read_text())
    assert config["vocab_size"] == len(own)
    card = (finished_shards / "final" / "README.md").read_text()
    assert "documents of lines.jsonl, tokenised to" in card and str(folder) not in card


def test_a_model_of_another_tokenizer_is_refused(sharded, undisturbed, tmp_path):
    sizes = {
        name: TrainConfig().__getattribute__(name) for name in ("hidden_size", "layers", "heads", "intermediate_size")
    }
    with pytest.raises(
        ValueError, match="data: the tokenizer of .* is not the one saved with model .*: tokenise with the"
    ):
        train(sharded(model=str(undisturbed), **sizes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_changed_or_broken_shards_are_not_taken_for_the_same_run(sharded, folder, texts, tmp_path, monkeypatch):
    copy = shutil.copytree(folder, tmp_path / "shards")
    config = sharded(data=str(copy))
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        with pytest.raises(Stop):
            train(config, tmp_path / "run")
    cut = copy / "00000.train.tokens"
    whole = cut.read_bytes()
    cut.write_bytes(whole[:-2])
    with pytest.raises(ValueError, match=r"data: .*00000\.train\.tokens has .* bytes, expected"):
        train(config, tmp_path / "run")
    shutil.rmtree(copy)
    source = FileText(texts)
    write_shards(source, source.origin, byte_tokenizer(), copy, held_out=0.5)
    with pytest.raises(ValueError, match="data: the shards have changed since .* was started"):
        train(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"files": "a.txt"}, r"files \(a.txt\) and data \(shards\) were both given: leave out one"),
        ({"dataset": "a"}, r"dataset \(a\) and data \(shards\) were both given"),
        ({"tokenizer": "bytes"}, r"tokenizer \(bytes\) and data \(shards\) were both given"),
        ({"held_out": 0.1}, r"held_out \(0.1\) and data \(shards\) were both given"),
        ({"split": "test"}, r"split \(test\) and data \(shards\) were both given"),
    ],
)
def test_settings_that_do_not_go_with_shards_are_named(settings, expected):
    with pytest.raises(ValueError, match=expected):
        TrainConfig(data="shards", **settings)
    applied = TrainConfig(data="shards").applied()
    assert (applied["data"], *(applied[name] for name in ("held_out", "split", "files"))) == (
        "shards",
        None,
        None,
        None,
    )
    begun = TrainConfig(files=("a",), model="b").applied()
    assert (begun["held_out"], begun["split"], begun["max_bytes"], begun["heads"]) == (0.05, None, None, None)


def test_shards_that_do_not_do_claim_no_folder(sharded, folder, tmp_path):
    held_out = ShardedText(folder, 2, split="held_out").tokens
    for changes, expected in (
        (
            {"data": str(tmp_path)},
            r"data: .* has no index\.json, expected a folder written by `metaplastic data tokenise`",
        ),
        ({"data": str(tmp_path / "nowhere")}, "data: .*nowhere is no folder"),
        ({"block_length": 4000}, "tokens in its split 'train', expected at least block_length = 4000"),
        (
            {"block_length": held_out + 1},
            f"has {held_out} tokens in its split 'held_out', expected .*: tokenise with a",
        ),
    ):
        with pytest.raises((ValueError, OSError), match=expected):
            train(sharded(**changes), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_two_processes_end_where_one_does(sharded, nursery, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    jobs = []
    for rank in (None, 0, 1):
        config = sharded(batch_size=4, accumulation=1, steps=3, eval_every=0, save_every=0)
        output = tmp_path / ("one" if rank is None else "two")
        environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        arguments = {"config": dataclasses.asdict(config), "output": str(output)}
        job = {"function": "train_and_die", "arguments": arguments}
        jobs.append(job if rank is None else job | {"environment": environment})
    assert nursery.run(*jobs) == [0, 0, 0], nursery.log.read_text()
    one, two = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-5, rtol=1e-4, msg=name)
