"""The picture of docs/decoders.md: where a second row is found, by length, in random heads. Measured here.

python docs/make_decoder_figure.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
import torch

import whence
from whence.core.attention.search_reachable import search_reachable
from whence.identifiable import IdentifiableDecoderConfig, IdentifiableForCausalLM

LENGTHS = (16, 24, 32, 48, 64, 96)
KINDS = {
    "RoPE, free keys": {"keys": "free"},
    "RoPE, free keys, values turned": {"keys": "free", "rotate_values": True},
    "ALiBi, free keys": {"keys": "free", "position_embedding_type": "alibi"},
    "RoPE, K = V turned alike": {"keys": "shared"},
    "ALiBi, K = V": {"keys": "shared", "position_embedding_type": "alibi"},
}


def shares(fields: dict[str, object]) -> list[float]:
    """The share of 16 rows (two layers, four heads, two texts; heads of 16) in which a second row was found."""
    torch.manual_seed(0)
    config = IdentifiableDecoderConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=2, intermediate_size=64, **fields
    )
    model = IdentifiableForCausalLM(config).double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 1.2 * parameter.shape[-1] ** -0.5)
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    found = []
    for n in LENGTHS:
        hits = []
        for seed in (0, 1):
            ids = torch.randint(500, (n,), generator=torch.Generator().manual_seed(seed))
            for layer in whence.trace(model, ids):
                for head in range(4):
                    row, keys, values = layer.attention[head, -1], layer.keys[head], layer.values[head]
                    hits.append(search_reachable(row, keys, values, starts=24, use_theorem=False).exists)
        found.append(sum(hits) / len(hits))
    return found


def main() -> None:
    mpl.rcParams["svg.hashsalt"] = "decoder"  # the same numbers, the same bytes
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for number, (name, fields) in enumerate(KINDS.items()):
        values = shares(fields)
        print(name, dict(zip(LENGTHS, values, strict=True)), flush=True)
        # The two tied ones lie on one line: a large open square around a small dot shows both.
        marker = {"marker": "s", "fillstyle": "none", "markersize": 10} if number == 4 else {"marker": "o"}
        axes.plot(LENGTHS, values, label=name, linestyle="-" if number < 3 else "--", **marker)
    axes.axvline(17, color="grey", linewidth=0.8)
    axes.text(18.2, 0.06, "d_v + 1", color="grey")
    axes.set(xlabel="tokens that the row sees", ylabel="rows with a second row found", ylim=(-0.05, 1.05))
    axes.legend(fontsize=8)
    figure.savefig(Path(__file__).parent / "figures" / "decoder_second_rows.svg", metadata={"Date": None})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
