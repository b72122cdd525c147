"""What a position is in the world the model reads: the seventh atom, residue 22, 0.42 seconds."""

from __future__ import annotations

import re
from collections.abc import Sequence

from whence.errors import InputError
from whence.results.labels import Tokens

# An atom in brackets: isotope, element, chirality, hydrogens, charge, map number. [SEP] and [CLS] are none.
_ATOM = re.compile(r"\[\d*([A-Z][a-z]?|[bcnops])@{0,2}(?:H\d*)?[+-]*\d*(?::\d+)?\]|(Br|Cl|[BCNOSPFI]|[bcnops])")


def element(token: str) -> str | None:
    """The chemical element of a SMILES token, or None where it is no atom.

    >>> [element(t) for t in ("c", "[nH]", "Cl", "(", "1", "[O-]", ">>", "[SEP]", "[C@@H]")]
    ['C', 'N', 'Cl', None, None, 'O', None, None, 'C']
    """
    found = _ATOM.fullmatch(token)
    return None if found is None else (found[1] or found[2]).capitalize()


def position_names(tokens: Tokens, positions: str) -> tuple[str, ...]:
    """Names for the positions of a text: "C7", the seventh atom and a carbon; "C22", residue 22 and a cysteine.

    positions: what the catalogue says a token is. Special tokens, and SMILES tokens that are no atoms, keep their text.
    """
    if positions not in ("atoms", "residues"):
        return tuple(tokens)
    names, count = [], 0
    for text, special in zip(tokens, tokens.special, strict=True):
        symbol = None if special else element(text) if positions == "atoms" else text
        count += symbol is not None
        names.append(text if symbol is None else f"{symbol}{count}")
    return tuple(names)


def atom_candidates(tokens: Sequence[str]) -> dict[int, list[int]]:
    """For every product atom of a reaction SMILES, the reactant atoms of the same element: RXNMapper's question.

    Where no reactant atom has the element (its reagent is not written), all reactant atoms are candidates.

    >>> atom_candidates(["[CLS]", "C", "O", ">>", "C", "[SEP]"])
    {4: [1]}
    """
    arrows = [i for i, token in enumerate(tokens) if token == ">>"]
    if len(arrows) != 1:
        raise InputError(f"a reaction SMILES has one '>>' between reactants and products; this text has {len(arrows)}.")
    elements = [element(token) for token in tokens]
    candidates = {}
    for query in range(arrows[0] + 1, len(tokens)):
        if elements[query] is not None:
            atoms = [k for k in range(arrows[0]) if elements[k] is not None]
            candidates[query] = [k for k in atoms if elements[k] == elements[query]] or atoms
    return candidates
