"""Atoms: which reactant atom became which product atom, as RXNMapper reads it off one attention head."""

from __future__ import annotations

from pathlib import Path

import whence
from gallery.page import command, picture, table, write
from whence.attention.decide import Decisions
from whence.attention.plots_decisions import COLOURS
from whence.attention.position_names import atom_candidates, element
from whence.core.attention.null_space import null_space
from whence.results.plotting import new_axes

WRONG = "Clc1ccccc1.OB(O)C1=CCCCC1>>C1=C(c2ccccc2)CCCC1"
# The first is in the tests of the rxnmapper package, as are the next two; the fourth and fifth are from its reports.
THEIRS = (
    "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F",
    "C1COCCO1.CC(C)(C)OC(=O)CONC(=O)NCc1cccc2ccccc12.Cl>>O=C(O)CONC(=O)NCc1cccc2ccccc12",
    "CC[O-]~[Na+].BrCC.[Na+]~[H-]>>CCOCC",
    WRONG,
    "C=CC(C=C)C(O)C12CC3CC(CC(C3)C1)C2>>C=CC(C=C)C(Br)C12CC3CC(CC(C3)C1)C2",
)
OURS = (
    "CCO.CC(=O)O>>CC(=O)OCC",
    "CC(=O)Cl.NCc1ccccc1>>CC(=O)NCc1ccccc1",
    "OC(=O)c1ccccc1.CN>>CNC(=O)c1ccccc1",
    "CCBr.Oc1ccccc1>>CCOc1ccccc1",
    "CI.c1ccc2[nH]ccc2c1>>Cn1ccc2ccccc21",
    "Brc1ccccc1.OB(O)c1ccncc1>>c1ccc(-c2ccncc2)cc1",
    "Ic1ccc(OC)cc1.C#CCO>>COc1ccc(C#CCO)cc1",
    "O=Cc1ccccc1.CC(C)=O>>CC(=O)C=Cc1ccccc1",
    "CC(=O)CC.[BH4-].[Na+]>>CC(O)CC",
    "OCc1ccccc1.[O]>>O=Cc1ccccc1",
    "CCOC(=O)CC.[OH-].[Na+]>>OC(=O)CC",
    "C=CCO.BrBr>>OCC(Br)CBr",
    "N#CCc1ccccc1.O>>NC(=O)Cc1ccccc1",
    "O=[N+]([O-])c1ccc(Cl)cc1.[H][H]>>Nc1ccc(Cl)cc1",
    "CC(C)(C)OC(=O)NCCO.Cl>>NCCO",
    "NCCO.CC(C)(C)OC(=O)OC(=O)OC(C)(C)C>>CC(C)(C)OC(=O)NCCO",
    "OCC1CCCCC1.CS(=O)(=O)Cl>>CS(=O)(=O)OCC1CCCCC1",
    "CS(=O)(=O)OCC1CCCCC1.[N-]=[N+]=[N-].[Na+]>>[N-]=[N+]=NCC1CCCCC1",
    "Clc1ncccn1.C1COCCN1>>c1cnc(N2CCOCC2)nc1",
    "Fc1ccc([N+](=O)[O-])cc1.CNC>>CN(C)c1ccc([N+](=O)[O-])cc1",
    "O=C1CCCCC1.NO>>ON=C1CCCCC1",
    "O=C1CCCCC1.C[Mg]Br>>CC1(O)CCCCC1",
    "C=C.C=CC=C>>C1CCCC=C1",
    "O=C1OC(=O)c2ccccc12.NCCc1ccccc1>>O=C1N(CCc2ccccc2)C(=O)c2ccccc12",
    "CC(=O)c1ccccc1.BrBr>>O=C(CBr)c1ccccc1",
    "O=C(CBr)c1ccccc1.NC(N)=S>>Nc1nc(-c2ccccc2)cs1",
    "CSc1ccccc1.OO>>CS(=O)c1ccccc1",
    "OCCCl.[C-]#N.[K+]>>OCCC#N",
)


def decide(model: whence.Model, reaction: str) -> Decisions:
    """Every product atom's largest reactant atom of the same element, in layer 10 head 5."""
    trace = whence.trace(model, reaction)
    candidates = atom_candidates(list(trace.tokens))
    return whence.decide(trace, whence.rules.argmax(candidates), layer=10, head=5, queries=list(candidates))


