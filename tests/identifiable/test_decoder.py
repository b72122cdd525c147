"""The identifiable decoder: it computes what its file says, in every way of running it, and its rows are unique."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

import whence
from tests.identifiable.decoder_oracle import Row, layer_rows, logits, rms, second_row
from whence.errors import InputError
from whence.identifiable import IdentifiableDecoderConfig, IdentifiableDecoderModel, IdentifiableForCausalLM
from whence.identifiable.modeling_identifiable_decoder import alibi_slopes
from whence.identifiable.training.vocabulary import train_byte_tokenizer

TIED: dict[str, dict[str, Any]] = {
    "rope-shared": {},
    "rope-tied": {"keys": "tied"},
    "rope-partial-tied": {"keys": "tied", "rotary_fraction": 0.5, "key_size": 12},
    "rope-small-key": {"key_size": 8},
    "rope-gqa-norms-sink": {
        "num_key_value_heads": 1, "shared_norm": True, "query_norm": True, "sink": "fixed", "attention_bias": True,
    },
    "alibi-shared": {"position_embedding_type": "alibi"},
    "alibi-tied-sink": {"position_embedding_type": "alibi", "keys": "tied", "sink": "fixed"},
    "bias-tied": {"position_embedding_type": "bias", "keys": "tied", "attention_bias": True},
    "none-tied": {"position_embedding_type": "none", "keys": "tied", "key_size": 6},
}  # fmt: skip
FREE: dict[str, dict[str, Any]] = {
    "rope-free": {"keys": "free"},
    "rope-rotary-values-free": {"keys": "free", "rotate_values": True, "rotary_fraction": 0.5},
    "alibi-free-norm": {"keys": "free", "position_embedding_type": "alibi", "key_norm": True},
    "none-free-capped": {"keys": "free", "position_embedding_type": "none", "softcap": 5.0},
}
ALL = TIED | FREE


def make(scale: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    """A random decoder of two layers, two heads of 16, with weights large enough that its attention is not flat."""
    base: dict[str, Any] = {"vocab_size": 600, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                            "intermediate_size": 48}  # fmt: skip
    torch.manual_seed(seed)
    model = IdentifiableForCausalLM(IdentifiableDecoderConfig(**(base | fields))).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, 0.0, scale * max(1, parameter.shape[-1]) ** -0.5)
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    return model


def draw(n: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 600, (batch, n), generator=torch.Generator().manual_seed(seed))


def rows_of(model: Any, n: int, first: int = 0, **forced: Any) -> list[list[Row]]:
    """[head][row from `first` on] of the first layer on n random tokens, as the oracle has them."""
    x = torch.randn(n, model.config.hidden_size, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    gain = model.model.layers[0].attention_norm.weight.detach().numpy()
    return layer_rows(model, 0, rms(x.numpy(), gain, model.config.rms_norm_eps), first, **forced)


def outside(phi: np.ndarray, t: np.ndarray) -> float:
    """The share of Φ outside span[T, 1]."""
    basis = np.linalg.svd(np.hstack([t, np.ones((len(t), 1))]), full_matrices=False)
    u = basis[0][:, basis[1] > basis[1][0] * 1e-13]
    centred = phi - phi.mean(0)
    return float(np.linalg.norm(centred - u @ (u.T @ centred)) / np.linalg.norm(centred))


# -- the model is its formula ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_it_equals_loops_over_heads_and_rows(name: str) -> None:
    model, ids = make(**ALL[name]), draw(14)
    with torch.no_grad():
        ours = model(ids).logits[0].numpy()
    assert np.abs(ours - logits(model, ids)).max() < 1e-10


@pytest.mark.parametrize("name", ALL)
def test_every_way_of_running_it_gives_the_same(name: str) -> None:
    model, ids = make(**ALL[name]), draw(21, 2)
    with torch.no_grad():
        plain = model(ids).logits
        shifted = model(ids, position_ids=torch.arange(21)[None] + 37).logits
        padded = model(
            torch.nn.functional.pad(ids, (6, 0)), attention_mask=torch.tensor([[0] * 6 + [1] * 21] * 2)
        ).logits[:, 6:]
        right = model(
            torch.nn.functional.pad(ids, (0, 6)), attention_mask=torch.tensor([[1] * 21 + [0] * 6] * 2)
        ).logits
        ragged = torch.tensor([[0] * 5 + [1] * 16, [1] * 21])
        alone = model(ids[:1, 5:]).logits
        other = "eager" if model.config._attn_implementation == "sdpa" else model.config._attn_implementation
        model.set_attn_implementation(other)
        eager = model(ids).logits
        mixed = model(ids, attention_mask=ragged).logits
    for answer in (shifted, padded, right[:, :21], eager):
        assert float((answer - plain).abs().max()) < 1e-11
    assert float((mixed[:1, 5:] - alone).abs().max()) < 1e-11
    assert float((mixed[1] - plain[1]).abs().max()) < 1e-11


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ALL)
def test_decoding_from_the_cache_equals_the_full_pass(name: str, implementation: str) -> None:
    model, ids = make(**ALL[name]), draw(24, 2)
    if model.config.softcap is None:
        model.set_attn_implementation(implementation)
    mask = torch.tensor([[0] * 4 + [1] * 20, [1] * 24])
    with torch.no_grad():
        full = model(ids, attention_mask=mask).logits
        cache, parts = None, []
        for chunk in ((0, 10), (10, 17), (17, 18), (18, 24)):
            step = model(
                ids[:, slice(*chunk)], attention_mask=mask[:, : chunk[1]], past_key_values=cache, use_cache=True
            )
            cache = step.past_key_values
            parts.append(step.logits)
    apart = (torch.cat(parts, 1) - full).abs().amax(-1)
    assert float(apart[0, 4:].max()) < 1e-11
    assert float(apart[1].max()) < 1e-11


def test_the_cache_holds_one_tensor_a_head() -> None:
    def size(**fields: Any) -> int:
        with torch.no_grad():
            cache = make(**fields)(draw(20), use_cache=True).past_key_values
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    assert 2 * size() == size(keys="free")
    assert 2 * size(num_key_value_heads=1) == size()


def test_key_and_value_are_one_tensor_also_in_half_precision() -> None:
    """Copies of key and value that are rounded apart would leave 2e-3 of the key outside the values."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    seen = []

    def spy(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        seen.append((key, value))
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("decoder-spy", spy)
    AttentionMaskInterface.register("decoder-spy", sdpa_mask)
    model = make(dtype=torch.bfloat16)
    model.set_attn_implementation("decoder-spy")
    with torch.no_grad():
        cache = model(draw(20), use_cache=True).past_key_values
        model(draw(1), past_key_values=cache)
    assert len(seen) == 4
    assert all(key.data_ptr() == value.data_ptr() for key, value in seen)


def test_generation_is_greedy_decoding_by_hand() -> None:
    model, ids = make(), draw(7)
    made = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, ids)


