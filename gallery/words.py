"""Words in time: when was each word spoken, by Whisper's alignment heads?"""

from __future__ import annotations

import statistics
from pathlib import Path

import whence
from gallery.page import command, picture, table, write
from gallery.speech import speak
from whence import rules

SENTENCES = (
    "The train to the mountains leaves in the morning, and it does not matter who drives it.",
    "My brother planted seven apple trees behind the house and waited for rain.",
    "When the music stopped, nobody in the large room knew what to say.",
)
WINDOW = 10  # frames of .02 s on either side of the peak


def make() -> Path:
    model = whence.load("whisper")
    words, errors, spread = [], [], []
    shown = None
    readable: dict[tuple[int, int], list[str]] = {}
    widths: list[float] = []
    refuted = total = 0
    for sentence in SENTENCES:
        speech = speak(sentence)
        found = whence.align(model, (speech.samples, speech.rate), sentence)
        shown = shown or found
        place = 0
        for i, name in enumerate(found.names):
            place = sentence.index(name, place)
            at, early, late = (float(t[i]) * found.unit for t in (found.first, found.early, found.late))
            truth = speech.starts.get(place)
            if truth is not None:
                errors.append(abs(at - truth))
            spread.append(max(abs(early - at), abs(late - at)))
            told = "" if truth is None else f"{truth:.2f}"
            words.append([name, told, f"{at:.2f}", f"{early:.2f} … {late:.2f}", found.verdicts[i]])
            place += len(name)
        refuted += sum(word == "refuted" for word in found.verdicts)
        total += len(found.names)
        assert found.check()
        assert found.trace is not None
        for pair in found.heads:
            rule = rules.mass(rules.around_peak(WINDOW), at_least=0.5, label="±.2 s of the peak")
            mass = whence.decide(
                found.trace, rule, heads=[pair], queries=list(found.queries), attention="cross", verify=False
            )
            for value, d in zip(mass.value.tolist(), mass.decisions, strict=True):
                if value > 0.5:
                    readable.setdefault(pair, []).append(d.verdict)
                    widths.append(d.upper - d.lower)
                else:
                    readable.setdefault(pair, []).append("spread out")
    assert shown is not None
    heads = []
    for pair, told in readable.items():
        peaked = [word for word in told if word != "spread out"]
        good = sum(word == "certified" for word in peaked)
        word = (
            "read"
            if len(peaked) >= len(told) / 2 and good >= 0.95 * len(peaked)
            else "careful"
            if good >= 0.5 * max(len(peaked), 1)
            else "do not read"
        )
        heads.append([f"{pair[0]}.{pair[1]}", len(told), len(peaked), good, word])
    peaked_rows = sum(h[2] for h in heads)
    certified = sum(h[3] for h in heads)
    proved = (
        "no word's range can be certified"
        if shown.fixed <= 0
        else f"{shown.fixed} words of the first sentence have a certified range"
    )
    return write(
        "words",
        "Words in time: when was it spoken?",
        "**The question.** Word timestamps of Whisper are read off the attention of a few 'alignment heads', in tiny.en eight of "
        "the 24 in the decoder's cross-attention. The heads look at 1,500 frames with values of 64 dimensions: a row can be moved in more than 1,400 "
        "directions. May one use these heads?",
        "**The rules.** (1) More than half of a row lies within ±.2 s of its peak: `mass(around_peak(10))`. (2) The path: "
        "frames after the sound cut off, standardised over tokens, running median of 7, mean of the heads, dynamic time warping, "
        "as transformers does it.",
        f"**The verdict.** (1) **Mostly yes for single rows**: of {peaked_rows} rows that put more than half of their mass within ±.2 s of "
        f"their peak, {certified} are certified to do so (median width of the interval {statistics.median(widths):.2f}). (2) **Not for the path**: attention with the same "
        f"outputs, every row moved within what the outputs allow, moves {refuted} of {total} word times by more than .2 s, and "
        f"the model does not notice. Standardising each frame over all tokens couples all rows, so nothing about that path can be certified; for the "
        f"path without it, {proved}.",
        picture("words", shown.plot(), "Words by time, with the times that the same outputs allow"),
        f"**The counter-example.** Put into the model, all alignment rows at once: early, {shown.verifications[0].sentence()} Late, "
        f"{shown.verifications[1].sentence()}",
        f"**Identified is not correct, and neither is the reverse.** Against espeak-ng's own word times the recipe is off by {statistics.median(errors):.2f} s "
        f"(median of the {len(errors)} words whose time it reports; largest {max(errors):.2f} s); the alternatives move words by {statistics.median(spread):.2f} s (median; largest {max(spread):.2f} s).",
        "**The same on the command line**",
        command(
            f'whence get whisper\nespeak-ng -v en-us -s 140 -w speech.wav "{SENTENCES[0]}"\nwhence decide speech.wav --model whisper --rule path',
            needs="whisper",
        ),
        "## May I use these heads?",
        table(["layer.head", "rows", "with more than half near the peak", "of these certified", "verdict"], heads),
        "*read*: at least half of the rows have a peak worth the name, and 95 % of those are certified; *do not read*: fewer than half are.",
        "## Every word",
        table(["word", "spoken at (s)", "recipe", "same outputs: early … late", "verdict (.2 s)"], words),
        "Made from sentences of our own, spoken by espeak-ng, which reports when words begin (little words that it speaks in one go have no time of their own); whence was given the words.",
    )
