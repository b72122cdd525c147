"""Build the zoo and print what came of it: `python -m conformance [--only bert gpt2] [--timeout 60]`."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch

from conformance.zoo import CannotBuild, Family, build, families, find, variants


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    family: Family
    parameters: int
    seconds: float
    reason: str = ""


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


def attempt(family: Family, timeout: float) -> Row:
    """Build one family; a failure becomes its reason."""
    start = time.perf_counter()
    parameters, reason = 0, ""
    try:
        with time_limit(timeout):
            parameters = sum(p.numel() for p in build(family).model.parameters())
    except (CannotBuild, TimeoutError) as error:
        reason = str(error)
    return Row(family, parameters, time.perf_counter() - start, reason)


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit 1 if a family that is not a recorded skip failed."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="build these families only")
    parser.add_argument("--variants", action="store_true", help="also bert:causal and the like")
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
    print(f"{'family':28} {'class':44} {'params':>9} {'s':>5}  result")
    rows = []
    for family in chosen:
        row = attempt(family, arguments.timeout)
        rows.append(row)
        result = "ok" if not row.reason else f"{'skipped' if family.skip else 'FAILED'}: {row.reason}"
        size = f"{row.parameters:9,} {row.seconds:5.2f}"
        print(f"{family.name:28} {family.class_name:44} {size}  {result}", flush=True)
    built = sum(not row.reason for row in rows)
    skipped = sum(row.family.skip is not None for row in rows)
    print(f"{built} built, {skipped} skipped, {len(rows) - built - skipped} failed, of {len(rows)}")
    return int(built + skipped < len(rows))


def quiet() -> None:
    """Silence advice about missing kernels and odd token ids: it is not about these models."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
