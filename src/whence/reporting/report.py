"""A report: the page of one trace as one HTML file, or in a notebook."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence.errors import InputError
from whence.results.files import write_atomically

if TYPE_CHECKING:
    from whence.attention.decide import Decisions
    from whence.faithful.result import Faithfulness
    from whence.mixing.mixture import Mixture
    from whence.reading.trace import Trace
    from whence.reporting.analysis import Analysis
    from whence.reporting.document import Document
    from whence.results.progress import Progress
    from whence.surveys.result import Survey


@dataclass(frozen=True)
class Report:
    """Everything whence shows of one trace, ready to be saved or displayed."""

    document: Document = field(repr=False)
    page: str | None = field(default=None, repr=False)  # a page of its own, where the usual one has nothing to show

    def __repr__(self) -> str:
        text = self.text or ""
        shown = repr(text if len(text) <= 40 else text[:39] + "…")
        return f"Report({self.model} on {shown}: {len(self.findings)} findings; .save('report.html') writes the page)"

    @property
    def text(self) -> str | None:
        text: str | None = self.document.manifest["text"]
        return text

    @property
    def model(self) -> str:
        return str(self.document.manifest["model"])

    @property
    def findings(self) -> list[str]:
        """What is true of the text, in plain words."""
        parts = (*self.document.manifest["stacks"], *self.document.manifest.get("runs", ()))
        return [sentence for part in parts for sentence in part["findings"]]

    def to_html(self) -> str:
        """The page with its data inside: opens from disk, fetches nothing."""
        if self.page is not None:
            return self.page
        from whence.reporting.html import standalone

        return standalone(self.document)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to `path` (….html) and return where it is."""
        target = Path(path)
        if target.suffix.lower() not in (".html", ".htm"):
            raise InputError(f"a report is an HTML file: {str(path)!r} should end in .html.")
        return write_atomically(target, self.to_html().encode("utf-8"))

    def _repr_html_(self) -> str:
        page = html.escape(self.to_html(), quote=True)
        return (
            f'<iframe title="whence report" srcdoc="{page}" sandbox="allow-scripts allow-downloads" '
            'style="width:100%;height:820px;border:1px solid #8884;border-radius:8px"></iframe>'
        )


def report(
    trace: Any,
    tokens: Any = None,
    values: Any = None,
    *,
    detail: str = "standard",
    methods: Iterable[str | Mixture] | None = None,
    attributions: Iterable[str] | None = None,
    budget: float | None = None,
    judged_rows: bool = False,
    epsilon: float | None = None,
    decisions: Iterable[Decisions] = (),
    runs: Iterable[Faithfulness | Survey] = (),
    removal: bool | None = None,
    token_identifiability: Any = None,
    analysis: Analysis | None = None,
    progress: Progress = None,
) -> Report:
    """The page of one trace, of a model and a text, or of attention that somebody has already.

    Which heads may be read, where hidden tokens come from, what the output came from.

    Args:
        trace: what `whence.trace` gives for one text; or a model (with `tokens` a text); or attention as
            `whence.from_tensors` takes it, with its `tokens` and, where they are at hand, its `values`: without values the
            page shows the maps and says that nothing can be certified. Or a run over many texts, from
            `whence.faithfulness` or `whence.survey`, for a page of its own, to which the other arguments do not apply.
        detail: "light", the pictures of the listed heads only; "standard", all heads, 8-bit pictures, and the numbers
            and bounds of each row's 16 heaviest weights; "full", 16 bits and the bounds of every weight.
        methods: names of `whence.contributions` methods, or results that are there already (such as hidden token
            attribution); None: ALTI, norms and rollout.
        attributions: names of `whence.attribute` methods for the prediction of a model with a head, or for the answer of a
            trace that has one (`continuation`, `max_new_tokens`), token by token; None: quick ones.
        budget: seconds for the exact intervals of the listed heads, the three to read and the three not to. None:
            every row of a text of up to 512 tokens, 15 seconds for a longer one; math.inf: every row, however long it
            takes. The page says of each row whether its intervals are exact; the listed rows always are.
        judged_rows: exact intervals only where they decide something: for the listed rows, and in the heads that may be
            read for the rows that the verdict rests on (a sample); the others show bounds, and other attention is searched
            for the rows that the verdict looked at, and for every row of the listed heads.
        epsilon: how far a weight may be uncertain and still be read, see `whence.verdict`; None: 0.05.
        decisions: results of `whence.decide`, for a view of their own.
        runs: results of `whence.faithfulness` or `whence.survey`, each for a view of its own.
        removal: the explanations put to the test on this text: removal curves, Δ, and whether the computation fixes them.
            None: where that takes some seconds only.
        token_identifiability: a result of that measure, to draw its curves.
        analysis: what was computed of this trace before (`whence.reporting.analysis.Analysis`).
        progress: see `whence.results.progress`.

    >>> import whence
    >>> whence.report(whence.trace(whence.load(), "The bank raised its rates.")).findings[1][:23]
    "A head's values have 32"
    """
    from whence.faithful.result import Faithfulness
    from whence.model.memory import fixed
    from whence.reading.layer import GIVEN
    from whence.reporting.analysis import Analysis
    from whence.reporting.document import build, run_document
    from whence.results.progress import shown
    from whence.surveys.result import Survey

    if isinstance(trace, Faithfulness | Survey):
        return Report(run_document(trace))
    trace = _as_trace(trace, tokens, values)
    if budget is not None and not budget >= 0:
        raise InputError(f"budget={budget!r} is not a number of seconds.")
    if analysis is None:
        analysis = Analysis(trace, epsilon=0.05 if epsilon is None else epsilon)
    elif analysis.trace is not trace or epsilon not in (None, analysis.epsilon):
        raise InputError(
            f"epsilon={epsilon!r}, but the analysis given is of "
            f"{'this' if analysis.trace is trace else 'another'} trace with epsilon={analysis.epsilon!r}: leave one of them out."
        )
    if all(
        layer.grouped_values is None and layer.reason == GIVEN for stack in trace.stacks.values() for layer in stack
    ):
        from whence.reporting.lines import maps_only

        return maps_only(trace)
    # The model is run dozens of times, and nobody changes it meanwhile: its weights are looked at once.
    with shown(progress) as step, fixed(None if trace.model is None else trace.model.model):
        return Report(
            build(
                trace,
                detail=detail,
                methods=methods,
                attributions=attributions,
                budget=budget,
                judged_rows=judged_rows,
                analysis=analysis,
                decisions=decisions,
                runs=runs,
                removal=removal,
                token_identifiability=token_identifiability,
                step=step,
            )
        )


def _as_trace(given: Any, tokens: Any, values: Any) -> Trace:
    """The trace to report on: given, made of a model and a text, or of tensors."""
    from whence.reading.from_tensors import from_tensors
    from whence.reading.trace import Trace
    from whence.reading.tracing import trace

    if isinstance(given, Trace):
        if tokens is not None or values is not None:
            raise InputError("a trace has its tokens and values already: leave them out.")
        return given
    if isinstance(given, (list, tuple)) or (hasattr(given, "dim") and hasattr(given, "shape")):
        return from_tensors(given, tokens, values)
    if tokens is None:
        raise InputError(
            f"report takes what whence.trace gives for one text, a model and a text, or attentions and tokens; not a "
            f"{type(given).__name__} alone."
        )
    traced = trace(given, tokens)
    if not isinstance(traced, Trace):
        raise InputError("a report is of one text: give one, not several.")
    return traced
