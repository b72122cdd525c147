"""The tokens of a sequence, as people read them: text, spans, words, and which of them are special."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from whence.results.declared import listed


@dataclass(frozen=True)
class Tokens(Sequence[str]):
    """One sequence of tokens; indexing and iterating give the readable text.

    `raw` is what the tokenizer calls them (with its Ġ, ▁ and ##), `spans` where each stands in the text it came from,
    `words` the number of the word each belongs to (None for special tokens, or where the tokenizer does not say).
    """

    text: tuple[str, ...]
    raw: tuple[str, ...]
    ids: tuple[int, ...] | None = None
    spans: tuple[tuple[int, int] | None, ...] | None = None
    words: tuple[int | None, ...] | None = None
    special: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if not self.special:
            object.__setattr__(self, "special", (False,) * len(self.text))

    def __repr__(self) -> str:
        shown = " ".join(self.text)
        return f"Tokens({len(self)}: {shown if len(shown) <= 120 else shown[:119] + '…'})"

    def __len__(self) -> int:
        return len(self.text)

    def __iter__(self) -> Iterator[str]:
        return iter(self.text)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        return self.text[index]

    @classmethod
    def positions(cls, n: int, label: str = "position") -> Tokens:
        """Tokens that have no text: positions of an image or a sound, or of a model without a tokenizer."""
        names = tuple(f"{label} {i}" for i in range(n))
        return cls(names, names)

    @classmethod
    def seconds(cls, n: int, frame: float) -> Tokens:
        """The frames of a sound, named by the time at which each begins: "0.42 s"."""
        names = tuple(f"{i * frame:.2f} s" for i in range(n))
        return cls(names, names)

    @classmethod
    def patches(cls, n: int) -> Tokens:
        """The positions of a vision transformer: [CLS] (and distillation) first where the rest is a square grid."""
        for extra in (1, 2, 0):
            side = round(max(n - extra, 0) ** 0.5)
            if side and side * side == n - extra:
                names = [f"[{name}]" for name in ("CLS", "DIST")[:extra]]
                names += [f"patch {i // side},{i % side}" for i in range(n - extra)]
                return cls(tuple(names), tuple(names), special=tuple(i < extra for i in range(n)))
        return cls.positions(n)

    def with_sink(self) -> Tokens:
        """These tokens and a last one for a learned sink, as the columns of `Layer.attention_and_sink`."""

        def longer(parts: tuple[Any, ...] | None) -> Any:
            return None if parts is None else (*parts, None)

        return Tokens(
            (*self.text, "sink"),
            (*self.raw, "sink"),
            None,
            longer(self.spans),
            longer(self.words),
            (*self.special, True),
        )

    def kinds(self) -> tuple[str, ...]:
        """Each token's type in the sense of Brunner's Figure 1: the special token's name, "punctuation" or "rest"."""
        kinds = []
        for text, special in zip(self.text, self.special, strict=True):
            stripped = text.strip()
            if special:
                kinds.append(stripped or text)
            elif stripped and all(unicodedata.category(c)[0] in "PS" for c in stripped):
                kinds.append("punctuation")
            else:
                kinds.append("rest")
        return tuple(kinds)

    def groups(self) -> list[list[int]]:
        """Positions word by word, in order; special tokens and tokens of no known word stand alone."""
        if self.words is None:
            return [[i] for i in range(len(self))]
        groups: list[list[int]] = []
        for i, word in enumerate(self.words):
            follows = i > 0 and word is not None and self.words[i - 1] == word
            if follows and not self.special[i] and not self.special[i - 1]:
                groups[-1].append(i)
            else:
                groups.append([i])
        return groups

    def name(self, index: int) -> str:
        """A token within a sentence: in quotation marks unless it is special, a piece of a word with the word."""
        if self.special[index]:
            return self.text[index]
        group = next(g for g in self.groups() if index in g)
        whole = "".join(self.text[i] for i in group).strip()
        return f"‘{self.text[index]}’" + (f" (in ‘{whole}’)" if len(group) > 1 else "")

    def by_word(self) -> Tokens:
        """The words themselves, as tokens."""
        groups = self.groups()
        text = tuple("".join(self.text[i] for i in g).strip() or self.text[g[0]] for g in groups)
        spans = None
        if self.spans is not None:
            merged = []
            for g in groups:
                inner = [s for s in (self.spans[i] for i in g) if s is not None]
                merged.append((inner[0][0], inner[-1][1]) if inner else None)
            spans = tuple(merged)
        return Tokens(
            text,
            tuple(" ".join(self.raw[i] for i in g) for g in groups),
            None,
            spans,
            tuple(None if self.words is None else self.words[g[0]] for g in groups),
            tuple(self.special[g[0]] for g in groups),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": list(self.text),
            "raw": list(self.raw),
            "ids": None if self.ids is None else list(self.ids),
            "spans": None if self.spans is None else [None if s is None else list(s) for s in self.spans],
            "words": None if self.words is None else list(self.words),
            "special": list(self.special),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Tokens:
        spans = data["spans"]
        for name, part in data.items():
            if part is not None and len(listed(part)) != len(data["text"]):
                raise ValueError(f"{len(data['text'])} tokens have {len(part)} {name}")
        return cls(
            tuple(data["text"]),
            tuple(data["raw"]),
            None if data["ids"] is None else tuple(data["ids"]),
            None if spans is None else tuple(None if s is None else listed(s) for s in spans),
            None if data["words"] is None else tuple(data["words"]),
            tuple(data["special"]),
        )


def readable(tokenizer: Any, raw: Sequence[str], special: Sequence[bool]) -> tuple[str, ...]:
    """Token strings without the tokenizer's own marks: no ##, Ġ or ▁; a token that is a space stays visible."""
    texts = []
    for token, is_special in zip(raw, special, strict=True):
        if is_special:
            texts.append(token)
            continue
        text = token
        if token.startswith("##"):
            text = token[2:]
        elif "Ġ" in token or "▁" in token or "Ċ" in token or not token.isascii():
            try:
                text = tokenizer.convert_tokens_to_string([token])
            except (TypeError, ValueError, KeyError, AttributeError):
                text = token.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")
        elif token.endswith("</w>"):
            text = token[: -len("</w>")]
        texts.append(text.strip() or {"\n": "⏎", "\t": "⇥"}.get(text, "␣" if text.strip() == "" else text))
    return tuple(texts)
