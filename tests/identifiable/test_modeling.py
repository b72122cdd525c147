"""The model: every variant reads and computes as its file says, and no trap of public implementations is in it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, pipeline

import whence
from whence.errors import InputError
from whence.identifiable import IdentifiableConfig, IdentifiableForSequenceClassification, IdentifiableModel
from whence.identifiable.training.vocabulary import train_tokenizer

VARIANTS = [
    {"heads": heads, "keys": keys, "position_embedding_type": positions, "norm": norm, "num_hidden_layers": layers}
    for heads, keys, positions, norm, layers in itertools.product(
        ("concat", "add"), ("free", "tied", "shared"), ("learned", "none", "bias"), ("post", "pre"), (1, 2)
    )
] + [{"attention": "uniform", "heads": heads, "norm": norm} for heads in ("concat", "add") for norm in ("post", "pre")]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("fields", VARIANTS, ids=lambda f: "-".join(str(v) for v in f.values()))
def test_the_reading_of_every_variant_is_proved(make: Any, fields: dict[str, Any], implementation: str) -> None:
    report = whence.doctor(make(attn_implementation=implementation, **fields))
    assert report.proof.holds == dict.fromkeys("abcdef", True), report.reasons
    assert all(site.keys_error is not None and site.keys_error < 1e-4 for site in report.proof.sites)


def oracle(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of one text by loops over heads and tokens, in float64, straight from the formulas."""
    config, core = model.config, model.model
    weights = {k: v.double() for k, v in model.state_dict().items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / (var + config.layer_norm_eps).sqrt() * weights[name + ".weight"] + weights[name + ".bias"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[name + ".weight"].T + weights[name + ".bias"]

    x = weights["model.embeddings.word_embeddings.weight"][ids[0]]
    n = len(x)
    if config.position_embedding_type == "learned":
        x = x + weights["model.embeddings.position_embeddings.weight"][:n]
    x = norm(x, "model.embeddings.LayerNorm")
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}"
        y = norm(x, f"{at}.attention_norm") if config.norm == "pre" else x
        outputs = []
        for h in range(config.num_attention_heads):
            v = linear(y, f"{at}.attention.value")[:, h * config.value_size : (h + 1) * config.value_size]
            scores = torch.zeros(n, n, dtype=torch.float64)
            if config.attention == "softmax":
                span = slice(h * config.key_size, (h + 1) * config.key_size)
                q = linear(y, f"{at}.attention.query")[:, span]
                if config.keys == "free":
                    k = linear(y, f"{at}.attention.key")[:, span]
                else:
                    k = v @ weights[f"{at}.attention.mixing"][h] if config.keys == "tied" else v
                for row in range(n):
                    for column in range(n):
                        scores[row, column] = q[row] @ k[column] / math.sqrt(config.key_size)
                        if config.position_embedding_type == "bias":
                            reach = config.relative_distance
                            far = max(-reach, min(reach, column - row)) + reach
                            scores[row, column] += weights[f"{at}.attention.distance_bias.weight"][far, h]
            outputs.append(scores.softmax(-1) @ v)
        joined = sum(outputs) if config.heads == "add" else torch.cat(outputs, -1)
        block = linear(joined, f"{at}.attention.output")
        x = x + block if config.norm == "pre" else norm(x + block, f"{at}.attention_norm")
        y = norm(x, f"{at}.output_norm") if config.norm == "pre" else x
        y = linear(torch.nn.functional.gelu(linear(y, f"{at}.intermediate")), f"{at}.down")
        x = x + y if config.norm == "pre" else norm(x + y, f"{at}.output_norm")
    if core.final_norm is not None:
        x = norm(x, "model.final_norm")
    pooled = x[0] if config.classifier_pooling == "cls" else x.mean(0)
    return linear(pooled, "classifier")


@pytest.mark.parametrize(
    "fields",
    [
        {"keys": "tied", "key_size": 5},
        {"keys": "shared", "norm": "pre", "num_hidden_layers": 2},
        {"heads": "add", "position_embedding_type": "bias"},
        {"key_size": 3, "value_size": 11, "position_embedding_type": "none", "classifier_pooling": "mean"},
        {"attention": "uniform", "heads": "add", "norm": "pre"},
    ],
    ids=str,
)
def test_the_model_computes_its_formulas(make: Any, ids: Any, fields: dict[str, Any]) -> None:
    model = make(**fields).double()
    with torch.no_grad():
        assert torch.allclose(model(ids(9)).logits[0], oracle(model, ids(9)), atol=1e-10)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "fields",
    [{"keys": "tied"}, {"heads": "add"}, {"attention": "uniform"}, {"position_embedding_type": "bias"}],
    ids=str,
)
def test_batch_mates_and_padding_never_change_a_prediction(
    make: Any, ids: Any, fields: dict[str, Any], implementation: str
) -> None:
    model = make(attn_implementation=implementation, num_hidden_layers=2, **fields).double()
    lengths = (3, 11, 7, 1)
    texts = [ids(n, seed=n) for n in lengths]
    with torch.no_grad():
        alone = torch.cat([model(text).logits for text in texts])
        for pad in (0, 77):  # what the padding holds is of no account
            batch = torch.full((len(texts), 14), pad)
            mask = torch.zeros(len(texts), 14, dtype=torch.long)
            for row, text in enumerate(texts):
                batch[row, : text.shape[1]], mask[row, : text.shape[1]] = text[0], 1
            order = torch.tensor([2, 0, 3, 1])
            together = model(batch[order], attention_mask=mask[order]).logits
            assert torch.allclose(together, alone[order], atol=1e-12)


