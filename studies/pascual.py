"""Pascual et al. (EACL 2021) run again: is what a head attends to where its output comes from?

    python studies/pascual.py [--models minilm bert-tiny stories15M smollm2]

Writes docs/studies/pascual.md.
"""

from __future__ import annotations

from _papers import cell, short_sentences, subjects, table, write_page

from whence.surveys.intervals import mean_over_texts

TEXTS = {"minilm": 200, "bert-tiny": 200, "stories15M": 200, "smollm2": 24}
LONGEST = {"smollm2": 12}


def main() -> None:
    parts, verdicts = [], []
    for subject in subjects(__doc__ or ""):
        texts = short_sentences(subject.model.tokenizer, TEXTS.get(subject.name, 200), LONGEST.get(subject.name, 20))
        survey = subject.survey(
            "local-global", texts, measures=("local-global",), without=("certainty", "alti", "tokens")
        )
        heads, n = survey.heads, survey.texts["length"]
        rows, by_head = [], heads.groupby(["layer", "head"])["local_global_pearson"].mean()
        for layer, part in heads.groupby("layer"):
            cells = [cell(mean_over_texts(part, f"local_global_{name}")) for name in ("pearson", "spearman", "jsd")]
            rows.append([int(layer) + 1, *cells, f"{by_head[layer].min():.2f} to {by_head[layer].max():.2f}"])
        parts.append(
            f"## {subject.title}\n\n{int(survey.texts['reason'].isna().sum())} sentences of {n.min()}–{n.max()} tokens.\n\n"
            + table(["layer", "Pearson r", "Spearman ρ", "Jensen–Shannon divergence", "r of single heads"], rows)
        )
        first, last = (
            mean_over_texts(heads[heads["layer"] == at], "local_global_pearson") for at in (0, heads["layer"].max())
        )
        word = (
            "agrees" if last["high"] < first["low"] else "not separated" if last["low"] <= first["high"] else "differs"
        )
        verdicts.append(
            f"{subject.title}: attention and attribution part with depth **{word}** (r {cell(first)} in the first layer, "
            f"{cell(last)} in the last). Heads of all layers between {by_head.min():.2f} and {by_head.max():.2f}."
        )
    body = f"""
Pascual, Brunner and Wattenhofer, *Telling BERT's Full Story: from Local Attention to Global Aggregation* (EACL 2021): a head's
attention is *local*, over the hidden tokens that it reads; the attribution of its output to the input tokens is *global*. The
paper says that the two differ, because hidden tokens are mixtures. Its figures could not be had here, so that only that claim
is tried. Row by row, means over rows, heads and texts, each with the 95 % interval over texts; the global side is hidden token
attribution of the head outputs with 16 probes at every token.

{chr(10).join("- " + line for line in verdicts)}

In the first layer the hidden tokens are the input tokens, and local and global differ only by how a value depends on its token
and
by the weights' own dependence on it: what is missing to 1 there is not mixture.

{chr(10).join(parts)}
"""
    write_page("pascual", "Pascual et al. 2021, run again", "pascual.py", body)


if __name__ == "__main__":
    main()
