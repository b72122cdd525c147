"""Conversion of decoders, experimental: plain weights for ALiBi and no positions, another class for Llamas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import whence
from tests.identifiable.test_decoder import make
from whence.errors import InputError, ModelError
from whence.identifiable.conversion.rotary import same_model, tied_start
from whence.identifiable.training.documents import demo_documents
from whence.identifiable.training.vocabulary import train_byte_tokenizer

TEXTS = list(demo_documents(60).train)


def loaded(**fields: Any) -> whence.Model:
    tokenizer = train_byte_tokenizer(TEXTS, vocab_size=300, max_length=128)
    return whence.Model(make(dtype=torch.float32, keys="free", vocab_size=len(tokenizer), **fields), tokenizer)


@pytest.mark.parametrize("positions", ["alibi", "none"])
def test_a_decoder_without_rotary_positions_becomes_unique_and_stays_plain_weights(
    positions: str, tmp_path: Path
) -> None:
    model = loaded(position_embedding_type=positions)
    with pytest.raises(ModelError, match="experimental"):
        whence.tie_keys(model, TEXTS, steps=0, lengths=())
    made = whence.tie_keys(model, TEXTS, steps=2, lengths=(), max_length=64, experimental=True)
    assert whence.uniqueness(model, search=0).answer.startswith("unique up to 17 tokens")
    assert whence.uniqueness(made.model, search=0).answer == "unique at every length by Theorem A"
    made.save(tmp_path)
    again = whence.load(str(tmp_path)).model
    assert type(again) is type(model.model)
    assert again.config.keys == "free"  # an ordinary key matrix, W_K = W_V·M
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, made.model.model(ids).logits)


def llama(**fields: Any) -> whence.Model:
    """A small Llama with grouped keys whose weights are large enough to matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_byte_tokenizer(TEXTS, vocab_size=300, max_length=128)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, **fields,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
    return whence.Model(model, tokenizer)


