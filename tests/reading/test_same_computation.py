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


# Every pair of family and way is right but for these.
NOT_TAKEN, REFUSED, RIGHT = "not taken by the model", "refused", "right"
EXCEPTIONS = {
    **{(family, way): NOT_TAKEN for family in ("opt", "bloom", "t5") for way in ("4-D", "4-D boolean")},
    # transformers reads positions that start again as packed texts, in a batch of one sequence only: a row by itself is
    # another computation than the same row in the batch that was given.
    **{(family, "packed positions"): REFUSED for family in ("gpt2", "llama", "gpt_neox")},
}


def outcome(way, specimen):
    given, mask = inputs_for(way, specimen)
    try:
        with torch.no_grad():
            expected = specimen.model(**given).logits
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return NOT_TAKEN
    try:
        traces = trace(Model(specimen.model), given)
    except WhenceError as refusal:
        return REFUSED if "traced by itself, gives logits that differ" in str(refusal) else str(refusal)
    assert len(traces) == 2
    for row, found in enumerate(traces):
        rows = expected[row] if "decoder_input_ids" in given else expected[row][mask[row].bool()]
        assert found.logits.shape == rows.shape
        assert (found.logits - rows).abs().max() <= 1e-4 * rows.abs().max(), way
        for stack in found.stacks.values():
            assert torch.allclose(stack.attention.sum(-1), torch.ones(()), atol=1e-4), (way, stack.name)
    return RIGHT


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_is_of_what_the_model_computes(family):
    specimen = build(family)
    if specimen.model._supports_sdpa:
        specimen.model.set_attn_implementation("sdpa")
    outcomes = {way: outcome(way, specimen) for way in WAYS}
    assert outcomes == {way: EXCEPTIONS.get((family, way), RIGHT) for way in WAYS}


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_model_that_gives_tuples_is_read_as_one_that_gives_names(family):
    specimen = build(family)
    named = trace(Model(specimen.model), specimen.inputs)
    tuples = build(family)
    tuples.model.load_state_dict(specimen.model.state_dict())
    tuples.model.config.return_dict = False
    assert isinstance(tuples.model(**specimen.inputs), tuple)
    found = trace(Model(tuples.model), specimen.inputs)
    for kept in ("logits", "final_states"):
        one, other = getattr(named, kept), getattr(found, kept)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    assert named.logits is not None or named.final_states is not None
    assert isinstance(tuples.model(**specimen.inputs), tuple)  # the model is as it was


def test_packed_positions_of_one_sequence_are_packed_texts():
    """In a batch of one the refusal above does not hold: the second text does not look at the first."""
    specimen = build("llama")
    specimen.model.set_attn_implementation("sdpa")
    ids = specimen.inputs["input_ids"]
    n = ids.shape[1]
    positions = torch.cat([torch.arange(n // 2), torch.arange(n - n // 2)])[None]
    found = trace(Model(specimen.model), {"input_ids": ids, "position_ids": positions})
    with torch.no_grad():
        expected = specimen.model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    torch.testing.assert_close(found.logits, expected, atol=1e-4, rtol=1e-4)
    assert float(found.attention[:, :, n // 2 :, : n // 2].abs().max()) == 0.0


def test_a_later_run_of_a_trace_with_hidden_tokens_is_refused():
    from whence.reading.rerun.substitution import ZeroValues, substitute

    specimen = build("bert")
    given, _ = inputs_for("holes", specimen)
    found = trace(Model(specimen.model), given)[0]
    with pytest.raises(WhenceError, match="hides tokens"):
        substitute(found, ZeroValues(0, [1]))


@pytest.mark.parametrize("family", ["bert", "llama", "t5", "bart"])
def test_labels_change_nothing_but_what_the_decoder_reads(family):
    """A batch as it comes from a data loader: of an encoder–decoder, the labels moved by one are the decoder's input."""
    specimen = build(family)
    specimen.model.config.decoder_start_token_id = 0
    ids = specimen.inputs["input_ids"]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.flip(1)[:, :9]}
    batch |= {} if family in ("t5", "bart") else {"labels": ids.flip(1)}
    with torch.no_grad():
        expected = specimen.model(**batch).logits[0]
    found = trace(Model(specimen.model), batch)
    torch.testing.assert_close(found.logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gpt_neox", "gptj", "phi", "llama", "gpt2"])
def test_embeddings_given_end_every_block_where_ids_do(family):
    # A model that is given embeddings is given its first block's residual, too: its final state is not that block's output.
    specimen = build(family)
    ids = specimen.inputs["input_ids"]
    embedded = specimen.model.get_input_embeddings()(ids).detach()
    one, two = (
        trace(Model(specimen.model), {name: t}) for name, t in (("input_ids", ids), ("inputs_embeds", embedded))
    )
    with torch.no_grad():
        states = specimen.model(input_ids=ids, output_hidden_states=True).hidden_states
    for layer in range(len(one) - 1):  # the last one of transformers' states is after the final norm
        for each in (one, two):
            assert torch.allclose(each[layer].block_output, states[layer + 1][0], atol=1e-5)
