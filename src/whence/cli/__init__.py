"""The command line. One file per sub-command; this one puts them together.

A sub-command is a module of this package with a function `command`, whose docstring is its help. To add one,
add its name here. It imports torch and transformers inside the function: `whence --help` must stay quick.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence

import typer

from whence.cli._app import Debug, Version, run

COMMANDS: tuple[str, ...] = (
    "look",
    "certify",
    "decide",
    "serve",
    "tokens",
    "doctor",
    "train",
    "convert",
    "methods",
    "get",
    "mix",
    "attribute",
    "faithful",
    "survey",
)
"""Names of the modules, in the order of the help page."""

EPILOG = (
    "Exit codes: 0 done, 1 it could not be done (a model that cannot be read, nothing fetched), 2 it was asked wrongly, 130 "
    "interrupted. Embedded models are kept in $WHENCE_CACHE, else ~/.cache/whence. Completion for your shell: whence "
    "--install-completion."
)


def build() -> typer.Typer:
    """The whole application."""
    app = typer.Typer(
        name="whence",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        epilog=EPILOG,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(version: Version = False, debug: Debug = False) -> None:
        """Where did this hidden state come from, and may its attention be read?

        Takes a Hugging Face transformer and a text, and answers with numbers that can be checked, or says what it cannot prove.
        """

    for name in COMMANDS:
        module = importlib.import_module(f"whence.cli.{name}")
        app.command(name.strip("_").replace("_", "-"), help=paragraphs(module.command.__doc__))(module.command)
    return app


def paragraphs(docstring: str | None) -> str:
    """A docstring whose paragraphs are one line each, so that a window of any width breaks them where it must."""
    return "\n\n".join(" ".join(one.split()) for one in inspect.cleandoc(docstring or "").split("\n\n"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code; `arguments` default to the process's own."""
    return run(build(), arguments)
