"""`whence look` on 128 tokens and the report on 512, now and at an earlier commit, in one run.

    python benchmarks/look.py [--commit 7092e6e] [--tokens 128] [--report-tokens 512] [--skip-report]

The earlier commit is checked out as a git worktree in a temporary folder and run with the same Python and the same
libraries. Processor time of the whole process, start to end; the old `look` has a budget of 4 s on the wall for exact
intervals, so that on a busy machine it does less: how many rows of the listed heads are exact is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOOK = "import sys; from whence.cli import main; sys.exit(main(['look', '-', '--report', sys.argv[1]]))"
REPORT = (
    "import sys, whence; text = sys.stdin.read(); "
    "whence.report(whence.trace(whence.load(), text), progress=False).save(sys.argv[1])"
)


def spent(tree: Path, code: str, text: str, page: Path) -> float:
    """Processor seconds of one process that runs `code` with the package of `tree`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", code, str(page)],
        input=text,
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def exact_rows(page: Path) -> str:
    """Rows of the listed heads whose intervals are exact, as the page says."""
    found = re.search(r'"exact_heads":\s*(\[.*?\])', page.read_text(encoding="utf-8"))
    heads = json.loads(found[1]) if found else []
    return f"{sum(h['rows'] for h in heads)} of {sum(h['of'] for h in heads)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="7092e6e")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--report-tokens", type=int, default=512)
    parser.add_argument("--skip-report", action="store_true")
    options = parser.parse_args()
    from page import prose

    import whence

    model = whence.load()
    with tempfile.TemporaryDirectory() as folder:
        old, page = Path(folder) / "old", Path(folder) / "page.html"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "-q", "--detach", old, options.commit], check=True)
        try:
            jobs = [("look", LOOK, options.tokens)]
            jobs += [] if options.skip_report else [("report", REPORT, options.report_tokens)]
            for name, code, tokens in jobs:
                text = prose(model, tokens)
                seconds = {}
                for tree in (old, ROOT):
                    seconds[tree] = spent(tree, code, text, page)
                    which = "now" if tree == ROOT else options.commit
                    print(f"{name:7s} {tokens:4d} tokens  {which:8s} {seconds[tree]:7.1f} s of the processor, exact rows "
                          f"{exact_rows(page)}", flush=True)  # fmt: skip
                print(f"{name:7s} {seconds[ROOT] / seconds[old]:.0%} of {options.commit} (wanted 60 %)", flush=True)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", old], check=True)


if __name__ == "__main__":
    main()
