"""FileText: documents of files one after another, from any place on."""

import bz2
import json

import pyarrow
import pyarrow.parquet
import pytest

from metaplastic.tasks import FileText, documents, read_documents

ROWS = ["one", None, "  ", "two\n\x1e\nthree", "četiri"]


@pytest.fixture(params=["whole", "in small pieces"])
def _chunks(request, monkeypatch):
    if request.param == "in small pieces":
        monkeypatch.setattr(documents, "CHUNK", 3)


@pytest.fixture
def folder(tmp_path):
    """All kinds of files, the first of a kind with several documents and the second with one or none."""
    (tmp_path / "a.txt").write_bytes("\ufeffà\n\x1e\nb\x1e\n\x1e\nx\x1e\x1e\nc".encode())
    (tmp_path / "b.txt").write_text("only")
    (tmp_path / "c.md.bz2").write_bytes(bz2.compress(b"packed\x1e\n") + bz2.compress(b"twice"))
    (tmp_path / "d.jsonl.bz2").write_bytes(bz2.compress(b'\xef\xbb\xbf{"text": "l1\\u001e\\nl1b"}\n\n{"text": "l2"}'))
    (tmp_path / "e.jsonl").write_text('{"text": "  "}\n')
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"id": n, "text": text} for n, text in enumerate(ROWS)]),
        tmp_path / "f.parquet", row_group_size=2,
    )  # fmt: skip
    return tmp_path


WHOLE = [
    ("a.txt", "à\n\x1e\nb\x1e\n\x1e\nx\x1e\x1e\nc"), ("b.txt", "only"), ("c.md.bz2", "packed\x1e\ntwice"),
    ("d.jsonl.bz2#0", "l1\x1e\nl1b"), ("d.jsonl.bz2#1", "l2"),
    ("f.parquet#0", "one"), ("f.parquet#1", "two\n\x1e\nthree"), ("f.parquet#2", "četiri"),
]  # fmt: skip
PIECES = [
    ("a.txt#0", "à\n"), ("a.txt#1", "b"), ("a.txt#2", "x\x1e"), ("a.txt#3", "c"), ("b.txt", "only"),
    ("c.md.bz2#0", "packed"), ("c.md.bz2#1", "twice"),
    ("d.jsonl.bz2#0", "l1"), ("d.jsonl.bz2#1", "l1b"), ("d.jsonl.bz2#2", "l2"),
    ("f.parquet#0", "one"), ("f.parquet#1", "two\n"), ("f.parquet#2", "three"), ("f.parquet#3", "četiri"),
]  # fmt: skip


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize(("separator", "expected"), [(None, WHOLE), ("\x1e\n", PIECES)])
def test_every_kind_of_file_gives_its_documents_from_any_place_on(folder, separator, expected):
    expected = [(f"{folder}/{name}", text) for name, text in expected]
    source = FileText(folder, separator=separator)
    states = [source.state_dict(), *(json.loads(json.dumps(source.state_dict())) for _ in source)]
    assert len(states) == len(expected) + 1
    assert source.progress[0] == source.progress[1] == sum(file.stat().st_size for file in folder.iterdir())
    for place, state in enumerate(states):
        again = FileText(folder, separator=separator)
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert list(again) == expected[place:]
        assert list(again) == []  # the place is the end
    assert read_documents(folder, separator=separator) == expected


def test_progress_counts_bytes_of_files(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "some text"}\n' * 10_000)
    source = FileText(tmp_path)
    seen = [source.progress[0] for _ in source]
    assert seen == sorted(seen) and 0 < seen[1] < 100_000 and 220_000 < seen[10_001] < 330_000
    assert source.progress == (440_000, 440_000)


def test_origin_is_of_names_and_sizes_and_not_of_places(folder, tmp_path_factory):
    import shutil

    copy = shutil.copytree(folder, tmp_path_factory.mktemp("elsewhere") / folder.name)
    origin = FileText(folder).origin
    assert origin == FileText(copy).origin and str(folder.parent) not in json.dumps(origin)
    assert origin != FileText(folder, separator="\x1e\n").origin
    (copy / "b.txt").write_text("other")
    assert origin["names and sizes"] != FileText(copy).origin["names and sizes"]


def test_columns(tmp_path):
    table = pyarrow.Table.from_pylist([{"body": "a", "n": 1}, {"body": "b", "n": None}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"body": "c"}')
    assert [text for _, text in read_documents(tmp_path, column="body")] == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"a\.parquet: has no column 'text', expected one of 'body', 'n'"):
        read_documents(tmp_path)
    with pytest.raises(ValueError, match=r"a\.parquet: column 'n' holds int '1', expected strings"):
        read_documents(tmp_path / "a.parquet", column="n")
    with pytest.raises(ValueError, match=r"b\.jsonl, line 1: expected a JSON object with a string 'text'"):
        read_documents(tmp_path / "b.jsonl")


def test_a_broken_parquet_file_is_named(tmp_path):
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": "some text " * 100}]), file)
    whole = file.read_bytes()
    for content in (b"", b"text", whole[:-20], whole[:10] + b"\xff" * 30 + whole[40:]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.parquet: expected a whole Parquet file"):
            read_documents(file)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.bz2"])
def test_bytes_that_are_no_text_are_placed(tmp_path, name, mark):
    content = mark + b'{"text": "fine"}\n{"text": "caf\xe9 au lait"}\n'
    place = content.index(b"\xe9")
    (tmp_path / name).write_bytes(bz2.compress(content) if name.endswith("bz2") else content)
    where = f"{name}, line 2" if "jsonl" in name else name
    with pytest.raises(ValueError, match=f"{where}: expected UTF-8 text, got 0xe9 at (decompressed )?byte {place}$"):
        read_documents(tmp_path / name)


@pytest.mark.parametrize("deep", ["[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000])
def test_json_too_deep_to_follow_is_placed(tmp_path, deep):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "fine"}}\n{{"text": "fine", "more": {deep}}}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: expected a JSON object nested less deeply, got \{\"text"):
        read_documents(tmp_path / "a.jsonl")


def test_strings_of_parquet_that_are_none_are_placed(tmp_path):
    """Parquet writes whatever bytes it is told are a string."""
    texts = [b"fine", None, b"caf\xe9"]
    column = pyarrow.array(texts, pyarrow.binary())
    string = pyarrow.Array.from_buffers(pyarrow.string(), 3, column.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": string}), tmp_path / "a.parquet", row_group_size=2)
    with pytest.raises(ValueError, match=r"a\.parquet, row 2, column 'text': expected UTF-8 text, got 0xe9$"):
        read_documents(tmp_path / "a.parquet")


def test_a_folder_without_text_is_found_where_others_have_some(tmp_path):
    for name in ("full", "blank", "none"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "a.txt").write_text("text")
    (tmp_path / "blank" / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"paths: .*none has no text, expected text in \*.txt"):
        FileText([tmp_path / "full", tmp_path / "none"])
    source = FileText([tmp_path / "full", tmp_path / "blank"])
    with pytest.raises(ValueError, match="paths: .*blank has no text"):
        list(source)
    assert len(read_documents([tmp_path / "full", tmp_path / "blank" / "..", tmp_path / "full"])) == 1
