"""bertviz's head view and model view, with the same parameters, in which what is uncertain fades.

from whence.bertviz import head_view        # was: from bertviz import head_view
head_view(attention, tokens)                # shows the weights, and says that nothing can be certified
head_view(attention, tokens, values=values) # solid lines are certain, pale ones are not
head_view(trace)                            # a trace has its values
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whence.errors import InputError, MissingExtraError
from whence.reading.from_tensors import from_tensors
from whence.reading.trace import Trace
from whence.reporting.lines import lines_page

__all__ = ["head_view", "model_view"]


class Lines:
    """A page of lines: it shows itself in a notebook, `data` is its HTML, and `save` writes it."""

    def __init__(self, data: str) -> None:
        self.data = data

    def __repr__(self) -> str:
        return f"Lines({len(self.data):,} characters of HTML; .save('attention.html') writes it)"

    def save(self, path: str | Path) -> Path:
        """Write the page and return where it is."""
        from whence.results.files import write_atomically

        if Path(path).suffix.lower() not in (".html", ".htm"):
            raise InputError(f"the view is an HTML page: {str(path)!r} should end in .html.")
        return write_atomically(Path(path), self.data.encode("utf-8"))

    def _repr_html_(self) -> str:
        import html

        return (
            f'<iframe title="attention" srcdoc="{html.escape(self.data, quote=True)}" sandbox="allow-scripts" '
            'style="width:100%;height:640px;border:1px solid #8884;border-radius:8px"></iframe>'
        )


def head_view(
    attention: Any = None,
    tokens: Any = None,
    sentence_b_start: int | None = None,
    prettify_tokens: bool = True,
    layer: int | None = None,
    heads: Sequence[int] | None = None,
    encoder_attention: Any = None,
    decoder_attention: Any = None,
    cross_attention: Any = None,
    encoder_tokens: Any = None,
    decoder_tokens: Any = None,
    include_layers: Sequence[int] | None = None,
    html_action: str = "view",
    *,
    values: Any = None,
    encoder_values: Any = None,
    decoder_values: Any = None,
    cross_values: Any = None,
) -> Lines | None:
    """Lines from each token to those it attends to, head by head; parameters as bertviz's `head_view`, and values.

    attention: a tuple of [1, head, query, key], one a layer, or a `whence.Trace`. values (and encoder_, decoder_,
    cross_values): as `whence.from_tensors` takes them; with them, or a trace, what is not certain is pale. html_action:
    "view" displays it in a notebook, "return" gives it back.
    """
    trace = _trace(
        attention, tokens, values, encoder_attention, decoder_attention, cross_attention, encoder_tokens, decoder_tokens,
        encoder_values, decoder_values, cross_values,
    )  # fmt: skip
    page = lines_page(
        trace, "head", layer=layer, heads=heads, layers=_included(trace, include_layers, layer),
        split=_split(trace, sentence_b_start), raw=not prettify_tokens,
    )  # fmt: skip
    return _given_back(Lines(page), html_action)


def model_view(
    attention: Any = None,
    tokens: Any = None,
    sentence_b_start: int | None = None,
    prettify_tokens: bool = True,
    display_mode: str = "dark",
    encoder_attention: Any = None,
    decoder_attention: Any = None,
    cross_attention: Any = None,
    encoder_tokens: Any = None,
    decoder_tokens: Any = None,
    include_layers: Sequence[int] | None = None,
    include_heads: Sequence[int] | None = None,
    html_action: str = "view",
    *,
    values: Any = None,
    encoder_values: Any = None,
    decoder_values: Any = None,
    cross_values: Any = None,
) -> Lines | None:
    """Every head of every layer at a glance; parameters as bertviz's `model_view`, and values as in `head_view`."""
    if display_mode not in ("dark", "light"):
        raise InputError(f"display_mode={display_mode!r} is not 'dark' or 'light'.")
    trace = _trace(
        attention, tokens, values, encoder_attention, decoder_attention, cross_attention, encoder_tokens, decoder_tokens,
        encoder_values, decoder_values, cross_values,
    )  # fmt: skip
    if include_heads is not None:
        trace = trace.select(heads=list(include_heads))
    page = lines_page(
        trace, "model", layers=_included(trace, include_layers, None), split=_split(trace, sentence_b_start),
        dark=display_mode == "dark", raw=not prettify_tokens,
    )  # fmt: skip
    return _given_back(Lines(page), html_action)


def _trace(
    attention: Any, tokens: Any, values: Any, encoder: Any, decoder: Any, cross: Any, encoder_tokens: Any,
    decoder_tokens: Any, encoder_values: Any, decoder_values: Any, cross_values: Any,
) -> Trace:  # fmt: skip
    if isinstance(attention, Trace):
        return attention
    return from_tensors(
        attention, tokens, values, encoder_attentions=encoder, decoder_attentions=decoder, cross_attentions=cross,
        encoder_tokens=encoder_tokens, decoder_tokens=decoder_tokens, encoder_values=encoder_values,
        decoder_values=decoder_values, cross_values=cross_values,
    )  # fmt: skip


def _included(trace: Trace, include: Sequence[int] | None, layer: int | None) -> list[int] | None:
    have = [each.index for each in trace.of()]
    for number in [*(include or []), *([] if layer is None else [layer])]:
        if number not in have:
            raise InputError(f"there is no layer {number}: it has layers {have[0]} … {have[-1]}.")
    return None if include is None else sorted(set(include))


def _split(trace: Trace, start: int | None) -> int | None:
    if start is not None and not 0 < start < len(trace.tokens):
        raise InputError(f"sentence_b_start={start} is not a position between two of the {len(trace.tokens)} tokens.")
    return start


def _given_back(lines: Lines, action: str) -> Lines | None:
    if action == "return":
        return lines
    if action != "view":
        raise InputError(f"html_action={action!r} is not 'view' or 'return'.")
    try:
        from IPython.display import display
    except ImportError as problem:
        raise MissingExtraError("html_action='view' needs IPython; use 'return' and .save(…).") from problem
    display(lines)  # type: ignore[no-untyped-call]
    return None
