"""Labelled data: what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from whence.errors import InputError
from whence.identifiable.data import Labelled, read_labelled
from whence.identifiable.training.batches import split
from whence.identifiable.training.demo import demo_data


def write(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


def test_labels_of_any_kind(tmp_path: Path) -> None:
    data = read_labelled(write(tmp_path, "a.csv", "text,label\ngood,pos\nbad,neg\nfine, pos\n"))
    assert data.labels == ("pos", "neg", "pos")
    assert data.classes == ("neg", "pos")
    numbers = read_labelled(write(tmp_path, "a.jsonl", '{"text": "a", "label": 10}\n{"text": "b", "label": 2.0}\n'))
    assert numbers.classes == ("2", "10")


def test_a_missing_column_lists_those_found(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "review,stars\ngood,5\n")
    with pytest.raises(InputError, match=r"'review', 'stars'"):
        read_labelled(path)
    with pytest.raises(InputError, match=r"'body'.*'review', 'stars'"):
        read_labelled(path, "body", "stars")
    assert read_labelled(path, "review", "stars").labels == ("5",)


def test_empty_texts_and_missing_labels(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "text,label\ngood,1\n  ,0\nbad,0\n")
    with pytest.raises(InputError, match=r"row 2 .* empty text"):
        read_labelled(path)
    kept = read_labelled(path, skip_empty=True)
    assert (kept.texts, kept.empty) == (("good", "bad"), 1)
    with pytest.raises(InputError, match=r"row 1 .* no label"):
        read_labelled(write(tmp_path, "b.csv", "text,label\ngood,\n"))


def test_one_class_only_and_unseen_labels() -> None:
    with pytest.raises(InputError, match="one class only, 'a'"):
        Labelled(("x", "y"), ("a", "a"), "here").check_trainable()
    with pytest.raises(InputError, match="holds no texts"):
        Labelled((), (), "here").check_trainable()
    with pytest.raises(InputError, match=r"'c' \(2 texts\)"):
        Labelled(("x", "y"), ("c", "c"), "here").check_known(("a", "b"))
    with pytest.raises(InputError, match="1 texts and 2 labels"):
        Labelled(("x",), ("a", "b"), "here")


def test_the_split_keeps_proportions_and_every_text_once() -> None:
    data = Labelled(tuple(map(str, range(100))), ("a",) * 80 + ("b",) * 19 + ("c",), "here")
    train, valid = split(data, 0.1, 0)
    assert sorted(train.texts + valid.texts) == sorted(data.texts)
    assert valid.labels.count("a") == 8
    assert valid.labels.count("b") == 2
    assert "c" in train.labels
    assert split(data, 0.1, 0)[1].texts == valid.texts
    assert split(data, 0.1, 1)[1].texts != valid.texts
    with pytest.raises(InputError, match="too few texts"):
        split(Labelled(("x", "y"), ("a", "b"), "here"), 0.1, 0)


def test_demo_data_are_balanced_and_no_bag_of_words_solves_them() -> None:
    data = demo_data(600)
    assert data.labels.count("first") == 300
    by_word: dict[str, list[int]] = {}
    for text, label in zip(data.texts, data.labels, strict=True):
        for word in set(text.split()):
            by_word.setdefault(word, []).append(label == "first")
    shares = [sum(marks) / len(marks) for marks in by_word.values() if len(marks) > 60]
    assert max(abs(s - 0.5) for s in shares) < 0.15  # no word gives the label away
