"""From a pretrained model to one whose attention is unique: keys tied to values, distilled, folded, proved."""

# torch and transformers leave these functions without types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence.core.numerics.tolerances import TIED_KEYS
from whence.errors import InputError, ModelError
from whence.identifiable.conversion import closed_form
from whence.identifiable.conversion.checkpoint import History
from whence.identifiable.conversion.convert_decoder import ConvertedDecoder, refuse_encoder_options, tie_rotary_keys
from whence.identifiable.conversion.distillation import Schedule, distil
from whence.identifiable.conversion.fidelity import Fidelity, compare, groups, probe
from whence.identifiable.conversion.probes import Probe
from whence.identifiable.conversion.refusal import refuse_unfit
from whence.identifiable.conversion.result import Converted
from whence.identifiable.conversion.rotary import convertible
from whence.identifiable.conversion.tied_key import Projections, fold, projections, tie, unfold
from whence.identifiable.conversion.windows import WindowedTexts, batch, tokenise
from whence.identifiable.statement import LayerFacts, Statement, facts_of, state
from whence.model.load import Model, as_model
from whence.reading.encodings import sequences_given
from whence.results.progress import Progress, Say
from whence.results.provenance import Provenance

FITTING_TEXTS = 64  # windows for the closed form


def tie_keys(
    model: Any,
    texts: Any,
    steps: int = 400,
    *,
    held_out: Any = None,
    probes: Sequence[Probe] = (),
    learning_rate: float = 3e-4,
    tokens: int = 1024,
    max_length: int | None = None,
    lengths: Sequence[int] = (64, 128, 256, 512),
    texts_per_length: int = 200,
    seed: int = 0,
    start: Any = None,
    embedding_weight: float = 1.0,
    experimental: bool = False,
    truncate: bool = False,
    checkpoint: str | Path | None = None,
    progress: Progress = False,
    say: Say | None = None,
) -> Converted | ConvertedDecoder:
    """Convert a BERT-family encoder so that its attention is unique at every length; the model given is not changed.

    Every key projection becomes K = V·M, M fitted per head in closed form to the attention logits on `texts`; then
    `steps` steps of distillation bring the hidden states back (`tokens` tokens in a batch, texts of all lengths up to
    `max_length`, the model's own maximum by default). `steps=0`: the closed form alone. `texts`: a list, a data set or an
    encoding; the second texts of pairs count as texts of their own. `held_out`: texts to measure
    fidelity on; None: a tenth of `texts` is set aside. `probes`: labelled data for linear probes. `start`: an earlier
    conversion of the same model to go on from, in place of the closed form. `embedding_weight`: how much the embedding
    of a whole text counts beside its hidden states. `experimental`: convert a decoder; without rotary positions (ALiBi,
    none) it is saved as plain weights of its own class, a Llama becomes an `IdentifiableForCausalLM`, distilled by its
    logits, with its perplexity before and after (`ConvertedDecoder`). `truncate`: of a text that is longer than the model
    reads use the first part alone, not windows from all of it. `checkpoint`: a file from which a run that was stopped
    goes on. A model in half precision is converted in float32.

    Theorem 1: if col(K) ⊂ span[T, 1], the softmax row with a given head output is unique at every n.

    >>> import whence
    >>> texts = [f"The {a} {b}." for a in ("cat", "dog", "old man") for b in ("slept", "ran home", "sang a song")]
    >>> whence.tie_keys("minilm", texts, steps=0, lengths=()).tied_residual < 1e-4
    True
    """
    chosen = as_model(model)
    refuse_unfit(chosen, experimental=experimental)
    chosen = _in_full_precision(chosen)
    if steps < 0:
        raise InputError(f"steps={steps}: give 0 (closed form only) or more.")
    if chosen.tokenizer is None:
        raise InputError(f"{chosen.name} came without a tokenizer: give whence.Model(model, tokenizer).")
    limit = _limit(chosen, max_length)
    fitting, kept = _set_aside(
        _single_texts(chosen, texts), None if held_out is None else _single_texts(chosen, held_out), seed
    )
    corpus, measured = (tokenise(chosen.tokenizer, part, limit, truncate=truncate) for part in (fitting, kept))
    say = say or (lambda _: None)
    where = None if checkpoint is None else Path(checkpoint)
    schedule = Schedule(steps, learning_rate, tokens, seed=seed, embedding_weight=embedding_weight)
    settings = {
        "steps": steps, "learning_rate": learning_rate, "tokens": tokens, "max_length": limit, "seed": seed,
        "texts": len(fitting), "held_out": len(kept), "embedding_weight": embedding_weight,
        "start": None if start is None else as_model(start).name,
    }  # fmt: skip
    if convertible(chosen.model):
        refuse_encoder_options(probes, start)
        return tie_rotary_keys(
            chosen, corpus, measured, schedule, checkpoint=where, progress=progress, say=say, settings=settings
        )

    config: Any = chosen.model.config
    heads = int(config.num_attention_heads)
    student = copy.deepcopy(chosen.model).eval()
    places = projections(student, heads)
    if start is None:
        say("fitting M in closed form")
        tie(places, fit(chosen, corpus, places, seed))
    else:
        _copy_weights(as_model(start), student, chosen.name)
        tie(places, unfold(places))
    made = groups(measured, [n for n in lengths if n <= limit], texts_per_length, seed)
    before = Fidelity(compare(chosen.model, student, measured, made))
    _choose_trainable(student, places)
    say(f"distilling for {steps} steps")
    history = (
        distil(
            student,
            chosen.model,
            corpus,
            schedule,
            checkpoint=where,
            start=None if start is None else as_model(start).weights_hash,
            progress=progress,
        )
        if steps
        else History()
    )
    student.requires_grad_(True)
    mixing = tuple(fold(places))
    student_config: Any = student.config
    student_config.update({"whence": {"keys": "tied", "converted_from": chosen.name}})
    result = Model(student, chosen.tokenizer, chosen.processor, f"{chosen.name}, keys tied")
    residual = tied_residual(result, measured)
    if residual > TIED_KEYS:
        raise ModelError(
            f"after conversion {residual:.1e} of a key of {chosen.name} still lies outside its values: the model "
            "changes its keys after projecting them, so tying the projections does not make its attention unique."
        )
    say("measuring fidelity")
    after = Fidelity(
        compare(chosen.model, student, measured, made),
        {task.name: probe(chosen.model, student, chosen.tokenizer, measured, task) for task in probes},
    )
    return Converted(
        result,
        mixing,
        before,
        after,
        _statement(result, measured, places, mixing, limit),
        residual,
        history,
        Provenance(chosen.name, "tie_keys", settings, source=chosen),
        settings,
    )


