"""Certificates as figures for a paper; each returns the Axes. matplotlib comes with the extra 'plot'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whence.results.plotting import SEQUENTIAL, new_axes

if TYPE_CHECKING:
    from whence.core.attention.certificate import Certificate
    from whence.core.attention.head_certificate import HeadCertificate
    from whence.results.labels import Tokens

BLUE, INK = "#2f7dbd", "#1b1d21"


def plot_certificate(certificate: Certificate, ax: Any = None) -> Any:
    """Each certified weight as a bar, with the interval in which every alternative has it."""
    axes = ax if ax is not None else new_axes((5.2, 0.3 * len(certificate.keys) + 1.1))
    # A certificate of a trace has tokens.
    known: Any = certificate if getattr(certificate, "tokens", None) is not None else None
    names = key_names(None if known is None else known.key_tokens, certificate.keys.tolist())
    places = range(len(names))
    axes.barh(places, certificate.weights.tolist(), color=BLUE, height=0.55)
    weights = certificate.weights
    ends = [(weights - certificate.lower).clamp(min=0).tolist(), (certificate.upper - weights).clamp(min=0).tolist()]
    axes.errorbar(certificate.weights.tolist(), places, xerr=ends, fmt="none", ecolor=INK, capsize=3, linewidth=1.2)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set(xlabel="weight, and where it could lie", xlim=(0, None))
    if known is not None:
        title = f"layer {known.layer}, head {known.head}, from {without_formulas(known.tokens[known.query])}"
        axes.set_title(title, fontsize="medium")
    return axes


def plot_head_certificate(certificate: HeadCertificate, ax: Any = None) -> Any:
    """How wide the proved interval of each weight is, [query, key]."""
    axes = ax if ax is not None else new_axes((6.4, 5.4))
    image = axes.imshow(
        (certificate.upper - certificate.lower).numpy(), cmap=SEQUENTIAL, vmin=0.0, interpolation="nearest"
    )
    axes.set(xlabel="key", ylabel="query")
    axes.set_title("width of the proved intervals", fontsize="medium")
    axes.figure.colorbar(image, ax=axes, shrink=0.85)
    return axes


def key_names(tokens: Tokens | None, keys: list[int]) -> list[str]:
    """Each key by its token and position, or by its position alone."""
    return [str(k) if tokens is None else f"{without_formulas(tokens[k])} {k}" for k in keys]


def without_formulas(token: str) -> str:
    """The token as matplotlib must be given it: a dollar sign starts no formula."""
    return token.replace("$", r"\$")