def test_padding_is_never_attended_to(make: Any, ids: Any) -> None:
    model = make(attn_implementation="eager")
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    weights = model(ids(5), attention_mask=mask, output_attentions=True).attentions[0]
    assert float(weights[..., 3:].detach().abs().max()) == 0
    assert torch.allclose(weights.sum(-1), torch.ones(1))


def test_sdpa_and_eager_agree(make: Any, ids: Any) -> None:
    for fields in ({"keys": "tied"}, {"position_embedding_type": "bias"}, {"key_size": 3}):
        one, two = make(attn_implementation="sdpa", **fields), make(attn_implementation="eager", **fields)
        assert torch.allclose(one(ids(12)).logits, two(ids(12)).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "count"),
    [({}, 66_048), ({"heads": "add"}, 115_584), ({"keys": "tied"}, 53_632), ({"keys": "shared"}, 49_536),
     ({"key_size": 16}, 49_536), ({"attention": "uniform"}, 33_024)],
    ids=str,
)  # fmt: skip
def test_attention_parameters_are_as_documented(fields: dict[str, Any], count: int) -> None:
    model = IdentifiableModel(IdentifiableConfig(vocab_size=10, hidden_size=128, **fields))
    assert sum(p.numel() for p in model.layers[0].attention.parameters()) == count


def test_every_weight_is_initialised_whatever_the_sizes() -> None:
    """A public implementation leaves q, k, v as allocated when d_k = d."""
    for fields in ({"key_size": 32}, {"keys": "tied", "key_size": 32}, {"heads": "add", "key_size": 32}):
        model = IdentifiableModel(IdentifiableConfig(vocab_size=50, hidden_size=32, **fields))
        for name, parameter in model.named_parameters():
            assert bool(torch.isfinite(parameter).all()), name
            if name.endswith("query.weight"):
                assert 0.01 < float(parameter.detach().std()) < 0.04


def test_scores_are_scaled_by_the_key_size(make: Any, ids: Any) -> None:
    layer = whence.trace(make(key_size=4, value_size=16), ids(10))[0]
    assert layer.scale == pytest.approx(0.5)
    assert layer.keys.shape[-1] == 4
    assert layer.values.shape[-1] == 16


def null_dimension(layer: Any, head: int) -> int:
    """n − rank([T, 1]), T the head's transformed values, by a float64 SVD."""
    t = layer.transformed_values[head].double()
    return len(t) - int(
        torch.linalg.matrix_rank(torch.cat([t, torch.ones(len(t), 1, dtype=torch.float64)], 1), rtol=1e-10)
    )


