"""A data set that the project generates itself, so that a first training needs no data from outside.

What it is: short made-up sentences about who did what to whom, labelled with who ends up with the object. The answer
depends on the verb and on the order of naming together, so a bag of words alone cannot solve it. It says nothing about
real language.
"""

from __future__ import annotations

import random

from whence.identifiable.data import Labelled

NAMES = ("anna", "ben", "clara", "david", "emma", "felix", "grace", "henry")
THINGS = ("the red book", "a small lamp", "the old map", "a silver coin", "the blue cup", "a heavy box")
GIVE = ("gave", "sold", "handed", "sent", "lent")
TAKE = ("took", "bought", "received", "borrowed", "stole")
WHEN = (
    "yesterday",
    "on a cold morning",
    "after the long meeting",
    "without a word",
    "as everybody watched",
    "in the end",
)


def demo_data(count: int = 3000, seed: int = 0) -> Labelled:
    """`count` sentences, half of them "first", half "second": does the person named first or second have the thing now?

    >>> data = demo_data(2)
    >>> len(data), data.classes
    (2, ('first', 'second'))
    """
    draw = random.Random(seed)
    texts, labels = [], []
    for i in range(count):
        one, two = draw.sample(NAMES, 2)
        thing, when, label = draw.choice(THINGS), draw.choice(WHEN), ("first", "second")[i % 2]
        # "to" and "from" do not give the verb away: both orders of naming occur with both kinds of verb.
        giver_first = draw.random() < 0.5
        if giver_first:  # one gave to two → second; two took from one → the taker is named first
            sentence = (
                f"{one} {draw.choice(GIVE)} {thing} to {two}"
                if label == "second"
                else f"{one} {draw.choice(TAKE)} {thing} from {two}"
            )
        else:  # "to one, two gave …" → first has it; "from one, two took …" → second has it
            sentence = (
                f"to {one} , {two} {draw.choice(GIVE)} {thing}"
                if label == "first"
                else f"from {one} , {two} {draw.choice(TAKE)} {thing}"
            )
        parts = [when, ",", sentence] if draw.random() < 0.5 else [sentence, when]
        texts.append(" ".join(parts) + " .")
        labels.append(label)
    order = list(range(count))
    draw.shuffle(order)
    return Labelled(tuple(texts[i] for i in order), tuple(labels[i] for i in order), "the generated demo data")
