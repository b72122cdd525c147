"""A saved report, opened from disk: the numbers are the Python ones, and it can be used."""

from __future__ import annotations

import csv
import io
import re
import struct
from pathlib import Path
from typing import Any

import pytest

import whence
from whence.core.attention.bounds import weight_bounds


def go(page: Any, hash_: str) -> None:
    page.evaluate(f"location.hash = {hash_!r}")
    page.wait_for_selector("[aria-busy]", state="detached")
    page.wait_for_timeout(120)


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def test_overview_shows_the_findings_and_the_grid_of_python(watched: Any, saved: Any, traced: Any) -> None:
    report, address = saved
    page = watched().open(address)
    shown = page.inner_text(".findings")
    for sentence in report.findings:
        assert sentence in shown
    found = whence.identifiability(traced)
    verdict = whence.verdict(traced)
    assert int(verdict.extra["unique"].sum()) == 0  # so that the colour is the share that decides
    share = verdict.values
    for quantity, values in (("certain", share), ("null_share", found.values.mean(-1)), ("r", found.extra["head_r"])):
        go(page, f"#view=overview&quantity={quantity}")
        cells = page.eval_on_selector_all(".grid-cell", "els => els.map(e => e.getAttribute('aria-label'))")
        assert len(cells) == values.numel()
        for label in cells:
            layer, head, value = re.fullmatch(r"Layer (\d+) head (\d+): .* (\S+)", label).groups()  # type: ignore[union-attr]
            assert number(value) == pytest.approx(float(values[int(layer), int(head)]), abs=5.1e-4)
    for name, kind in (("worst", "do not read"), ("best", "read")):
        assert page.locator(f".listed.{name} > li").count() == min(3, len(verdict.heads_that(kind)))


def test_row_weights_and_bounds_are_those_of_python(watched: Any, saved: Any, traced: Any) -> None:
    page = watched().open(saved[1])
    listed = {(e["layer"], e["head"]) for e in saved[0].document.manifest["stacks"][0]["exact_heads"]}
    layer, query = 2, 7
    head = next(h for h in range(12) if (layer, h) not in listed)
    go(page, f"#view=head&layer={layer}&head={head}&query={query}")
    attention = traced[layer].attention[head, query].double()
    bounds = weight_bounds(traced[layer].attention, traced[layer].values)
    rows = page.eval_on_selector_all(
        ".view.head .card:nth-of-type(2) table.bars tbody tr",
        "trs => trs.map(tr => [Number(tr.dataset.key), ...['.weight', '.interval'].map(c => tr.querySelector(c).textContent)])",
    )
    assert len(rows) >= 16
    assert [r[0] for r in rows][:3] == attention.topk(3).indices.tolist()
    for key, weight, interval in rows:
        assert number(weight) == pytest.approx(float(attention[key]), abs=5.2e-4)
        low, high = (number(v) for v in interval.strip("[]").split(", "))
        assert low == pytest.approx(float(bounds.lower[head, query, key]), abs=5.3e-4)
        assert high == pytest.approx(float(bounds.upper[head, query, key]), abs=5.3e-4)
        assert low - 5e-4 <= float(attention[key]) <= high + 5e-4


BARS = ".view.head .card:nth-of-type(2) table.bars tbody tr"


def test_every_row_of_the_listed_heads_has_exact_intervals(watched: Any, saved: Any, traced: Any) -> None:
    report, address = saved
    stack = report.document.manifest["stacks"][0]
    n = len(traced.tokens)
    heads = {(c["layer"], c["head"]) for c in (*stack["worst"], *stack["best"])}
    assert len(heads) == 6
    assert {(e["layer"], e["head"]) for e in stack["exact_heads"]} == heads
    assert all(e["rows"] == e["of"] == n for e in stack["exact_heads"])
    page = watched().open(address)
    listed = stack["worst"][0]
    for query in (listed["query"], 0, n - 1):
        go(page, f"#view=head&layer={listed['layer']}&head={listed['head']}&query={query}")
        exact = whence.certify(traced, listed["layer"], listed["head"], query, top=None, orders=False)
        where = {int(k): i for i, k in enumerate(exact.keys)}
        shown = page.eval_on_selector_all(
            BARS,
            "trs => trs.map(tr => [Number(tr.dataset.key), tr.querySelector('.interval').textContent, "
            "tr.querySelector('.bar-picture').classList.contains('exact')])",
        )
        assert len(shown) == 16
        for key, interval, marked in shown:
            assert marked
            low, high = (number(v) for v in interval.strip("[]").split(", "))
            assert low == pytest.approx(float(exact.lower[where[key]]), abs=5.3e-4)
            assert high == pytest.approx(float(exact.upper[where[key]]), abs=5.3e-4)
        assert f"All {n} rows of this head" in page.inner_text(".view.head .card:nth-of-type(2) .hint:last-child")