@pytest.mark.parametrize(
    ("fields", "rank"),
    [
        ({"keys": "free"}, 8),
        ({"heads": "add"}, 31),  # d − 1: what a LayerNorm gives out sums to 0
        ({"heads": "add", "norm": "pre"}, 31),
        ({"keys": "tied", "value_size": 6}, 6),
        ({"heads": "add", "value_size": 20}, 20),
    ],
    ids=str,
)
def test_each_head_has_the_value_to_output_rank_that_is_claimed(
    make: Any, ids: Any, fields: dict[str, Any], rank: int
) -> None:
    """Adding heads is a sum over heads, not a reshape that sums neighbouring features of one head."""
    model = make(**fields)
    assert model.identifiability_statement().layers[0].value_to_output_rank == rank
    for n, expected in ((rank + 1, 0), (rank + 2, 1), (rank + 20, 19)):
        layer = whence.trace(model.double(), ids(n))[0]
        assert [null_dimension(layer, head) for head in range(4)] == [expected] * 4


def test_added_heads_are_unique_at_64_tokens_where_concatenated_ones_are_not(make: Any, ids: Any) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    assert null_dimension(whence.trace(make(heads="add", **sizes).double(), ids(64))[0], 0) == 0
    assert null_dimension(whence.trace(make(heads="concat", **sizes).double(), ids(64))[0], 0) == 64 - 17


def test_uniform_attention_is_uniform(make: Any, ids: Any) -> None:
    trace = whence.trace(make(attention="uniform"), ids(7))
    assert torch.allclose(trace[0].attention, torch.tensor(1 / 7))


def test_saved_and_loaded_by_the_auto_classes(make: Any, ids: Any, tmp_path: Path) -> None:
    model = make(keys="tied", key_size=5, position_embedding_type="bias")
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).key_size == 5
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert isinstance(again, IdentifiableForSequenceClassification)
    assert torch.equal(again(ids(6)).logits, model(ids(6)).logits)
    base = AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, IdentifiableModel)
    assert torch.equal(base(ids(6)).last_hidden_state, model.model(ids(6)).last_hidden_state)


def test_loaded_by_whence_and_by_a_pipeline(make: Any, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["the cat sat", "the dog ran", "a cat ran home"] * 3, 60, 32)
    make(vocab_size=len(tokenizer), max_position_embeddings=32).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = whence.load(tmp_path)
    assert isinstance(loaded.model, IdentifiableForSequenceClassification)
    trace = whence.trace(loaded, "the cat ran")
    assert next(iter(trace.tokens)) == "[CLS]"
    assert trace.logits.shape[-1] == 3
    found = pipeline("text-classification", str(tmp_path))("the cat ran")
    assert found[0]["label"] == f"LABEL_{int(trace.logits.argmax())}"


def test_whence_gives_out_the_classes() -> None:
    assert whence.IdentifiableModel is IdentifiableModel
    assert whence.IdentifiableConfig is IdentifiableConfig


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"keys": "tied", "position_embedding_type": "rope"}, "rotation by position"),
        ({"keys": "free", "position_embedding_type": "rotary"}, "no rotary"),
        ({"position_embedding_type": "alibi"}, "learned, none, bias"),
        ({"keys": "knotted"}, "free, tied, shared"),
        ({"heads": "stack"}, "concat, add"),
        ({"keys": "shared", "key_size": 3}, "key_size=3 must be value_size=32"),
        ({"hidden_size": 30}, "does not divide"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"norm": "sandwich"}, "post, pre"),
    ],
    ids=str,
)
def test_bad_configurations_are_refused_with_what_to_do(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        IdentifiableConfig(**fields)


def test_a_text_that_is_too_long_is_refused(make: Any, ids: Any) -> None:
    with pytest.raises(InputError, match="max_position_embeddings=16"):
        make(max_position_embeddings=16)(ids(17))
    with pytest.raises(InputError, match="not both"):
        make().model()
