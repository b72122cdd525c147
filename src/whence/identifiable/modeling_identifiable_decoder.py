"""The identifiable decoder: a causal language model whose attention rows are the only ones that give its outputs.

Read from top to bottom. Shapes: b batch, n tokens, d hidden_size, H heads, G key-value heads, k key_size, v value_size.

    u_j = R_j · norm?(W_V x_j + b_V)                                  (b, G, n, v)   key, value and cache, one tensor
    q_i = R_i · norm?(W_Q x_i)                                        (b, H, n, k)
    a_i = softmax_{j ≤ i}( q_i · M u_j / √k + B_ij  [, sink] )        (b, H, n, n)   M = 1 for shared keys
    z_i = R_{−i} Σ_j a_ij u_j                                         (b, H, n, v)
    block output = concat_H(z) W_O + b_O                              (b, n, d)

R_j turns pairs of numbers by j times their frequency (RoPE); it is absent with ALiBi, learned biases or no positions.

Why (Theorem A): in row i every logit is q · φ_j + b_j with φ_j = M R_{j−i} v_j, and the output is Σ a_j t_j with
t_j = R_{j−i} v_j: Φ = T·M. If x and a are two softmax rows with one output, δ = x − a is orthogonal to T and to 1,
hence to Φ; but log x − log a = Φ Δq + c1, so KL(x‖a) + KL(a‖x) = δᵀ(log x − log a) = 0. M has to commute with the
rotations: a complex number on every turned pair, any matrix on the rest, nothing between. Were values not turned, Φ
would not be T times any one matrix; were the output not turned back, the model would not be relative to position.
"""

# torch and transformers leave these functions without types.
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from whence.errors import InputError
from whence.identifiable.configuration_identifiable_decoder import IdentifiableDecoderConfig

if TYPE_CHECKING:
    from whence.identifiable.decoder_statement import DecoderStatement

Rotation = tuple[Tensor, Tensor]  # cosines and sines, each (b, 1, n, pairs)


