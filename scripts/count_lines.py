"""Python lines of src/whence, with what came after the first 172 files apart: `python scripts/count_lines.py [--files]`.

FEATURES lists, by what a user gets, the files that hold it and nothing else. A file that serves old and new features alike
counts as old, so the old features are counted too high rather than too low.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "whence"
FIRST = 23_630  # lines of the 172 files of commit 7092e6e

FEATURES: dict[str, tuple[str, ...]] = {
    "faithfulness, plausibility, controls": ("faithful/*.py", "cli/faithful.py"),
    "surveys of a corpus": ("surveys/*.py", "cli/survey.py", "reading/datasets.py"),
    "decisions and alignments": (
        "rules.py", "attention/decide.py", "attention/decided_rows.py", "attention/align.py", "attention/droppable.py",
        "attention/position_names.py", "attention/plots_alignment.py", "attention/plots_decisions.py",
        "attention/verified_rows.py", "core/attention/decision.py", "core/attention/claim.py", "core/attention/decision_check.py",
        "attention/pushed_paths.py", "attention/recording.py", "core/attention/path_certificate.py",
        "core/attention/interior_point.py", "core/attention/alignment.py", "core/attention/aimed.py",
        "cli/decide.py", "reporting/decisions.py",
    ),
    "the identifiable decoder, uniqueness of any model": (
        "identifiable/configuration_identifiable_decoder.py", "identifiable/modeling_identifiable_decoder.py",
        "identifiable/decoder_statement.py", "identifiable/training/language_model.py", "identifiable/training/documents.py",
        "identifiable/training/compare_language_models.py", "attention/uniqueness.py", "attention/probe_text.py",
        "attention/reachable_second_row.py",
        "core/attention/score_law.py", "cli/_train_lm.py",
    ),
    "long texts and batches, fused attention": (
        "reading/capture/fused.py", "reading/capture/own_writes.py", "reading/attention_rows.py", "reading/joined_layers.py",
        "reading/streaming.py", "mixing/streamed.py", "mixing/span.py", "mixing/span_attribution.py", "core/numerics/threads.py",
    ),
    "generation, tensors from elsewhere, models that mix early": (
        "reading/generation.py", "reading/from_tensors.py", "reading/tokenised.py", "reading/rerun/word_embeddings.py",
        "mixing/text_units.py", "mixing/attribute_one.py",
    ),
    "views of runs": ("reporting/lines.py", "reporting/runs.py", "results/short_repr.py"),
    "the absolute verdict": ("attention/verdict.py", "core/attention/verdict.py", "core/attention/row_intervals.py"),
    "proof by intervention, texts, adapters, rows of their own": (
        "reading/wiring/intervention.py", "reading/wiring/held.py", "reading/wiring/pushed.py", "reading/wiring/copies.py",
        "reading/wiring/on_text.py", "reading/wiring/proof_inputs.py", "reading/wiring/row_map.py", "reading/wiring/claim.py",
        "reading/capture/untouched.py", "reading/capture/multi_head.py", "reading/same_computation.py",
        "model/offload.py",
    ),
    "runs that survive kills, damaged files, a server for others": (
        "results/run_folder.py", "results/run_identity.py", "results/tensor_file.py", "results/records.py",
        "model/pickled_weights.py", "model/sdist.py", "serving/connections.py", "serving/guard.py", "serving/token.py",
        "serving/logs.py", "identifiable/conversion/checkpoint.py",
    ),
    "more explanations of a prediction": (
        "mixing/gradient_rollout.py", "mixing/last_attention.py", "mixing/read_out.py", "mixing/raised.py",
        "mixing/token_scores.py", "cli/attribute.py",
    ),
    "methods from other packages, papers, progress": ("results/method.py", "results/papers.py", "results/progress.py"),
    "names of rows and columns that people read; views of others": ("results/labels.py", "bertviz.py"),
}  # fmt: skip

FUNCTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "attention sinks": {
        "reading/capture/recorder.py": ("sink_of",), "reading/capture/interface.py": ("_with_sink",),
        "attention/heads.py": ("key_labels",),
    },
    "adapters": {"reading/wiring/linear_maps.py": ("_adapted",), "model/load.py": ("unwrapped",)},
    "certificates whose every number is proved again": {
        "core/attention/certificate_check.py": ("_proved_ends", "_well_formed", "_proved_dimension"),
        "core/attention/certificate.py": ("_support",),
    },
    "a target and a foil": {
        "mixing/prediction.py": ("choice", "_position", "token_id", "prediction_of"), "mixing/attribute.py": ("explain",),
    },
    "texts as a stream, files written whole, bytes counted": {
        "reading/texts.py": ("stream_texts", "_object"), "results/files.py": ("whole_files", "regular_target"),
        "serving/shelf.py": ("tensor_bytes",), "model/foreign_weights.py": ("tensors_sha256",),
        "identifiable/training/vocabulary.py": ("train_byte_tokenizer",),
    },
    "everything about one method": {"cli/methods.py": ("_about",)},
}  # fmt: skip
"""Functions of such features in files that are older."""


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def main() -> None:
    rest = {path: lines(path) for path in sorted(SOURCE.rglob("*.py"))}
    total = sum(rest.values())
    print(f"{total:>7,}  all of src/whence, {len(rest)} files")
    for feature, patterns in FEATURES.items():
        files = {path for pattern in patterns for path in SOURCE.glob(pattern)} & set(rest)
        print(f"{sum(rest.pop(path) for path in files):>7,}  {feature}, {len(files)} files")
    for feature, parts in FUNCTIONS.items():
        count = 0
        for file, names in parts.items():
            for node in ast.walk(ast.parse((SOURCE / file).read_text())):
                if isinstance(node, ast.FunctionDef) and node.name in names and node.end_lineno is not None:
                    size = node.end_lineno - node.lineno + 1
                    rest[SOURCE / file] -= size
                    count += size
        print(f"{count:>7,}  {feature}, functions in {len(parts)} older files")
    print(f"{sum(rest.values()):>7,}  the rest, {len(rest)} files; commit 7092e6e had {FIRST:,} in 172")
    if "--files" in sys.argv:
        for path, count in sorted(rest.items(), key=lambda item: -item[1]):
            print(f"{count:>7,}    {path.relative_to(SOURCE)}")


if __name__ == "__main__":
    main()
