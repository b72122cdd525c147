"""A decoder with rotary positions becomes an identifiable one: first the same computation, then one tensor for two.

`same_model` puts the weights of a Llama into `IdentifiableForCausalLM` with free keys: the same logits, which is checked.
`tied_start` then makes the old key both key and value, K = V = R_j k_j, and fits the output projection anew,

    W_O = argmin Σ_i ‖z_i W_O − y_i‖²,     z_i = R_{−i} Σ_j a_ij R_j k_j,

y_i being what the original's attention block adds at token i. `logit_loss` then brings the model back: the divergence
of its next-token distribution from the original's, and the hidden states.
"""

# torch and transformers leave these functions without types.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from whence.core.numerics.tolerances import SAME_LOGITS
from whence.errors import InputError, ModelError
from whence.identifiable.configuration_identifiable_decoder import IdentifiableDecoderConfig
from whence.identifiable.conversion.windows import WindowedTexts
from whence.identifiable.modeling_identifiable_decoder import IdentifiableForCausalLM
from whence.model.load import Model

RIDGE = 1e-4  # of the mean square of the head outputs: keeps the fitted projection from blowing up rare directions


def convertible(model: nn.Module) -> bool:
    """Whether the blocks are those of `IdentifiableForCausalLM` but for the key: a Llama, or that class with free keys."""
    config: Any = getattr(model, "config", None)
    if isinstance(model, IdentifiableForCausalLM):
        return bool(
            config.position_embedding_type == "rope" and config.keys == "free" and config.attention == "softmax"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    plain = rope.get("rope_type", "default") == "default" and float(rope.get("partial_rotary_factor", 1.0)) == 1.0
    return type(model).__name__ == "LlamaForCausalLM" and plain


def same_model(model: Model) -> IdentifiableForCausalLM:
    """The original's computation in the identifiable class, keys free; refused where the logits differ."""
    original: Any = model.model
    if isinstance(original, IdentifiableForCausalLM):
        return original
    config = original.config
    size = config.head_dim
    student: IdentifiableForCausalLM = IdentifiableForCausalLM(
        IdentifiableDecoderConfig(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads,
            intermediate_size=config.intermediate_size, key_size=size, value_size=size, keys="free",
            position_embedding_type="rope", rotate_values=False,
            rope_theta=float(config.rope_parameters["rope_theta"]), attention_bias=bool(config.attention_bias),
            hidden_act=config.hidden_act, feed_forward="gated", feed_forward_bias=bool(config.mlp_bias),
            max_position_embeddings=config.max_position_embeddings, rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=bool(config.tie_word_embeddings), pad_token_id=config.pad_token_id,
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id,
        )
    ).to(original.lm_head.weight)  # fmt: skip
    pairs = [("model.embed_tokens", "model.embed_tokens"), ("model.norm", "model.final_norm"), ("lm_head", "lm_head")]
    for i in range(config.num_hidden_layers):
        pairs += [(f"model.layers.{i}.{theirs}", f"model.layers.{i}.{ours}") for theirs, ours in _LAYER.items()]
    with torch.no_grad():
        for theirs, ours in pairs:
            turned = theirs.endswith(("q_proj", "k_proj"))
            for name, parameter in original.get_submodule(theirs).named_parameters():
                value = interleaved(parameter, size) if turned else parameter
                student.get_submodule(ours).get_parameter(name).copy_(value)
    student.eval()
    ids = torch.arange(min(32, config.max_position_embeddings), device=original.device)[None] % config.vocab_size
    with torch.no_grad():
        theirs_logits, ours_logits = original.eval()(ids).logits, student(ids).logits
    error = float((theirs_logits - ours_logits).abs().max() / theirs_logits.abs().max())
    if not error <= SAME_LOGITS:
        raise ModelError(
            f"{model.name} could not be written as an identifiable decoder with free keys: its logits differ by "
            f"{error:.1e} of their size. It does something that Llama does not."
        )
    return student


_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.output",
    "post_attention_layernorm": "feed_forward_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}


def interleaved(weight: Tensor, size: int) -> Tensor:
    """Rows of a projection (heads · size, d), or its bias: Llama turns the pairs (p, p + size/2), we turn (2p, 2p + 1)."""
    half = weight.unflatten(0, (-1, 2, size // 2))
    turned: Tensor = half.transpose(1, 2).flatten(0, 2)
    return turned


def tied_start(free: IdentifiableForCausalLM, batches: Iterable[dict[str, Tensor]]) -> IdentifiableForCausalLM:
    """Key := value := the old key; the output projections fitted to what the old blocks add, on these texts."""
    fields = free.config.to_dict() | {"keys": "shared", "rotate_values": True, "key_norm": False, "softcap": None}
    known = {name: fields[name] for name in IdentifiableDecoderConfig.__dataclass_fields__ if name in fields}
    tied: IdentifiableForCausalLM = (
        IdentifiableForCausalLM(IdentifiableDecoderConfig(**known)).to(free.lm_head.weight).eval()
    )
    weights = free.state_dict()
    kept = {n: w for n, w in weights.items() if ".attention.key." not in n and ".attention.value." not in n}
    kept |= {n.replace(".key.", ".value."): w for n, w in weights.items() if ".attention.key." in n}
    tied.load_state_dict(kept)
    problems = [_OutputFit(layer.attention.output) for layer in tied.model.layers]
    for inputs in batches:
        _collect(free, tied, inputs, problems)
    for problem in problems:
        problem.solve()
    return tied


class _OutputFit:
    """Least squares for one output projection, from sums over all tokens seen."""

    def __init__(self, output: nn.Linear) -> None:
        self.output = output
        width, d = output.in_features, output.out_features
        self.gram = torch.zeros(width, width, dtype=torch.float64)
        self.right = torch.zeros(width, d, dtype=torch.float64)

    def add(self, z: Tensor, wanted: Tensor) -> None:
        z, wanted = z.double(), wanted.double()
        self.gram += z.T @ z
        self.right += z.T @ wanted

    def solve(self) -> None:
        ridge = RIDGE * self.gram.diagonal().mean() * torch.eye(len(self.gram), dtype=torch.float64)
        weight = torch.linalg.solve(self.gram + ridge, self.right).T
        with torch.no_grad():
            self.output.weight.copy_(weight)
            if self.output.bias is not None:
                self.output.bias.zero_()


@torch.no_grad()
def _collect(free: Any, tied: Any, inputs: dict[str, Tensor], problems: list[_OutputFit]) -> None:
    """The original runs once; every tied block is given the input of the original one."""
    real = inputs["attention_mask"].bool()
    handles = []
    for old, new, problem in zip(free.model.layers, tied.model.layers, problems, strict=True):

        def watch(
            _: nn.Module, args: Any, kwargs: Any, out: Any, new: Any = new, problem: _OutputFit = problem
        ) -> None:
            heads: list[Tensor] = []
            handle = new.attention.output.register_forward_pre_hook(lambda _, given: heads.append(given[0]))
            try:
                new.attention(*args, **kwargs)
            finally:
                handle.remove()
            problem.add(heads[0][real], out[0][real])

        handles.append(old.attention.register_forward_hook(watch, with_kwargs=True))
    try:
        free(**inputs)
    finally:
        for handle in handles:
            handle.remove()


def logit_loss(original: nn.Module, tied: nn.Module, inputs: dict[str, Tensor], weight: float) -> Tensor:
    """KL(p‖p̂) of the next token, a mean over real tokens, plus `weight` times Σ_l of the relative error of the states."""
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        wanted = original(**inputs, output_hidden_states=True)
    ours = tied(**inputs, output_hidden_states=True)
    target = functional.log_softmax(wanted.logits[real], -1)
    loss = functional.kl_div(
        functional.log_softmax(ours.logits[real], -1), target, log_target=True, reduction="batchmean"
    )
    for theirs, own in zip(wanted.hidden_states[1:], ours.hidden_states[1:], strict=True):
        loss = loss + weight * (own - theirs)[real].square().sum() / theirs[real].square().sum()
    return loss


@torch.no_grad()
def perplexity(model: nn.Module, corpus: WindowedTexts, *, together: int = 8) -> float:
    """exp of the mean cross-entropy of the next token, over the beginnings of all texts."""
    total, count = 0.0, 0
    pieces = [text[: corpus.room] for text in corpus.texts]
    for first in range(0, len(pieces), together):
        inputs = corpus.batch(pieces[first : first + together])
        logits = model(**inputs).logits[:, :-1]
        real = inputs["attention_mask"][:, 1:].bool()
        total += float(functional.cross_entropy(logits[real], inputs["input_ids"][:, 1:][real], reduction="sum"))
        count += int(real.sum())
    if not count:
        raise InputError(
            f"none of the {len(pieces)} texts to measure on has a next token: each is one token long. Give longer texts "
            "(held_out=)."
        )
    return math.exp(total / count)


def trainable(tied: IdentifiableForCausalLM) -> None:
    """The blocks are trained; embeddings and head stay the original's."""
    for name, parameter in tied.named_parameters():
        parameter.requires_grad_(name.startswith(("model.layers.", "model.final_norm.")))
