"""Training a language model: packing, bits per byte, resuming after a kill, comparing; and the command line."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from whence.cli import main
from whence.errors import InputError
from whence.identifiable.training.documents import Documents, Packed, demo_documents, pack, read_documents
from whence.identifiable.training.language_model import LanguageModelSettings, nats, train_language_model
from whence.identifiable.training.vocabulary import train_byte_tokenizer

torch.set_num_threads(1)
TINY: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def tiny(**fields: Any) -> LanguageModelSettings:
    return LanguageModelSettings(**({"vocab_size": 300, "context": 24, "model": TINY} | fields))


def test_every_token_is_predicted_exactly_once() -> None:
    stream = list(range(100, 147))
    blocks = Packed(stream, 10, pad=0)
    assert blocks.ids.shape == (5, 11)
    assert blocks.tokens == 46
    predicted = [int(t) for row in blocks.labels[:, 1:] for t in row if t != -100]
    assert predicted == stream[1:]


def test_bits_per_byte_are_the_sum_of_every_token_s_surprise(tmp_path: Path) -> None:
    documents = Documents(("the cat sat on the mat . " * 40,), ("the dog sat — on the mat .",), "two texts")
    made = train_language_model(documents, out=tmp_path / "m", settings=tiny(context=8))
    ids = [
        made.tokenizer.eos_token_id,
        *made.tokenizer(documents.validation[0])["input_ids"],
        made.tokenizer.eos_token_id,
    ]
    total = 0.0
    for start in range(0, len(ids) - 1, 8):  # blocks that begin with the last token of the one before
        block = torch.tensor([ids[start : start + 9]])
        with torch.no_grad():
            log_p = made.model(block[:, :-1]).logits.double().log_softmax(-1)[0]
        total -= sum(float(log_p[i, block[0, i + 1]]) for i in range(block.shape[1] - 1))
    size = len(documents.validation[0].encode())
    assert size == 28  # the dash has three bytes
    assert made.metrics["validation_bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-6)
    assert nats(made.model, pack(documents.validation, made.tokenizer, 8)) == pytest.approx(total, rel=1e-6)


def test_a_folder_that_everything_loads(tmp_path: Path) -> None:
    made = train_language_model(demo_documents(120), out=tmp_path, settings=tiny())
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = AutoTokenizer.from_pretrained(tmp_path)("who has the red book now ?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, made.model(ids).logits, atol=1e-6)
    assert json.loads((tmp_path / "metrics.json").read_text())["theorem"] == "Theorem A"
    assert "unique at every length" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert not (tmp_path / "checkpoints").exists()


def test_it_learns(tmp_path: Path) -> None:
    text = Documents(("a b c d e f g h " * 300,), ("a b c d e f g h " * 10,), "letters")
    made = train_language_model(text, out=tmp_path, settings=tiny(epochs=12, learning_rate=1e-2))
    assert made.metrics["validation_bits_per_byte"] < 0.5


SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from whence.identifiable.training.documents import demo_documents
from whence.identifiable.training.language_model import LanguageModelSettings, train_language_model
model = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
settings = LanguageModelSettings(vocab_size=300, context=24, epochs=2, checkpoint_steps=10, model=model)
train_language_model(demo_documents(300), out=sys.argv[1], settings=settings)
"""


def test_killed_and_run_again_it_ends_with_the_same_weights(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "killed")], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not list((tmp_path / "killed").glob("checkpoints/checkpoint-*/complete")) and time.monotonic() < deadline:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "metrics.json").exists()
    settings = tiny(epochs=2, checkpoint_steps=10)
    said: list[str] = []
    resumed = train_language_model(demo_documents(300), out=tmp_path / "killed", settings=settings, say=said.append)
    assert any("Going on from" in line for line in said)
    whole = train_language_model(demo_documents(300), out=tmp_path / "whole", settings=settings)
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    train_language_model(demo_documents(60), out=tmp_path, settings=tiny())
    with pytest.raises(InputError, match="learning_rate"):
        train_language_model(demo_documents(60), out=tmp_path, settings=tiny(learning_rate=0.1))
    with pytest.raises(InputError, match="training texts"):
        train_language_model(demo_documents(61), out=tmp_path, settings=tiny())


def test_documents_from_files(tmp_path: Path) -> None:
    plain = tmp_path / "book.txt"
    plain.write_text("\n".join(f"line {i} of the book" for i in range(100)), encoding="utf-8")
    book = read_documents(str(plain))
    assert book.train[0] + book.validation[0] == plain.read_text(encoding="utf-8")
    assert book.validation[0].startswith("line 9")
    table = tmp_path / "reviews.csv"
    table.write_text("review\n" + "\n".join(f"text number {i}" for i in range(50)) + "\n", encoding="utf-8")
    rows = read_documents(str(table), "review")
    assert (len(rows.train), len(rows.validation)) == (45, 5)
    assert not set(rows.train) & set(rows.validation)
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="no text"):
        read_documents(str(tmp_path / "empty.txt"))
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        read_documents(str(tmp_path / "bytes.txt"))
    with pytest.raises(InputError, match="no file"):
        read_documents(str(tmp_path / "absent.txt"))


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"variant": "rope-loose"}, "rope-loose"), ({"epochs": 0}, "epochs"), ({"context": -1}, "context"),
     ({"vocab_size": 100}, "256 bytes")],
)  # fmt: skip
def test_bad_settings_are_refused(tmp_path: Path, fields: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        train_language_model(demo_documents(20), out=tmp_path, settings=tiny(**fields))


def test_the_byte_tokenizer_gives_every_text_back() -> None:
    tokenizer = train_byte_tokenizer(["some words, some more words"], vocab_size=280)
    for text in ("ünïcödé — 漢字 🙂", "  two  spaces\n\tand a tab", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "text.txt"
    file.write_text("\n".join(demo_documents(150).train), encoding="utf-8")
    small = ["--hidden-size", "16", "--heads", "2", "--layers", "1", "--vocab-size", "300", "--max-length", "24", "-q"]
    common = ["train", "--task", "lm", "--data", str(file), *small, "--threads", "1"]
    assert main([*common, "-o", str(tmp_path / "m"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["theorem"] == "Theorem A"
    compared = [*common, "-o", str(tmp_path / "c"), "--compare", "--variants", "rope,rope-tied", "--seeds", "2"]
    assert main(compared) == 0
    table = capsys.readouterr().out
    assert "| rope-tied |" in table
    assert "±" in table
    assert (tmp_path / "c" / "compare.md").read_text(encoding="utf-8").strip() == table.strip()
    assert main(["train", "--task", "lm", "-q"]) != 0
    assert main(["train", "--task", "poetry", "--demo", "-q"]) != 0
