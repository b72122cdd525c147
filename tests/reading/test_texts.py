"""Reading texts: every format gives the same texts, and what is wrong is said with what was found."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whence.errors import InputError, MissingExtraError, UnavailableError
from whence.reading.texts import read_texts

ROWS = [
    {"text": 'He said: "yes, twice", then left', "other": "a\u2028b", "label": "1"},
    {"text": "", "other": "é ü 漢字", "label": "0"},
    {"text": "a\ttab, a comma", "other": "two", "label": "1"},
]


def write(folder: Path, kind: str, rows: list[dict[str, str]]) -> Path:
    import csv

    path = folder / f"texts.{kind}"
    if kind in ("csv", "tsv"):
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="," if kind == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    elif kind == "json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_every_format_gives_the_same(kind: str, tmp_path: Path) -> None:
    data = read_texts(write(tmp_path, kind, ROWS), label="label", pair="other")
    assert list(data.texts) == [row["text"] for row in ROWS]
    assert data.pairs == tuple(row["other"] for row in ROWS)
    assert data.labels == ("1", "0", "1")
    assert data.sequences[1] == ("", "é ü 漢字")
    assert len(read_texts(write(tmp_path, kind, ROWS), limit=2)) == 2


lines = st.text(st.characters(blacklist_characters="\0\n\r", blacklist_categories=("Cs",))).filter(bool)


@given(st.lists(lines, min_size=1, max_size=8))
def test_plain_text_is_one_a_line(texts: list[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.txt"
        path.write_bytes(("\n".join(texts) + "\n").encode())
        assert list(read_texts(path).texts) == [texts[0].removeprefix("\ufeff"), *texts[1:]]


def test_empty_lines_stay_and_windows_line_ends_do_not(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes("\ufeffone\r\n\r\ntwo".encode())
    assert read_texts(path).texts == ("one", "", "two")


def test_tsv_without_quoting(tmp_path: Path) -> None:
    """MRPC and GLUE: a quotation mark at the start of a text is a quotation mark."""
    path = tmp_path / "pairs.txt"
    path.write_text('Quality\t#1 String\t#2 String\n1\t"Yes, he said.\tNo.\n0\tWell "so"\t"b"\n', encoding="utf-8")
    data = read_texts(path, "#1 String", "Quality", pair="#2 String", format="tsv")
    assert data.sequences == [('"Yes, he said.', "No."), ('Well "so"', '"b"')]


def test_the_only_column_or_a_known_name(tmp_path: Path) -> None:
    assert read_texts(write(tmp_path, "csv", [{"whatever": "a"}])).texts == ("a",)
    assert read_texts(write(tmp_path, "csv", [{"id": "1", "Sentence": "b"}])).texts == ("b",)
    lines = tmp_path / "strings.jsonl"
    lines.write_text('"one"\n"two"\n', encoding="utf-8")
    assert read_texts(lines).texts == ("one", "two")


@pytest.mark.parametrize(
    ("name", "content", "options", "said"),
    [
        ("a.csv", b"id,body\n1,x\n", {}, "which column.*'id', 'body'"),
        ("a.csv", b"text,label\nx,1\n", {"text": "body"}, "no text column 'body'; it has the columns 'text', 'label'"),
        ("a.csv", b"text,label\nx,1\n", {"label": "y"}, "no label column 'y'"),
        ("a.csv", b"text,label\nx,1\n", {"pair": "y"}, "no pair column 'y'"),
        ("a.csv", b"text,label\nx,1,2\n", {}, "line 2: 3 fields where the header has 2"),
        ("a.csv", b"", {}, "is empty"),
        ("a.csv", b"text\n", {}, "holds no texts"),
        ("a.txt", b"", {}, "holds no texts"),
        ("a.txt", b"ab\xff", {}, r"not UTF-8 \(byte 2\)"),
        ("a.txt", b"x", {"limit": 0}, "limit=0"),
        ("a.txt", b"x", {"format": "xml"}, "format='xml' is not known"),
        ("a.doc", b"x", {}, "ends in '.doc'"),
        ("a.jsonl", b'{"text": "x"}\n{oops}\n', {}, "line 2, is not JSON"),
        ("a.jsonl", b'{"text": 3}\n', {}, "is 3, not a text"),
        ("a.jsonl", b"[1]\n", {}, "line 1"),
        ("a.json", b'{"text": "x"}', {}, "holds a dict"),
        ("a.json", b"{", {}, "is not JSON"),
    ],
)
def test_what_is_wrong_is_said(name: str, content: bytes, options: dict[str, str], said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_texts(path, **options)  # type: ignore[arg-type]


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        read_texts(tmp_path / "nothing")
    with pytest.raises(InputError, match="is a folder"):
        read_texts(tmp_path)


def test_a_damaged_parquet_file(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    path.write_bytes(b"not parquet at all")
    with pytest.raises(InputError, match="not a Parquet file"):
        read_texts(path)


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for module in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"needs pyarrow: pip install 'whence\[train\]'"):
        read_texts(tmp_path / "a.parquet")
    with pytest.raises(MissingExtraError, match=r"no file 'imdb'.*needs datasets"):
        read_texts("imdb")


def test_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"sentence": ["a", "b", None], "label": [0, 1, 1]})
    asked = []

    def load(name: str, configuration: str | None, split: str) -> object:
        asked.append((name, configuration, split))
        if name == "absent":
            raise FileNotFoundError("nowhere")
        return table

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = read_texts("glue:sst2", label="label", split="validation")
    assert asked == [("glue", "sst2", "validation")]
    assert data.texts == ("a", "b", "")
    assert data.labels == (0, 1, 1)
    with pytest.raises(UnavailableError, match="nowhere"):
        read_texts("absent")


# -- files that are not what they seem ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"text,text,label\nx,y,1\n", r"a\.csv', line 1: the column 'text' is there 2 times"),
        ("a.tsv", b"text\tlabel\tlabel\nx\ty\tz\n", r"the column 'label' is there 2 times"),
        ("a.csv", b"text,label\na,1\rb,2\n", r"a\.csv', line 2, has a carriage return without a line feed"),
        ("a.txt", b"one\ntwo\rthree\n", r"a\.txt', line 2, has a carriage return"),
        ("a.jsonl", b'{"text": "a"}\r{"text": "b"}\n', r"a\.jsonl', line 1, has a carriage return"),
        ("a.jsonl", b'{"text": "fine"}\n' + b'{"text": ' * 100_000, r"line 2, is JSON that is nested too deep"),
        ("a.json", b"[" * 100_000, r"a\.json' is JSON that is nested too deep"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud83d"}\n', r"line 2, holds half a surrogate pair"),
        ("a.json", b'["fine", "\\udc00"]', r"entry 1, holds half a surrogate pair"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "b", "text": "c"}\n',
            r"line 2, is not JSON: the name 'text' is there twice",
        ),
        ("a.csv", b'text,label\n"never closed,1\nx,2\ny,3\n', r"a\.csv', line 4: unexpected end of data"),
        ("a.csv", b'text,label\n"Well" he said,1\n', r"a\.csv', line 2: .* Quote texts"),
        ("a.csv", "text\nfine\n".encode("utf-16-le"), r"a\.csv', line 1, has a NUL character in it: .* UTF-8"),
        ("a.csv", "text\nfine\n".encode("utf-16"), r"a\.csv', line 1, is not UTF-8"),
        ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}\n", r"a\.jsonl', line 1, is not JSON"),
        ("a.csv", b"text\nfine\n\xff\n", r"a\.csv', line 3, is not UTF-8"),
    ],
)
def test_odd_files_are_refused_with_line_and_remedy(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said) as refusal:
        read_texts(tmp_path / name)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["/dev/zero", "x" * 300 + ".csv", "/y" * 3000 + ".csv", "a\0b.csv", "."])
def test_what_is_no_file_is_not_read(name):
    with pytest.raises(InputError, match=r"no file|is a device|is a folder"):
        read_texts(name)


def test_windows_line_ends_are_line_ends(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'text,label\r\n"two\r\nlines",1\r\n')
    assert read_texts(tmp_path / "a.csv").texts == ("two\nlines",)


def assert_sentence(said):
    assert "\n" not in said
    assert "a.parquet' is" in said
    assert said.endswith("make or copy the file again.")


def test_a_parquet_file_damaged_anywhere_is_refused(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    texts = [f"text number {i} of a table" for i in range(2000)]
    table = arrow.table({"text": texts})
    parquet.write_table(table, path, row_group_size=500, write_page_checksum=True)
    data, draw = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(60):
        harmed = bytearray(data)
        at = draw.randrange(len(data))
        harmed[at : at + 40] = draw.randbytes(len(harmed[at : at + 40]))
        path.write_bytes(harmed if draw.random() < 0.7 else data[:at])
        try:
            read = read_texts(path).texts
        except InputError as refusal:
            said = str(refusal)
            refused += 1
            assert_sentence(said)
        else:
            assert read == tuple(texts)  # a byte that nobody reads: what is accepted is what was written
    assert refused > 30
