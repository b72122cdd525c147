"""The statement: what it claims is measured on the weights, and holds in a search for alternatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import whence
from whence.core.attention.search_reachable import search_reachable
from whence.identifiable.statement import EVERY, rank


def second_rows(model: Any, ids: torch.Tensor, rows: int = 8, starts: int = 16) -> tuple[int, float]:
    """How many rows of layer 0 have a second softmax row with the same head output, and how many starts came back."""
    layer = whence.trace(model, ids)[0]
    found, returned = 0, 0
    heads, n = layer.attention.shape[:2]
    for i in range(rows):
        head, query = i % heads, (7 * i) % n
        # Nudged about as much as rounding to float32 does: not exactly tied, so that the search is made.
        keys = layer.keys[head].double()
        keys = keys * (1 + 3e-7 * torch.randn(keys.shape, generator=torch.Generator().manual_seed(i)))
        result = search_reachable(
            layer.attention[head, query].double(), keys, layer.values[head].double(), starts=starts
        )
        assert not result.tied
        found += result.exists and result.total_variation > 1e-4
        returned += result.returned
    return found, returned / (rows * starts)


@pytest.mark.parametrize("n", [64, 128, 256])
def test_theorem_1_tied_keys_have_no_second_row_where_free_ones_do(make: Any, ids: Any, n: int) -> None:
    assert second_rows(make(keys="free"), ids(n))[0] >= 5
    for fields in ({"keys": "tied"}, {"keys": "shared"}, {"keys": "tied", "position_embedding_type": "bias"}):
        found, returned = second_rows(make(**fields), ids(n))
        assert found == 0
        assert returned > 0.95


@pytest.mark.parametrize(
    ("fields", "head", "block"),
    [
        ({}, 9, 9),
        ({"heads": "add"}, 32, 9),
        ({"keys": "tied"}, EVERY, EVERY),
        ({"keys": "shared", "norm": "pre"}, EVERY, EVERY),
        ({"heads": "add", "keys": "tied"}, EVERY, 9),
        ({"keys": "tied", "value_size": 16}, EVERY, 9),  # 4 · 16 rows in 32 columns: heads cannot be told apart
        ({"key_size": 4}, 9, 9),
    ],
    ids=str,
)
def test_what_is_unique_from_what_and_up_to_which_length(make: Any, fields: Any, head: Any, block: Any) -> None:
    statement = make(**fields).identifiability_statement()
    assert statement.from_head == head
    assert statement.from_block == block
    assert statement.to_dict()["layers"][0]["value_size"] == make(**fields).config.value_size


def test_the_joint_null_dimension_is_as_stated_for_the_block(make: Any, ids: Any) -> None:
    """All heads' rows together, given the block output only: H(n − 1) − rank unknowns stay free, 0 up to the claim."""
    for fields in ({"heads": "concat"}, {"heads": "add"}):
        model = make(**fields)
        claimed = model.identifiability_statement().from_block
        for n, expected in ((claimed, 0), (claimed + 1, 4)):
            t = whence.trace(model, ids(n))[0].transformed_values.double()  # (head, n, d)
            ones = torch.block_diag(*[torch.ones(n, 1, dtype=torch.float64)] * 4)
            both = torch.cat([t.flatten(0, 1), ones], 1)
            assert 4 * n - int(torch.linalg.matrix_rank(both, rtol=1e-6)) == expected


def test_ranks_are_measured_not_assumed(make: Any) -> None:
    model = make(keys="tied")
    attention = model.model.layers[0].attention
    with torch.no_grad():  # head 0 loses a direction on the way out, and it is one that its keys read
        attention.output.weight[:, 0] = attention.output.weight[:, 1]
    statement = model.identifiability_statement()
    assert statement.layers[0].head_output_rank == 7
    assert statement.simplex_from_head == 8
    assert statement.from_head == 8
    assert "Theorem 1 does not apply" in str(statement)


def test_a_lost_direction_that_the_keys_do_not_read_costs_nothing(make: Any) -> None:
    model = make(keys="tied", key_size=3)
    attention = model.model.layers[0].attention
    with torch.no_grad():
        attention.output.weight[:, 0] = 0
        attention.mixing[0, 0] = 0
    assert model.identifiability_statement().from_head == EVERY
    assert model.identifiability_statement().from_block != EVERY


def test_the_words_say_the_numbers(make: Any) -> None:
    words = str(make(keys="tied").identifiability_statement())
    for part in ("value size 8", "more than 9 tokens", "every length", "Theorem 1", "condition number", "512 tokens"):
        assert part in words
    assert "nothing to identify" in str(make(attention="uniform").identifiability_statement())
    assert "family" in str(make(key_size=16).identifiability_statement())
    assert "do not depend on the query" in str(make(position_embedding_type="bias").identifiability_statement())


def test_rank_ignores_what_rounding_to_float32_leaves() -> None:
    torch.manual_seed(0)
    low = (torch.randn(60, 5) @ torch.randn(5, 60)).double()  # the product was rounded to float32
    assert int(rank(low)) == 5


def test_tied_keys_are_called_tied_and_given_one_length(make: Any) -> None:
    said = make(keys="tied").identifiability_statement().sentences()
    assert "keys tied to values" in said[0]
    assert "concat" not in " ".join(said)
    assert [s for s in said if "unique up to" in s] == []
    assert sum("unique at every length" in s for s in said) == 1
    free = make(keys="free").identifiability_statement().sentences()
    assert "free keys" in free[0]
    assert sum("unique up to 9 tokens" in s for s in free) >= 1


def test_a_tied_model_speaks_of_its_keys_and_of_one_length_only() -> None:
    """Not of the arrangement by its setting's name, nor of two lengths up to which rows are unique."""
    from whence.identifiable.training.variants import VARIANTS

    config = whence.IdentifiableConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        **VARIANTS["tied"],
    )
    said = " ".join(whence.IdentifiableForSequenceClassification(config).identifiability_statement().sentences())
    assert "concat" not in said
    assert "keys tied to values" in said
    assert "unique at every length" in said
    assert "unique up to" not in said