@pytest.mark.parametrize("fields", [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
def test_a_llama_is_an_identifiable_decoder_with_free_keys(fields: dict[str, Any]) -> None:
    """The same logits, from a class that turns other pairs of numbers."""
    model = llama(**fields)
    for name, parameter in model.model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    ids = torch.randint(250, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        error = (model.model(ids).logits - same_model(model)(ids).logits).abs().max()
    assert float(error) < 2e-5


def test_a_model_that_only_looks_like_a_llama_is_refused() -> None:
    model = llama()
    model.model.model.layers[1].self_attn.scaling *= 1.5
    with pytest.raises(ModelError, match="logits differ"):
        same_model(model)


def test_a_llama_becomes_another_class_with_unique_attention_and_is_distilled(tmp_path: Path) -> None:
    model = llama()
    before = {name: p.clone() for name, p in model.model.named_parameters()}
    with pytest.raises(ModelError, match="experimental=True"):
        whence.tie_keys(model, TEXTS, steps=0)
    made = whence.tie_keys(model, TEXTS, steps=60, learning_rate=3e-3, tokens=512, max_length=64, experimental=True)
    assert all(torch.equal(p, before[name]) for name, p in model.model.named_parameters())
    assert made.original == pytest.approx(slow_perplexity(model, made.settings), rel=1e-5)
    assert made.history.losses[-1] < 0.8 * made.history.losses[0]
    assert made.ratio == made.after / made.original
    assert ("do not use it" in made.sentences()[0]) == (made.ratio > 1.15)
    assert made.statement.theorem == "Theorem A"
    assert whence.uniqueness(made.model, search=0).answer == "unique at every length by Theorem A"
    made.save(tmp_path)
    again = whence.load(str(tmp_path)).model
    assert type(again).__name__ == "IdentifiableForCausalLM"
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, made.model.model(ids).logits)


def slow_perplexity(model: whence.Model, settings: dict[str, Any]) -> float:
    """Token by token, text by text, over the texts that tie_keys sets aside: every tenth of them, by its seed."""
    from whence.identifiable.conversion.convert import _set_aside

    _, kept = _set_aside(TEXTS, None, settings["seed"])
    nats, count = 0.0, 0
    for text in kept:
        ids = torch.tensor(model.tokenizer(text)["input_ids"][: settings["max_length"]])
        with torch.no_grad():
            logits = model.model(ids[None]).logits[0].double()
        for i in range(len(ids) - 1):
            nats -= float(torch.log_softmax(logits[i], -1)[ids[i + 1]])
            count += 1
    return float(torch.tensor(nats / count).exp())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_converted_in_float32_and_the_model_is_left_alone(dtype: torch.dtype) -> None:
    """As the same weights raised by hand: in half precision the logits of the two classes differ by rounding alone."""
    model = llama()
    model.model.to(dtype)
    raised = llama()
    raised.model.load_state_dict({name: weight.float() for name, weight in model.model.state_dict().items()})
    options: dict[str, Any] = {"steps": 2, "lengths": (), "max_length": 32, "experimental": True}
    made, wanted = whence.tie_keys(model, TEXTS, **options), whence.tie_keys(raised, TEXTS, **options)
    assert made.after == wanted.after
    assert {p.dtype for p in made.model.model.parameters()} == {torch.float32}
    assert {p.dtype for p in model.model.parameters()} == {dtype}


def test_texts_without_a_next_token_are_no_measure() -> None:
    with pytest.raises(InputError, match="none of the 2 texts to measure on has a next token"):
        whence.tie_keys(llama(), TEXTS, 0, held_out=["a", "b"], experimental=True)


def test_adapters_are_to_be_merged_first() -> None:
    from peft import LoraConfig, get_peft_model

    model = llama()
    wrapped: Any = get_peft_model(model.model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ModelError, match=r"give model.merge_and_unload\(\)"):
        whence.tie_keys(whence.Model(wrapped, model.tokenizer), TEXTS, 0, experimental=True)
    whence.tie_keys(whence.Model(wrapped.merge_and_unload(), model.tokenizer), TEXTS, 0, experimental=True)


def test_the_fitted_outputs_are_the_best_there_are() -> None:
    """The closed form against a solver that sees all tokens at once; no other projection comes nearer to the old block."""
    free = make(dtype=torch.float32, keys="free")
    ids = torch.randint(free.config.vocab_size, (4, 30), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    tied = tied_start(free, [inputs])
    heads, wanted = [], []
    free.model.layers[0].attention.register_forward_hook(lambda _, __, out: wanted.append(out[0]))
    tied.model.layers[0].attention.output.register_forward_pre_hook(lambda _, given: heads.append(given[0]))
    with torch.no_grad():
        free(**inputs)
        tied(**inputs)
    z, y = heads[0].flatten(0, 1).double(), wanted[0].flatten(0, 1).double()  # layer 0 has the same input in both
    best = torch.linalg.lstsq(z, y).solution
    error = torch.linalg.matrix_norm(z @ tied.model.layers[0].attention.output.weight.detach().double().T - y)
    assert float(error) <= 1.01 * float(torch.linalg.matrix_norm(z @ best - y)) + 1e-3 * float(
        torch.linalg.matrix_norm(y)
    )


def test_other_rotary_decoders_are_refused_also_as_an_experiment() -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    tokenizer = train_byte_tokenizer(TEXTS, vocab_size=300, max_length=128)
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    with pytest.raises(ModelError, match="RoPE"):
        whence.tie_keys(whence.Model(GPTNeoXForCausalLM(config), tokenizer), TEXTS, steps=0, experimental=True)
    with pytest.raises(InputError, match="start"):
        whence.tie_keys(llama(), TEXTS, steps=0, experimental=True, start="minilm")


def test_the_command_prints_the_perplexities_in_every_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import json

    from whence.cli import main

    model = llama()
    model.model.save_pretrained(tmp_path / "llama")
    model.tokenizer.save_pretrained(tmp_path / "llama")
    (tmp_path / "texts.txt").write_text("\n".join(t.replace("\n", " ") for t in TEXTS), encoding="utf-8")
    command = [
        "convert",
        str(tmp_path / "llama"),
        "--texts",
        str(tmp_path / "texts.txt"),
        "--out",
        str(tmp_path / "out"),
    ]
    for how in ("json", "csv", "table"):  # the second and third time the run is finished
        assert main([*command, "--steps", "1", "--experimental", "--format", how, "--quiet"]) == 0
        printed = capsys.readouterr().out
        if how == "json":
            assert set(json.loads(printed)["perplexity"]) == {"original", "before", "after", "ratio"}
        elif how == "csv":
            assert printed.splitlines()[0] == "original,before,after,ratio"