# -- settings and texts -----------------------------------------------------------------------------------------------


def _in_full_precision(model: Model) -> Model:
    """The model, or a copy in float32 of one in half precision: there a step of distillation is lost in the rounding.

    The copy is made from the configuration: casting a model rounds what no checkpoint holds, the frequencies of rotary
    positions, and casting it back does not bring them back.
    """
    given: Any = model.model
    if all(p.dtype not in (torch.float16, torch.bfloat16) for p in given.parameters()):
        return model
    raised = type(given)(copy.deepcopy(given.config)).to(given.device, torch.float32)
    raised.load_state_dict({name: weight.float() for name, weight in given.state_dict().items()})
    return Model(raised.eval(), model.tokenizer, model.processor, model.name)


def _limit(model: Model, wanted: int | None) -> int:
    from whence.reading.tokenised import position_limit

    own = position_limit(model.model)
    if wanted is not None and own is not None and wanted > own:
        raise InputError(f"max_length={wanted}, but {model.name} has positions for {own} tokens.")
    return wanted or own or 512


def _copy_weights(start: Model, into: nn.Module, name: str) -> None:
    try:
        into.load_state_dict(start.model.state_dict())
    except RuntimeError as problem:
        said = " ".join(str(problem).split())[:200]
        raise InputError(f"start={start.name!r} is no conversion of {name!r}: {said}") from problem


def _single_texts(model: Model, given: Any) -> list[str]:
    """Every text by itself, the second ones of pairs too: windows are cut from single texts."""
    return [text for sequence in sequences_given(model, given) for text in sequence]


