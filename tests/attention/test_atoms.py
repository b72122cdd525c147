"""RXNMapper's atom map as decisions: the reactions for which the counts are known."""

from __future__ import annotations

import pytest

import whence
from whence.attention.position_names import atom_candidates, element
from whence.errors import InputError, UnavailableError

KNOWN = {
    "Clc1ccccc1.OB(O)C1=CCCCC1>>C1=C(c2ccccc2)CCCC1": 12,
    "C=CC(C=C)C(O)C12CC3CC(CC(C3)C1)C2>>C=CC(C=C)C(Br)C12CC3CC(CC(C3)C1)C2": 17,
    "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F": 11,
}


@pytest.fixture(scope="module")
def mapper():
    try:
        return whence.load("rxnmapper")
    except UnavailableError as problem:
        pytest.skip(str(problem))


@pytest.mark.parametrize("reaction", KNOWN)
def test_every_atom_of_the_known_reactions_is_certified(mapper, reaction):
    trace = whence.trace(mapper, reaction)
    candidates = atom_candidates(list(trace.tokens))
    found = whence.decide(trace, whence.rules.argmax(candidates), layer=10, head=5, queries=list(candidates))
    assert found.counts == {"certified": KNOWN[reaction], "refuted": 0, "open": 0}
    assert found.check()
    # Not for want of freedom: the rows of this head are far from unique.
    assert int(whence.identifiability(trace).extra["simplex_null_dimension"][10, 5].max()) >= 10


def test_atoms_are_named_by_their_place(mapper):
    trace = whence.trace(mapper, "CCO.Cl>>CCCl")
    found = whence.decide(trace, whence.rules.argmax(), layer=10, head=5, query="Cl7")
    assert found.queries == (9,)
    assert found.key_names[1:4] == ("C1", "C2", "O3")


def test_the_tokens_of_a_reaction(mapper):
    tokens = list(whence.trace(mapper, "[nH]1cccc1.C[C@@H](Br)Cl>>C%12CC%12").tokens)
    assert tokens[1] == "[nH]"
    assert "[C@@H]" in tokens
    assert [element(t) for t in ("[nH]", "[SEP]", "Br", "%12", "[C@@H]", "[O-]", "[K+]")] == [
        "N", None, "Br", None, "C", "O", "K",
    ]  # fmt: skip


def test_a_text_without_an_arrow_is_no_reaction():
    with pytest.raises(InputError, match="one '>>'"):
        atom_candidates(["C", "O"])
