"""Tracing: run a proved model once and hand out what it showed, sequence by sequence, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, overload

from torch import Tensor

from whence.errors import InputError
from whence.model.load import Model, as_model
from whence.model.memory import remembered
from whence.reading.capture.untouched import guarded
from whence.reading.datasets import dataset_rows, is_dataset
from whence.reading.encodings import is_encoding
from whence.reading.generation import chat_text, is_chat, with_continuation
from whence.reading.inputs import Prepared, beginning, pad_together, prepare
from whence.reading.rerun.run import prove_model, run
from whence.reading.same_computation import check_outputs
from whence.reading.texts import Texts
from whence.reading.trace import KEEP, Trace
from whence.reading.trace_of_row import trace_of_row
from whence.reading.wiring.op_graph import deviation
from whence.reading.wiring.proof import Proof

BATCH = 8  # sequences in one forward pass


@overload
def trace(
    model: Any, text: str, text_pair: str | None = ..., target: Any = ..., *,
    continuation: Any = ..., max_new_tokens: int | None = ..., chat: bool | None = ...,
    keep: Iterable[str] | None = ..., truncate: bool = ..., batch_size: int = ...,
) -> Trace: ...  # fmt: skip
@overload
def trace(
    model: Any, text: Any, text_pair: Any = ..., target: Any = ..., *,
    continuation: Any = ..., max_new_tokens: int | None = ..., chat: bool | None = ...,
    keep: Iterable[str] | None = ..., truncate: bool = ..., batch_size: int = ...,
) -> Any: ...  # fmt: skip
def trace(
    model: Any,
    text: Any,
    text_pair: Any = None,
    target: Any = None,
    *,
    continuation: Any = None,
    max_new_tokens: int | None = None,
    chat: bool | None = None,
    keep: Iterable[str] | None = None,
    truncate: bool = False,
    batch_size: int = BATCH,
) -> Trace | list[Trace]:
    """Run `model` on `text` once and return everything the measures need, with proved meaning.

    `model`: what `whence.load` gives, a bare transformers model (its tokenizer is found by its name), a pipeline, or a
    name. `text`: a text or a (text, pair) tuple (a `Trace` comes back); a list of them, a `datasets.Dataset`, a
    `BatchEncoding` or a padded batch of ready tensors (a list comes back, padding removed); token ids; an image.
    `text_pair`: a second text, for models that read two. `target`: for encoder–decoders, what the decoder reads
    (text or ids); None: what the model itself writes.

    `continuation`: for decoders, what follows the prompt (a text, put behind it as it is, or ids); or `max_new_tokens`,
    so many tokens that the model writes, the likeliest first. `chat`: apply the model's chat template to the text, or
    to a list of messages {"role": …, "content": …}; None: to messages only.

    `keep`: which of "attention", "queries", "keys", "values", "outputs", "states", "logits" to hold; None: all. A
    decoder's logits, one for every word and token, are not even computed without "logits" where the model lets itself be
    told (one for each class always is). `truncate`: cut a text that is too long instead of refusing it.

    On the first trace of a model the six checks of `whence.reading.wiring.proof` are made; a model that cannot be read is
    refused with what was tried.

    >>> import whence
    >>> whence.trace(whence.load(), "The bank raised its rates.").attention[0, 0].sum(-1).round().tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    chosen = as_model(model)
    wanted = kept_parts(keep)

    def run_model() -> Trace | list[Trace]:
        given = prepare_all(
            chosen, text, text_pair, target, continuation=continuation, max_new_tokens=max_new_tokens, chat=chat,
            truncate=truncate,
        )  # fmt: skip
        return _trace(chosen, *given, wanted, batch_size)

    return guarded(chosen.model, run_model)


def prepare_all(
    model: Model,
    text: Any,
    text_pair: Any = None,
    target: Any = None,
    *,
    continuation: Any = None,
    max_new_tokens: int | None = None,
    chat: bool | None = None,
    truncate: bool = False,
) -> tuple[list[Prepared], bool]:
    """Everything that `trace` takes as sequences for the model, and whether it was a single one."""
    templated = chat or (chat is None and is_chat(text))
    if templated:
        text = chat_text(model, text)
    translates = bool(getattr(getattr(model.model, "config", None), "is_encoder_decoder", False))
    if translates and continuation is not None:
        raise InputError(f"{model.name} is an encoder–decoder: give what its decoder reads with target=.")
    prepared, single = prepare(
        model, text, text_pair, target, truncate=truncate, special=not templated,
        max_new_tokens=max_new_tokens if translates else None,
    )  # fmt: skip
    if translates or (continuation is None and max_new_tokens is None):
        return prepared, single
    each = [continuation] * len(prepared) if single or isinstance(continuation, str) else continuation
    following = [None] * len(prepared) if each is None else list(each)
    if len(following) != len(prepared):
        raise InputError(f"continuation has {len(following)} entries for {len(prepared)} prompts: give one for each.")
    return [
        with_continuation(model, one, after, max_new_tokens) for one, after in zip(prepared, following, strict=True)
    ], single


