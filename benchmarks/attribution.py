"""Hidden token attribution on other families than BERT's: `python benchmarks/attribution.py [--lengths 32 64] [FAMILY …]`.

Random models of 6 layers of 384 with 12 heads. A backward pass per output number (timed on a sample of outputs in every
layer, and scaled) against whence's exact attribution, all layers; the last column is how whence went about it. One
thread; processor time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

import whence
from whence.mixing.jacobian.forward_mode import Runner
from whence.reading.inputs import Prepared
from whence.reading.rerun.run import prove_model
from whence.reading.trace import Trace

VOCABULARY = 1000
SIZES = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
OTHER_SIZES = {"n_embd": 384, "n_layer": 6, "n_head": 12}


def _families() -> dict[str, Callable[[], nn.Module]]:
    import transformers as t

    v = {"vocab_size": VOCABULARY}
    grouped = {**v, **SIZES, "intermediate_size": 1024, "num_key_value_heads": 4}
    return {
        "deberta-v2": lambda: t.DebertaV2Model(
            t.DebertaV2Config(
                **v, **SIZES, intermediate_size=1536, relative_attention=True, position_buckets=32,
                pos_att_type=["p2c", "c2p"], position_biased_input=False, share_att_key=True,
                norm_rel_ebd="layer_norm", max_position_embeddings=128,
            )
        ),
        "bloom": lambda: t.BloomModel(t.BloomConfig(**v, hidden_size=384, n_layer=6, n_head=12)),
        "gpt2": lambda: t.GPT2Model(t.GPT2Config(**v, **OTHER_SIZES)),
        "gptj": lambda: t.GPTJModel(t.GPTJConfig(**v, **OTHER_SIZES, rotary_dim=16)),
        "gpt-neox": lambda: t.GPTNeoXModel(t.GPTNeoXConfig(**v, **SIZES, intermediate_size=1536)),
        "llama": lambda: t.LlamaModel(t.LlamaConfig(**grouped)),
        "gemma2": lambda: t.Gemma2Model(t.Gemma2Config(**grouped, head_dim=32, query_pre_attn_scalar=32)),
        "falcon": lambda: t.FalconModel(t.FalconConfig(**v, **SIZES)),
        "xlnet": lambda: t.XLNetModel(t.XLNetConfig(**v, d_model=384, n_layer=6, n_head=12, d_inner=1536)),
        "t5": lambda: t.T5EncoderModel(
            t.T5Config(**v, d_model=384, d_kv=32, num_layers=6, num_heads=12, d_ff=1536)
        ),
    }  # fmt: skip


def backward_loop(trace: Trace, sample: int) -> float:
    """Seconds for a backward pass from every number of every block's output, from a sample of them in each layer."""
    stack, model = trace.of(), trace.model
    assert model is not None
    proof = prove_model(model, Prepared(dict(trace.inputs), trace.tokens))
    runner = Runner(model, proof, dict(trace.inputs), proof.of(stack.name), stack.layers)
    n, width = stack.layers[0].block_input.shape
    step = torch.zeros(1, n, width, requires_grad=True)
    total = 0.0
    for state in runner.moved(step, gradients=True)[0]:
        outputs = [(i * 7919 % n, i * 104729 % width) for i in range(sample + 1)]
        torch.autograd.grad(state[0, outputs[0][0], outputs[0][1]], step, retain_graph=True)  # warm
        begin = time.process_time()
        for token, k in outputs[1:]:
            torch.autograd.grad(state[0, token, k], step, retain_graph=True)
        total += (time.process_time() - begin) / sample * n * width
    return total


def main() -> None:
    families = _families()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(families))
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--sample", type=int, default=8, help="outputs per layer that the backward loop is timed on")
    given = parser.parse_args()
    unknown = [name for name in given.families if name not in families]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(families)}")
    torch.set_num_threads(1)
    print(f"{'family':>10} {'n':>4} {'backward s':>11} {'exact s':>8} {'ratio':>6}  way")
    for name in given.families or families:
        for n in given.lengths:
            torch.manual_seed(0)
            model = whence.Model(families[name]().eval())
            ids = torch.randint(1, VOCABULARY, (1, n))
            trace = whence.trace(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            assert isinstance(trace, Trace)
            loop = backward_loop(trace, given.sample)
            begin = time.process_time()
            mixed = whence.hidden_token_attribution(trace, "exact")
            exact = time.process_time() - begin
            way = mixed.provenance.settings["way"]
            print(f"{name:>10} {n:>4} {loop:>11.0f} {exact:>8.1f} {loop / exact:>5.1f}x  {way}", flush=True)


if __name__ == "__main__":
    main()