def test_other_heads_have_bounds_and_say_so(watched: Any, saved: Any) -> None:
    report, address = saved
    stack = report.document.manifest["stacks"][0]
    heads = {(e["layer"], e["head"]) for e in stack["exact_heads"]}
    layer, head = next((i, j) for i in stack["layers"] for j in stack["heads"] if (i, j) not in heads)
    page = watched().open(address)
    go(page, f"#view=head&layer={layer}&head={head}&query=3")
    assert page.locator(f"{BARS} .bar-picture.exact").count() == 0
    assert "whence serve proves any row" in page.inner_text(".view.head .card:nth-of-type(2) .hint:last-child")


def test_slider_moves_the_bars_and_leaves_the_output(watched: Any, saved: Any) -> None:
    report, address = saved
    witness = report.document.manifest["stacks"][0]["witnesses"][0]
    page = watched().open(address)
    go(page, f"#view=head&layer={witness['layer']}&head={witness['head']}&query={witness['query']}")
    slider = page.locator(".slide input[type=range]")
    before = page.eval_on_selector_all(".slide rect.bar", "b => b.map(e => e.getAttribute('width'))")
    picture = page.evaluate("document.querySelector('.slide canvas.strip').toDataURL()")
    slider.focus()
    page.keyboard.press("End")
    after = page.eval_on_selector_all(".slide rect.bar", "b => b.map(e => e.getAttribute('width'))")
    assert before != after
    assert page.evaluate("document.querySelector('.slide canvas.strip').toDataURL()") == picture
    assert page.inner_text(".slide-output .badge") == "not moving"
    top = max(range(len(witness["alternative"])), key=lambda i: witness["alternative"][i])
    shown = page.inner_text(f".slide tr[data-key='{top}'] .weight")
    assert number(shown) == pytest.approx(witness["alternative"][top], abs=5.1e-4)
    assert witness["path"][-1]["final_states"] < 1e-6
    page.get_by_label("control: to a random row as far away").check()
    assert page.inner_text(".slide-output .badge") == "moving"
    assert page.evaluate("document.querySelector('.slide canvas.strip').toDataURL()") != picture


def test_provenance_rolls_out_as_python_does(watched: Any, saved: Any, traced: Any) -> None:
    page = watched().open(saved[1])
    hidden, layer = 9, 3
    go(page, f"#view=provenance&method=alti&compare=rollout&hidden={hidden}&at={layer}")
    page.wait_for_selector("table[data-method=rollout]")
    for method in ("alti", "rollout"):
        shares = whence.contributions(traced, method=method).rollout().values[layer, hidden]
        rows = page.eval_on_selector_all(
            f"table[data-method={method}] tbody tr", "trs => trs.map(tr => [...tr.children].map(c => c.textContent))"
        )
        assert [int(r[0]) for r in rows[:3]] == shares.topk(3).indices.tolist()
        for key, _, share in rows:
            assert number(share) == pytest.approx(float(shares[int(key)]), abs=2e-4)


def test_identity_shows_the_summaries_of_python(watched: Any, saved: Any, traced: Any) -> None:
    page = watched().open(saved[1])
    go(page, "#view=identity")
    page.locator("details.numbers summary").first.click()
    shown = page.eval_on_selector_all(
        ".chart-card:first-of-type table.data tbody tr", "trs => trs.map(tr => tr.children[1].textContent)"
    )
    expected = whence.contributions(traced, method="alti").rollout().own_share()["median"].tolist()
    assert [number(v) for v in shown] == pytest.approx(expected, abs=5.1e-3)


