"""Words in time: when was each word spoken, by Whisper's alignment heads?"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path

import torch

import whence
from gallery.page import command, picture, table, write
from gallery.speech import Speech, speak
from whence import rules
from whence.attention.align import Alignment
from whence.attention.decided_rows import gather_rows
from whence.attention.pushed_paths import path_of

SENTENCES = (
    "The train to the mountains leaves in the morning, and it does not matter who drives it.",
    "My brother planted seven apple trees behind the house and waited for rain.",
    "When the music stopped, nobody in the large room knew what to say.",
)
WINDOW = 10  # frames of .02 s on either side of the peak
NEAR = rules.mass(rules.around_peak(WINDOW), at_least=0.5, label="±.2 s of the peak")


@dataclass
class Tally:
    """What the sentences add up to; times in seconds."""

    rows: list[list[object]] = field(default_factory=list)
    own: list[float] = field(default_factory=list)  # error against the truth: transformers' reading,
    before: list[float] = field(default_factory=list)  # ... the row before, as OpenAI's code reads it,
    plain: list[float] = field(default_factory=list)  # ... and the plain path, both of transformers' rows
    moved: list[float] = field(default_factory=list)  # by the early or the late alignment
    width: list[float] = field(default_factory=list)  # of the certified ranges that leave something out
    asked: int = 0  # words but for the first of each sentence, with which every path begins
    refuted: int = 0
    close: int = 0
    words: int = 0


def row_before(found: Alignment) -> torch.Tensor:
    """The times by the same recipe, each token's read off the row before it; nothing else is computed."""
    assert found.trace is not None
    queries = [found.queries[0] - 1, *found.queries]
    rows = gather_rows(found.trace, found.heads, queries, "cross").rows
    return path_of(rows, found.keys, found.median, True)[list(found.starts[:-1])] * found.unit


def add(tally: Tally, sentence: str, speech: Speech, found: Alignment) -> None:
    """One sentence: every word with its truth, its times and its ranges."""
    place = 0
    before = row_before(found)
    for i, name in enumerate(found.names):
        place = sentence.index(name, place)
        at, early, late, plain, low, high = (
            float(t[i]) * found.unit
            for t in (found.first, found.early, found.late, found.plain, found.earliest, found.latest)
        )
        truth = speech.starts.get(place)
        if truth is not None:
            for errors, time in ((tally.own, at), (tally.before, float(before[i])), (tally.plain, plain)):
                errors.append(abs(time - truth))
        begins = found.starts[i] == 0
        free = high - low >= (found.keys - 1) * found.unit
        if not begins:
            tally.asked += 1
            tally.moved.append(max(abs(early - at), abs(late - at)))
            if not free:
                tally.width.append(high - low)
        proved = "(every path begins here)" if begins else "nothing" if free else f"{low:.2f} … {high:.2f}"
        tally.rows.append(
            [
                name,
                "" if truth is None else f"{truth:.2f}",
                f"{at:.2f}",
                f"{early:.2f} … {late:.2f}",
                found.verdicts[i],
                f"{plain:.2f}",
                proved,
                f"{float(before[i]):.2f}",
            ]
        )
        place += len(name)
    tally.refuted += found.verdicts.count("refuted")
    tally.close += found.close
    tally.words += len(found.names)


def heads_of(found: Alignment, told: dict[tuple[int, int], list[tuple[str, float, float]]]) -> None:
    """Every row of every alignment head: whether it has more than half near its peak, and whether that is certified."""
    assert found.trace is not None
    for pair in found.heads:
        mass = whence.decide(
            found.trace, NEAR, heads=[pair], queries=list(found.queries), attention="cross", verify=False
        )
        assert mass.check()
        for value, d in zip(mass.value.tolist(), mass.decisions, strict=True):
            told.setdefault(pair, []).append((d.verdict, value, d.upper - d.lower))


def head_rows(told: dict[tuple[int, int], list[tuple[str, float, float]]]) -> list[list[object]]:
    """A line a head: its rows, those with a peak, those certified, and whether it may be read."""
    rows: list[list[object]] = []
    for (layer, head), each in told.items():
        peaked = [(word, width) for word, value, width in each if value >= 0.5]
        good = sum(word == "certified" for word, _ in peaked)
        verdict = "do not read"
        if 2 * len(peaked) >= len(each) and good >= 0.95 * len(peaked):
            verdict = "read"
        elif peaked and 2 * good >= len(peaked):
            verdict = "careful"
        width = f"{statistics.median(w for _, w in peaked):.2f}" if peaked else ""
        rows.append([f"{layer}.{head}", len(each), len(peaked), good, width, verdict])
    return rows


