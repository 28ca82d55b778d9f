import bz2
import json
import random
import sys
import sysconfig
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from metaplastic.tasks import (
    PackedText,
    byte_tokenizer,
    collate_packed,
    load_tokenizer,
    read_documents,
    split_documents,
    standard_library_documents,
)
from metaplastic.tasks import text as module

HARD_TEXTS = [
    "",
    "a",
    " leading and trailing \t\n\r\n ",
    "naïve café — 日本語 😀👩‍👩‍👧 e\u0301",
    "\x00\x01\x7f\x80\xad\xff\u2028\ufeff\U0010ffff",
    "spells <|endoftext|> and <|padding|>, said . he , no ?",
    "".join(map(chr, range(0x250))),
]


def random_strings(count, seed=0):
    generator = random.Random(seed)
    for _ in range(count):
        top = generator.choice([0x80, 0x800, 0xD800, 0x110000])
        codes = (generator.randrange(top) for _ in range(generator.randrange(1, 60)))
        yield "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def merging_tokenizer():
    """A byte-level tokenizer with merges, as pretrained models have."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False
    )
    backend.train_from_iterator([text for _, text in standard_library_documents(max_bytes=100_000)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


# Byte tokenizer


def test_ids_are_the_bytes_and_text_comes_back(tokenizer):
    for text in [*HARD_TEXTS, *random_strings(300)]:
        ids = tokenizer(text, split_special_tokens=True)["input_ids"]
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_each_byte_has_its_id(tokenizer):
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert tokenizer.convert_ids_to_tokens(list(range(256))) == [bytes_to_unicode()[byte] for byte in range(256)]
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (
        258,
        256,
        256,
        257,
    )
    assert tokenizer("<|endoftext|>")["input_ids"] == [256]
    assert tokenizer(["a", "abc"], padding=True)["input_ids"] == [[257, 257, 97], [97, 98, 99]]


def test_saved_tokenizer_loads_through_auto_tokenizer(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path), load_tokenizer(str(tmp_path))):
        assert loaded.get_vocab() == tokenizer.get_vocab() and loaded.padding_side == "left"
        assert (loaded.eos_token_id, loaded.pad_token_id) == (256, 257)
        for text in HARD_TEXTS:
            assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
            assert loaded.decode(loaded(text)["input_ids"]) == text


def test_load_tokenizer(tokenizer, tmp_path):
    for name in (None, "bytes"):
        assert load_tokenizer(name).get_vocab() == tokenizer.get_vocab()
    with pytest.raises(OSError, match=r"name_or_path: got .*expected 'bytes', a folder"):
        load_tokenizer(tmp_path)


def test_fifty_megabytes_of_bytes_in_seconds(tokenizer):
    started = time.perf_counter()
    dataset = PackedText([("long", "Fünfzig. " * 5_000_000)], tokenizer, 1024)
    assert len(dataset) == 50_000_001 // 1024
    assert time.perf_counter() - started < 5


# Reading


def test_files_and_folders_are_read_in_order(tmp_path):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "b.txt").write_bytes("bé\r\n".encode())
    (folder / "a.md.bz2").write_bytes(bz2.compress(b"\xef\xbb\xbfa"))
    (folder / "sub" / "c.py").write_text("c")
    (folder / "sub" / "__init__.py").write_text("")
    (folder / ".hidden" / "d.txt").write_text("hidden")
    (folder / "picture.png").write_bytes(b"\xff\xfe")
    single = tmp_path / "any.name"
    single.write_text("single")
    assert read_documents([single, folder, folder / "b.txt"]) == [
        (str(single), "single"),
        (str(folder / "a.md.bz2"), "a"),
        (str(folder / "b.txt"), "bé\r\n"),
        (str(folder / "sub" / "c.py"), "c"),
    ]
    assert read_documents(str(folder), pattern="*.py") == [(str(folder / "sub" / "c.py"), "c")]


def test_separator_and_jsonl(tmp_path):
    books = tmp_path / "books.txt.bz2"
    books.write_bytes(bz2.compress(b"one\n\x1e\ntwo\n\x1e\n\n"))
    assert read_documents(books, separator="\x1e\n") == [(f"{books}#0", "one\n"), (f"{books}#1", "two\n")]
    assert read_documents(books) == [(str(books), "one\n\x1e\ntwo\n\x1e\n\n")]
    lines = [{"text": "první\nline"}, {"text": "second", "id": 2}, {"text": " "}]
    for name, pack in (("rows.jsonl", bytes), ("rows.jsonl.bz2", bz2.compress)):
        file = tmp_path / name
        file.write_bytes(pack("\n".join(map(json.dumps, lines)).encode() + b"\n\n"))
        assert read_documents(file) == [(f"{file}#0", "první\nline"), (f"{file}#1", "second")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "empty.txt has no text, expected a file with text"),
        ("blank.txt", b" \n\n", "blank.txt has no text"),
        ("latin.txt", b"caf\xe9 au lait", "latin.txt: expected UTF-8 text, got 0xe9 at byte 3"),
        (
            "latin.txt.bz2",
            bz2.compress(b"caf\xe9"),
            "latin.txt.bz2: expected UTF-8 text, got 0xe9 at decompressed byte 3",
        ),
        ("plain.bz2", b"plain", "plain.bz2: expected a whole bz2 archive"),
        ("cut.bz2", bz2.compress(b"text" * 99)[:-9], "cut.bz2: expected a whole bz2 archive"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"body": "b"}',
            "a.jsonl, line 2: expected a JSON object with a string 'text', got",
        ),
        ("b.jsonl", b"[1]", "b.jsonl, line 1: expected a JSON object"),
        ("c.jsonl", b'{"text": 3}', "c.jsonl, line 1: expected a JSON object"),
        ("d.jsonl", b'{"text": "\\ud800"}', "d.jsonl, line 1: expected a JSON object"),
        ("e.jsonl", b"text", "e.jsonl, line 1: expected a JSON object"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_documents(tmp_path / name)


def test_bad_paths_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.txt does not exist, expected a file or folder"):
        read_documents(tmp_path / "absent.txt")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"has no text, expected text in \*.txt, \*.md"):
        read_documents(tmp_path)
    with pytest.raises(ValueError, match="paths: got none"):
        read_documents([])
    with pytest.raises(ValueError, match="separator: got an empty string"):
        read_documents(tmp_path, separator="")


# Splitting


def test_split_is_disjoint_and_depends_on_the_seed_alone():
    documents = [(str(number), f"text {number % 37}") for number in range(100)]
    train, validation = split_documents(documents, 0.2, seed=1)
    for global_seed in (0, 1):
        random.seed(global_seed)
        assert split_documents(iter(documents), 0.2, seed=1) == (train, validation)
    assert split_documents(documents, 0.2, seed=2) != (train, validation)
    assert not {text for _, text in train} & {text for _, text in validation}
    assert sorted(train + validation) == sorted(documents)
    assert len({text for _, text in validation}) == round(0.2 * 37)
    assert train == [pair for pair in documents if pair in train]


@pytest.mark.parametrize("held_out", [0.001, 0.999])
def test_either_side_gets_a_document(held_out):
    train, validation = split_documents([("a", "1"), ("b", "2")], held_out, seed=0)
    assert len(train) == len(validation) == 1


def test_a_single_text_is_cut_by_position():
    assert split_documents([("a", "0123456789")], 0.3, seed=0) == ([("a", "0123456")], [("a", "789")])
    train, validation = split_documents([("a", "0123456789"), ("b", "0123456789")], 0.3, seed=0)
    assert train == [("a", "0123456"), ("b", "0123456")] and validation == [("a", "789"), ("b", "789")]


def test_bad_splits_are_named():
    for share in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"held_out: got {share}, expected a share above 0 and below 1"):
            split_documents([("a", "text")], share, seed=0)
    with pytest.raises(ValueError, match="documents: got none"):
        split_documents([], 0.5, seed=0)
    with pytest.raises(ValueError, match="documents: got one text of 1 characters"):
        split_documents([("a", "x")], 0.5, seed=0)


# The standard library


def test_standard_library_text_is_there_and_deterministic(tokenizer):
    documents = standard_library_documents(max_bytes=1_500_000)
    assert documents == standard_library_documents(max_bytes=1_500_000)
    assert 1_000_000 < sum(len(text.encode()) for _, text in documents) <= 1_500_000
    names = [name for name, _ in documents]
    assert names[0].startswith("pydoc_data/topics/") and "argparse.py" in names and len(set(names)) == len(names)
    assert not any("test" in name.split("/") or "site-packages" in name for name in names)
    assert len(PackedText(documents, tokenizer, 256)) > 3000


def test_standard_library_without_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python.zip"))
    topics = standard_library_documents()
    assert topics and all(name.startswith("pydoc_data/topics/") for name, _ in topics)
    with pytest.raises(ValueError, match="max_bytes: got 10, expected at least"):
        standard_library_documents(max_bytes=10)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(FileNotFoundError, match="read_documents"):
        standard_library_documents()


def test_unreadable_sources_are_left_out(monkeypatch, tmp_path):
    (tmp_path / "good.py").write_text("x = 1")
    (tmp_path / "bad.py").write_bytes(b"\xff")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "inner.py").write_text("x = 2")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    sources = [pair for pair in standard_library_documents() if not pair[0].startswith("pydoc_data")]
    assert sources == [("good.py", "x = 1")]


# Packing


def documents_of(lengths, seed=0):
    generator = random.Random(seed)
    return [(str(number), "".join(generator.choices("abcdé ", k=length))) for number, length in enumerate(lengths)]


LENGTHS = [[100], [7, 0, 1, 15, 16, 14, 40, 3, 0, 0, 5], [15, 15, 31], [1] * 50]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("which", ["tokenizer", "merging_tokenizer"])
def test_blocks_give_back_the_stream_and_labels_stay_within_documents(lengths, which, request):
    tokenizer = request.getfixturevalue(which)
    documents = documents_of(lengths)
    stream, place = [], []  # tokens, and the position of each in its document
    for _, text in documents:
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        stream += ids
        place += range(len(ids))
    dataset = PackedText(documents, tokenizer, 16)
    rows = list(dataset)
    assert len(rows) == len(dataset) == len(stream) // 16 and dataset.dropped_tokens == len(stream) % 16
    assert torch.cat([row["input_ids"] for row in rows]).tolist() == stream[: 16 * len(rows)]
    for number, row in enumerate(rows):
        inside = place[16 * number : 16 * number + 16]
        starts = [position for position in range(16) if position == 0 or inside[position] == 0]
        expected = row["input_ids"].clone()
        expected[starts] = -100
        assert row["starts"].tolist() == starts and torch.equal(row["labels"], expected)
        assert all(tensor.dtype == torch.int64 for tensor in row.values())
    assert torch.equal(dataset[-1]["input_ids"], rows[-1]["input_ids"])


@pytest.mark.parametrize("lengths", LENGTHS)
def test_collated_rows_are_independent_sequences(tokenizer, lengths):
    dataset = PackedText(documents_of(lengths), tokenizer, 16)
    batch = next(iter(DataLoader(dataset, batch_size=3, collate_fn=collate_packed)))
    rows = [dataset[index] for index in range(min(3, len(dataset)))]
    total = 16 * len(rows)
    assert batch["input_ids"].shape == batch["labels"].shape == (1, total)
    assert torch.equal(batch["input_ids"][0], torch.cat([row["input_ids"] for row in rows]))
    offsets = batch["cu_seqlens"]
    assert offsets.dtype == torch.int32 and offsets[0] == 0 and offsets[-1] == total
    assert (offsets.diff() > 0).all()
    assert (batch["labels"][0, offsets[:-1].long()] == -100).all()
    scored = batch["labels"][0] != -100
    assert torch.equal(batch["labels"][0, scored], batch["input_ids"][0, scored])
    assert scored.sum() == total - (len(offsets) - 1)
    ends = (batch["input_ids"][0] == 256).nonzero()[:, 0] + 1
    assert set(ends.tolist()) | set(range(0, total + 1, 16)) == set(offsets.tolist()) | ({total} & set(ends.tolist()))


def test_collate_packed_takes_rows_without_starts_and_of_any_length():
    rows = [{"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in (3, 5)]
    batch = collate_packed([rows[0], {**rows[1], "starts": torch.tensor([2, 2, 4])}])
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 7, 8]
    assert batch["labels"].tolist() == [[-100, 1, 2, -100, 1, -100, 3, -100]]
    assert rows[0]["labels"].tolist() == [0, 1, 2]  # the rows themselves stay as they were


def test_bad_rows_are_named():
    row = {"input_ids": torch.arange(3), "labels": torch.arange(3), "starts": torch.tensor([3])}
    with pytest.raises(ValueError, match="rows: got none"):
        collate_packed([])
    with pytest.raises(ValueError, match=r"rows: got starts \[0, 3\] in row 0, expected positions below 3"):
        collate_packed([row])


@pytest.mark.parametrize("which", ["tokenizer", "merging_tokenizer"])
def test_text_cannot_fake_a_border(which, request):
    tokenizer = request.getfixturevalue(which)
    dataset = PackedText([("a", f"one {tokenizer.eos_token} two " * 3)], tokenizer, 20)
    assert all((row["input_ids"] != tokenizer.eos_token_id).all() and row["starts"].tolist() == [0] for row in dataset)


def test_the_short_way_for_bytes_gives_the_ids_of_the_tokenizer(tokenizer, tmp_path, monkeypatch):
    tokenizer.save_pretrained(tmp_path)
    documents = [(str(number), text) for number, text in enumerate([*HARD_TEXTS, *random_strings(50)])]
    assert module._reads_bytes(tokenizer) and module._reads_bytes(load_tokenizer(tmp_path))
    short = [row["input_ids"] for row in PackedText(documents, tokenizer, 8)]
    monkeypatch.setattr(module, "_reads_bytes", lambda tokenizer: False)
    assert torch.equal(
        torch.stack(short), torch.stack([row["input_ids"] for row in PackedText(documents, tokenizer, 8)])
    )


def test_a_tokenizer_that_changes_text_does_not_take_the_short_way():
    from tokenizers import normalizers

    lower = byte_tokenizer()
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert PackedText([("a", "ABC")], lower, 2)[0]["input_ids"].tolist() == [97, 98]


def test_batches_of_documents_do_not_change_the_ids(merging_tokenizer, monkeypatch):
    documents = standard_library_documents(max_bytes=200_000)
    whole = PackedText(documents, merging_tokenizer, 64)
    batches = module.batches
    monkeypatch.setattr(module, "batches", lambda documents, characters: batches(documents, 1000))
    cut = PackedText(documents, merging_tokenizer, 64)
    assert np.array_equal(whole._stream, cut._stream) and np.array_equal(whole._starts, cut._starts)


def test_bad_packing_is_named(tokenizer, merging_tokenizer):
    with pytest.raises(ValueError, match=r"documents: got 8 tokens \(a, b\), expected at least block_length = 16"):
        PackedText([("a", "abc"), ("b", "def")], tokenizer, 16)
    with pytest.raises(ValueError, match=r"documents: got 0 tokens \(no documents\)"):
        PackedText([], tokenizer, 16)
    with pytest.raises(ValueError, match="block_length: got 1, expected an integer of at least 2"):
        PackedText([("a", "abc")], tokenizer, 1)
    with pytest.raises(IndexError, match="index: got 2, expected a block number below 2"):
        PackedText([("a", "abc")], tokenizer, 2)[2]
    bare = byte_tokenizer()
    bare.eos_token = None
    with pytest.raises(ValueError, match=r"tokenizer: got a .* without eos_token"):
        PackedText([("a", "abc")], bare, 2)
