"""The methods of whence, by name: what the command line, the page and the documentation list.

A method is declared once, with its paper, what it costs and what it needs. Either next to its function:

    @register("rollout", question="mixing", paper="Abnar & Zuidema 2020", cost="trace", summary="…")
    def rollout(trace): ...

or, so that listing the methods does not import torch, by the place of its function:

    declare("rollout", "whence.mixing.rollout:rollout", question="mixing", …)

whence's own are declared in `whence._methods`, which is read on the first look-up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from threading import RLock
from typing import Any, TypeVar

from whence.errors import InputError

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

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Method:
    """One registered method. Calling it calls its function, which is imported only then."""

    name: str
    question: str
    paper: str
    cost: str
    summary: str
    needs: tuple[str, ...] = ()
    """What must be there beyond a trace: 'model', 'wiring', 'head', 'extra:explain', …"""
    target: str = ""
    """Where the function is: 'package.module:function'."""
    _function: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.name or self.name != self.name.strip().lower():
            raise InputError(f"A method's name is lower-case and without spaces around it, not {self.name!r}.")
        for what, value, known in (("question", self.question, QUESTIONS), ("cost", self.cost, COSTS)):
            if value not in known:
                raise InputError(f"{self.name}: {value!r} is no {what}; choose one of {', '.join(known)}.")
        if not all(part for part in self.target.partition(":")):
            raise InputError(f"{self.name}: a target is written 'package.module:function', not {self.target!r}.")

    @property
    def function(self) -> Callable[..., Any]:
        """The function itself; imported on first use."""
        if self._function is None:
            module, _, path = self.target.partition(":")
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
            object.__setattr__(self, "_function", found)
        assert self._function is not None
        return self._function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {
            "name": self.name,
            "question": self.question,
            "summary": self.summary,
            "paper": self.paper,
            "cost": self.cost,
            "needs": list(self.needs),
            "target": self.target,
        }


_registered: dict[str, Method] = {}
_lock = RLock()
_built_in = False


def register(
    name: str, *, question: str, paper: str, cost: str, summary: str, needs: tuple[str, ...] = ()
) -> Callable[[F], F]:
    """Register the decorated function, which is returned unchanged."""

    def decorate(function: F) -> F:
        target = f"{function.__module__}:{function.__qualname__}"
        _add(Method(name, question, paper, cost, summary, tuple(needs), target, function))
        return function

    return decorate


def declare(
    name: str, target: str, *, question: str, paper: str, cost: str, summary: str, needs: tuple[str, ...] = ()
) -> Method:
    """Register a function by its place, 'package.module:function', without importing it."""
    return _add(Method(name, question, paper, cost, summary, tuple(needs), target))


def methods(question: str | None = None) -> tuple[Method, ...]:
    """Every method, or those that answer one question: in the order of the questions, then by name."""
    if question is not None and question not in QUESTIONS:
        raise InputError(_unknown("question", question, QUESTIONS))
    _load_built_in()
    order = list(QUESTIONS)
    found = (m for m in _registered.values() if question in (None, m.question))
    return tuple(sorted(found, key=lambda m: (order.index(m.question), m.name)))


def method(name: str) -> Method:
    """The method of that name; an InputError with the nearest names where there is none."""
    _load_built_in()
    try:
        return _registered[name.strip().lower()]
    except KeyError:
        raise InputError(_unknown("method", name, _registered)) from None


def _add(new: Method) -> Method:
    """No two methods share a name; the same function may come twice, declared and decorated, or reloaded."""
    with _lock:
        old = _registered.get(new.name)
        if old is not None and old.target != new.target:
            raise InputError(f"The method name {new.name!r} is taken by {old.target}; {new.target} needs another.")
        _registered[new.name] = new
    return new


def _load_built_in() -> None:
    global _built_in
    with _lock:
        if not _built_in:
            importlib.import_module("whence._methods")
            _built_in = True


def _unknown(what: str, name: str, known: dict[str, Any]) -> str:
    near = get_close_matches(name.strip().lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are: {', '.join(known) or 'none'}."
    return f"No {what} is called {name!r}; {hint}"
