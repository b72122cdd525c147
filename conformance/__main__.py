"""Prove the reader on every family and write docs/SUPPORT.md: `python -m conformance [--only bert gpt2]`."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from conformance import ways
from conformance.support import write
from conformance.sweep import Verdict, judge
from conformance.zoo import Family, families, find, variants

SUPPORT = Path(__file__).resolve().parent.parent / "docs" / "SUPPORT.md"
BAR = {"abde": 200, "abcdef": 185}


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after `seconds` (POSIX, main thread)."""

    def stop(_signum: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(family: Family, timeout: float) -> Verdict:
    """Judge one family within its time."""
    try:
        with time_limit(timeout):
            return judge(family)
    except TimeoutError as problem:
        return Verdict(family, reason=str(problem))


def main(argv: list[str] | None = None) -> int:
    """Print a line per family; exit 1 if the bar is missed, a number is silently wrong, or a family crashed."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="these families only; nothing is written")
    parser.add_argument("--variants", action="store_true", help="also bert:causal and the like; nothing is written")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds allowed per family")
    arguments = parser.parse_args(argv)
    quiet()
    chosen = [*families(), *(variants() if arguments.variants else [])]
    if arguments.only:
        chosen = [find(name) for name in arguments.only]
    if arguments.list:
        print("\n".join(family.name for family in chosen))
        return 0
    verdicts = []
    for family in chosen:
        start = time.perf_counter()
        verdict = attempt(family, arguments.timeout)
        verdicts.append(verdict)
        marks = "".join(check if held else "-" for check, held in verdict.holds.items())
        error = "" if verdict.rebuilt is None else f"{verdict.rebuilt:.0e}"
        took = time.perf_counter() - start
        print(
            f"{family.name:28} {marks} {error:>6} {verdict.kinds:24} {took:4.1f}s  {verdict.reason[:140]}", flush=True
        )
    both, whole = (sum(all(v.holds[c] for c in checks) for v in verdicts) for checks in BAR)
    wrong = [v.family.name for v in verdicts if v.rebuilt is not None and v.rebuilt > 1e-4]
    print(
        f"{len(verdicts)} families: {both} with (a), (b), (d) and (e); {whole} with (c) and (f) too; "
        f"wrong on a second input: {wrong or 'none'}"
    )
    if arguments.only or arguments.variants:
        return int(bool(wrong))
    write(SUPPORT, verdicts)
    uses = ways.judge_all()
    ways.put(SUPPORT, uses)
    wrong += [f"{use.family} ({use.way})" for use in uses if use.result == ways.WRONG]
    return int(bool(wrong) or both < BAR["abde"] or whole < BAR["abcdef"])


def quiet() -> None:
    """Silence advice about missing kernels and odd token ids: it is not about these models."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
