"""What the first reader of this project got wrong, each in a few lines that need only public names.

The first reader had the checks (a) to (d) and no intervention. This file runs on its code, too, and every test fails there:

    git worktree add --detach /tmp/first 7092e6e
    cp tests/reading/test_first_reader.py tests/mixing/decompx_oracle.py /tmp/first/tests/
    cd /tmp/first && PYTHONPATH=src:. python -m pytest tests/test_first_reader.py

| finding | here | in full |
|---|---|---|
| 1 the rest as a part | lora | wiring/test_adapters.py, wiring/test_intervention.py |
| 2 mixing outside attention | mixing, long_encoder | wiring/test_intervention.py |
| 3 a proof where it does not hold | one_token, causal, big_bird, later_changes | test_intervention.py, test_untouched.py |
| 4 inputs | masks | test_same_computation.py |
| 5 other threads | other_thread, one_configuration | test_threads.py |
| 6 sinks | sink | test_sinks.py, attention/test_sinks.py |
| 7 certificates | tampered, ends | core/attention/test_certificate.py, test_certificate_check.py |
| 8 labels | swin, funnel | wiring/test_intervention.py |
| 9 wrong refusals | offloaded, compiled, torch_encoder, wavlm, squeezebert | test_ways_of_use.py |
| 10 DecompX | decompx | mixing/test_decompx.py |
| 11 half precision | bf16_rank, bf16_intervals, fp16_attribution | attention/, mixing/test_half_precision.py |
| 12 mixed masks | windows | attention/test_mixed_masks.py |
| 13 rows that are read | mean_pooling, last_row, patches | mixing/test_read_out.py |
| 14 rank of a layer | layer_rank | attention/test_traces.py |
| 15 smaller | albert, deficient, alti_logit, kl_texts, probe_errors, decompx_gemma | mixing/, identifiable/conversion/ |
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import threading
import time
from fractions import Fraction

import pytest
import torch
import transformers
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import whence
from conformance.zoo import build

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def ids(n, seed=1):
    return torch.randint(5, 60, (1, n), generator=torch.Generator().manual_seed(seed))


def llama(**settings):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, **settings)).eval()


def bert(**settings):
    torch.manual_seed(0)
    return BertModel(BertConfig(**SMALL, initializer_range=0.2, **settings)).eval()


def read(model, inputs):
    found = whence.trace(whence.Model(model, name="model"), inputs)
    return found[0] if isinstance(found, list) else found


def far(one, other):
    return float((one - other).abs().max())


def plain(model, inputs):
    with torch.no_grad():
        return model(**inputs)


# -- 1, 2 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "part"), [("bert", "dense"), ("llama", "o_proj")])
def test_lora(family, part):
    peft = pytest.importorskip("peft")
    specimen = build(family)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[part], init_lora_weights=False)
    adapted = peft.get_peft_model(specimen.model, config).eval()
    merged = copy.deepcopy(adapted).merge_and_unload()
    one, two = (whence.contributions(read(m, specimen.inputs), "alti").values for m in (adapted, merged))
    assert far(one, two) < 1e-4


@pytest.mark.parametrize("family", ["jamba", "lfm2"])
def test_mixing(family):
    specimen = build(family)
    with pytest.raises(whence.errors.WhenceError):
        whence.contributions(read(specimen.model, specimen.inputs), "alti").rollout()


@pytest.mark.parametrize("family", ["led", "longt5"])
def test_long_encoder(family):
    specimen = build(family)
    with pytest.raises(whence.errors.WhenceError):
        whence.contributions(read(specimen.model, specimen.inputs), "alti", attention="decoder").rollout()


# -- 3 -------------------------------------------------------------------------------------------------------------


def test_one_token():
    model = whence.Model(llama(), name="model")
    whence.trace(model, {"input_ids": ids(1)})
    assert list(whence.trace(model, {"input_ids": ids(9)}).stacks) == ["decoder"]


def test_causal():
    """A model that reads short texts left to right and longer ones at once."""
    module = bert(attn_implementation="eager")

    def mask(_module, args, kwargs):
        n = args[0].shape[1]
        hidden = (
            torch.full((1, 1, n, n), torch.finfo(torch.float32).min).triu(1) if n <= 12 else torch.zeros(1, 1, n, n)
        )
        return (args[0], hidden, *args[2:]), {k: v for k, v in kwargs.items() if k != "attention_mask"}

    for layer in module.encoder.layer:
        layer.attention.register_forward_pre_hook(mask, with_kwargs=True)
    model = whence.Model(module, name="model")
    assert whence.trace(model, {"input_ids": ids(9)})[0].causal
    longer = whence.trace(model, {"input_ids": ids(20)})
    assert float(longer[0].attention.triu(1).max()) > 0.01
    assert not longer[0].causal


def test_big_bird():
    torch.manual_seed(0)
    config = transformers.BigBirdConfig(**SMALL, block_size=2, num_random_blocks=1, max_position_embeddings=256)
    model = transformers.BigBirdModel(config).eval()
    read(model, {"input_ids": ids(12)})
    assert model.attention_type == "block_sparse"


@pytest.mark.parametrize("how", ["weights", "hook"])
def test_later_changes(how):
    """A measure that runs the model again, on a trace made before the model was changed: as it was then, or refused."""
    model, inputs = bert(), {"input_ids": ids(9)}
    before = whence.contributions(read(model, inputs), "value-zeroing").values
    trace = read(model, inputs)
    dense = model.encoder.layer[1].attention.output.dense
    if how == "weights":
        dense.weight.data *= 3
    else:
        dense.register_forward_hook(lambda _module, _args, output: 3 * output)
    try:
        after = whence.contributions(trace, "value-zeroing").values
    except whence.errors.WhenceError:
        return
    assert far(before, after) < 1e-6


# -- 4, 5 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["4-D", "holes"])
def test_masks(kind):
    model, n = llama(), 9
    seen = torch.ones(n, n).tril().bool()
    seen[5:, 1:3] = False
    holes = torch.tensor([[1, 1, 0, 1, 1, 0, 0, 1, 1]])
    additive = torch.zeros(1, 1, n, n).masked_fill(~seen, torch.finfo(torch.float32).min)
    inputs = {"input_ids": ids(n), "attention_mask": additive if kind == "4-D" else holes}
    shown = slice(None) if kind == "4-D" else holes[0].bool()
    assert far(read(model, inputs).logits, plain(model, inputs).logits[0][shown]) < 1e-4


def test_other_thread():
    """A plain pass that made its mask before a trace began and runs its attention while the trace runs."""
    model, inputs, passes = llama(attn_implementation="sdpa"), {"input_ids": ids(12)}, []
    found = whence.Model(model, name="model")
    whence.trace(found, inputs)
    expected = plain(model, inputs).logits
    mask_made, tracing, done = threading.Event(), threading.Event(), threading.Event()
    mine = threading.get_ident()

    def hook(*_):
        if threading.get_ident() == mine:
            tracing.set()
            done.wait(20)
        else:
            mask_made.set()
            tracing.wait(20)

    def work():
        passes.append(plain(model, inputs).logits)
        done.set()

    model.model.layers[0].register_forward_pre_hook(hook)
    other = threading.Thread(target=work)
    other.start()
    mask_made.wait(20)
    whence.trace(found, inputs)
    other.join()
    assert far(expected, passes[0]) < 1e-5


def test_one_configuration():
    """Two models of one configuration object, traced by two threads of which each begins within the other."""
    one = llama(attn_implementation="sdpa")
    two = LlamaForCausalLM(one.config).eval()
    models = [whence.Model(m, name="model") for m in (one, two)]
    inputs, problems, threads = {"input_ids": ids(12)}, [], []
    for model in models:
        whence.trace(model, inputs)
    mine = threading.get_ident()

    def work():
        try:
            whence.trace(models[1], inputs)
        except Exception as problem:
            problems.append(problem)

    def hook(*_):
        if threading.get_ident() == mine:
            threads.append(threading.Thread(target=work))
            threads[-1].start()
            threads[-1].join(0.1)

    one.model.layers[0].register_forward_hook(hook)
    two.model.layers[0].register_forward_hook(lambda *_: time.sleep(0.1))
    whence.trace(models[0], inputs)
    for thread in threads:
        thread.join()
    assert not problems
    assert one.config._attn_implementation == "sdpa"


# -- 6, 7, 8 -------------------------------------------------------------------------------------------------------


def test_sink():
    """With a sink the weights may sum to anything up to 1: it is one more column, of value 0."""
    specimen = build("gpt_oss")
    trace = read(specimen.model, {"input_ids": ids(26)})
    free = whence.identifiability(trace).extra["simplex_null_dimension"]
    for i, layer in enumerate(trace):
        for query in (6, 25):
            seen = layer.attention[0, query] > 0
            columns = nn.functional.pad(layer.values[0].double()[seen], (0, 0, 0, 1))
            columns = nn.functional.pad(columns, (0, 1), value=1.0)
            assert int(free[i, 0, query]) == len(columns) - int(torch.linalg.matrix_rank(columns, rtol=1e-6))


@pytest.mark.parametrize(
    ("name", "change"), [("tolerance", lambda _: -1.0), ("rank", lambda r: r + 1), ("dimension", lambda d: d - 1),
                         ("condition", lambda c: 1.5 * c)],
)  # fmt: skip
def test_tampered(name, change):
    torch.manual_seed(0)
    certificate = whence.certify_row(torch.randn(30).softmax(-1), torch.randn(30, 6))
    assert certificate.check()
    assert not dataclasses.replace(certificate, **{name: change(getattr(certificate, name))}).check()


def test_ends():
    """The mass outside the named keys may not be tighter than its dual proves, in rational arithmetic."""
    generator = torch.Generator().manual_seed(64)  # a case in which rounding to nearest is one bit too tight
    n, d = (int(torch.randint(low, high, (1,), generator=generator)) for low, high in ((2, 24), (1, 18)))
    row = torch.softmax(torch.randn(n, generator=generator, dtype=torch.float64) * 4, -1).float()
    values = torch.randn(n, d, generator=generator, dtype=torch.float64)
    c = whence.certify_row(
        row, (values * 10.0 ** float(torch.randint(-2, 3, (1,), generator=generator))).float().round()
    )
    dual = [Fraction(x) for x in c.outside_dual.tolist()]
    price = [sum((Fraction(x) * u for x, u in zip(line, dual, strict=True)), Fraction(0)) for line in c.values.tolist()]
    bound = sum((Fraction(a) * p for a, p in zip(c.row.tolist(), price, strict=True)), Fraction(0))
    bound += min((0 if j in c.keys.tolist() else -1) - p for j, p in enumerate(price))
    assert -Fraction(c.outside) <= max(bound, -1)


def test_swin():
    torch.manual_seed(0)
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, window_size=4, embed_dim=16, depths=[2], num_heads=[2]
    )
    with pytest.raises(whence.errors.ModelError, match="windows"):  # 4 of 16 patches each, of 64
        read(transformers.SwinModel(config).eval(), {"pixel_values": torch.randn(1, 3, 32, 32)})


def test_funnel():
    specimen = build("funnel")
    assert list(read(specimen.model, specimen.inputs).stacks) == ["encoder"]


# -- 9 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["cpu", "disk"])
def test_offloaded(way, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, inputs = bert(), {"input_ids": ids(9)}
    expected = whence.contributions(read(model, inputs), "alti").values
    if way == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    assert far(expected, whence.contributions(read(model, inputs), "alti").values) < 1e-5


def test_compiled():
    model, inputs = bert(), {"input_ids": ids(9)}
    expected = read(model, inputs).attention
    assert far(read(torch.compile(model, backend="eager"), inputs).attention, expected) < 1e-6


def test_torch_encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    assert read(model, {"src": torch.randn(1, 9, 16)}).attention.shape == (2, 4, 9, 9)


def test_wavlm():
    torch.manual_seed(0)
    config = transformers.WavLMConfig(
        **SMALL, conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, num_buckets=20,
    )  # fmt: skip
    rows = read(transformers.WavLMModel(config).eval(), {"input_values": torch.randn(1, 400)}).attention.sum(-1)
    assert far(rows, torch.ones_like(rows)) < 1e-5


def test_squeezebert():
    specimen = build("squeezebert")
    trace = read(specimen.model, specimen.inputs)
    with pytest.raises(whence.errors.WhenceError, match="does not have one row for each position"):
        whence.contributions(trace, "alti")


# -- 10, 11, 12 ----------------------------------------------------------------------------------------------------


def shaken(family):
    specimen = build(family)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in specimen.model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return specimen.model.to(torch.float64)


def test_decompx():
    try:
        from tests import decompx_oracle as slow  # a copy beside this file: the first reader has one of its own rule
    except ImportError:
        from tests.mixing import decompx_oracle as slow
    model = shaken("bert")
    trace = read(model, {"input_ids": ids(5), "attention_mask": torch.ones(1, 5, dtype=torch.long)})
    expected = slow.lengths(trace[0].block_input, slow.bert(model.base_model), False)
    assert far(whence.contributions(trace, "decompx").values, expected) < 1e-6


TEXT = "The old doctor told the nurse that she would not leave the ward before the storm was over."


def test_bf16_rank(minilm_path):
    """Ranks of the values as the model has them, by float64 singular values."""
    trace = whence.trace(whence.load("minilm", dtype=torch.bfloat16), TEXT)
    rank = whence.identifiability(trace).extra["rank"]
    for layer in (0, len(trace) - 1):
        values = trace[layer].values.double()
        sizes = torch.linalg.svdvals(values)
        slow = (sizes > sizes[:, :1] * max(values.shape[1:]) * torch.finfo(torch.float32).eps).sum(-1)
        assert rank[layer, :, -1].tolist() == slow.tolist()
    assert int(rank.min()) > 0


def test_bf16_intervals(minilm_path):
    trace = whence.trace(whence.load("minilm", dtype=torch.bfloat16), TEXT)
    certificate = whence.certify(trace, 0, 0, 3)
    assert float((certificate.upper - certificate.lower).min()) < 0.999


def test_fp16_attribution():
    """Against the same weights in float64: derivatives and their squares are taken in more than half precision."""
    model, inputs = bert(), {"input_ids": ids(9)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    exact = whence.hidden_token_attribution(read(copy.deepcopy(model).double(), inputs), "exact").values
    half = whence.hidden_token_attribution(read(model.half(), inputs), "exact").values
    assert far(exact, half.double()) < 1e-5


def test_windows():
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        **{**SMALL, "num_hidden_layers": 3}, local_attention=8, global_attn_every_n_layers=2, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    found = whence.identifiability(read(transformers.ModernBertModel(config).eval(), {"input_ids": ids(20)}))
    assert found.values.shape == (3, 4, 20)


# -- 13, 14 --------------------------------------------------------------------------------------------------------


def rows_of(model, inputs):
    """What the head reads, by its attribution: the weights on the rows of the rolled-out matrix."""
    trace = read(model, inputs)
    rolled = whence.contributions(trace, "rollout").rollout().values[-1]
    scores = whence.attribute(whence.Model(model, name="model"), trace, "rollout").values
    return torch.linalg.lstsq(rolled.T.double(), scores.double()[:, None]).solution[:, 0].float()


def moved(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def test_mean_pooling():
    config = transformers.ModernBertConfig(
        **SMALL,
        classifier_pooling="mean",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    rows = rows_of(moved(transformers.ModernBertForSequenceClassification(config)), {"input_ids": ids(6)})
    assert far(rows, torch.full((6,), 1 / 6)) < 1e-3


def test_last_row():
    config = transformers.XLNetConfig(vocab_size=64, d_model=16, n_layer=2, n_head=2, d_inner=24, num_labels=3)
    rows = rows_of(moved(transformers.XLNetForSequenceClassification(config)), {"input_ids": ids(6)})
    assert far(rows, torch.eye(6)[-1]) < 1e-3


def test_patches():
    settings = {**SMALL, "vocab_size": 10, "num_labels": 3}
    config = transformers.BeitConfig(image_size=8, patch_size=4, use_mean_pooling=True, **settings)
    rows = rows_of(moved(transformers.BeitForImageClassification(config)), {"pixel_values": torch.randn(1, 3, 8, 8)})
    assert far(rows, torch.tensor([0, 0.25, 0.25, 0.25, 0.25])) < 1e-3


def test_layer_rank():
    torch.manual_seed(0)
    model = BertModel(
        BertConfig(**{**SMALL, "hidden_size": 384, "num_attention_heads": 12, "num_hidden_layers": 1})
    ).eval()
    weight = model.encoder.layer[0].attention.output.dense.weight
    with torch.no_grad():  # σ_min / σ_max = 3e-5, as in trained models
        u, _, v = torch.linalg.svd(weight.double())
        weight.copy_((u * torch.logspace(0, -4.523, 384, dtype=torch.float64)) @ v)
    assert whence.layer_statement(read(model, {"input_ids": ids(20)}), 0).joint.determines_heads


# -- 15 ------------------------------------------------------------------------------------------------------------


def test_albert():
    """ALBERT's embeddings pass a norm and a linear map: before is not after, or is refused."""
    specimen = build("albert")
    trace = read(specimen.model, specimen.inputs)
    after = whence.hidden_token_attribution(trace, "exact").values
    try:
        before = whence.hidden_token_attribution(trace, "exact", embeddings="before").values
    except whence.errors.WhenceError:
        return
    assert far(before, after) > 1e-4


