"""The verdict in sentences. "Beats" needs a Holm-adjusted p < .05 under every operator; anything less is not separated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whence.faithful.statistics import FEWEST, Difference, Estimate, separated

if TYPE_CHECKING:
    from whence.faithful.result import Faithfulness


def sentences(result: Faithfulness) -> tuple[str, ...]:
    """What may be said of the methods, and what may not."""
    said: list[str] = []
    for name, many in result.failures.items():
        number, problem = many[0]
        gone = "it is left out" if name not in result.methods else "those texts are left out of every comparison"
        said.append(f"{name} failed on {len(many)} of {len(result.records)} texts ({gone}); text {number}: {problem}")
    short = sum(not r.scored for r in result.records)
    if short:
        said.append(f"{short} of {len(result.records)} texts have fewer than two units and are not scored.")
    if not result.methods and result.failures:
        return (*said, "No method explained any text: there is nothing to compare.")
    if not result.paired:
        return (*said, "No text can be scored: there is no verdict.")
    if not result.settings["random"]:
        return (*said, "No random orders were run (random=0), so nothing can be called faithful.")
    constant = [m for m in result.methods if all(len(set(result.records[i].scores[m])) == 1 for i in result.paired)]
    said += [f"{m} gives every unit the same score: it explains nothing, and its order is random." for m in constant]
    if len(result.paired) < FEWEST:
        few = f"{len(result.paired)} text{'s' if len(result.paired) > 1 else ''}"
        said.append(
            f"{few}: too few to call a method better than another; {FEWEST} are needed. The table describes them."
        )
        return tuple(said)
    operators = " and ".join(result.operators)
    by_pair = _by_pair(result)
    beats = [m for m in result.methods if separated(by_pair[m, "random"]) > 0]
    worse = [m for m in result.methods if separated(by_pair[m, "random"]) < 0]
    neither = [m for m in result.methods if m not in beats + worse]
    where = f"on {len(result.paired)} texts, under {operators}"
    said.append(f"Better than a random order {where}: {_listed(beats)}.")
    if neither:
        said.append(f"Not separated from a random order: {_listed(neither)}.")
    if worse:
        said.append(f"Worse than a random order: {_listed(worse)}.")
    for signed in (True, False):
        said += _best(result, [m for m in beats if result.signed[m] is signed], signed, by_pair)
    perturbing = [m for m in result.methods if m in result.settings["perturbs"]]
    if perturbing and "mask" in result.operators:
        said.append(
            f"Flagged: {_listed(perturbing)} remove words by the same mask that the operator mask tests them with."
        )
    if len(result.operators) == 1:
        said.append(f"Only {operators} was run: how words are removed can change a ranking; run both operators.")
    return tuple(said)


def _by_pair(result: Faithfulness) -> dict[tuple[str, str], list[Difference]]:
    """first − second for every ordered pair, a list with one entry per operator."""
    pairs: dict[tuple[str, str], list[Difference]] = {}
    for operator in result.operators:
        for d in result.pairs(operator):
            e = d.estimate
            turned = type(e)(-e.mean, -e.high, -e.low)
            pairs.setdefault((d.first, d.second), []).append(d)
            pairs.setdefault((d.second, d.first), []).append(Difference(d.second, d.first, turned, d.p, d.adjusted))
    return pairs


def _best(
    result: Faithfulness, names: list[str], signed: bool, by_pair: dict[tuple[str, str], list[Difference]]
) -> list[str]:
    """Within methods that are signed, or that are not: which is best, what it beats, and what it is not separated from."""
    kind = "signed" if signed else "unsigned"
    if len(names) < 2:
        return []

    def deltas(method: str) -> list[Estimate]:
        return [result.bootstrap("delta", op).estimate(result.methods.index(method)) for op in result.operators]

    best = max(names, key=lambda m: sum(e.mean for e in deltas(m)))
    others = [m for m in names if m != best]
    beaten = [m for m in others if separated(by_pair[best, m]) > 0]
    equal = [m for m in others if m not in beaten]
    ends = zip(deltas(best), result.operators, strict=True)
    shown = ", ".join(f"{e.mean:.2f} [{e.low:.2f}, {e.high:.2f}] {op}" for e, op in ends)
    said = [f"Among {kind} methods {best} has the largest Δ ({shown}); it beats {_listed(beaten)}."]
    if equal:
        said.append(f"Not separated from {best}: {_listed(equal)}.")
    return said


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none"
