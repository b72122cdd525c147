"""Python lines of src/whence for the features of commit 7092e6e, with what came later apart: `python scripts/count_lines.py`.

    python scripts/count_lines.py            the account
    python scripts/count_lines.py --commits  every commit since, what it added and where it was booked
    python scripts/count_lines.py --files    every file of today that is not wholly of a newer feature, by its length

The account is made from the history. Every commit since 7092e6e added or removed lines of src/whence. Those that rebuilt
what was there count, and so does every commit up to LAST that is not listed here: the old features then take 23,630 lines
and what the rebuilding added. Commits that brought a newer feature are listed under it in FEATURES, with what they added
net. A commit that did both is listed by its files ("24cce1f:path"), or counts as a whole as rebuilding. Nothing that a
rebuilding commit cut from, or added to, a file that is wholly of a newer feature (WHOLE) counts: it is not among the old
features' lines. Constants of newer features that moved into the one file of tolerances are listed by name (TOLERANCES).

What is listed is checked: a file of WHOLE that was there at 7092e6e, a commit that is not since then, a constant that was
there, are errors.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "whence"
FIRST, LINES = "7092e6e", 23_630
LAST = "17ae92e"  # the last commit that is booked; what came after it is shown apart

FEATURES: dict[str, str] = {
    "proof by intervention; adapters; hybrids; masks, sinks, threads, half precision read rightly": """
        7120b2d 782e604 6983d98 6320375 9c958b9 9b7640f e5bbff8 8efb3e9 73e1527 140a9ca 906f1b8 df65abc 34b9572 4ed185d
        bdf983e 55b4a48 3a7070d f3b2f76 bf65258 2a97ece 9f4bfbd 2ede5c0 004270b 529591a c293d10 daf9a59 a799f9d 0ab3a01
        1b0a0b9 05b9c7a dde81ad f09803c e111dea b68b757 9fbff2c f42a78f 04bdadc 7ed3c8d a556dbf b25f158 5b683a3
        6dd81dc 656b925 6d9083b 13e6a6b accf1d8 ea37337 662392d 17ae92e
        24cce1f:reading/capture/interface.py
        5822c47:reading/capture/interface.py 5822c47:reading/capture/recorder.py 5822c47:reading/labels.py
        5822c47:reading/layer.py 5822c47:reading/capture/function_mode.py 5822c47:mixing/jacobian/forward_mode.py""",
    "runs that survive kills, damaged files, a server for others": """
        7440291 439b091 dfcbedb 49c4dd1 f54ed49 e48fce1 20aceba a668d21 c31d447 9cc76bc 1097225 a48a185
        0f167d3 7d37525 6b5375e 2176345 a03b4e8 4cc7c66 105a169""",
    "targets and foils; faithfulness, plausibility, controls": """
        ea4415e 1a119bf b79fd61 66e1aa8 c27e6d1 711b5b8 13e288c e3f4ccc d61227c 6c396c6 306a70f 098084a c3f3f56 730b133""",
    "surveys of a corpus": "4b6e5d5 8dbecf2 1bf70e9 9bd46d5 49c9941",
    "decisions, alignments, a catalogue of other models": """
        3de9450 3eaa0fa a42d677 9d579ae 62a3bd8 4d0e023 5aebf8b 7037ea5 7ef2c22 c40b7e4 aa314bc 0620e48
        9098dfa 09ecdd2""",
    "the identifiable decoder, uniqueness of any model": """
        b498047 e6da8b0 8a26b5a a598dc7 c3d64ea 3be2cb8 70c666e fc5b6a6 a0afa3a 4dc7e2f 3bb81ec 666ea7f""",
    "long texts, streams, batches, fused attention": """
        0c49929 86284df f9a22d9 4783caa 32d6fab f0c618c 350381a a0505ed 1c12288 3e994a5 a9f4242 6efa85e 0b96493 c0e119b
        d52e243 64d92ec 193f5b3 38c8ee2 3743ab6 99e8809""",
    "the absolute verdict, the page, one way to ask for everything": """
        69f17ec 4ffe167 74ca8ec 2b0498c 5ab463d 04a7f35 1ed33b2 2ceb8ab 779ba23 e078c9c 69ae593 4f0982b 5195cd1 2e95a4e
        7678944 8766802 55aead4 3bcab7c 662f42e e589b03 1d3bccd 716c7e7 07a288f f119161 8342c4a 1c81ec4 a459c39
        312a057""",
}
"""Commits by what they brought to users that was not there, or was wrong, at 7092e6e."""

WHOLE: tuple[str, ...] = (
    "faithful/*.py", "cli/faithful.py", "surveys/*.py", "cli/survey.py", "reading/datasets.py", "rules.py",
    "attention/decide.py", "attention/decided_rows.py", "attention/align.py", "attention/droppable.py",
    "attention/position_names.py", "attention/plots_alignment.py", "attention/plots_decisions.py",
    "attention/verified_rows.py", "core/attention/decision.py", "core/attention/claim.py", "attention/verdict.py",
    "core/attention/head_rows.py",
    "core/attention/decision_check.py", "attention/pushed_paths.py", "attention/recording.py", "core/attention/verdict.py",
    "core/attention/path_certificate.py", "core/attention/interior_point.py", "core/attention/alignment.py",
    "core/attention/aimed.py", "cli/decide.py", "reporting/decisions.py", "attention/uniqueness.py",
    "identifiable/configuration_identifiable_decoder.py", "identifiable/modeling_identifiable_decoder.py",
    "identifiable/decoder_statement.py", "identifiable/training/language_model.py", "identifiable/training/documents.py",
    "identifiable/training/compare_language_models.py", "attention/reachable_second_row.py", "attention/probe_text.py",
    "core/attention/score_law.py", "cli/_train_lm.py", "reading/capture/fused.py", "reading/capture/own_writes.py",
    "reading/attention_rows.py", "reading/joined_layers.py", "reading/streaming.py", "mixing/streamed.py", "mixing/span.py",
    "mixing/span_attribution.py", "core/numerics/threads.py", "reading/generation.py", "reading/from_tensors.py",
    "reading/rerun/word_embeddings.py", "mixing/text_units.py", "reporting/lines.py", "reporting/runs.py",
    "results/short_repr.py", "reading/wiring/intervention.py", "reading/wiring/held.py", "reading/wiring/pushed.py",
    "reading/wiring/copies.py", "reading/wiring/on_text.py", "reading/wiring/row_map.py", "reading/wiring/claim.py",
    "reading/capture/untouched.py", "reading/capture/multi_head.py", "reading/same_computation.py", "model/offload.py",
    "results/run_folder.py", "results/run_identity.py", "results/records.py", "model/pickled_weights.py", "model/sdist.py",
    "serving/connections.py", "serving/token.py", "identifiable/conversion/checkpoint.py", "mixing/gradient_rollout.py",
    "mixing/last_attention.py", "mixing/read_out.py", "mixing/raised.py", "cli/attribute.py", "bertviz.py",
)  # fmt: skip
"""Files that hold a newer feature and nothing else."""

TOLERANCES = (
    "UNIT_SUM", "SOLVED", "DUALITY_GAP", "INTERIOR_ZERO", "FIRST_WEIGHT", "LIGHT_KEY", "SHORTEST_STEP", "FAR_ROW",
    "SMALLEST_WEIGHT", "SCORE_FIT", "HEAD_OUTPUT", "UNREAD", "SAME_LOGITS", "JSD_ZERO", "DRAW_ROUNDING", "BREACH",
    "SAME_OUTPUT", "RAISED_SUM", "SHOWN_MOVE",
)  # fmt: skip
"""Constants of newer features in core/numerics/tolerances.py."""


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


def whole(file: str) -> bool:
    return any(fnmatch(file, pattern) for pattern in WHOLE)


def booked() -> dict[str, str]:
    """The feature of each commit, or "commit:file"."""
    return {entry: feature for feature, entries in FEATURES.items() for entry in entries.split()}


def changes() -> Iterator[tuple[str, str, dict[str, int]]]:
    """(commit, subject, lines by file of src/whence) since the first, renames followed."""
    text = git(
        "log", "--reverse", "--no-merges", "-M50%", "--numstat", "--format=@%h %s", f"{FIRST}..HEAD", "--", "src/whence"
    )
    for part in text.split("\n@"):
        head, *lines = part.removeprefix("@").splitlines()
        files: Counter[str] = Counter()
        for line in lines:
            if line.count("\t") == 2 and line.rstrip("}").endswith(".py"):
                more, less, path = line.split("\t")
                path = re.sub(r"\{[^}]* => ([^}]*)\}", r"\1", path).replace("//", "/").rpartition(" => ")[2]
                files[path.removeprefix("src/whence/")] += int(more) - int(less)
        commit, _, subject = head.partition(" ")
        yield commit[:7], subject, dict(files)


def tolerance_lines(text: str) -> int:
    """Lines of the constants of newer features, each with its reason and the blank line after it."""
    body = ast.parse(text).body
    return sum(
        (after.end_lineno or 0) - node.lineno + 2
        for node, after in pairwise(body)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in TOLERANCES
    )


def problems(commits: set[str]) -> list[str]:
    """What is listed and should not be."""
    old = [p.removeprefix("src/whence/") for p in git("ls-tree", "-r", "--name-only", FIRST, "src/whence").splitlines()]
    wrong = [f"{file} was there at {FIRST}" for file in old if whole(file)]
    wrong += [f"{entry} is no commit since {FIRST}" for entry in booked() if entry.partition(":")[0] not in commits]
    before = "".join(git("show", f"{FIRST}:src/whence/{file}") for file in old if file.endswith(".py"))
    wrong += [f"{name} was there at {FIRST}" for name in TOLERANCES if re.search(rf"^{name} =", before, re.MULTILINE)]
    return wrong


def main() -> int:
    features, rebuilding, open_lines, open_commits = booked(), 0, 0, 0
    sums: defaultdict[str, int] = defaultdict(int)
    commits: set[str] = set()
    for commit, subject, files in changes():
        if LAST in commits and commit not in features:
            open_lines, open_commits = open_lines + sum(files.values()), open_commits + 1
            continue
        commits.add(commit)
        kept = 0
        for file, lines in files.items():
            feature = (
                features.get(f"{commit}:{file}") or features.get(commit) or ("later, tidied" if whole(file) else None)
            )
            sums[feature or ""] += lines
            kept += 0 if feature else lines
        rebuilding += kept
        if "--commits" in sys.argv:
            print(
                f"{sum(files.values()):>+7,}  {commit}  {features.get(commit) or f'rebuilding {kept:+}'}: {subject[:90]}"
            )
    moved = tolerance_lines((SOURCE / "core/numerics/tolerances.py").read_text())
    today = {path: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    print(f"{sum(today.values()):>7,}  all of src/whence, {len(today)} files")
    for feature in [*FEATURES, "later, tidied"]:
        print(f"{sums[feature]:>7,}  {feature}")
    print(f"{moved:>7,}  of it in the one file of tolerances")
    if open_commits:
        print(f"{open_lines:>7,}  in {open_commits} commits after {LAST}, not booked yet")
    rest = LINES + rebuilding - moved
    print(f"{rest:>7,}  for the features of {FIRST}, which took {LINES:,} there ({rest - LINES:+,})")
    if "--files" in sys.argv:
        for path, lines in sorted(today.items(), key=lambda item: -item[1]):
            if not whole(str(path.relative_to(SOURCE))):
                print(f"{lines:>7,}    {path.relative_to(SOURCE)}")
    wrong = problems(commits)
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong or rest >= LINES else 0


if __name__ == "__main__":
    sys.exit(main())