def make() -> Path:
    model = whence.load("whisper")
    tally, told = Tally(), {}
    shown = None
    for sentence in SENTENCES:
        speech = speak(sentence)
        found = whence.align(model, (speech.samples, speech.rate), sentence)
        assert found.check()
        shown = shown or found
        add(tally, sentence, speech, found)
        heads_of(found, told)
    assert shown is not None
    heads = head_rows(told)
    peaked, good = (sum(int(h[k]) for h in heads) for k in (2, 3))  # type: ignore[call-overload]
    words = {word: [str(h[0]) for h in heads if h[5] == word] for word in ("read", "careful", "do not read")}
    median = statistics.median
    ranges = (
        "no word has a certified range"
        if not tally.width
        else f"{len(tally.width)} of {tally.asked} words have a certified range, {median(tally.width):.2f} s wide (median), "
        f"{tally.close} of them within ±.2 s of the path's own time"
    )
    short = f"{len(words['read'])} of the {len(heads)} may be read, {len(words['careful'])} with care, {len(words['do not read'])} may not"
    listed = "; ".join(f"*{word}*: {', '.join(pairs)}" for word, pairs in words.items() if pairs)
    return write(
        "words",
        "Words in time: when was it spoken?",
        "**The question.** Word timestamps of Whisper are read off the attention of a few ‘alignment heads’, in tiny.en eight of "
        f"the 24 in the decoder's cross-attention. They look at 1,500 frames with values of {shown.values.shape[-1]} dimensions: a row can be moved in "
        "more than 1,400 directions without any change of the head's output. May one use these heads?",
        "**The rules.** (1) At least half of a row lies within ±.2 s of its peak: `mass(around_peak(10), at_least=0.5)`. (2) The recipe, as transformers "
        "has it: frames after the sound cut off, each frame standardised over the tokens, a running median of 7 frames, the mean "
        "of the heads, dynamic time warping. (3) The plain path: the mean of the heads and dynamic time warping, nothing else: `path()`.",
        f"**The verdict.** **A row may be read where it is certified, the plain path with its range beside it; the recipe's own path is not proved.** (1) Of {peaked} rows with at least half near "
        f"their peak {good} are certified to have it there. (2) Standardising couples all rows, so nothing can be certified of the recipe's own path; the early and late alignments found "
        f"with the same outputs move {tally.refuted or 'none'} of its {tally.words} times by more than .2 s (largest {max(tally.moved):.2f} s). That is a search, not a proof that none does. (3) Of the "
        f"plain path {ranges}.",
        picture(
            "words",
            shown.plot(),
            "Words by time: the recipe's path, its extreme alternatives, and the certified ranges",
        ),
        "*The first sentence. Blue: the recipe's path. Orange: the early and the late alignment found with the same outputs. Green: where the plain path is "
        "proved to lie.*",
        "**The counter-example.** All alignment rows at once, put into the model. "
        + " ".join(
            f"The {word} alignment: " + ("none was found." if outcome is None else outcome.sentence())
            for word, outcome in zip(("early", "late"), shown.verifications, strict=True)
        ),
        f"**Identified is not correct.** espeak-ng says when it begins each word. The recipe is off by {median(tally.own):.2f} s (median of {len(tally.own)} words), the plain path by "
        f"{median(tally.plain):.2f} s, however well their times are fixed: transformers reads a token's time off the row of *that* token, which already looks at what comes next. Read off the row before "
        f"it, from which the token was predicted, as OpenAI's own code does, the same recipe is off by {median(tally.before):.2f} s "
        '(`whence.align(…, rows="before")`, `--rows before`).',
        "**The same on the command line**",
        command(
            f'apt-get install espeak-ng\nwhence get whisper\nespeak-ng -v en-us -s 140 -w speech.wav "{SENTENCES[0]}"\n'
            f'whence decide speech.wav --model whisper --rule path --words "{SENTENCES[0]}"',
            installs="espeak-ng",
        ),
        "## May I use these heads?",
        f"**For tiny.en, on these sentences, {short}.** Row by row, layer.head: {listed}. A head is *read* when at least half of its rows have half of their weight near the peak and 95 % of those are "
        "certified to; *do not read* when fewer than half of those are certified (or there are none); *careful* between.",
        table(
            [
                "layer.head",
                "rows",
                "half near the peak",
                "of these certified",
                "median width of the interval",
                "verdict",
            ],
            heads,
        ),
        "## Every word",
        table(
            [
                "word",
                "spoken at (s)",
                "recipe",
                "early alignment … late one",
                "verdict (.2 s)",
                "plain path",
                "certified range of the plain path",
                "recipe, row before",
            ],
            tally.rows,
        ),
        "Sentences of our own, spoken by espeak-ng (voice en-us, 140 words a minute, .3 s of silence before and after) through its library, which reports the sample at which each word begins; little words "
        "that it speaks in one go (‘in the’) have no time of their own. whence was given the words. Verdict: *refuted* where one of the two alignments, verified in the model, is more than .2 s away.",
    )
