"""What is asked about one text: which of its units can be removed, and which output of the model is watched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from whence.errors import InputError
from whence.model.load import Model
from whence.reading.inputs import Prepared, prepare
from whence.results.labels import Tokens

UNITS = ("word", "token")


@dataclass(frozen=True)
class Units:
    """The removable parts of a text: words or tokens, never a special token nor the position that asks."""

    positions: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    spans: tuple[tuple[int, int] | None, ...]

    def __len__(self) -> int:
        return len(self.positions)

    def gather(self, scores: Sequence[float] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A unit's score is the sum of its tokens' scores."""
        values = np.asarray(scores, dtype=np.float64)
        return np.array([values[list(places)].sum() for places in self.positions])


@dataclass(frozen=True)
class TextQuestion:
    """One text with its units and the output that is watched while units are removed.

    `position`: where the prediction is read in the whole text (a language model), None where there is one for the text.
    `target`: the class or token id. `foil`: with it the output is logit(target) − logit(foil), else p(target).
    """

    prepared: Prepared
    units: Units
    position: int | None
    target: int
    foil: int | None = None

    @cached_property
    def key(self) -> str:
        """A name made of the content: ids, units and output. Equal questions have equal keys in every run."""
        inputs = {name: tensor.tolist() for name, tensor in sorted(self.prepared.inputs.items())}
        content = [inputs, self.units.positions, self.position, self.target, self.foil]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]

    def generator(self, seed: int, purpose: str) -> np.random.Generator:
        """Random numbers that depend on the seed and this text alone, so that order, shards and resuming do not matter."""
        digest = hashlib.sha256(f"{seed}\0{self.key}\0{purpose}".encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def units_of(prepared: Prepared, kind: str, position: int | None, unknown: int | None = None) -> Units:
    """The removable units of a prepared text. `unknown`: the id of [UNK], which stands for a word and is removable."""
    if kind not in UNITS:
        raise InputError(f"units={kind!r} is not 'word' or 'token'.")
    tokens = prepared.tokens
    if tokens is None:
        raise InputError("units can be removed from texts only: these inputs have no tokens.")
    groups = [[i] for i in range(len(tokens))] if kind == "token" else words_of(tokens, prepared.text)
    stays = [
        s and (unknown is None or tokens.ids is None or tokens.ids[i] != unknown) for i, s in enumerate(tokens.special)
    ]
    kept = [g for g in groups if not any(stays[i] for i in g) and position not in g]
    return Units(
        tuple(tuple(g) for g in kept),
        tuple("".join(tokens[i] for i in g) for g in kept),
        tuple(_span(tokens, g) for g in kept),
    )


def words_of(tokens: Tokens, text: str | None) -> list[list[int]]:
    """Positions word by word. A tokenizer that calls a whole text one word (Llama's) is cut at white space."""
    words: list[list[int]] = []
    for group in tokens.groups():
        for i in group:
            if i == group[0] or _space_before(tokens, i, text):
                words.append([])
            words[-1].append(i)
    return words


def _space_before(tokens: Tokens, i: int, text: str | None) -> bool:
    spans = tokens.spans
    if text is None or spans is None or spans[i] is None or spans[i - 1] is None:
        return False
    (start, _), (_, end) = spans[i], spans[i - 1]  # type: ignore[misc]
    return start > end or text[start : start + 1].isspace()


def _span(tokens: Tokens, group: list[int]) -> tuple[int, int] | None:
    known = [(i, span) for i, span in enumerate(tokens.spans or ()) if span is not None]
    inside = [span for i, span in known if i in group]
    if inside:
        return inside[0][0], inside[-1][1]
    before = [span[1] for i, span in known if i < group[0]]  # [UNK]: what lies between its neighbours
    after = [span[0] for i, span in known if i > group[-1]]
    return (before[-1] if before else 0, after[0]) if after else None


def prepared_text(model: Model, text: Any, truncate: bool = False) -> Prepared:
    """One text as the model takes it: a text, (text, second text), or for encoder–decoders (source, what was written).

    An encoder–decoder whose written part is not given has written nothing yet.
    """
    first, second = text if isinstance(text, tuple) and len(text) == 2 else (text, None)
    if getattr(getattr(model.model, "config", None), "is_encoder_decoder", False) and not _classifies(model):
        start = model.model.config.decoder_start_token_id
        return prepare(model, first, None, [start] if second is None else second, truncate=truncate)[0][0]
    return prepare(model, first, second, truncate=truncate)[0][0]


def _classifies(model: Model) -> bool:
    return type(model.model).__name__.endswith("ForSequenceClassification")


def asking_position(model: Model, prepared: Prepared) -> int | None:
    """The position of the text that asks and therefore stays: [MASK], or the last one of a decoder that writes on.

    None for classifiers, and for encoder–decoders, whose question stands in the decoder.
    """
    if _classifies(model) or "decoder_input_ids" in prepared.inputs:
        return None
    tokens = prepared.tokens
    mask = getattr(model.tokenizer, "mask_token_id", None)
    at = [i for i, token in enumerate((tokens.ids if tokens else None) or ()) if mask is not None and token == mask]
    if len(at) == 1:
        return at[0]
    can_generate = getattr(model.model, "can_generate", None)
    if callable(can_generate) and can_generate():
        return prepared.length - 1
    head = getattr(model.model, "get_output_embeddings", None)
    if not callable(head) or head() is None:
        raise InputError(
            f"{model.name} makes no prediction (it has no head), so nothing can be watched while words are removed: load it "
            "with a task, such as 'text-classification' or 'fill-mask'."
        )
    raise InputError(
        f"the text {str(prepared.text)[:60]!r} has {len(at)} mask tokens: a masked language model predicts one. Write "
        f"{getattr(model.tokenizer, 'mask_token', '[MASK]')} once, where it should predict."
    )
