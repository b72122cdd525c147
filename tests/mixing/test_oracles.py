"""Every method that explains is paired with the test that compares it with its definition; one without a pair fails here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from whence.method_table import explaining

HERE = Path(__file__).parent

ORACLES = {
    "attention": "test_contributions.py::test_attention_and_effective_attention_as_they_are",
    "effective": "test_contributions.py::test_effective_of_a_rank_deficient_projection",
    "rollout": "test_contributions.py::test_rollout_counts_the_residual_as_half",
    "effective-rollout": "test_contributions.py::test_attention_and_effective_attention_as_they_are",
    "flow": "test_contributions.py::test_flow_equals_networkx",
    "norms": "test_decomposition.py::test_equal_to_the_head_expanded_formula",
    "alti": "test_decomposition.py::test_equal_to_the_head_expanded_formula",
    "globenc": "test_contributions.py::test_globenc_after_the_second_norm",
    "value-zeroing": "test_contributions.py::test_value_zeroing_takes_the_path_of_the_model",
    "decompx": "test_decompx.py::test_random_post_norm",
    "alti-logit": "test_attribute.py::test_alti_logit_head_by_head",
    "hidden-token-attribution": "test_hidden_token_attribution.py::test_equal_to_a_backward_loop",
    "gradient": "test_attribute.py::test_gradients_are_taken_at_the_word_embeddings",
    "input-x-gradient": "test_attribute.py::test_gradients_are_taken_at_the_word_embeddings",
    "absolute-input-x-gradient": "test_attribute.py::test_absolute_forms",
    "integrated-gradients": "test_attribute.py::test_integrated_gradients_are_complete",
    "absolute-integrated-gradients": "test_attribute.py::test_absolute_forms",
    "occlusion": "test_attribute.py::test_occlusion_is_leave_one_out",
    "lime": "test_attribute.py::test_lime_and_shap_of_a_linear_model",
    "kernel-shap": "test_attribute.py::test_lime_and_shap_of_a_linear_model",
    "last-attention": "test_attribute.py::test_last_attention_at_the_row_that_is_read",
    "last-effective": "test_attribute.py::test_last_attention_at_the_row_that_is_read",
    "gradient-rollout": "test_attribute.py::test_gradient_rollout_from_its_definition",
}
"""By method: file and function of its oracle test."""


def test_every_method_has_an_oracle() -> None:
    assert {m.name for m in explaining() if m.location.startswith("whence.")} == set(ORACLES)


@pytest.mark.parametrize("where", sorted(set(ORACLES.values())))
def test_the_oracle_is_there_and_asserts(where: str) -> None:
    file, _, name = where.partition("::")
    tree = ast.parse((HERE / file).read_text())
    helpers = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert name in helpers, where

    def asserts(node: ast.AST) -> bool:
        called = {n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        return any(isinstance(n, ast.Assert) for n in ast.walk(node)) or any(
            asserts(helpers[c]) for c in called if c in helpers and helpers[c] is not node
        )

    assert asserts(helpers[name]), where
