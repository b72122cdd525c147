#!/usr/bin/env python
"""Thousands of odd calls to every function of the core: each must be right or raise InputError.

python scripts/fuzz_core.py [--calls 20000] [--seed 0]
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.core.odd_inputs import FUNCTIONS, one_call


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = sorted(FUNCTIONS)
    counts: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for k in range(options.calls):
        name, seed = names[k % len(names)], options.seed + k
        try:
            counts[one_call(name, seed)] += 1
        except Exception as problem:  # whatever it is, it is reported
            counts["wrong"] += 1
            key = f"{name}: {type(problem).__name__}: {str(problem)[:90]}"
            wrong[key] += 1
            if wrong[key] == 1:
                print(f"{name} seed {seed}")
                traceback.print_exc(limit=-4)
    print(f"{options.calls} calls of {len(names)} functions: {dict(counts)}")
    for key, count in wrong.most_common():
        print(f"{count:6d}  {key}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
