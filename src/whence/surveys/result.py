"""A survey's rows, read back from its folder, and what they say of the corpus."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence.attention.verdict import AVOID, READ
from whence.errors import InputError
from whence.results.files import is_regular_file
from whence.results.run_folder import NAME, read_run
from whence.results.run_identity import RunIdentity
from whence.results.short_repr import short_repr
from whence.surveys.head_columns import KINDS
from whence.surveys.intervals import mean_over_texts, share_over_texts
from whence.surveys.shards import arrow, is_whole

if TYPE_CHECKING:
    import pandas as pd

METHOD = "survey"
COLUMNS = {
    "heads": {"text", "length", "layer", "head"},
    "layers": {"text", "length", "layer"},
    "texts": {"text", "length", "reason"},
}
LENGTHS = (0, 32, 64, 128, 256, 512)
"""Upper ends of the groups of lengths; longer texts are the last group."""


@dataclass(frozen=True)
class Survey:
    """What a survey found. `heads`: a line per text, layer and head; `layers`: per text and layer; `texts`: per text.

    The columns are documented in docs/scale.md; every one is a mean over the rows (tokens) of that text, or a count.
    """

    __repr__ = short_repr

    folder: Path
    identity: RunIdentity
    complete: bool
    files: Mapping[str, str] | None = field(default=None, repr=False)
    """The files that a finished survey left, with their SHA-256."""

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.identity.settings)

    @cached_property
    def heads(self) -> pd.DataFrame:
        return self._table("heads")

    @cached_property
    def layers(self) -> pd.DataFrame:
        return self._table("layers")

    @cached_property
    def texts(self) -> pd.DataFrame:
        return self._table("texts")

    def _table(self, name: str) -> pd.DataFrame:
        if self.files is not None:
            wanted = [self.folder / file for file in self.files if Path(file).parts[:1] == (name,)]
        else:
            # A shard under way may have rows without its texts: only what is done is read.
            done = {path.name for path in (self.folder / "texts").glob("*.parquet")}
            wanted = sorted(path for path in (self.folder / name).glob("*.parquet") if path.name in done)
        if not wanted:
            raise InputError(f"{str(self.folder)!r} has no finished shard yet: run the survey.")
        pa = arrow()
        tables = [self._shard(path, name) for path in wanted]
        frame: pd.DataFrame = pa.concat_tables(tables).to_pandas()
        return frame

    def _shard(self, path: Path, name: str) -> Any:
        """One file's rows; refused where it is not what the survey wrote."""
        data = path.read_bytes() if is_regular_file(path) else b""
        known = None if self.files is None else self.files[path.relative_to(self.folder).as_posix()]
        pa = arrow()
        try:
            # The hash that a finished run noted also holds for files of versions that wrote none into them.
            if not (is_whole(data) if known is None else hashlib.sha256(data).hexdigest() == known):
                raise ValueError("its content is not what was written")
            rows = pa.parquet.read_table(pa.BufferReader(data)).replace_schema_metadata(None)
            if missing := sorted(COLUMNS[name] - {*rows.column_names}):
                raise ValueError(f"it has no column {missing[0]!r}")
        except (pa.ArrowException, ValueError) as problem:
            way_on = (
                "the same survey, run again, makes it anew."
                if known is None
                else "restore it from a copy, or run the survey again in another folder."
            )
            said = " ".join(str(problem).split())[:120]
            raise InputError(f"{str(path)!r} is damaged ({said}): {way_on}") from problem
        return rows

    @property
    def failed(self) -> pd.DataFrame:
        """The texts that could not be measured, each with its reason."""
        return self.texts[self.texts["reason"].notna()]

    def to_frame(self) -> pd.DataFrame:
        """The lines of heads, each with its group of lengths."""
        return self.heads.assign(group=length_groups(self.heads["length"]))

    def verdict(self) -> pd.DataFrame:
        """May each head be read on this corpus? Rows pooled, 95 % intervals over texts (methods 1.3).

        Columns: layer, head, verdict, share (of certain rows among those neither unique nor flat), low, high, texts.
        """
        self._needs("certain", "certainty")
        rows = []
        for (layer, head), lines in self.heads.groupby(["layer", "head"]):
            estimate = certain_share(lines)
            share = estimate["share"]
            if int(lines["rows"].sum()) == 0:
                name = "unique"
            elif share != share:
                name = "flat"
            else:
                name = "read" if share >= READ else "careful" if share >= AVOID else "do not read"
            rows.append({"layer": layer, "head": head, "verdict": name, **estimate})
        return _frame(rows)

    def certain(self, *by: str) -> pd.DataFrame:
        """The share of readings that are certain: unique or certain rows, among those that are not flat.

        by: "layer", "head", "group" (of lengths). Pooled over rows, 95 % intervals over texts.
        """
        self._needs("certain", "certainty")
        return self._grouped(self.to_frame(), by, lambda lines: certain_share(lines, unique=True))

    def certain_by_type(self, *by: str) -> pd.DataFrame:
        """The share of certain rows among those neither unique nor flat, by the type of token with the heaviest weight."""
        self._needs("certain_rest", "certainty")
        import pandas as pd

        parts = []
        for kind in KINDS:
            frame = self.to_frame()
            frame["certain"], frame["open"] = frame[f"certain_{kind}"], frame[f"open_{kind}"]
            parts.append(self._grouped(frame, by, certain_share).assign(type=kind))
        return pd.concat(parts, ignore_index=True)

    def attention_to(self, *by: str) -> pd.DataFrame:
        """Attention that goes to each type of token, raw and effective: Brunner's figure 1, intervals over texts."""
        self._needs("raw_start", "attention")
        frame, found = self.to_frame(), []
        for kind in KINDS:
            for side in ("raw", "effective"):
                means = self._grouped(frame, by, lambda part, name=f"{side}_{kind}": mean_over_texts(part, name))
                found.append(means.assign(type=kind, side=side))
        import pandas as pd

        return pd.concat(found, ignore_index=True)

    def mean(self, column: str, *by: str) -> pd.DataFrame:
        """The mean of any column over texts, with its 95 % interval, by layer, head or group of lengths."""
        for frame in (self.heads, self.layers):
            if column in frame.columns and set(by) - {"group"} <= set(frame.columns):
                named = frame.assign(group=length_groups(frame["length"]))
                return self._grouped(named, by, lambda part: mean_over_texts(part, column))
        have = sorted({*self.heads.columns, *self.layers.columns})
        raise InputError(f"no column {column!r} by {', '.join(by) or 'nothing'}; there are {', '.join(have)}.")

    def share_of_tokens(self, column: str) -> pd.DataFrame:
        """A count of tokens as a share of all tokens, by layer: alti_beaten gives P̃, tokens_cosine the naive rate."""
        if column not in self.layers.columns:
            raise InputError(f"the survey has no column {column!r}; its layers have {', '.join(self.layers.columns)}.")
        return self._grouped(
            self.layers, ("layer",), lambda part: share_over_texts(part["text"], part[column], part["length"])
        )

    def _grouped(self, frame: pd.DataFrame, by: tuple[str, ...], measure: Any) -> pd.DataFrame:
        if not by:
            return _frame([measure(frame)])
        rows = []
        for key, part in frame.groupby(list(by), observed=True, sort=True):
            rows.append({**dict(zip(by, key, strict=True)), **measure(part)})
        return _frame(rows)

    def _needs(self, column: str, measure: str) -> None:
        if column not in self.heads.columns:
            raise InputError(f"this survey was run without the measure {measure!r}: run it again with it.")

    def plot(self, figure: str = "certain", *, ax: Any = None) -> Any:
        """One of the figures of `whence.surveys.figures.FIGURES`; returns the Axes."""
        from whence.surveys.figures import plot

        return plot(self, figure, ax)

    def card(self) -> str:
        """The paragraph for a model card."""
        from whence.surveys.card import paragraph

        return paragraph(self)

    def to_dict(self) -> dict[str, Any]:
        """Numbers for a model card, for JSON."""
        from whence.surveys.card import facts

        return facts(self)


