"""The options of every command that takes a model, defined once: which model, how it is loaded, how its text is read."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from whence.errors import InputError

if TYPE_CHECKING:
    from whence.model.load import Model
    from whence.reading.trace import Trace

Continuation = Annotated[
    str | None, typer.Option("--continuation", help="What follows the prompt, explained token by token.")
]
MaxNewTokens = Annotated[
    int | None, typer.Option("--max-new-tokens", help="Explain so many tokens that the model writes itself.")
]
Chat = Annotated[bool, typer.Option("--chat", help="Put the text through the model's chat template.")]

ModelArgument = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="The model, as --model takes it.", show_default=False)
]

DEFAULT_MODEL = "minilm"
DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelChoice:
    """What the shared options say. A command takes it as `source` and is decorated with `takes_model`."""

    model: Annotated[
        str, typer.Option("--model", "-m", metavar="MODEL", help="An embedded model, a local folder or a hub id.")
    ] = DEFAULT_MODEL
    task: Annotated[str | None, typer.Option("--task", help="The head to load, as text-classification or base.")] = None
    pair: Annotated[str | None, typer.Option("--pair", help="A second text, for models that read two.")] = None
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut a text that is too long.")] = False
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Read weights that are not safetensors.")] = False
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, mps; else the processor.")] = None
    dtype: Annotated[str | None, typer.Option("--dtype", help=f"{', '.join(DTYPES)}; else the model's own.")] = None

    def check(self) -> None:
        """Refuse a device or a type of numbers that cannot be, before anything is loaded."""
        import torch

        if self.dtype is not None and self.dtype not in DTYPES:
            raise InputError(f"--dtype {self.dtype} is not one of {', '.join(DTYPES)}.")
        if self.device is not None:
            try:
                torch.empty(0, device=self.device)
            except (RuntimeError, AssertionError) as problem:
                said = str(problem).splitlines()[0]
                raise InputError(f"--device {self.device} cannot be used here: {said}") from problem

    def load(self) -> Model:
        """The model as the options say."""
        import torch

        from whence.model.load import load

        self.check()
        return load(
            self.model, self.task, dtype=self.dtype and getattr(torch, self.dtype), device=self.device,
            trust_remote_code=self.trust_remote_code, allow_pickle=self.allow_pickle,
        )  # fmt: skip

    def named(self, argument: str | None) -> ModelChoice:
        """The same with the model that a command's argument names, where it does."""
        if argument is not None and self.model not in (DEFAULT_MODEL, argument):
            raise InputError(f"{argument} and --model {self.model} name two models: give one.")
        return self if argument is None else replace(self, model=argument)

    @property
    def only_a_name(self) -> bool:
        """Whether nothing but the model's name was given, so that its name says it all."""
        loading = ("task", "trust_remote_code", "allow_pickle", "device", "dtype")
        return all(getattr(self, name) in (None, False) for name in loading)

    def trace(self, text: str, target: Any = None, **answer: Any) -> Trace:
        """The trace of a text (or of standard input, for -); `answer`: what follows it, as `whence.trace` takes it."""
        from whence.reading.tracing import trace

        traced: Trace = trace(self.load(), read(text), self.pair, target, truncate=self.truncate, **answer)
        return traced


def read(text: str) -> str:
    """The text, or standard input for -."""
    return sys.stdin.read() if text == "-" else text


def takes_model(*, without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the shared options in place of its parameter `source`; `without`: those it has in a form of its own."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(ModelChoice, include_extras=True)
        own = get_type_hints(command, include_extras=True)
        shared = [f for f in fields(ModelChoice) if f.name not in without]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            chosen = {f.name: given.pop(f.name) for f in shared}
            command(**given, source=ModelChoice(**chosen))

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = []
        for parameter in inspect.signature(command).parameters.values():
            if parameter.name == "source":
                parameters += [
                    inspect.Parameter(f.name, keyword, default=f.default, annotation=hints[f.name]) for f in shared
                ]
            else:
                parameters.append(parameter.replace(kind=keyword, annotation=own[parameter.name]))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate
