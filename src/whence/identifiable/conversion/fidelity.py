"""Fidelity: how near a converted model is to its original, by length of text, on texts it was not fitted to."""

# torch and transformers leave these functions without types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from whence.identifiable.conversion import probes as probing
from whence.identifiable.conversion.distillation import pool
from whence.identifiable.conversion.windows import WindowedTexts
from whence.reading.capture.attach import INTERFACE, attached
from whence.reading.capture.recorder import AttentionRecorder
from whence.reading.capture.untouched import evaluating
from whence.results.short_repr import short_repr

if TYPE_CHECKING:
    import pandas as pd

NATURAL = "as they are"


@dataclass(frozen=True)
class AtLength:
    """Held-out texts of one length. Cosines are means over tokens (states) and over texts (embeddings)."""

    length: str
    texts: int
    tokens: float  # mean number, special ones included
    state_cosine: float  # of final states, token by token
    embedding_cosine: float  # of the mean of the final states
    worst_embedding_cosine: float
    neighbours_kept: float  # texts whose nearest neighbour among these texts (by cosine) is still the same
    attention_kl: float  # KL(original ‖ converted) in nats, mean over layers, heads and rows


@dataclass(frozen=True)
class Fidelity:
    """Fidelity at several lengths, and linear probes (accuracy of the original, accuracy of the converted model)."""

    __repr__ = short_repr

    lengths: tuple[AtLength, ...]
    probes: dict[str, tuple[float, float]] = field(default_factory=dict)

    def at(self, length: int | str) -> AtLength:
        """The line for one length."""
        return next(line for line in self.lengths if line.length == str(length))

    def to_dict(self) -> dict[str, Any]:
        return {
            "lengths": [asdict(line) for line in self.lengths],
            "probes": {k: list(v) for k, v in self.probes.items()},
        }

    def to_frame(self) -> pd.DataFrame:
        """One line per length."""
        import pandas as pd

        return pd.DataFrame([asdict(line) for line in self.lengths])


def groups(corpus: WindowedTexts, lengths: Sequence[int], count: int, seed: int = 0) -> dict[str, list[list[int]]]:
    """Held-out pieces by length: texts as they are (cut at the maximum), and windows of exactly so many tokens.

    Windows are taken from the beginning of texts that are long enough, and from several texts in a row where none is.
    """
    draw = random.Random(seed)
    order = list(range(len(corpus.texts)))
    draw.shuffle(order)
    groups = {NATURAL: [list(corpus.texts[i][: corpus.room]) for i in order[:count]]}
    around = len(corpus.before) + len(corpus.after)
    for length in lengths:
        room = min(length - around, corpus.room)
        windows = [list(corpus.texts[i][:room]) for i in order if len(corpus.texts[i]) >= room][:count]
        at = 0
        while len(windows) < min(count, 8) and at < len(order):  # too few long texts: join short ones
            joined: list[int] = []
            while len(joined) < room and at < len(order):
                joined += corpus.texts[order[at]]
                at += 1
            if len(joined) >= room:
                windows.append(joined[:room])
        if windows:
            groups[str(length)] = windows
    return groups