def rotation(position_ids: Tensor, size: int, theta: float, like: Tensor) -> Rotation:
    """Cosines and sines of position · theta^(−2p/size) for the pairs p of `size` numbers."""
    exact = like.dtype if like.dtype == torch.float64 else torch.float32
    frequencies = theta ** (-torch.arange(0, size, 2, device=like.device, dtype=exact) / size)
    angles = position_ids[:, None, :, None].to(exact) * frequencies
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the leading pairs (2p, 2p + 1) of x (b, heads, n, size); numbers beyond the turned ones stay."""
    turned = 2 * cos.shape[-1]
    even, odd = x[..., 0:turned:2], x[..., 1:turned:2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return pairs if turned == x.shape[-1] else torch.cat((pairs, x[..., turned:]), dim=-1)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,  # (b, H, n, k)
    key: Tensor,  # (b, G, m, k)
    value: Tensor,  # (b, G, m, v)
    attention_mask: Tensor | None,  # additive, broadcastable to (b, H, n, m)
    scaling: float,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,  # (1, H, n, m)
    s_aux: Tensor | None = None,  # (H,), the logit of the sink
    softcap: float | None = None,
    **kwargs: Any,  # noqa: ARG001 (transformers hands every implementation the same arguments)
) -> tuple[Tensor, Tensor]:
    """Attention written out; with a sink the rows sum to less than 1, the rest being the sink's."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores + attention_mask
    if s_aux is None:
        weights = scores.softmax(dim=-1)
    else:
        sink = s_aux.to(scores)[None, :, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
    weights = functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights  # (b, n, H, v), (b, H, n, m)


def fused_with_sink(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, dropout: float,
    position_bias: Tensor | None, sink: Tensor,
) -> tuple[Tensor, None]:  # fmt: skip
    """The same through sdpa: the sink is one more key, the zero vector, whose score is its bias and whose value is 0."""
    heads, n, m = query.shape[1], query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(n, m, dtype=torch.bool, device=query.device).tril(m - n)[None, None]
    scores = query.new_zeros(1, heads, n, m) if position_bias is None else position_bias.to(query)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    scores = torch.cat((sink.to(query)[None, :, None, None].expand(*scores.shape[:-1], 1), scores), dim=-1)
    key, value = (functional.pad(t, (0, 0, 1, 0)).repeat_interleave(heads // t.shape[1], dim=1) for t in (key, value))
    out = functional.scaled_dot_product_attention(query, key, value, scores, dropout, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


class IdentifiableDecoderAttention(nn.Module):
    """Causal attention in which one tensor can be key, value and cache."""

    def __init__(self, config: IdentifiableDecoderConfig, layer_idx: int) -> None:
        super().__init__()
        assert config.key_size is not None
        assert config.value_size is not None
        assert config.num_key_value_heads is not None
        self.config, self.layer_idx = config, layer_idx
        d, heads, groups, k, v = (
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.key_size, config.value_size,
        )  # fmt: skip
        self.sizes = (heads, groups, k, v)
        self.num_key_value_groups = heads // groups
        self.scaling = k**-0.5
        self.is_causal = True
        bias = config.attention_bias
        self.value = nn.Linear(d, groups * v, bias=bias)
        self.output = nn.Linear(heads * v, d, bias=bias)
        self.value_norm = nn.RMSNorm(v, eps=config.rms_norm_eps) if config.shared_norm else None
        self.sink = nn.Parameter(torch.empty(heads)) if config.sink == "fixed" else None
        self.distance_bias: nn.Embedding | None = None
        if config.attention == "uniform":
            return
        self.query = nn.Linear(d, heads * k, bias=bias)
        self.query_norm = nn.RMSNorm(k, eps=config.rms_norm_eps) if config.query_norm else None
        self.key_norm = nn.RMSNorm(k, eps=config.rms_norm_eps) if config.key_norm else None
        if config.keys == "free":
            self.key = nn.Linear(d, groups * k, bias=bias)
        elif config.keys == "tied":
            turned = config.rotary_size(v)
            self.turned = (turned, min(turned, k))  # of the value, of the key
            self.mixing_pairs = nn.Parameter(torch.empty(groups, self.turned[1] // 2, 2))  # complex numbers
            self.mixing = nn.Parameter(torch.empty(groups, v - turned, k - self.turned[1]))
        if config.position_embedding_type == "bias":
            self.distance_bias = nn.Embedding(config.relative_distance + 1, heads)

    def split(self, x: Tensor, size: int) -> Tensor:
        """(b, n, heads · size) → (b, heads, n, size)"""
        heads: Tensor = x.unflatten(-1, (-1, size)).transpose(1, 2)
        return heads

    def tie(self, u: Tensor) -> Tensor:
        """The key made from what is value and cache: (b, G, m, v) → (b, G, m, k). It commutes with the rotations."""
        if self.config.keys == "shared":
            return u[..., : self.sizes[2]]
        turned, kept = self.turned
        real, imaginary = self.mixing_pairs[:, None, :, 0], self.mixing_pairs[:, None, :, 1]
        pairs = rotate(u[..., :kept], real, imaginary)  # a rotation and a length: a product of complex numbers
        return torch.cat((pairs, u[..., turned:] @ self.mixing), dim=-1)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotations: tuple[Rotation, Rotation] | None = None,  # of queries and keys, of values
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        config, (_, _, k, v) = self.config, self.sizes
        past = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        u = self.split(self.value(hidden_states), v)
        u = u if self.value_norm is None else self.value_norm(u)
        u = rotate(u, *rotations[1]) if rotations and config.rotate_values else u
        if config.attention == "uniform":  # equal scores: softmax then shares equally among the visible keys
            u = u if past_key_values is None else past_key_values.update(u, u[..., :0], self.layer_idx)[0]
            query = u.new_zeros(*hidden_states.shape[:1], self.sizes[0], hidden_states.shape[1], k)
            key = u.new_zeros(*u.shape[:-1], k)
        else:
            query = self.split(self.query(hidden_states), k)
            query = query if self.query_norm is None else self.query_norm(query)
            query = rotate(query, *rotations[0]) if rotations else query
            if config.keys == "free":
                key = self.split(self.key(hidden_states), k)
                key = key if self.key_norm is None else self.key_norm(key)
                key = rotate(key, *rotations[0]) if rotations else key
                if past_key_values is not None:
                    key, u = past_key_values.update(key, u, self.layer_idx)
            else:
                if past_key_values is not None:  # one tensor a head: the place of the values stays empty
                    u = past_key_values.update(u, u[..., :0], self.layer_idx)[0]
                key = self.tie(u)
        dropout = config.attention_probs_dropout_prob if self.training else 0.0
        bias = self.position_bias(past, hidden_states.shape[1], u)
        if self.sink is not None and config._attn_implementation == "sdpa":
            out, weights = fused_with_sink(query, key, u, attention_mask, self.scaling, dropout, bias, self.sink)
        else:
            attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
                config._attn_implementation, eager_attention_forward
            )
            extra: dict[str, Any] = {} if self.sink is None else {"s_aux": self.sink}
            extra |= {} if config.softcap is None else {"softcap": config.softcap}
            out, weights = attend(
                self, query, key, u, attention_mask, dropout=dropout, scaling=self.scaling, position_bias=bias,
                **extra, **kwargs,
            )  # fmt: skip
        if rotations and config.rotate_values:  # back by the query's own position: cos, −sin
            cos, sin = (t.transpose(1, 2) for t in rotations[1])
            out = rotate(out, cos, -sin)
        return self.output(out.flatten(2)), weights

    def position_bias(self, past: int, n: int, u: Tensor) -> Tensor | None:
        """What is added to the scores, the same for every query vector: (1, H, n, m), or None."""
        config = self.config
        if config.attention == "uniform" or (self.distance_bias is None and config.position_embedding_type != "alibi"):
            return None
        at = torch.arange(past, past + n, device=u.device)
        distance = (at[:, None] - torch.arange(u.shape[2], device=u.device)[None, :]).clamp(min=0)
        if self.distance_bias is None:
            return -distance.to(u)[None, None] * alibi_slopes(self.sizes[0]).to(u)[None, :, None, None]
        bias: Tensor = self.distance_bias(distance.clamp(max=config.relative_distance))
        return bias.permute(2, 0, 1)[None]


def alibi_slopes(heads: int) -> Tensor:
    """Press et al. 2022: 2^(−8h/H) for H a power of 2, and every second slope of 2H in between for other numbers."""
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    slopes += [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)]
    return torch.tensor(slopes)


class IdentifiableDecoderLayer(nn.Module):
    """Attention and a feed-forward network, each with an RMSNorm before it and its residual."""

    def __init__(self, config: IdentifiableDecoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = IdentifiableDecoderAttention(config, layer_idx)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        d, inner, bias = config.hidden_size, config.intermediate_size, config.feed_forward_bias
        self.gate = nn.Linear(d, inner, bias=bias) if config.feed_forward == "gated" else None
        self.up = nn.Linear(d, inner, bias=bias)
        self.activation = ACT2FN[config.hidden_act]
        self.down = nn.Linear(inner, d, bias=bias)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), **kwargs)[0])
        y = self.feed_forward_norm(x)
        inner = self.activation(self.up(y)) if self.gate is None else self.activation(self.gate(y)) * self.up(y)
        out: Tensor = x + self.dropout(self.down(inner))
        return out


class IdentifiableDecoderPreTrainedModel(PreTrainedModel):
    """What both models share: their configuration, initialisation and the statement of what is unique."""

    config_class = IdentifiableDecoderConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ["IdentifiableDecoderLayer"]  # noqa: RUF012 (transformers declares it so)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": IdentifiableDecoderLayer,
        "attentions": IdentifiableDecoderAttention,
    }

    def __init__(self, config: IdentifiableDecoderConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.softcap is not None:  # sdpa has no soft cap
            config._attn_implementation = "eager"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, IdentifiableDecoderAttention):
            if hasattr(module, "mixing"):  # the identity: at first a key is its value, or a part of it
                init.copy_(module.mixing, torch.eye(*module.mixing.shape[1:]).expand_as(module.mixing))
                init.copy_(module.mixing_pairs, torch.tensor([1.0, 0.0]).expand_as(module.mixing_pairs))
            if module.sink is not None:
                init.zeros_(module.sink)
            if module.distance_bias is not None:
                init.zeros_(module.distance_bias.weight)

    def identifiability_statement(self) -> DecoderStatement:
        """Which theorem covers this model's attention, under which conditions, measured on the weights."""
        from whence.identifiable.decoder_statement import decoder_statement

        return decoder_statement(self)


class IdentifiableDecoderModel(IdentifiableDecoderPreTrainedModel):
    """The decoder: ids or embeddings in, hidden states (b, n, d) out."""

    def __init__(self, config: IdentifiableDecoderConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.layers = nn.ModuleList([IdentifiableDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    def rotations(self, position_ids: Tensor, x: Tensor) -> tuple[Rotation, Rotation] | None:
        """For queries and keys, and for values. A tied key is turned as the part of the value that it is made from."""
        config = self.config
        if config.position_embedding_type != "rope":
            return None
        theta = float(config.rope_theta)
        values = rotation(position_ids, config.rotary_size(config.value_size), theta, x)
        if config.keys == "free":
            return rotation(position_ids, config.rotary_size(config.key_size), theta, x), values
        pairs = config.key_size // 2
        return (values[0][..., :pairs], values[1][..., :pairs]), values

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """`attention_mask` (b, n) is 1 at real tokens; padding may stand on either side."""
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give either input_ids or inputs_embeds, and not both.")
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(past, past + x.shape[1], device=x.device)[None]
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=past_key_values,
            position_ids=position_ids,
        )  # fmt: skip
        rotations = self.rotations(position_ids, x)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, rotations=rotations, past_key_values=past_key_values, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.final_norm(x), past_key_values=past_key_values)


class IdentifiableForCausalLM(IdentifiableDecoderPreTrainedModel, GenerationMixin):
    """The decoder with a language-model head, for `generate`, `Trainer` and `AutoModelForCausalLM`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: IdentifiableDecoderConfig) -> None:
        super().__init__(config)
        self.model = IdentifiableDecoderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (b, n, vocab_size), and with `labels` (b, n) the mean cross-entropy of the next token."""
        outputs = self.model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values,
            inputs_embeds=inputs_embeds, use_cache=use_cache, return_dict=True, **kwargs,
        )  # fmt: skip
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss: Any = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


AutoConfig.register("identifiable_decoder", IdentifiableDecoderConfig, exist_ok=True)
AutoModel.register(IdentifiableDecoderConfig, IdentifiableDecoderModel, exist_ok=True)
AutoModelForCausalLM.register(IdentifiableDecoderConfig, IdentifiableForCausalLM, exist_ok=True)
