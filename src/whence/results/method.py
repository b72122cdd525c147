"""What an entry of the method table says of a method."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from whence.errors import InputError
from whence.results.short_repr import short_repr

QUESTIONS: dict[str, str] = {
    "attention": "Is this attention identifiable?",
    "tokens": "Is this token still itself?",
    "mixing": "Where did this hidden state come from?",
    "faithfulness": "Which explanation is faithful?",
    "models": "Can I have a model whose attention means something?",
}
"""What a user asks, in the order in which methods are listed."""

COSTS: dict[str, str] = {
    "trace": "arithmetic on one trace; the model is not run again",
    "passes": "further forward passes, up to one per token or head",
    "gradients": "backward passes",
    "solver": "a linear program or another optimisation per row or head",
    "training": "a model is trained",
}
"""Classes of cost, cheapest first."""

DETERMINED: dict[str, str] = {
    "theorem": "invariant by theorem: the same for every attention that gives the same head outputs",
    "map": "a function of what the model computes, so another attention with the same outputs cannot change it",
    "weights": "reads single attention weights: another attention with the same outputs changes it",
    "": "not an explanation",
}
"""Whether the computation determines the explanation."""

GIVES = ("matrix", "contributions", "scores", "measure")


@dataclass(frozen=True)
class Method:
    """One entry. Calling it calls its object, which is imported only then."""

    __repr__ = short_repr

    name: str
    question: str
    paper: str
    cost: str
    summary: str
    needs: tuple[str, ...] = ()
    """What must be there beyond a trace: 'model', 'wiring', 'head', 'extra:explain', …"""
    location: str = ""
    """'package.module:object'"""
    title: str = ""
    gives: str = "measure"
    options: tuple[str, ...] = ()
    signed: bool = False
    """Whether a negative number means "against": scores that are shares or lengths are unsigned."""
    determined: str = ""
    contrast: bool = False
    """Whether it explains a chosen target, and the target rather than a foil."""
    shown: bool = False
    """Whether the page offers it."""
    aliases: tuple[str, ...] = ()
    _function: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.name or self.name != self.name.strip().lower():
            raise InputError(f"A method's name is lower-case and without spaces around it, not {self.name!r}.")
        for what, value, known in (
            ("question", self.question, QUESTIONS),
            ("cost", self.cost, COSTS),
            ("kind of determinedness", self.determined, DETERMINED),
            ("kind of object", self.gives, GIVES),
        ):
            if value not in known:
                raise InputError(f"{self.name}: {value!r} is no {what}; choose one of {', '.join(map(repr, known))}.")
        if self.gives in ("matrix", "contributions", "scores") and not self.determined:
            raise InputError(f"{self.name} explains: say whether it is determined, with determined=, one of "
                             f"{', '.join(map(repr, list(DETERMINED)[:-1]))}.")  # fmt: skip
        if not all(part for part in self.location.partition(":")):
            raise InputError(f"{self.name}: a location is written 'package.module:object', not {self.location!r}.")
        if not self.title:
            object.__setattr__(self, "title", self.name.replace("-", " ").capitalize())

    @property
    def papers(self) -> tuple[str, ...]:
        """What it rests on, one by one; nothing where it is whence's own."""
        return tuple(name for name in self.paper.split("; ") if name != "whence")

    @property
    def function(self) -> Callable[..., Any]:
        """The object itself; imported on first use."""
        if self._function is None:
            module, _, path = self.location.partition(":")
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
            object.__setattr__(self, "_function", found)
        assert self._function is not None
        return self._function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object."""
        return self.function(*args, **kwargs)

    def check_options(self, given: Iterable[str]) -> None:
        """Refuse the first option that this method does not take."""
        unknown = [option for option in given if option not in self.options]
        if unknown:
            takes = f"it takes {', '.join(self.options)}" if self.options else "it takes none"
            raise InputError(f"method {self.name!r} has no option {unknown[0]!r}; {takes}.")

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        names = ("name", "title", "question", "summary", "paper", "cost", "needs", "options", "signed", "determined",
                 "contrast", "shown", "gives", "location")  # fmt: skip
        found = {name: getattr(self, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
