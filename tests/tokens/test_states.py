from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from whence.errors import InputError, UnavailableError
from whence.reading.tracing import trace
from whence.tokens.corpus import corpus
from whence.tokens.states import Store, collect


@pytest.mark.parametrize("budget", [0, 500, 1 << 30])
def test_the_budget_changes_nothing_but_the_place(budget: int, tmp_path: Path) -> None:
    parts = [torch.randn(3, n, 5) for n in (4, 1, 7, 2)]
    with Store(budget, tmp_path) as store:
        for part in parts:
            store.add(part)
        store.finish()
        assert store.on_disk == (budget < 1 << 30)
        for layer in range(3):
            assert torch.equal(store[layer], torch.cat([part[layer] for part in parts]))
        assert store.bytes == 3 * 14 * 5 * 4
        assert not list(tmp_path.iterdir())  # its files have no names: whatever ends the process, nothing is left


def test_nothing_is_left_behind_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with Store(0, tmp_path) as store:
            store.add(torch.ones(1, 2, 3))
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there() -> None:
    with Store(0, "no/such/folder") as store, pytest.raises(InputError, match="no/such/folder"):
        store.add(torch.ones(1, 2, 3))


def test_a_full_disk_says_what_to_do(tmp_path: Path) -> None:
    with Store(0, tmp_path) as store:
        store.add(torch.ones(1, 2, 3))
        with Path("/dev/full").open("wb", buffering=0) as full:
            store._files = [full]
            with pytest.raises(UnavailableError, match=r"No space left.*folder="):
                store.add(torch.ones(1, 2, 3))


@pytest.mark.parametrize("family", ["bert", "llama", "bart"])
def test_states_are_those_of_the_trace(tiny: Any, corpus40: list[str], family: str) -> None:
    model = tiny(family)
    read = corpus(model, corpus40[:10])
    with Store() as store:
        tokens, layers, causal = collect(model, read, store, None, batch_size=4)
        assert layers == (0, 1, 2)
        assert causal == (family == "llama")
        start = 0
        for sequence, found in zip(read.sequences, tokens, strict=True):
            target = sequence[0] if family == "bart" else None
            alone = trace(model, sequence[0], None, target, keep=("states",)).states
            for place, layer in enumerate((0, *layers)):
                ours = store[place][start : start + len(found)]
                assert torch.allclose(ours, alone[layer], atol=1e-4)
            start += len(found)


@pytest.mark.parametrize("family", ["jamba", "lfm2"])
def test_states_of_a_model_that_mixes_before_its_first_attention(tiny: Any, corpus40: list[str], family: str) -> None:
    model = tiny(family)
    read = corpus(model, corpus40[:4])
    with Store() as store:
        collect(model, read, store, None, batch_size=2)
        ids = [i for sequence in read.sequences for i in model.tokenizer(sequence[0])["input_ids"]]
        words = model.model.get_input_embeddings().weight[torch.tensor(ids)]
        assert torch.allclose(store[0], words.detach(), atol=1e-6)  # not what is left of them after the mixing layer
        last = trace(model, read.sequences[-1][0], keep=("states",)).states[-1]
        assert torch.allclose(store[len(store) - 1][-len(last) :], last, atol=1e-4)


@pytest.mark.parametrize("layers", [[3], [-1], []])
def test_wrong_layers(tiny: Any, corpus40: list[str], layers: list[int]) -> None:
    with Store() as store, pytest.raises(InputError, match="hidden states 0 … 2"):
        collect(tiny("bert"), corpus(tiny("bert"), corpus40[:5]), store, layers)


def test_what_is_left_out(tiny: Any) -> None:
    bert = corpus(tiny("bert"), ["w1 w2", "", "  ", "w1  w2", "w1 w2", "w3", ("w4", "w5"), ("w4", " "), "w9"])
    assert bert.left_out == {"empty": 3, "duplicate": 2, "without tokens": 0, "of one token": 0}
    assert bert.sequences == (("w3",), ("w9",), ("w1 w2",), ("w4", "w5"))  # shortest first
    llama = corpus(tiny("llama"), ["w1 w2", "w3", "w4 w5 w6", "w7 w8"])
    assert llama.left_out["of one token"] == 1


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ("a text", "one string"),
        (3, "texts is a int"),
        ([1, 2], "text 0 is 1"),
        ([("a", "b", "c")], "a text or a pair"),
        ([], "no text was left"),
        (["", " "], "2 empty"),
        (["w1 w2"], "at least 3 are needed"),
        (["w1 w2", "w1  w2", "w3 w4"], "1 duplicate"),
        (["w1 " * 600] * 2 + ["w2 " * 600, "w3"], "2 of 3 texts are longer than"),
    ],
)
def test_bad_texts(tiny: Any, texts: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        corpus(tiny("bert"), texts)