def _trace(
    model: Model, prepared: list[Prepared], single: bool, wanted: frozenset[str], batch_size: int
) -> Trace | list[Trace]:
    proof = prove_model(model, prepared[0])
    traces = []
    for group, batch in _batches(model, prepared, batch_size, proof):
        outcome = run(model, proof, batch, len(group), wanted)
        traces += [(i, trace_of_row(model, proof, outcome, row, prepared[i], wanted)) for row, i in enumerate(group)]
    ordered = [t for _, t in sorted(traces, key=lambda pair: pair[0])]
    if prepared[0].given is not None:
        check_outputs(model, prepared, ordered, proof.tolerance)
    return ordered[0] if single else ordered


WINDOW = 8  # batches whose texts are sorted by length together


def traces(
    model: Any,
    texts: Iterable[Any],
    *,
    keep: Iterable[str] | None = None,
    truncate: bool = False,
    batch_size: int = BATCH,
) -> Iterator[Trace]:
    """The traces of many texts, one after the other in their order, none of them held on to once it was given out.

    `texts`: any iterable, read as far as it is needed. Texts run in batches, as in `whence.trace(model, [...])`; each trace
    that is given out owns its tensors, so that keeping one does not keep its batch.

    >>> import whence
    >>> texts = ["The bank raised its rates.", "It rained."]
    >>> [len(trace.tokens) for trace in whence.traces(whence.load(), texts)]
    [8, 5]
    """
    chosen, wanted = as_model(model), kept_parts(keep)
    if isinstance(texts, str):
        raise InputError("traces takes several texts; give one as a list, or use whence.trace.")
    if is_encoding(texts):  # one batch already
        made = trace(chosen, texts, keep=wanted, batch_size=batch_size)
        yield from (one.copied() for one in (made if isinstance(made, list) else [made]))
        return
    source = _one_by_one(texts)
    while window := list(islice(source, WINDOW * batch_size)):
        made = trace(chosen, window, keep=wanted, truncate=truncate, batch_size=batch_size)
        made.reverse()
        while made:
            yield made.pop().copied()


def _one_by_one(texts: Any) -> Iterator[Any]:
    """Each text of what was given; rows of a data set are texts or pairs."""
    if is_dataset(texts):
        return (row if len(row) > 1 else row[0] for row in dataset_rows(texts))
    if isinstance(texts, Texts):
        return (row if len(row) > 1 else row[0] for row in texts.sequences)
    return iter(texts)


def collected(model: Model, prepared: Prepared) -> Trace:
    """Everything that one forward pass shows of one prepared sequence."""

    def work() -> Trace:
        proof, wanted = prove_model(model, prepared), kept_parts(None)
        outcome = run(model, proof, dict(prepared.inputs), 1, wanted)
        return trace_of_row(model, proof, outcome, 0, prepared, wanted)

    return guarded(model.model, work)


def kept_parts(keep: Iterable[str] | None) -> frozenset[str]:
    """The names of what a trace is to hold; None: all."""
    if keep is None:
        return frozenset(KEEP)
    wanted = frozenset([keep] if isinstance(keep, str) else keep)
    unknown = wanted - set(KEEP)
    if unknown:
        raise InputError(f"keep={sorted(unknown)} is not something a trace holds; choose among {', '.join(KEEP)}.")
    return wanted


# -- batches -------------------------------------------------------------------------------------------------------


def _batches(
    model: Model, prepared: Sequence[Prepared], size: int, proof: Proof
) -> Iterable[tuple[list[int], dict[str, Tensor]]]:
    """Groups of sequences of similar length, padded together; one by one where padding changes the model's outputs."""
    order = sorted(range(len(prepared)), key=lambda i: prepared[i].length)
    same = len({frozenset(p.inputs) for p in prepared}) == 1
    same = same and all(p.given is None or "attention_mask" not in p.inputs for p in prepared)  # masks of their own
    if len(prepared) > 1 and same and prepared[0].length and size > 1 and _padding_is_safe(model, proof, prepared):
        for start in range(0, len(order), size):
            group = order[start : start + size]
            yield group, pad_together(model, [prepared[i] for i in group])
    else:
        for i in order:
            yield [i], dict(prepared[i].inputs)


def _padding_is_safe(model: Model, proof: Proof, prepared: Sequence[Prepared]) -> bool:
    """Whether a sequence gives the same outputs in a padded batch as alone. Tried once per model, on short pieces."""
    return remembered(model.model, "padding is safe", lambda: _try_padding(model, proof, prepared))


def _try_padding(model: Model, proof: Proof, prepared: Sequence[Prepared]) -> bool:
    longest = max(prepared, key=lambda p: p.length)
    n = min(longest.length, 10)
    if n < 2:
        return False
    pieces = [beginning(longest.inputs, n, 7), beginning(longest.inputs, max(1, n // 2), 4)]
    together = run(model, proof, pad_together(model, [Prepared(p, None) for p in pieces]), 2, frozenset({"outputs"}))
    for row, piece in enumerate(pieces):
        alone = run(model, proof, dict(piece), 1, frozenset({"outputs"}))
        for ours, theirs in zip(alone.calls, together.calls, strict=True):
            n_query = ours.output.shape[2]
            if deviation(theirs.output[row, :, :n_query], ours.output[0]) > proof.tolerance:
                return False
    return True