def _set_aside(texts: list[str], held_out: Sequence[str] | None, seed: int) -> tuple[list[str], list[str]]:
    if held_out is not None:
        known = set(held_out)
        left = [t for t in texts if t not in known]  # a text that is measured is never fitted to
        if not left:
            raise InputError("every text is in held_out: give other texts to fit to.")
        return left, list(held_out)
    if len(texts) < 2:
        raise InputError(f"{len(texts)} text was given: tie_keys sets some aside to measure fidelity, so give more.")
    unique = list(dict.fromkeys(texts))
    order = torch.randperm(len(unique), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(2000, max(1, len(unique) // 10))
    return [unique[i] for i in order[count:]] or unique, [unique[i] for i in order[:count]]


# -- fitting and proving ---------------------------------------------------------------------------------------------


def fit(model: Model, corpus: WindowedTexts, places: list[Projections], seed: int) -> list[Tensor]:
    """M of every attention module, from the model's own queries, keys and values on texts of all lengths."""
    from whence.reading.tracing import trace

    problems: list[closed_form.LogitLeastSquares] = []
    for i in range(FITTING_TEXTS):
        inputs = batch(corpus, 1, seed + 1, i)  # a batch of one token's worth: one text
        n = int(inputs["attention_mask"][0].sum())
        layers = trace(model, inputs["input_ids"][:1, :n], keep=["queries", "keys", "values"])
        if len(layers) % len(places):
            raise ModelError(
                f"{model.name} attends {len(layers)} times with {len(places)} attention modules: not a plain stack."
            )
        for number in range(len(layers)):
            layer = layers[number]
            if not layer.keys_proved:
                raise ModelError(
                    f"in layer {number} of {model.name} the weights are not softmax of scaled query · key plus a bias "
                    "that was seen: its attention has terms that Theorem 1 does not cover."
                )
            at = number * len(places) // len(layers)  # layers may share one module (ALBERT)
            if at == len(problems):
                heads, _, size = layer.values.shape
                problems.append(closed_form.LogitLeastSquares(heads, size, layer.keys.shape[-1]))
            problems[at].add(layer.queries, layer.keys, layer.values)
    return [problem.solve() for problem in problems]


def _choose_trainable(model: nn.Module, places: list[Projections]) -> None:
    """The layers' weights are trained; embeddings, pooler and any head stay the original's."""
    stems = {re.split(r"\.\d+(\.|$)", place.path)[0] + "." for place in places}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(name.startswith(stem) for stem in stems))


def tied_residual(model: Model, corpus: WindowedTexts) -> float:
    """The largest share of any head's keys that lies outside span[V, 1], on held-out texts joined to the longest input.

    As long as the model reads: with no more tokens than d_v + 1 the span would hold any key.
    """
    from whence.reading.tracing import trace

    joined: list[int] = []
    while len(joined) < corpus.room:
        for text in corpus.texts:
            joined += text
    traced = trace(model, corpus.batch([joined[: corpus.room]])["input_ids"], keep=["keys", "values"])
    worst = 0.0
    for number in range(len(traced)):
        keys, values = traced[number].keys.double(), traced[number].values.double()
        keys, values = keys - keys.mean(-2, keepdim=True), values - values.mean(-2, keepdim=True)
        fitted = values @ torch.linalg.lstsq(values, keys, driver="gelsd").solution
        share = torch.linalg.matrix_norm(keys - fitted) / torch.linalg.matrix_norm(keys).clamp_min(1e-30)
        worst = max(worst, float(share.max()))
    return worst


def _statement(
    model: Model, corpus: WindowedTexts, places: list[Projections], mixing: Sequence[Tensor], limit: int
) -> Statement:
    """From the folded weights and the output projections that the reading proved."""
    from whence.reading.tracing import trace

    traced = trace(model, corpus.batch([corpus.texts[0][: corpus.room]])["input_ids"])
    facts: list[LayerFacts] = []
    for number in range(len(traced)):
        at = number * len(places) // len(traced)
        heads, size, key_size = mixing[at].shape
        slices = traced[number].projection.weight.detach().double()
        value = places[at].value.weight.detach().double().unflatten(0, (heads, size)).mT
        facts.append(facts_of(number, key_size, value, slices, slices.flatten(0, 1), mixing[at].double()))
    kind = traced[0].equation("wiring").kind
    return state(
        tuple(facts),
        heads=mixing[0].shape[0],
        arrangement="concat",
        keys="tied",
        attention="softmax",
        positions=str(getattr(model.model.config, "position_embedding_type", "learned")),
        norm="post" if kind == "post-norm" else kind,
        max_length=limit,
    )