def final_states(
    model: nn.Module, corpus: WindowedTexts, pieces: Sequence[Sequence[int]], tokens: int = 4096
) -> list[Tensor]:
    """The last hidden states of every piece, (n, d) each, in batches of similar length."""
    order = sorted(range(len(pieces)), key=lambda i: len(pieces[i]))
    found: dict[int, Tensor] = {}
    device = next(model.parameters()).device
    with evaluating(model):
        while order:
            size = max(1, tokens // (len(pieces[order[-1]]) + 2))
            chunk, order = order[-size:], order[:-size]
            inputs = {k: t.to(device) for k, t in corpus.batch([pieces[i] for i in chunk]).items()}
            states = model(**inputs, output_hidden_states=True).hidden_states[-1].cpu()
            for row, i in enumerate(chunk):
                found[i] = states[row, : int(inputs["attention_mask"][row].sum())]
    return [found[i] for i in range(len(pieces))]


def embeddings(states: Sequence[Tensor]) -> Tensor:
    """Mean over tokens of every text: (texts, d)."""
    return torch.stack([pool(s[None], torch.ones(1, len(s)))[0] for s in states])


def neighbours(vectors: Tensor) -> Tensor:
    """The nearest other row of each row, by cosine."""
    unit = functional.normalize(vectors, dim=-1)
    near = unit @ unit.T
    return near.fill_diagonal_(-torch.inf).argmax(-1)


def compare(
    original: nn.Module,
    converted: nn.Module,
    corpus: WindowedTexts,
    groups: dict[str, list[list[int]]],
) -> tuple[AtLength, ...]:
    """Fidelity on every group of pieces that `groups` made."""
    return tuple(_line(name, original, converted, corpus, pieces) for name, pieces in groups.items())


def _line(
    name: str, original: nn.Module, converted: nn.Module, corpus: WindowedTexts, pieces: list[list[int]]
) -> AtLength:
    ours, theirs = final_states(converted, corpus, pieces), final_states(original, corpus, pieces)
    cosine = torch.cat([functional.cosine_similarity(a, b, dim=-1) for a, b in zip(ours, theirs, strict=True)])
    e_ours, e_theirs = embeddings(ours), embeddings(theirs)
    similarity = functional.cosine_similarity(e_ours, e_theirs, dim=-1)
    kept = (
        (neighbours(e_ours) == neighbours(e_theirs)).double().mean() if len(pieces) > 2 else torch.tensor(float("nan"))
    )
    divergence = [attention_kl(original, converted, corpus, piece) for piece in pieces]
    return AtLength(
        length=name,
        texts=len(pieces),
        tokens=sum(len(s) for s in ours) / len(ours),
        state_cosine=float(cosine.mean()),
        embedding_cosine=float(similarity.mean()),
        worst_embedding_cosine=float(similarity.min()),
        neighbours_kept=float(kept),
        attention_kl=sum(divergence) / len(divergence),
    )


def attention_kl(original: nn.Module, converted: nn.Module, corpus: WindowedTexts, piece: Sequence[int]) -> float:
    """KL(a ‖ â) of one text, mean over layers, heads and rows."""
    total = []
    for a, b in zip(_attention(original, corpus, piece), _attention(converted, corpus, piece), strict=True):
        tiny = torch.finfo(torch.float64).tiny
        p, q = a.double().clamp_min(tiny), b.double().clamp_min(tiny)
        total.append(float((p * (p.log() - q.log())).sum(-1).mean()))
    return sum(total) / len(total)


def _attention(model: nn.Module, corpus: WindowedTexts, piece: Sequence[int]) -> tuple[Tensor, ...]:
    device = next(model.parameters()).device
    inputs = {k: t.to(device) for k, t in corpus.batch([piece]).items()}
    recorder = AttentionRecorder()
    with attached(model, INTERFACE, recorder, 1):
        model(**inputs)
    return tuple(call.weights for call in recorder.calls)


def probe(
    original: nn.Module, converted: nn.Module, tokenizer: Any, corpus: WindowedTexts, task: probing.Probe
) -> tuple[float, float]:
    """Accuracy of a linear probe on the embeddings of the original, and on those of the converted model."""
    labels = {label: i for i, label in enumerate(sorted({label for _, label in task.train}))}

    def encode(rows: Sequence[tuple[str, str]]) -> list[list[int]]:
        found = tokenizer([text for text, _ in rows], add_special_tokens=False, verbose=False)["input_ids"]
        return [list(ids)[: corpus.room] for ids in found]

    pieces = encode(task.train), encode(task.test)
    targets = [torch.tensor([labels[label] for _, label in rows]) for rows in (task.train, task.test)]
    scores = []
    for model in (original, converted):
        train, test = (embeddings(final_states(model, corpus, part)) for part in pieces)
        scores.append(probing.accuracy(train, targets[0], test, targets[1]))
    return scores[0], scores[1]
