"""What it costs to start: `whence --help` and `whence methods` against `python -c "import torch"`.

One thread, processor time of whole processes, in turns, best of five.

    python benchmarks/startup.py
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "import torch": "import torch",
    "whence --help": "from whence.cli import main; main(['--help'])",
    "whence methods": "from whence.cli import main; main(['methods'])",
}


def spent(code: str) -> float:
    """Processor seconds of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    best = dict.fromkeys(COMMANDS, float("inf"))
    for _ in range(5):
        for name, code in COMMANDS.items():
            best[name] = min(best[name], spent(code))
    for name, seconds in best.items():
        print(f"{name:15s} {seconds:.2f} s, {seconds / best['import torch']:.0%} of import torch (wanted 25 %)")


if __name__ == "__main__":
    main()