def certain_share(lines: pd.DataFrame, *, unique: bool = False) -> dict[str, float]:
    """The share of certain rows among those that are neither unique nor flat (`unique`: unique ones count as certain).

    Each text's sampled rows stand for all its rows that are not unique: weight rows / sampled. A text of which none was
    sampled says nothing.
    """
    each = lines.groupby("text")[["unique", "certain", "open", "sampled", "rows"]].sum().astype(float)
    each = each[(each["sampled"] > 0) | (each["rows"] == 0)]
    weight = each["rows"] / each["sampled"].clip(lower=1)
    certain, told = each["certain"] * weight, (each["certain"] + each["open"]) * weight
    if unique:
        certain, told = certain + each["unique"], told + each["unique"]
    return share_over_texts(each.index, certain, told)


def length_groups(lengths: pd.Series[Any]) -> pd.Series[Any]:
    """The group of each length: "1–32", "33–64", …"""
    import pandas as pd

    names = [f"{low + 1}–{high}" for low, high in pairwise(LENGTHS)] + [f"{LENGTHS[-1] + 1}+"]
    return pd.cut(lengths, [*LENGTHS, float("inf")], labels=names)


def read_survey(folder: str | os.PathLike[str]) -> Survey:
    """A survey from its folder; one that is not finished gives what is done so far."""
    place = Path(folder).expanduser() / NAME
    if not is_regular_file(place):
        raise InputError(f"{str(folder)!r} is no folder of a survey: it has no {NAME}.")
    identity, files = read_run(place)
    if identity.method != METHOD:
        raise InputError(f"{str(folder)!r} holds a run of {identity.method!r}, not a survey.")
    return Survey(place.parent, identity, files is not None, files)


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows)