def drawing(found: Decisions, tokens: list[str]) -> str:
    """The reaction as a line of SMILES; an arc from every product atom to its reactant atom, in the verdict's colour."""
    n = len(tokens)
    axes = new_axes((max(7.0, 0.17 * n), 2.6))
    for i, token in enumerate(tokens):
        if token in ("[CLS]", "[SEP]"):
            continue
        weight = "bold" if element(token) else "normal"
        axes.text(i, 0, token, ha="center", va="center", fontsize=9, family="monospace", weight=weight)
    names = list(found.key_names)
    for query, answer, verdict in zip(found.queries, found.answers, found.verdicts, strict=True):
        key = names.index(answer)
        xs = [key + (query - key) * t / 30 for t in range(31)]
        ys = [0.25 + 4 * (query - key) / n * (t / 30) * (1 - t / 30) for t in range(31)]
        axes.plot(xs, ys, color=COLOURS[verdict], linewidth=1.1, linestyle="-" if verdict == "certified" else "--")
    axes.set_xlim(0, n - 1)
    axes.set_ylim(-0.2, 1.3)
    axes.set_axis_off()
    return picture("atoms", axes, "A reaction; every product atom is tied to the reactant atom that the head gives it")


def make() -> Path:
    model = whence.load("rxnmapper")
    rows, counts, checked, programs = [], {"certified": 0, "refuted": 0, "open": 0}, True, 0
    shown = None
    not_certified = []
    for reaction in (*THEIRS, *OURS):
        found = decide(model, reaction)
        checked = checked and found.check()
        programs += sum(d.programs for d in found.decisions)
        for word, n in found.counts.items():
            counts[word] += n
        if found.counts["certified"] < len(found):
            not_certified.append((reaction, found))
        free = len(found.key_names) - int(null_space(found.trace[10].values[5]).simplex_rank)  # type: ignore[index]
        rows.append(
            [
                f"`{reaction}`",
                "package" if reaction in THEIRS else "ours",
                len(found),
                *found.counts.values(),
                free,
                min((f"{m:.3f}" for m in found.margin.tolist() if m != float("inf")), default=""),
            ]
        )
        if reaction == WRONG:
            shown = found
    assert shown is not None
    tokens = list(shown.trace.tokens)  # type: ignore[union-attr]
    total = sum(counts.values())
    whole = sum(row[3] == row[2] for row in rows)
    loose = [row for row in rows if row[6] > 0]
    other = ""
    if not_certified:
        reaction, found = not_certified[0]
        i = next(i for i, word in enumerate(found.verdicts) if word != "certified")
        other = f"**The counter-example.** In `{reaction}`: {found.sentences()[i]}"
        if found.verification is not None:
            other += f" Put into the model: {found.verification.sentence()}"
    return write(
        "atoms",
        "Atoms: which atom became which?",
        "**The question.** RXNMapper reads atom maps off one attention head (layer 10, head 5) of a small ALBERT that was "
        "trained on reaction SMILES. Chemists use these maps. Does the model's computation fix them, or would other "
        "attention with the same outputs give other maps?",
        "**The rule.** Each product atom belongs to the reactant atom *of the same element* with the largest weight (where no "
        "reactant atom has the element, to the largest of all): `argmax(candidates)`.",
        f"**The verdict.** Of {total} assignments in {len(rows)} reactions **{counts['certified']} are certified**, "
        f"{counts['refuted']} refuted and {counts['open']} open; in {whole} of {len(rows)} reactions every atom is certified. "
        f"In {len(rows) - len(loose)} of them the text is so short that every row is unique anyway; in the other {len(loose)}, with "
        f"{sum(row[2] for row in loose)} atoms, rows can be moved in up to {max(row[6] for row in loose)} independent directions. "
        "Every proof was checked again without a solver: "
        + ("all hold." if checked else "**not all hold**.")
        + f" It took "
        f"{programs} linear programs; cheap bounds settled the rest.",
        drawing(shown, tokens),
        "*Every arc is certified: no attention row with the same head output assigns that atom differently.*",
        "**Identified is not correct.** The reaction above is one whose map the authors of RXNMapper call wrong: chlorobenzene "
        "is coupled with a cyclohexenyl boronic acid, and the map is what this head says. All its atoms are certified all the "
        "same. The certificate says: *this is the model's own reading, and not an accident of how attention happens to be "
        "written down*. It does not say that the chemistry is right. See [Identified is not correct](identified-is-not-correct.md).",
        other,
        "**The same on the command line**",
        command(
            f'whence get rxnmapper\nwhence decide "{WRONG}" --model rxnmapper --rule atoms --layer 10 --head 5',
            needs="rxnmapper",
        ),
        "## All reactions",
        f"{len(THEIRS)} come from the rxnmapper package's own tests and issue reports, {len(OURS)} were written for this page. "
        "*Free directions*: in how many a row can be moved without any change of the head's output (0: the row is unique). *Least margin*: by how much every decision of the reaction holds at least (a proved bound, not the exact least).",
        table(["reaction", "from", "atoms", "certified", "refuted", "open", "free directions", "least margin"], rows),
    )