def test_hover_and_keyboard(watched: Any, saved: Any, traced: Any) -> None:
    page = watched().open(saved[1])
    page.locator(".grid-cell").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Layer 1 head 1:")
    page.keyboard.press("Enter")
    page.wait_for_selector(".view.head canvas")
    assert "layer=1" in page.url
    assert "head=1" in page.url
    page.wait_for_selector("[aria-busy]", state="detached")
    frame = page.locator("[data-map=raw]")
    box = frame.bounding_box()
    n = len(traced.tokens)
    q, k = 3, 5
    page.mouse.move(box["x"] + (k + 0.5) / n * box["width"], box["y"] + (q + 0.5) / n * box["height"])
    page.wait_for_timeout(100)
    said = page.inner_text(".readout")
    assert f"({q})" in said
    assert f"({k})" in said
    assert f"(token {q})" in page.inner_text(
        ".view.head .card:nth-of-type(2) caption"
    )  # its bars, while it is pointed at
    raw = number(re.search(r"raw (?:≈ )?([\d.]+)", said).group(1))  # type: ignore[union-attr]
    assert raw == pytest.approx(float(traced[1].attention[1, q, k]), abs=4e-3)
    frame.focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_timeout(100)
    assert f"({q + 1})" in page.inner_text(".readout")
    page.keyboard.press("Enter")
    assert f"query={q + 1}" in page.url
    page.locator(".pick .token[aria-selected=true]").focus()
    page.keyboard.press("ArrowRight")
    assert f"query={q + 2}" in page.url
    page.keyboard.press("]")
    page.wait_for_url(re.compile("head=2"))
    page.keyboard.press("3")
    page.wait_for_selector(".view.provenance")
    page.go_back()
    page.wait_for_selector(".view.head")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_accessible_and_within_its_width(watched: Any, saved: Any, scheme: str, width: int) -> None:
    one = watched(color_scheme=scheme)
    one.page.set_viewport_size({"width": width, "height": 850})
    one.open(saved[1])
    for view in ("overview", "head", "provenance", "identity"):
        go(one.page, f"#view={view}")
        one.page.wait_for_timeout(200)
        assert one.page.evaluate("document.documentElement.scrollWidth") <= width
        assert one.serious() == [], view


def test_exports(watched: Any, saved: Any, traced: Any) -> None:
    one = watched()
    page = one.open(saved[1])

    def save(label: str) -> Path:
        with page.expect_download() as download:
            page.get_by_role("button", name=label, exact=True).first.click()
        return Path(download.value.path())

    rows = list(csv.reader(io.StringIO(save("Save whence heads as CSV").read_text(encoding="utf-8-sig"))))
    assert rows[0][:3] == ["layer", "head", "certain"]
    assert len(rows) == 1 + 72
    assert [float(row[2]) for row in rows[1:]] == pytest.approx(whence.verdict(traced).values.flatten().tolist())
    assert save("View as SVG").read_text(encoding="utf-8").startswith("<svg")
    assert save("View as PNG").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    go(page, "#view=head")
    assert save("Save whence attention maps as PNG").stat().st_size > 20_000
    figure = save("Save whence attention maps as SVG").read_text(encoding="utf-8")
    assert "foreignObject" not in figure  # other programs than browsers can show it
    names = re.findall(r"<text[^>]*>([^<]*)</text>", figure)
    for token in traced.tokens:  # a short text: every token along both sides of each of the three maps
        assert names.count(token) >= 6
    go(page, "#view=identity")
    chart = save("Save whence own share as SVG").read_text(encoding="utf-8")
    assert "foreignObject" not in chart
    assert "polyline" in chart
    for words in ("How much of itself is left", "ALTI", "Attention rollout"):  # which line is which
        assert f">{words}</text>" in chart
    table = page.locator('.card[data-name="own-by-token"] .scroll')
    hidden = table.evaluate("e => e.scrollWidth - e.clientWidth")
    assert hidden > 100
    before = page.locator('.card[data-name="own-by-token"]').bounding_box()
    assert before is not None
    picture = save("Save whence own by token as PNG").read_bytes()
    wide = struct.unpack(">I", picture[16:20])[0]
    assert wide >= 2 * (before["width"] + hidden)  # all of the table, not what was scrolled to
    assert page.locator('.card[data-name="own-by-token"]').bounding_box() == before


def test_deep_link_opens_the_same_view(watched: Any, saved: Any) -> None:
    page = watched().open(saved[1] + "#view=head&layer=4&head=2&query=6")
    page.wait_for_selector(".view.head table.bars")
    assert [page.locator(".controls select").nth(i).input_value() for i in (0, 1)] == ["4", "2"]
    assert page.locator(".pick .token[aria-selected=true]").get_attribute("data-i") == "6"
    page.get_by_role("button", name="Theme: system").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_the_address_names_the_head_that_is_shown(watched: Any, saved: Any) -> None:
    page = watched().open(saved[1])
    page.get_by_role("button", name="Head", exact=True).click()
    page.wait_for_selector("table.bars tbody tr")
    for part in ("view=head", "layer=", "head=", "query="):
        assert part in page.url.partition("#")[2]
    chosen = [page.locator(".controls select").nth(i).input_value() for i in (0, 1)]
    page.keyboard.press("]")
    page.wait_for_selector("[aria-busy]", state="detached")
    after = [page.locator(".controls select").nth(i).input_value() for i in (0, 1)]
    assert after != chosen
    assert f"layer={after[0]}&head={after[1]}&" in page.url + "&"


