"""How a result is printed: --format table, json, csv or parquet, the same for every command."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli._app import print_json
from whence.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("table", "json", "csv", "parquet")
Format = Annotated[
    str, typer.Option("--format", help="How to print the result: table, json, csv or parquet.", metavar="FORMAT")
]


def chosen_format(given: str, as_json: bool) -> str:
    """The format asked for; --json is short for --format json. Refused here, before any work is done."""
    if given not in FORMATS:
        raise InputError(
            f"--format {given} is not one of {', '.join(FORMATS)}: it says how the result is printed (how texts are read "
            "is --read-as, where there are texts to read)."
        )
    if as_json and given not in ("table", "json"):
        raise InputError(f"--json and --format {given} contradict each other: give one.")
    if given == "parquet":
        if sys.stdout.isatty():
            raise InputError("--format parquet is bytes, not for a terminal: send it to a file with > result.parquet.")
        try:
            import pyarrow  # noqa: F401
        except ImportError as problem:
            raise MissingExtraError("--format parquet needs pyarrow: pip install 'whence[scale]'") from problem
    return "json" if as_json else given


def put_out(how: str, *, table: Callable[[], None], data: Callable[[], Any], frame: Callable[[], pd.DataFrame]) -> None:
    """Print a result: `table` for people, `data` as JSON, `frame` as CSV or Parquet."""
    if how == "json":
        print_json(data())
    elif how == "csv":
        frame().to_csv(sys.stdout, index=False)
    elif how == "parquet":
        buffer = io.BytesIO()
        frame().to_parquet(buffer, index=False)
        sys.stdout.flush()
        sys.stdout.buffer.write(buffer.getvalue())
    else:
        table()


def frame_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows of plain data as a frame; a list in a cell is written with commas."""
    import pandas as pd

    def cell(value: Any) -> Any:
        return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value

    return pd.DataFrame([{key: cell(value) for key, value in row.items()} for row in rows])


def check_plot(path: Path | None) -> None:
    """Whether a picture can have that name; before the work, not after it."""
    if path is not None and path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InputError(f"--plot {str(path)!r}: the file must end in .png, .svg or .pdf.")


def save_plot(axes: Any, path: Path) -> None:
    """The figure of matplotlib Axes in a file, whole or not at all."""
    from whence.results.files import write_atomically

    buffer = io.BytesIO()
    axes.figure.savefig(buffer, format=path.suffix[1:].lower(), dpi=150)
    write_atomically(path, buffer.getvalue())
