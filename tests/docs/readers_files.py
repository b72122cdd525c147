"""What a reader of the pages has: reviews, training texts, a book, and classifiers and a language model trained on them."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path

from whence.cli import main

ROOT = Path(__file__).resolve().parents[2]
FILMS = ("plot", "music", "cast", "ending")
WORDS = {"good": ("wonderful", "moving", "clever"), "bad": ("dull", "awful", "tired")}


def reviews() -> list[tuple[str, str, str]]:
    """Text, label, and which words say it (0 or 1 for each)."""
    found = []
    for film in FILMS:
        for label, words in WORDS.items():
            for word in words:
                text = f"We thought that the {film} of this film was {word}"
                found.append((text, label, " ".join("1" if w == word else "0" for w in text.split())))
    return found


def write_texts(folder: Path) -> None:
    """reviews.csv, train.csv, test.csv, texts.txt, book.txt and documents.txt."""
    rows = reviews()
    for name, part in (("reviews", rows[::3]), ("train", rows * 3), ("test", rows)):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label", "words"), *part])
    texts = [text for text, _, _ in rows]
    (folder / "texts.txt").write_text("\n".join(texts[:6]) + "\n", encoding="utf-8")
    (folder / "book.txt").write_text("\n".join(texts * 8) + "\n", encoding="utf-8")
    page = (ROOT / "docs/gallery/sources.md").read_text(encoding="utf-8")
    (folder / "documents.txt").write_text(
        "\n".join(re.findall(r"^> (.*)$", page, re.MULTILINE)) + "\n", encoding="utf-8"
    )


def train_models(folder: Path) -> None:
    """my-classifier and another seed of it, as `whence train` makes them."""
    for seed, name in enumerate(("my-classifier", "my-classifier-2")):
        command = ["train", "--data", str(folder / "train.csv"), "--out", str(folder / name), "--seed", str(seed), "-q"]
        assert main([*command, "--epochs", "2", "--hidden-size", "32", "--layers", "2"]) == 0


def hand_over(stock: Path, folder: Path, page: str) -> None:
    """Copy what a reader has into the folder in which a page is read, but for what the page itself makes."""
    for thing in stock.iterdir():
        if re.search(rf"--out {re.escape(thing.name)}\b(?!-)", page):
            continue
        if thing.is_dir():
            shutil.copytree(thing, folder / thing.name)
        else:
            shutil.copy(thing, folder)
