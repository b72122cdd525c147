"""What the sub-commands share: their common options, where they write, and how they fail.

Results go to standard output; progress and messages to standard error. An error is one sentence. Exit codes:
0 done, 1 it could not be done, 2 it was asked wrongly, 130 interrupted.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from whence.cli._speech import in_options
from whence.errors import InputError, WhenceError, WhenceWarning

results = Console()
"""Standard output: what was asked for, and nothing else."""

messages = Console(stderr=True)
"""Standard error: progress, remarks, errors."""

DONE, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130

_debug = False
_options: frozenset[str] = frozenset()
"""The options of the command that runs: what messages may speak of."""


def _set_debug(value: bool) -> bool:
    global _debug
    _debug = _debug or value  # before or after the sub-command's name
    return value


def _show_version(value: bool) -> None:
    if value:
        try:
            version = importlib.metadata.version("whence")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed)"
        typer.echo(f"whence {version}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
]
Debug = Annotated[
    bool, typer.Option("--debug", callback=_set_debug, is_eager=True, help="Show the traceback of an error.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no remarks on standard error.")]

Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the method, as whence methods lists them."),
]


def in_quotes(token: str) -> str:
    """A token in a sentence: ‘noon’, but [CLS] and <|endoftext|> as they are."""
    return token if re.fullmatch(r"\[[A-Z]+\]|<[^<> ]+>", token) else f"‘{token}’"


def watched(quiet: bool) -> bool:
    """Whether progress is shown: somebody watches, and did not ask for silence."""
    return messages.is_terminal and not quiet


def options_of(given: Sequence[str] | None) -> dict[str, Any]:
    """["steps=20", "baseline=zero"] → {"steps": 20, "baseline": "zero"}: values as JSON where they are, else as text."""
    options: dict[str, Any] = {}
    for each in given or ():
        name, sign, value = each.partition("=")
        if not sign or not name.strip():
            raise InputError(f"--option {each!r} is not written NAME=VALUE.")
        try:
            options[name.strip().replace("-", "_")] = json.loads(value)
        except ValueError:
            options[name.strip().replace("-", "_")] = value
    return options


@contextmanager
def working(what: str, quiet: bool) -> Iterator[None]:
    """A moving line on standard error while something takes its time; nothing where nobody watches."""
    if quiet or not messages.is_terminal:
        yield
        return
    with messages.status(f"{what} …"):
        yield


def print_json(data: Any) -> None:
    """Print `data` as strict JSON; what JSON has no number for (NaN, infinity) becomes null."""
    sys.stdout.write(json.dumps(_strict(data), indent=2, ensure_ascii=not _speaks_utf8(), allow_nan=False) + "\n")


def _strict(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, dict):
        return {key: _strict(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_strict(value) for value in data]
    return data


def _speaks_utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def run(app: typer.Typer, arguments: Sequence[str] | None = None) -> int:
    """Run `app`, turn whatever goes wrong into a sentence and an exit code."""
    global _debug, _options
    _debug = False
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a letter shows its code, not an error
            stream.reconfigure(errors="backslashreplace")
    asked = list(sys.argv[1:] if arguments is None else arguments)
    _options = options_of_command(app, asked)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warned  # type: ignore[assignment]  # put back by the block
            code = app(args=arguments, prog_name="whence", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):
            return _reader_left()
        return stop.code if isinstance(stop.code, int) else FAILED
    except typer.Abort:
        return _interrupted()
    except Exception as error:
        return _failed(error)
    return code if isinstance(code, int) else DONE


def _failed(error: Exception) -> int:
    if _debug:
        messages.print_exception()
    if isinstance(error, WhenceError):
        _say(in_options(str(error), _options))
        return MISUSED if isinstance(error, InputError) else FAILED
    # Usage errors of click, which typer may bring along under its own name.
    if (usage := getattr(error, "format_message", None)) is not None:
        if text := usage():  # empty where there were no arguments at all: the help was printed
            context = getattr(error, "ctx", None)
            where = context.command_path if context is not None else "whence"
            _say(f"{text.removesuffix('.')}{'' if text.endswith('?') else '.'} See: {where} --help")
        return MISUSED
    hint = "" if _debug else " Run it again with --debug to see where."
    _say(f"{type(error).__name__}: {str(error) or 'no message'} (this should not happen).{hint}")
    return FAILED


def options_of_command(app: typer.Typer, arguments: Sequence[str]) -> frozenset[str]:
    """The long options of the command that the arguments name."""
    commands = getattr(typer.main.get_command(app), "commands", {})
    command = next((commands[word] for word in arguments if word in commands), None)
    return frozenset(opt for parameter in getattr(command, "params", ()) for opt in parameter.opts)


def check_report(path: str) -> None:
    """Refuse a report that could not be written, before any work is done for it."""
    target = Path(path)
    folder = target.expanduser().absolute().parent
    if target.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--report {path}: a report is an HTML file, so its name should end in .html.")
    if target.is_dir():
        raise InputError(f"--report {path} is a folder: name a file in it.")
    if not folder.is_dir():
        raise InputError(f"--report {path}: there is no folder {str(folder)!r}; make it first.")
    if not os.access(folder, os.W_OK):
        raise InputError(f"--report {path}: nothing may be written into {str(folder)!r}.")


def _warned(message: Warning | str, category: type[Warning], *rest: Any) -> None:
    """Warnings of whence as a line; those of others stay as they are."""
    if issubclass(category, WhenceWarning):
        messages.print(Text.assemble(("warning: ", "bold yellow"), in_options(str(message), _options)), soft_wrap=True)
    else:
        sys.stderr.write(warnings.formatwarning(message, category, *rest[:3]))


def _say(sentence: str) -> None:
    messages.print(Text.assemble(("error: ", "bold red"), sentence), soft_wrap=True)


def _interrupted() -> int:
    _say("interrupted.")
    return INTERRUPTED


def _reader_left() -> int:
    """`whence … | head`: the reader has enough. Say nothing, now or when Python flushes at exit."""
    with suppress(OSError, ValueError):  # standard output may be no file (in a test, a notebook)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED
