"""A run on a stream of text goes on with the very next block after a checkpoint, however it ended."""

import dataclasses
import json
import random
import shutil
import signal
import socket

import pytest
import torch
from transformers.trainer_pt_utils import safe_globals

from metaplastic.tasks import PackedText, byte_tokenizer, stream
from metaplastic.training import MetaplasticTrainer, TrainConfig, train
from metaplastic.training.checkpoint import checkpoints, step_of

from .rows import packed_rows
from .test_run import Stop, assert_same_run, logged


@pytest.fixture(scope="module")
def finished_stream(_quiet_machine, streamed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("streamed") / "run"
    train(streamed(), folder)
    return folder


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    """Documents are tokenised a few at a time, so that a batch is not the whole corpus."""
    monkeypatch.setattr(stream, "CHARACTERS", 500)


def stop_at(monkeypatch, step):
    """Stops a run before that step's end; the rows it has taken until then."""
    original, seen = MetaplasticTrainer.training_step, []

    def training_step(self, model, inputs, *args):
        if self.state.global_step == step:
            raise Stop
        seen.append(inputs["input_ids"].clone())
        return original(self, model, inputs, *args)

    monkeypatch.setattr(MetaplasticTrainer, "training_step", training_step)
    return seen


def test_the_run_of_these_tests_is_not_too_easy(finished_stream, streamed):
    result = json.loads((finished_stream / "results.json").read_text())
    entries = logged(result)
    assert entries[0]["epoch"] == 0 and entries[-1]["epoch"] >= 1  # more than one pass
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1
    assert result["measurements"]["tokens_seen"] == 10 * 9 * 32
    places = [json.loads((folder / "stream.json").read_text()) for folder in checkpoints(finished_stream)]
    assert all(place["position"] for place in places)  # within a window
    assert result["measurements"]["dropped_tokens"] > 0


@pytest.mark.parametrize("stops", [[7], [1, 4, 6, 9]])
def test_a_stopped_stream_resumes_to_the_same_bits(streamed, tmp_path, monkeypatch, finished_stream, stops):
    for stop in stops:
        with monkeypatch.context() as patch:
            stop_at(patch, stop)
            with pytest.raises(Stop):
                train(streamed(), tmp_path / "stopped")
    result = train(streamed(), tmp_path / "stopped")
    assert result["measurements"]["steps_this_call"] == 10 - (stops[-1] // 3) * 3
    assert (
        result["measurements"]["dropped_tokens"]
        == json.loads((finished_stream / "results.json").read_text())["measurements"]["dropped_tokens"]
    )
    assert_same_run(tmp_path / "stopped", finished_stream)
    ends = [folder / "checkpoint-10" for folder in (tmp_path / "stopped", finished_stream)]
    assert (ends[0] / "stream.json").read_text() == (ends[1] / "stream.json").read_text()
    with safe_globals():
        random_states = [torch.load(end / "rng_state.pth", weights_only=True) for end in ends]
    assert torch.equal(random_states[0]["cpu"], random_states[1]["cpu"])  # starting a loader draws no random number


def test_a_stream_killed_anywhere_resumes_to_the_same_bits(streamed, tmp_path, nursery, finished_stream):
    job = {"function": "train_and_die", "arguments": {"config": dataclasses.asdict(streamed())}}
    dangers = sorted(random.Random(1).sample(range(20, 100), 2))
    outputs = [tmp_path / f"killed at {at}" for at in dangers]
    first = [
        job | {"arguments": job["arguments"] | {"output": str(output), "at": at}}
        for output, at in zip(outputs, dangers, strict=True)
    ]
    codes = nursery.run(*first)
    assert set(codes) == {-signal.SIGKILL}, nursery.log.read_text()
    reached = {max(step_of(checkpoint) for checkpoint in checkpoints(output)) for output in outputs}
    assert len(reached) == 2 and max(reached) < 10, reached
    second = [job | {"arguments": job["arguments"] | {"output": str(output)}} for output in outputs]
    codes = nursery.run(*second)
    assert set(codes) == {0}, nursery.log.read_text()
    for output in outputs:
        assert_same_run(output, finished_stream)


def test_resuming_tokenises_one_window_and_not_the_stream(streamed, tmp_path, monkeypatch):
    config = streamed(shuffle_window=4, steps=6, save_every=5, eval_every=0)
    with monkeypatch.context() as patch:
        taken = stop_at(patch, 5)
        with pytest.raises(Stop):
            train(config, tmp_path / "run")
    assert len(taken) == 15
    read = []
    original = stream.PackedStream._batches

    def batches(self, state):
        for batch in original(self, state):
            read.append((self.window, len(batch[1])))
            yield batch

    monkeypatch.setattr(stream.PackedStream, "_batches", batches)
    # At the beginning the fingerprint reads PROBED blocks; from the checkpoint on it is a few windows.
    monkeypatch.setattr(stream, "PROBED", 1)
    with pytest.raises(ValueError, match="dataset: its first documents have changed"):
        train(config, tmp_path / "run")  # another fingerprint: another run
    read.clear()
    monkeypatch.setattr(stream, "PROBED", 64)
    train(config, tmp_path / "run")
    probed = 64 * 32
    assert sum(tokens for _, tokens in read) < probed + 1000 + 9 * 32 + 2 * 4 * 32 + 600


def test_what_is_held_out_is_never_trained_on(streamed, corpus, tmp_path, monkeypatch):
    folder = tmp_path / "again"
    shutil.copytree(corpus, folder)
    lines = (folder / "train-0.jsonl").read_text().splitlines(keepends=True)
    second = folder / "train-1.jsonl"
    second.write_text(lines[2] + lines[15] + second.read_text())  # one that is held out, and one that is not
    texts = [json.loads(line)["text"] for line in lines]
    taken = stop_at(monkeypatch, 10)
    config = streamed(dataset=str(folder), eval_every=0, save_every=0)
    trained = train(config, tmp_path / "run")["measurements"]
    tokenizer = byte_tokenizer()
    held_out = PackedText([("text", text) for text in texts[:10]], tokenizer, 32)
    assert trained["eval_tokens"] == sum(int((row["labels"][1:] != -100).sum()) for row in held_out)
    blocks = [piece for row in taken for piece in tokenizer.batch_decode(row.view(-1, 32))]
    pieces = {text[at : at + 15] for text in texts[:10] for at in range(0, len(text) - 15)}
    others = " ".join(
        json.loads(line)["text"]
        for file in sorted(folder.glob("train*"))
        for line in file.read_text().splitlines()
        if json.loads(line)["text"] not in texts[:10]
    )
    pieces = {piece for piece in pieces if piece not in others}
    assert len(pieces) > 50
    assert not [piece for piece in pieces if any(piece in block for block in blocks)]


def test_a_split_for_evaluation_leaves_the_stream_whole(streamed, corpus, tmp_path, monkeypatch):
    taken = stop_at(monkeypatch, 1)
    with pytest.raises(Stop):
        train(streamed(eval_split="validation", shuffle_window=1, accumulation=1), tmp_path / "run")
    text = json.loads((corpus / "train-0.jsonl").read_text().splitlines()[0])["text"]
    assert byte_tokenizer().decode(taken[0][0]).startswith(text[:90])
    card = json.loads((tmp_path / "run" / "run.json").read_text())
    assert card["eval_split"] == "validation"


def test_changed_data_is_not_taken_for_the_same_run(streamed, corpus, tmp_path, monkeypatch):
    folder = tmp_path / "data"
    shutil.copytree(corpus, folder)
    monkeypatch.setattr(stream, "PROBED", 16)
    config = streamed(dataset=str(folder), shuffle_window=16, steps=8, eval_every=0)
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(Stop):
            train(config, tmp_path / "run")
    for file, expected in (
        ("train-0.jsonl", "dataset: its first documents have changed since"),
        ("train-2.jsonl", r"dataset: its text has changed where this run goes on \(block 48 of the stream"),
    ):
        lines = (folder / file).read_text()
        (folder / file).write_text(lines.replace("memory", "MEMORY"))
        with pytest.raises(ValueError, match=expected):
            train(config, tmp_path / "run")
        (folder / file).write_text(lines)
    train(config, tmp_path / "run")


def test_bad_streams_claim_no_folder(streamed, corpus, tmp_path):
    for wrong, expected in (
        ({"split": "test"}, "split 'test' cannot be read"),
        ({"text_column": "body"}, "text_column: .* no column 'body', expected one of 'text'"),
        ({"eval_split": "test"}, "split 'test' cannot be read"),
        ({"held_out_documents": 60}, "held_out_documents: got 60, but dataset .* has 60 documents with text: none is"),
        ({"dataset_revision": "v1"}, "dataset_revision: got 'v1', but .* is a local folder, which has no revisions"),
        ({"block_length": 4000, "eval_split": "validation"}, "held-out documents"),
        ({"held_out_documents": 61}, "held_out_documents: got 61, but dataset .* has 60 documents with text: none is"),
        ({"held_out_documents": 1, "block_length": 500}, r"held-out documents \(1 of .*\): got \d+ tokens"),
        ({"dataset": str(tmp_path / "nowhere")}, "dataset: got .*nowhere"),
    ):
        with pytest.raises((ValueError, OSError), match=expected):
            train(streamed(**wrong), tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dataset": "a", "files": "b.txt"}, r"files is for files, and dataset is given, got \('b.txt',\)"),
        ({"dataset": "a", "held_out": 0.1}, "held_out is for files, and dataset is given, got 0.1"),
        ({"dataset": "a", "eval_split": "train"}, "eval_split is 'train', which is trained on"),
        ({"split": "test"}, "split is for dataset, which is not given, got 'test'"),
        ({"dataset": "a", "held_out_documents": 0}, "held_out_documents must be >= 1, got 0"),
        ({"dataset": "a", "shuffle_window": 0}, "shuffle_window must be >= 1, got 0"),
    ],
)
def test_settings_that_do_not_go_together_are_named(settings, expected):
    with pytest.raises(ValueError, match=expected):
        TrainConfig(**settings)


def test_workers_are_refused(streamed, tmp_path, network):
    from metaplastic.tasks import HubText, PackedStream, collate_packed
    from metaplastic.training import training_arguments

    arguments = training_arguments(tmp_path / "run", max_steps=1, dataloader_num_workers=2, disable_tqdm=True)
    rows = PackedStream(HubText(streamed().dataset), byte_tokenizer(), 16)
    trainer = MetaplasticTrainer(model=network(258), args=arguments, train_dataset=rows, data_collator=collate_packed)
    with pytest.raises(ValueError, match="got dataloader_num_workers = 2, expected 0"):
        trainer.train()


def test_two_processes_take_the_steps_of_one_on_a_stream(network, nursery, corpus, tmp_path):
    network(258).save_pretrained(tmp_path / "model")
    torch.save({"eval": packed_rows(5, seed=2)}, tmp_path / "rows.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    jobs = []
    for rank in (None, 0, 1):
        output = tmp_path / ("one" if rank is None else "two")
        output.mkdir(exist_ok=True)
        environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        arguments = {"rows": str(tmp_path / "rows.pt"), "output": str(output), "model": str(tmp_path / "model")}
        arguments |= {"per_device": 4 if rank is None else 2, "accumulation": 2, "dataset": str(corpus), "steps": 3}
        jobs.append(
            {"function": "one_step", "arguments": arguments, "environment": {} if rank is None else environment}
        )
    assert nursery.run(*jobs) == [0, 0, 0], nursery.log.read_text()
    one, two = (torch.load(tmp_path / name / "found.pt") for name in ("one", "two"))
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    for name, value in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], value, atol=1e-5, rtol=1e-4, msg=name)