def test_it_is_saved_and_loaded_by_the_auto_classes(tmp_path: Path) -> None:
    tokenizer = train_byte_tokenizer(["a fine day for a walk by the sea"] * 4, vocab_size=280)
    model = make(dtype=torch.float32, vocab_size=len(tokenizer), sink="fixed", keys="tied", eos_token_id=0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = torch.arange(3, 20)[None]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert type(AutoModel.from_pretrained(tmp_path)) is IdentifiableDecoderModel
    assert AutoTokenizer.from_pretrained(tmp_path).decode([5, 6]) == tokenizer.decode([5, 6])
    assert pipeline("text-generation", str(tmp_path))("a fine", max_new_tokens=3)[0]["generated_text"]
    assert isinstance(whence.load(str(tmp_path)).model, IdentifiableForCausalLM)


def test_the_loss_is_the_cross_entropy_of_the_next_token() -> None:
    model, ids = make(), draw(9, 2)
    with torch.no_grad():
        out = model(ids, labels=ids)
    p = out.logits.softmax(-1)
    by_hand = -sum(float(p[b, i, ids[b, i + 1]].log()) for b in range(2) for i in range(8)) / 16
    assert float(out.loss) == pytest.approx(by_hand, rel=1e-6)


def test_alibi_has_the_published_slopes() -> None:
    assert alibi_slopes(8).tolist() == [2**-i for i in range(1, 9)]
    twelve = alibi_slopes(12).tolist()
    assert twelve[:8] == [2**-i for i in range(1, 9)]
    assert twelve[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


# -- the theorem ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TIED)
def test_keys_lie_in_the_span_of_values_at_every_prefix(name: str) -> None:
    model = make(**TIED[name])
    lengths = (40, 64, 128, 512) if name == "rope-tied" else (40, 64)
    for n in lengths:
        for row in (head[-1] for head in rows_of(model, n, n - 1)):
            assert outside(row.phi, row.t) <= 1e-12
    if model.config.position_embedding_type == "rope":
        row = rows_of(model, 64, 63, rotate_values=False)[0][-1]
        assert outside(row.phi, row.t) > 0.1


@pytest.mark.parametrize("name", ["rope-partial-tied", "rope-gqa-norms-sink", "alibi-tied-sink"])
def test_the_kl_identity_and_the_stability_bound(name: str) -> None:
    """KL(x‖a) + KL(a‖x) = (o_x − o_a)·NΔq for rows of two queries, and TV ≤ ½√(‖Δo‖·‖NΔq‖)."""
    model, draw_ = make(**TIED[name]), np.random.default_rng(0)
    for head in rows_of(model, 40, 10):
        for row in head:
            change = draw_.normal(size=row.query.shape)
            e = np.exp(row.phi @ (row.query + change) + row.logits_fixed)
            x, a = e / e.sum(), row.weights
            n, *_ = np.linalg.lstsq(row.t, row.phi, rcond=None)  # Φ = T·N
            moved = (x - a) @ row.t
            divergence = float(((x - a) * (np.log(x) - np.log(a))).sum())
            assert abs(divergence - moved @ (n @ change)) <= 1e-10 * max(1.0, abs(divergence))
            bound = 0.5 * math.sqrt(float(np.linalg.norm(moved) * np.linalg.norm(n @ change)))
            assert 0.5 * np.abs(x - a).sum() <= bound + 1e-12


def test_the_head_output_is_the_gradient_of_log_z() -> None:
    for row in rows_of(make(sink="fixed"), 40, 5)[1]:
        query = torch.tensor(row.query, requires_grad=True)
        torch.logsumexp(torch.tensor(row.phi) @ query + torch.tensor(row.logits_fixed), 0).backward()
        assert query.grad is not None
        assert np.abs(query.grad.numpy() - row.weights @ row.t).max() < 1e-12


SMALL: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "scale": 3.0}


def found(model: Any, enough: int = 32, **forced: Any) -> int:
    """In how many of 32 rows (2 heads, the last 16 of 48 tokens, d_v = 8) the search finds a second one, up to `enough`.

    Half of every value is made small, so that values differ in length, as they do in trained models.
    """
    with torch.no_grad():
        model.model.layers[0].attention.value.weight[::2] *= 0.2
    rows = [row for head in rows_of(model, 48, 32, **forced) for row in head]
    assert len(rows) == 32
    count = 0
    for row in rows:
        count += second_row(row, softcap=forced.get("softcap")) is not None
        if count == enough:
            break
    return count


def test_no_second_row_is_found_with_tied_keys_and_many_with_free_ones() -> None:
    assert found(make(**SMALL)) == 0
    assert found(make(**SMALL, sink="fixed", position_embedding_type="alibi", keys="tied")) == 0
    assert found(make(**SMALL, keys="free"), enough=3) == 3
    assert found(make(**SMALL, keys="free", rotate_values=True), enough=3) == 3


@pytest.mark.parametrize(
    ("fields", "forced", "word"),
    [
        ({"rotate_values": False}, {"rotate_values": False}, "rotate_values"),
        ({"key_norm": True}, {"key_norm": True}, "key_norm"),
        ({"softcap": 2.0}, {"softcap": 2.0}, "softcap"),
    ],
)
def test_what_no_theorem_covers_is_refused_and_has_second_rows_when_forced(
    fields: dict[str, Any], forced: dict[str, Any], word: str
) -> None:
    with pytest.raises(InputError, match=word):
        make(**SMALL, **fields)
    assert found(make(**SMALL), enough=1, **forced) == 1
    make(**SMALL, **(fields | {"keys": "free"}))  # with free keys everything may be built


def test_a_gauge_transformation_changes_nothing() -> None:
    """Complex numbers on the pairs of u, their inverses in W_Q and W_O: the same function, the same statement."""
    model = make(num_hidden_layers=1)
    before, ids = model.identifiability_statement(), draw(16)
    with torch.no_grad():
        old = model(ids, output_attentions=False).logits.clone()
        attention = model.model.layers[0].attention
        c = torch.randn(2, 8, dtype=torch.complex128)

        def times(weight: torch.Tensor, by: torch.Tensor) -> torch.Tensor:  # rows of a head are pairs of numbers
            pairs = torch.view_as_complex(weight.reshape(2, 8, 2, -1).transpose(-1, -2).contiguous())
            return torch.view_as_real(pairs * by[..., None]).transpose(-1, -2).reshape(weight.shape)

        attention.value.weight.copy_(times(attention.value.weight, c))
        attention.query.weight.copy_(times(attention.query.weight, 1 / c.conj()))
        attention.output.weight.copy_(times(attention.output.weight.T, 1 / c.conj()).T)
        new = model(ids).logits
    assert float((new - old).abs().max()) < 1e-10
    after = model.identifiability_statement()
    assert (after.theorem, after.from_head, after.from_block) == (before.theorem, before.from_head, before.from_block)


# -- bad input, and the statement ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"position_embedding_type": "learned"}, "rope, alibi, bias, none"),
        ({"keys": "loose"}, "free, tied, shared"),
        ({"rotate_values": True, "position_embedding_type": "alibi"}, "turns nothing"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"rotary_fraction": 0.0}, "rotary_fraction=0"),
        ({"key_size": 7}, "whole pairs"),
        ({"key_size": 40}, "more than value_size"),
        ({"sink": "learned"}, "none, fixed"),
        ({"softcap": -1.0, "keys": "free"}, "more than 0"),
        ({"hidden_size": 0}, "at least 1"),
        ({"hidden_size": 33}, "does not divide"),
        ({"rotary_fraction": 0.01}, "no pair"),
    ],
)
def test_bad_configurations_are_refused_with_what_was_given(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        make(**fields)


def test_ids_and_embeddings_together_are_refused() -> None:
    model = make()
    with pytest.raises(InputError, match="not both"):
        model(draw(4), inputs_embeds=torch.zeros(1, 4, 32, dtype=torch.float64))
    with pytest.raises(InputError, match="not both"):
        model()


def test_the_statement_names_the_theorem_its_conditions_and_the_condition_number() -> None:
    model = make(dtype=torch.float32)
    statement = model.identifiability_statement()
    assert (statement.theorem, statement.from_head, statement.from_block) == (
        "Theorem A",
        "every length",
        "every length",
    )
    worst = max(
        float(np.linalg.cond(layer.attention.output.weight.detach().double().numpy())) for layer in model.model.layers
    )
    assert max(f.output_condition for f in statement.layers) == pytest.approx(worst, rel=1e-6)
    assert "Theorem A" in str(statement)
    assert f"{worst:.3g}" in str(statement)
    free = make(keys="free").identifiability_statement()
    assert (free.theorem, free.from_head) == (None, 17)
    assert make(keys="free", sink="fixed").identifiability_statement().from_head == 16
    small = make(keys="free", key_size=8).identifiability_statement()
    assert small.theorem == "Theorem B"
    assert "Generic" in str(small)
    assert 2 * statement.cache_numbers == free.cache_numbers


def test_the_statement_is_measured_on_the_weights() -> None:
    model = make()
    with torch.no_grad():
        model.model.layers[1].attention.output.weight[:, 3] = 0.0  # the output no longer shows one number of head 0
    statement = model.identifiability_statement()
    assert statement.theorem is None
    assert statement.failing is not None
    assert "loses" in statement.failing
    assert statement.from_head == 16


def test_the_uniform_control_shares_equally() -> None:
    model, ids = make(attention="uniform", position_embedding_type="none"), draw(12)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[1][0, 0]
    assert torch.allclose(weights, torch.ones(12, 12, dtype=torch.float64).tril() / torch.arange(1, 13)[:, None])
    assert "nothing to identify" in str(model.identifiability_statement())
