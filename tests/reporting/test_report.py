"""A report as data and as a file; sizes at each level of detail; models of other shapes."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import whence
from conformance.zoo import build, find
from tests.serving.tiny import TEXT, tiny_model
from whence.errors import InputError
from whence.reporting.html import bundled_script, source
from whence.reporting.quantise import unpack


@pytest.fixture(scope="module")
def trace() -> Any:
    torch.set_num_threads(1)
    return whence.trace(tiny_model(), TEXT)


def test_manifest_is_strict_json_and_names_its_blocks(trace: Any) -> None:
    document = whence.report(trace, budget=0.1).document
    plain = json.loads(json.dumps(document.manifest, allow_nan=False))
    stack = plain["stacks"][0]
    assert {f"head/encoder/{b}" for b in stack["blocks"]} == {k for k in document.blocks if k.startswith("head/")}
    assert len(stack["blocks"]) == 4
    assert [m["name"] for m in plain["mixtures"]] == ["alti", "norms", "rollout"]
    assert plain["prediction"]["output"]["items"][0]["probability"] == pytest.approx(
        float(trace.logits.double().softmax(-1).max())
    )


def test_effective_attention_and_alternatives_of_a_block(trace: Any) -> None:
    document = whence.report(trace, budget=0.1, detail="full").document
    arrays, _ = unpack(document.blocks["head/encoder/1/0"])
    effective = whence.effective_attention(trace).values[1, 0].double().numpy()
    assert arrays["effective"] == pytest.approx(effective, abs=1e-4)
    values = trace[1].values[0].double().numpy()
    before = trace[1].attention[0].double().numpy() @ values
    assert arrays["alternative"] @ values == pytest.approx(before, abs=2e-3)  # the same outputs, within quantisation
    assert abs(arrays["alternative"] - arrays["raw"]).max() > 0.01


def test_exact_is_said_where_it_is_and_nowhere_else(trace: Any) -> None:
    """Every weight marked exact is what a certificate proves; every other is a valid bound that is marked as one."""
    for budget in (None, 0.0):
        document = whence.report(trace, budget=budget).document
        stack = document.manifest["stacks"][0]
        for about in stack["exact_heads"]:
            layer, head = about["layer"], about["head"]
            arrays, _ = unpack(document.blocks[f"head/encoder/{layer}/{head}"])
            marked = arrays["exact"].astype(bool)
            listed = {c["query"] for c in (*stack["worst"], *stack["best"]) if (c["layer"], c["head"]) == (layer, head)}
            assert int(marked.any(-1).sum()) == about["rows"] == (about["of"] if budget is None else len(listed))
            assert all(marked[query].all() for query in listed)  # whatever the budget
            for query in range(about["of"]):
                exact = whence.certify(trace, layer, head, query, top=None, orders=False)
                ends = {
                    int(k): (float(a), float(b)) for k, a, b in zip(exact.keys, exact.lower, exact.upper, strict=True)
                }
                for k, key in enumerate(arrays["keys"][query].astype(int)):
                    low, high = ends[key]
                    assert arrays["lower"][query, k] <= low + 1e-9
                    assert arrays["upper"][query, k] >= high - 1e-9
                    if marked[query, k]:
                        assert arrays["lower"][query, k] == pytest.approx(low, abs=2e-5)
                        assert arrays["upper"][query, k] == pytest.approx(high, abs=2e-5)


def test_alternatives_of_the_listed_heads_move_every_row(trace: Any) -> None:
    document = whence.report(trace).document
    for about in document.manifest["stacks"][0]["exact_heads"]:
        arrays, header = unpack(document.blocks[f"head/encoder/{about['layer']}/{about['head']}"])
        moved = abs(arrays["alternative"] - arrays["raw"]).sum(-1) / 2
        assert moved.min() > 0.2
        assert header["moved"] == pytest.approx(moved.mean(), abs=0.02)


def test_work_can_be_stopped_while_rows_are_solved(trace: Any) -> None:
    from whence.reporting.document import build

    def stop(what: str, _done: float, _total: float = 1.0) -> None:
        if what.startswith("The prediction"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(trace, step=stop)
    assert not [t for t in threading.enumerate() if t.name.startswith("whence-exact")]


def test_progress_tells_what_is_done_and_never_goes_back(trace: Any) -> None:
    from whence.reporting.document import build

    heard: list[tuple[str, float]] = []
    build(trace, step=lambda what, share: heard.append((what, share)))
    shares = [share for _, share in heard]
    assert shares == sorted(shares)
    assert heard[-1] == ("Done", 1.0)
    with pytest.raises(InputError, match=r"budget=-1"):
        whence.report(trace, budget=-1)


def test_levels_of_detail(trace: Any) -> None:
    sizes = {d: len(whence.report(trace, budget=0.05, detail=d).to_html()) for d in ("light", "standard", "full")}
    assert sizes["light"] <= sizes["standard"] < sizes["full"]
    with pytest.raises(InputError, match="detail='huge'"):
        whence.report(trace, detail="huge")


def test_file_is_self_contained(trace: Any, tmp_path: Path) -> None:
    report = whence.report(trace, budget=0.05)
    path = report.save(tmp_path / "r.html")
    page = path.read_text(encoding="utf-8")
    assert "default-src 'none'" in page.replace("&#x27;", "'")
    assert not re.search(r"""(src|href)=["']?https?:""", page)
    assert page.count('<script type="module">') == 1
    assert "/root/" not in page
    assert str(tmp_path) not in page
    with pytest.raises(InputError, match=r"should end in \.html"):
        report.save(tmp_path / "r.txt")
    with pytest.raises(InputError, match=r"whence\.trace gives"):
        whence.report("text")  # type: ignore[arg-type]


def test_modules_are_bundled_in_order() -> None:
    script = bundled_script()
    assert "import {" not in script
    assert not re.search(r"^export ", script, re.MULTILINE)
    assert script.index("const _dom =") < script.index("const _main =")
    assert "innerHTML" not in script
    assert "http://" not in re.sub(r"http://www\.w3\.org/\S+", "", source("main.js") + source("live.js"))


@pytest.mark.parametrize("family", ["bart", "llama", "gpt2"])
def test_other_shapes_of_models(family: str) -> None:
    built = build(find(family))
    found = _trace(built)
    report = whence.report(found, budget=0.05)
    names = [s["name"] for s in report.document.manifest["stacks"]]
    assert names == list(found.stacks)
    for stack in report.document.manifest["stacks"]:
        keys = stack["key_tokens"] or stack["tokens"]
        arrays, _ = unpack(report.document.blocks[f"head/{stack['name']}/{stack['layers'][0]}/0"])
        assert arrays["raw"].shape == (len(stack["tokens"]["text"]), len(keys["text"]))


def _trace(built: Any) -> Any:
    found = whence.trace(built.model, built.inputs)
    return found[0] if isinstance(found, list) else found


def test_a_trace_from_a_file_has_no_model_and_says_so(trace: Any, tmp_path: Path) -> None:
    loaded = whence.Trace.load(trace.save(tmp_path / "t.safetensors"))
    manifest = whence.report(loaded, budget=0.05).document.manifest
    assert all(w["path"] is None for w in manifest["stacks"][0]["witnesses"])
    assert all("without its model" in a["reason"] for a in manifest["prediction"]["attributions"])
