"""The arrays of saved decisions: which there are, by which axes, and whether they fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from whence.core.attention.decision import Verdict
from whence.results.declared import Array, check_arrays, check_kinds

if TYPE_CHECKING:
    from whence.attention.decide import Decisions

ARRAYS = {
    "value": Array("query"),
    "rows": Array("head query key"),
    "values": Array("head key d_v"),
    "visible": Array("head query key", "boolean"),
    "weights": Array("head"),
}
OF_A_ROW = {
    "costs": Array("claim key"),
    "thresholds": Array("claim"),
    "strict": Array("claim", "boolean"),
    "bounds": Array("claim"),
    "duals": Array("claim head d_v"),
    "alternative": Array("head key", needed=False),
    "quantity": Array("key", needed=False),
    "range_duals": Array("2 head d_v", needed=False),
}


def check_decisions(asked: Decisions) -> None:
    """A ValueError unless every part is what it is declared to be, and as long as heads, queries and keys ask for."""
    check_kinds(asked)
    for name in ("query_names", "answers", "verdicts", "decisions", "claims"):
        if len(getattr(asked, name)) != len(asked):
            raise ValueError(f"{len(asked)} queries have {len(getattr(asked, name))} {name}")
    if unknown := {*asked.verdicts} - {*get_args(Verdict)}:
        raise ValueError(f"there is no verdict {unknown.pop()!r}")
    sizes = {"head": len(asked.heads), "query": len(asked)}
    check_arrays(ARRAYS, {name: getattr(asked, name) for name in ARRAYS}, sizes)
    sizes |= {"key": asked.rows.shape[-1], "d_v": asked.values.shape[-1]}
    if sizes["key"] - len(asked.key_names) not in (0, 1):  # a sink is the last key, and has no name
        raise ValueError(f"rows have {sizes['key']} keys, and {len(asked.key_names)} keys have names")
    for found, claims in zip(asked.decisions, asked.claims, strict=True):
        check_arrays(OF_A_ROW, {name: getattr(found, name) for name in OF_A_ROW}, sizes)
        for claim in claims:
            Array("key").check("costs of a claim", claim.costs, dict(sizes))
            if not {*claim.rivals} <= {*range(sizes["key"])} or len({*claim.rivals}) != len(claim.rivals):
                raise ValueError(f"a claim has rivals {claim.rivals} among {sizes['key']} keys")