def test_deficient():
    model = build("bert").model.to(torch.float64)
    with torch.no_grad():
        for block in model.base_model.encoder.layer:
            block.attention.output.dense.weight[:, ::2] = 0
    trace = read(model, {"input_ids": ids(12)})
    mixed = whence.contributions(trace, "effective", constraint="output").values
    assert far(mixed, whence.effective_attention(trace, constraint="output").values.mean(1)) < 1e-10


@pytest.mark.parametrize("family", ["granite", "cohere", "opt"])
def test_alti_logit(family):
    specimen = build(family)
    trace = read(specimen.model, specimen.inputs)
    found = whence.contributions(trace, "alti-logit", target=7, position=3)
    parts = found.values.sum() + sum(found.extra[k].sum() for k in ("feedforward", "embedding", "bias"))
    assert abs(float(parts - trace.logits[3, 7])) < 1e-3 * float(trace.logits.abs().max())


def part_of_whence(*names):
    for name in names:
        try:
            return importlib.import_module(f"whence.{name}")
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(names)


def test_kl_texts(minilm_path):
    """The divergence of 24 texts is the mean over 24 texts, not over the first 16."""
    fidelity = part_of_whence("identifiable.conversion.fidelity", "models.conversion.fidelity")
    windows = part_of_whence("identifiable.conversion.windows", "models.conversion.windows")
    original = whence.load("minilm")
    other = copy.deepcopy(original.model)
    with torch.no_grad():
        other.encoder.layer[1].attention.self.key.weight.add_(0.02)
    texts = [" ".join(TEXT.split()[: 4 + i % 9]) + f" {i}" for i in range(24)]
    corpus = windows.tokenise(original.tokenizer, texts, 16)
    pieces = [list(text) for text in corpus.texts]
    (line,) = fidelity.compare(original.model, other, corpus, {"all": pieces})
    each = []
    for piece in pieces:
        inputs, pair = corpus.batch([piece]), []
        for model in (original.model, other):
            model.set_attn_implementation("eager")
            pair.append(torch.stack(plain(model, {**inputs, "output_attentions": True}).attentions).double())
        each.append(float((pair[0] * (pair[0] / pair[1]).log()).sum(-1).mean()))
    assert line.texts == len(pieces) == 24
    assert line.attention_kl == pytest.approx(sum(each) / 24, rel=1e-4)


def test_probe_errors():
    """1.96 standard errors of eight probes cover 95 % of the exact shares."""
    trace = read(build("bert").model.to(torch.float64), {"input_ids": ids(12)})
    exact = whence.hidden_token_attribution(trace, "exact").values
    runs = [whence.hidden_token_attribution(trace, "probes", 8, seed=seed) for seed in range(24)]
    covered = torch.stack([(run.values - exact).abs() <= 1.96 * run.error for run in runs]).double().mean()
    assert 0.93 < float(covered) < 0.98


def test_decompx_gemma():
    specimen = build("gemma")
    one, two = (
        whence.contributions(read(specimen.model.to(dtype), specimen.inputs), "decompx").values
        for dtype in (torch.float32, torch.float64)
    )
    assert far(one, two) < 1e-4
