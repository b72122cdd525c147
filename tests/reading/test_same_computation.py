"""Whatever ready tensors are given: the trace is of what the model makes of them, or it is refused."""

from __future__ import annotations

import pytest
import torch

from conformance.zoo import build
from whence.errors import WhenceError
from whence.model.load import Model
from whence.reading.tracing import trace

FAMILIES = [
    "bert",
    "roberta",
    "distilbert",
    "albert",
    "electra",
    "modernbert",
    "gpt2",
    "opt",
    "llama",
    "gpt_neox",
    "bloom",
    "t5",
]
WAYS = ["2-D", "holes", "4-D", "4-D boolean", "left-padded", "packed positions", "pairs", "inputs_embeds"]


def inputs_for(way, specimen):
    """Inputs of this kind, and the positions that a mask shows in every row."""
    ids = specimen.inputs["input_ids"].repeat(2, 1)
    ids[1] = ids[1].flip(0)
    n = ids.shape[1]
    given = {k: v.repeat(2, 1) for k, v in specimen.inputs.items() if k == "decoder_input_ids"}
    given["input_ids"] = ids
    mask = torch.ones(2, n, dtype=torch.long)
    if way == "2-D":
        mask[1, n - 4 :] = 0
    elif way == "holes":
        mask[0, 3], mask[1, 5:7] = 0, 0
    elif way == "left-padded":
        mask[1, :4] = 0
    elif way.startswith("4-D"):
        visible = torch.ones(n, n, dtype=torch.bool).tril()
        visible[n // 2 :, 1:3] = False
        whole = visible.expand(2, 1, n, n)
        lowest = torch.finfo(torch.float32).min
        given["attention_mask"] = whole if "boolean" in way else torch.zeros(2, 1, n, n).masked_fill(~whole, lowest)
        return given, mask
    elif way == "packed positions":
        given["position_ids"] = torch.cat([torch.arange(n // 2), torch.arange(n - n // 2)]).expand(2, n)
        return given, mask
    elif way == "pairs":
        given["token_type_ids"] = (torch.arange(n) >= n // 2).long().expand(2, n)
    elif way == "inputs_embeds":
        given["inputs_embeds"] = specimen.model.get_input_embeddings()(given.pop("input_ids")).detach()
    given["attention_mask"] = mask
    return given, mask


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("implementation", ["sdpa"])
def test_a_trace_is_of_what_the_model_computes(family, implementation):
    specimen = build(family)
    model = specimen.model
    if model._supports_sdpa:
        model.set_attn_implementation(implementation)
    outcomes = {}
    for way in WAYS:
        given, mask = inputs_for(way, specimen)
        try:
            with torch.no_grad():
                expected = model(**given).logits
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
            continue  # not an input of this model
        try:
            traces = trace(Model(model), given)
        except WhenceError as refusal:
            outcomes[way] = str(refusal)
            continue
        for row, found in enumerate(traces):
            rows = expected[row] if "decoder_input_ids" in given else expected[row][mask[row].bool()]
            scale = rows.abs().max()
            assert (found.logits - rows).abs().max() <= 1e-4 * scale, way
            sums = found.attention.sum(-1) if family != "t5" else torch.ones(1)
            assert torch.allclose(sums, torch.ones(()), atol=1e-4), way
        outcomes[way] = "right"
    right = [way for way, outcome in outcomes.items() if outcome == "right"]
    assert {"2-D", "holes", "left-padded"} <= set(right), outcomes
    assert len(right) >= 4, outcomes


def test_a_later_run_of_a_trace_with_hidden_tokens_is_refused():
    from whence.reading.rerun.substitution import ZeroValues, substitute

    specimen = build("bert")
    given, _ = inputs_for("holes", specimen)
    found = trace(Model(specimen.model), given)[0]
    with pytest.raises(WhenceError, match="hides tokens"):
        substitute(found, ZeroValues(0, [1]))
