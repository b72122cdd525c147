"""Make the pages of docs/gallery: all of them, or those named. Every number on them is made here."""

from __future__ import annotations

import importlib
import sys
import time

PAGES = ("atoms", "residues", "sentences", "sources", "words")


def main(names: list[str]) -> None:
    for name in names or PAGES:
        if name not in PAGES:
            raise SystemExit(f"no page is called {name!r}; there are: {', '.join(PAGES)}.")
        begin = time.process_time()
        path = importlib.import_module(f"gallery.{name}").make()
        print(f"{path}: {time.process_time() - begin:.0f} s of processor time")


if __name__ == "__main__":
    main(sys.argv[1:])