def test_every_card_can_be_saved_and_every_table_as_csv(watched: Any, saved: Any) -> None:
    page = watched().open(saved[1])
    for view in ("overview", "head", "provenance", "identity"):
        go(page, f"#view={view}")
        page.wait_for_timeout(200)
        cards = page.locator(".card").all()
        assert cards
        for card in cards:
            offered = card.locator(".exporter button").all_inner_texts()
            assert offered[:2] == ["SVG", "PNG"]
            if card.locator("table, .mini").count():
                assert offered[2:] == ["CSV"], card.get_attribute("aria-label")


def test_notebook_display_shows_the_same_page(watched: Any, saved: Any, tmp_path: Path) -> None:
    report, _ = saved
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><title>n</title><body>{report._repr_html_()}", encoding="utf-8")
    page = watched().page
    page.goto(notebook.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator(".findings").wait_for()
    frame.get_by_role("button", name="Head", exact=True).click()
    frame.locator("table.bars").first.wait_for()


def test_a_model_with_a_head_shows_its_prediction(watched: Any, tmp_path: Path) -> None:
    folder = Path(__file__).parents[3] / "shared" / "models" / "bert-tiny-sst2"
    if not folder.exists():
        pytest.skip("the shared models are not here")
    pytest.importorskip("captum", reason="gradients come with the extra 'explain'")
    model = whence.load(folder)
    trace = whence.trace(model, "a gorgeous , witty , seductive movie that nobody should miss")
    report = whence.report(trace, budget=0.1)
    one = watched()
    page = one.open(report.save(tmp_path / "r.html").as_uri() + "#view=prediction")
    probability = trace.logits.double().softmax(-1)
    assert number(page.locator(".classes .num").first.inner_text()) == pytest.approx(float(probability.max()), abs=1e-4)
    rows = page.eval_on_selector_all(".tall tbody tr", "trs => trs.map(tr => [...tr.children].map(c => c.textContent))")
    scores = whence.attribute(model, trace, "alti").values
    assert [number(r[2]) for r in rows] == pytest.approx(scores.tolist(), abs=5.1e-4)
    leading = []
    shown = page.locator(".attribution .hint").all_inner_texts()
    known = [a for a in report.document.manifest["prediction"]["attributions"] if "reason" not in a]
    for line, entry in zip(shown, known, strict=True):  # the three that lead, special tokens too
        order = sorted(range(len(entry["values"])), key=lambda i: -abs(entry["values"][i]))[:3]
        places = [line.index(trace.tokens[i]) for i in order]
        assert places == sorted(places)
        leading += [trace.tokens.special[i] for i in order]
    assert any(leading)
    assert one.serious() == []


def test_the_verdict_is_the_same_on_the_page_as_in_python(watched: Any, traced: Any, tmp_path: Path) -> None:
    report = whence.report(traced, epsilon=0.2, budget=0.0, methods=["rollout"], detail="light")
    page = watched().open(report.save(tmp_path / "r.html").as_uri())
    verdict = whence.verdict(traced, epsilon=0.2)
    assert verdict.names() != whence.verdict(traced).names()
    assert verdict.sentences()[0] in page.inner_text(".findings")
    assert "ε = 0.2" in page.inner_text(".bad-scale")
    for layer, head in ((0, 8), (1, 4), (5, 0)):
        page.locator(".grid-cell").nth(12 * layer + head).hover()
        assert verdict.sentence(layer, head) in page.inner_text(".grid-info")


# Of each row of the third map: is its fifth pixel the grey of what was not searched?
GREY = """() => {
    const canvas = document.querySelectorAll('.matrix canvas')[2], { width, height } = canvas;
    const pixels = canvas.getContext('2d').getImageData(0, 0, width, height).data;
    return Array.from({length: ROWS}, (_, q) => {
        const at = 4 * (Math.floor((q + 0.5) / ROWS * height) * width + 5);
        return [0, 1, 2].every((i) => pixels[at + i] === 0xc9);
    });
}"""


def test_what_was_not_searched_in_time_is_grey_and_counted(watched: Any, saved: Any, tmp_path: Path) -> None:
    """The same report, but with only the first ten rows of one alternative map done."""
    from whence.reporting.quantise import unpack
    from whence.reporting.report import Report

    report, address = saved
    layer, head = (report.document.manifest["stacks"][0]["worst"][0][name] for name in ("layer", "head"))
    key = f"head/encoder/{layer}/{head}"
    arrays, header = unpack(report.document.blocks[key])
    n = len(arrays["raw"])
    assert header["searched"] == n
    grey = GREY.replace("ROWS", str(n))
    page = watched(color_scheme="light").open(f"{address}#view=head&layer={layer}&head={head}")
    page.wait_for_selector("table.bars tbody tr")
    assert "was up" not in page.inner_text(".matrix:nth-of-type(3) .about")
    assert not any(page.evaluate(grey))
    cut = _with_unsearched(report.document, key, 10)
    page = watched(color_scheme="light").open(
        f"{Report(cut).save(tmp_path / 'cut.html').as_uri()}#view=head&layer={layer}&head={head}"
    )
    page.wait_for_selector("table.bars tbody tr")
    assert f"after 10 of {n} rows" in page.inner_text(".matrix:nth-of-type(3) .about")
    assert page.evaluate(grey) == [q >= 10 for q in range(n)]


def _with_unsearched(document: Any, key: str, done: int) -> Any:
    """A copy of the document in which one head's alternative rows beyond `done` were not reached."""
    import json
    import zlib

    from whence.reporting.document import Document

    plain = bytearray(zlib.decompress(document.blocks[key]))
    (length,) = struct.unpack("<I", plain[:4])
    header = json.loads(plain[4 : 4 + length])
    place = 4 + length
    for name, about in header["arrays"].items():
        size = about["shape"][0] * about["shape"][1] * (2 if about["type"].endswith("16") else 1)
        if name == "searched":
            plain[place + done : place + size] = bytes(size - done)
        place += size
    header["searched"] = done
    said = json.dumps(header).encode()
    block = zlib.compress(struct.pack("<I", len(said)) + said + bytes(plain[4 + length :]))
    return Document(document.manifest, {**document.blocks, key: block})


def test_one_weight_has_one_interval(watched: Any, saved: Any) -> None:
    """Beside each other, the card of the row and that of its counter-example say the same of every weight in both."""
    report, address = saved
    stack = report.document.manifest["stacks"][0]
    page = watched().open(address)
    for witness in stack["witnesses"]:
        go(page, f"#view=head&layer={witness['layer']}&head={witness['head']}&query={witness['query']}")
        shown = [
            dict(
                page.eval_on_selector_all(
                    f"{card} table.bars tbody tr",
                    "trs => trs.map(tr => [tr.dataset.key, tr.querySelector('.interval').textContent"
                    " + tr.querySelector('.mark').textContent])",
                )
            )
            for card in (".card:nth-of-type(2)", ".card:nth-of-type(3)")
        ]
        both = shown[0].keys() & shown[1].keys()
        assert len(both) >= 5
        assert {k: shown[0][k] for k in both} == {k: shown[1][k] for k in both}


def test_maps_name_their_tokens_and_the_one_pointed_at(watched: Any, saved: Any, traced: Any) -> None:
    page = watched().open(saved[1] + "#view=head")
    page.wait_for_selector("table.bars tbody tr")
    for side in ("rows", "columns"):
        names = page.locator(f".matrix:first-of-type .side.{side} span").all_inner_texts()
        assert len(names) >= len(traced.tokens) // 3
        assert set(names) <= set(traced.tokens)
    page.locator("[data-map=raw]").focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    page.wait_for_timeout(100)
    named = page.locator(".matrix:first-of-type .named.rows")
    assert named.inner_text() in traced.tokens
    assert named.is_visible()
    page.get_by_label("effective", exact=True).check()
    assert page.locator(".matrix:visible").count() == 1


def test_the_first_look_goes_and_stays_away(watched: Any, saved: Any) -> None:
    one = watched()
    page = one.open(saved[1])
    assert page.locator(".guide").is_visible()
    assert one.serious() == []
    page.get_by_role("button", name="Got it").click()
    assert page.locator(".guide").count() == 0
    page = one.open(saved[1])
    assert page.locator(".guide").count() == 0
    page.get_by_role("button", name="Show the first look again").click()
    assert page.locator(".guide").is_visible()


def test_keys_that_are_offered_lead_somewhere(watched: Any, saved: Any) -> None:
    page = watched().open(saved[1])
    views = page.locator(".tabs .tab").count()
    assert views == 4  # no prediction: this model has no head
    assert f"1–{views} choose a view" in page.inner_text("footer")
    assert "step through the heads" not in page.inner_text("footer")
    for key in range(1, views + 1):
        page.keyboard.press(str(key))
        assert page.locator(".tab[aria-current=page]").inner_text() == page.locator(".tab").nth(key - 1).inner_text()
    page.keyboard.press("2")
    assert "[ and ] step through the heads" in page.inner_text("footer")


def test_neighbouring_charts_count_layers_alike(watched: Any, saved: Any, traced: Any) -> None:
    page = watched().open(saved[1] + "#view=identity")
    page.wait_for_selector(".chart")
    axes = page.eval_on_selector_all(
        ".chart-card",
        "cards => cards.map(c => [...c.querySelectorAll('thead th:first-child, tbody th')].map(e => e.textContent))",
    )
    assert len(axes) == 3
    assert all(axis == ["after layer", *(str(i) for i in range(len(traced.layers)))] for axis in axes)


def test_what_can_be_scrolled_shows_it(watched: Any, saved: Any) -> None:
    one = watched()
    one.page.set_viewport_size({"width": 390, "height": 850})
    page = one.open(saved[1] + "#view=identity")
    page.wait_for_selector(".heat")
    table = page.locator(".scroll:has(.heat)")
    page.wait_for_timeout(100)
    assert table.get_attribute("data-more") == "end"
    table.evaluate("e => { e.scrollLeft = 60; }")
    page.wait_for_timeout(100)
    assert table.get_attribute("data-more") == "start end"
    assert page.evaluate("getComputedStyle(document.querySelector('.scroll:has(.heat)')).maskImage").startswith(
        "linear-gradient"
    )


def test_decisions_have_a_view_with_the_numbers_of_python(watched: Any, tmp_path: Path) -> None:
    from tests.serving.tiny import TEXT, tiny_model

    trace = whence.trace(tiny_model(), TEXT)
    found = whence.decide(trace, whence.rules.argmax(), layer=1, head=0)
    report = whence.report(trace, decisions=[found], budget=0.0, methods=["rollout"], attributions=[])
    one = watched()
    page = one.open(report.save(tmp_path / "r.html").as_uri() + "#view=decisions")
    assert found.summary() in page.inner_text(".row-say")
    rows = page.eval_on_selector_all(
        ".decisions tbody tr", "trs => trs.map(tr => [...tr.children].map(c => c.textContent))"
    )
    assert [row[2] for row in rows] == list(found.verdicts)
    assert [row[1] for row in rows] == list(found.answers)
    assert [number(row[3]) for row in rows] == pytest.approx(found.value.tolist(), abs=5.1e-4)
    assert [number(row[5]) for row in rows] == pytest.approx(found.margin.tolist(), abs=5.1e-4)
    assert one.serious() == []
    page.locator(".decisions tbody .link").nth(3).click()
    page.wait_for_selector(".view.head")
    assert f"query={found.queries[3]}" in page.url
    with pytest.raises(whence.errors.InputError, match=r"decisions takes what whence\.decide gives"):
        whence.report(trace, decisions=["argmax"])  # type: ignore[list-item]


def test_a_map_that_was_stopped_says_so_and_a_whole_one_does_not(
    watched: Any, saved: Any, traced: Any, tmp_path: Path
) -> None:
    stopped = whence.report(traced, budget=0.0, methods=["rollout"], detail="light")
    row = stopped.document.manifest["stacks"][0]["worst"][0]
    place = f"#view=head&layer={row['layer']}&head={row['head']}"
    page = watched().open(stopped.save(tmp_path / "stopped.html").as_uri() + place)
    page.wait_for_selector("table.bars tbody tr")
    said = re.search(r"the time was up after (\d+) of (\d+) rows", page.locator(".matrix .about").nth(2).inner_text())
    assert said is not None
    assert 0 < int(said[1]) < int(said[2]) == len(traced.tokens)
    page = watched().open(saved[1] + place)
    page.wait_for_selector("table.bars tbody tr")
    assert "the time was up" not in page.locator(".matrix .about").nth(2).inner_text()
