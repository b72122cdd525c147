"""The identifiable transformer: an encoder whose attention weights are the only ones that give its output.

Read from top to bottom. Shapes: b batch, n tokens, d hidden_size, h heads, k key_size, v value_size.

    A = softmax(Q Kᵀ / √k + mask [+ position bias])        (b, h, n, n)
    Z = A V                                                (b, h, n, v)
    block output = concat_h(Z_h) W_O + b_O                  heads="concat", W_O (h·v, d)
                 = (Σ_h Z_h) W_O + b_O                      heads="add",    W_O (v, d)
    K = x W_K + b_K  |  V M  |  V                           keys="free" | "tied" | "shared"

Why tied keys: if a and x are two softmax rows over the same keys with the same output, δ = x − a is orthogonal to
V and to 1, hence to K = V M; but log x − log a lies in the span of K and 1, so
KL(x‖a) + KL(a‖x) = δᵀ(log x − log a) = 0.
Bhardwaj et al., ACL 2021, for the model; the tied key goes further, at every length.
"""

# torch and transformers leave these functions without types.
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from whence.errors import InputError
from whence.identifiable.configuration_identifiable import IdentifiableConfig

if TYPE_CHECKING:
    from whence.identifiable.statement import Statement


class Embeddings(nn.Module):
    """Words, and positions where they are learned: (b, n) → (b, n, d)."""

    def __init__(self, config: IdentifiableConfig) -> None:
        super().__init__()
        self.limit = config.max_position_embeddings
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        learned = config.position_embedding_type == "learned"
        self.position_embeddings = nn.Embedding(self.limit, config.hidden_size) if learned else None
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, position_ids: Tensor | None) -> Tensor:
        x = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        n = x.shape[1]
        if n > self.limit:
            raise InputError(f"a text has {n} tokens and max_position_embeddings={self.limit}: truncate it.")
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(torch.arange(n, device=x.device) if position_ids is None else position_ids)
        out: Tensor = self.dropout(self.LayerNorm(x))
        return out


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,  # (b, h, n, k)
    key: Tensor,  # (b, h, n, k)
    value: Tensor,  # (b, h, n, v)
    attention_mask: Tensor | None,  # additive, broadcastable to (b, h, n, n)
    scaling: float,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,  # (1, h, n, n)
    **kwargs: Any,  # noqa: ARG001 (transformers hands every implementation the same arguments)
) -> tuple[Tensor, Tensor]:
    """Attention written out; transformers' sdpa gives the same numbers faster."""
    scores = query @ key.transpose(-1, -2) * scaling
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights  # (b, n, h, v), (b, h, n, n)


class IdentifiableAttention(nn.Module):
    """Multi-head attention with free, tied or shared keys and concatenated or added heads."""

    def __init__(self, config: IdentifiableConfig) -> None:
        super().__init__()
        assert config.key_size is not None
        assert config.value_size is not None
        d, h, k, v = config.hidden_size, config.num_attention_heads, config.key_size, config.value_size
        self.config, self.sizes = config, (h, k, v)
        self.scaling = k**-0.5  # by the key's size: the scores are sums over k products
        self.is_causal = False
        self.value = nn.Linear(d, h * v)
        if config.attention == "softmax":
            self.query = nn.Linear(d, h * k)
            if config.keys == "free":
                self.key = nn.Linear(d, h * k)
            elif config.keys == "tied":
                self.mixing = nn.Parameter(torch.empty(h, v, k))  # M
            if config.position_embedding_type == "bias":
                self.distance_bias = nn.Embedding(2 * config.relative_distance + 1, h)
        self.output = nn.Linear(v if config.heads == "add" else h * v, d)

    def split(self, x: Tensor, size: int) -> Tensor:
        """(b, n, h · size) → (b, h, n, size)"""
        heads: Tensor = x.unflatten(-1, (-1, size)).transpose(1, 2)
        return heads

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Any]:
        _h, k, v = self.sizes
        value = self.split(self.value(hidden_states), v)
        if self.config.attention == "uniform":  # equal scores: softmax then shares equally among the visible keys
            key = query = value.new_zeros(*value.shape[:-1], k)
        else:
            query = self.split(self.query(hidden_states), k)
            if self.config.keys == "free":
                key = self.split(self.key(hidden_states), k)
            else:
                key = value @ self.mixing if self.config.keys == "tied" else value
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        bias = self.position_bias(hidden_states.shape[1]) if hasattr(self, "distance_bias") else None
        heads, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, position_bias=bias, **kwargs
        )
        mixed = heads.sum(dim=2) if self.config.heads == "add" else heads.flatten(2)  # (b, n, v) or (b, n, h·v)
        return self.output(mixed), weights

    def position_bias(self, n: int) -> Tensor:
        """A number per head and distance, the same for every query vector: (1, h, n, n)."""
        at = torch.arange(n, device=self.distance_bias.weight.device)
        reach = self.config.relative_distance
        distance = (at[None, :] - at[:, None]).clamp(-reach, reach) + reach
        bias: Tensor = self.distance_bias(distance)
        return bias.permute(2, 0, 1)[None]


class IdentifiableLayer(nn.Module):
    """Attention and a feed-forward network, each with its residual and its norm before or after."""

    def __init__(self, config: IdentifiableConfig) -> None:
        super().__init__()
        self.pre = config.norm == "pre"
        self.attention = IdentifiableAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.output_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.down(self.activation(self.intermediate(x))))
        return out

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        if self.pre:
            x = x + self.dropout(self.attention(self.attention_norm(x), attention_mask, **kwargs)[0])
            return x + self.feed_forward(self.output_norm(x))
        x = self.attention_norm(x + self.dropout(self.attention(x, attention_mask, **kwargs)[0]))
        out: Tensor = self.output_norm(x + self.feed_forward(x))
        return out


class IdentifiablePreTrainedModel(PreTrainedModel):
    """What both models share: their configuration, initialisation and the statement of what is unique."""

    config_class = IdentifiableConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ["IdentifiableLayer"]  # noqa: RUF012 (transformers declares it so)
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": IdentifiableLayer,
        "attentions": IdentifiableAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, IdentifiableAttention):
            if hasattr(module, "mixing"):  # near the identity: at first a key is its value, or a part of it
                _, k, v = module.sizes
                init.normal_(module.mixing, 0.0, self.config.initializer_range)
                init.copy_(module.mixing, module.mixing + torch.eye(v, k, device=module.mixing.device))
            if hasattr(module, "distance_bias"):
                init.zeros_(module.distance_bias.weight)

    def identifiability_statement(self) -> Statement:
        """What is unique about this model's attention, given what, up to which length, and why: from the weights."""
        from whence.identifiable.statement import statement

        return statement(self)


class IdentifiableModel(IdentifiablePreTrainedModel):
    """The encoder: ids or embeddings in, hidden states (b, n, d) out."""

    def __init__(self, config: IdentifiableConfig) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList([IdentifiableLayer(config) for _ in range(config.num_hidden_layers)])
        pre = config.norm == "pre"
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if pre else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        assert isinstance(value, nn.Embedding)
        self.embeddings.word_embeddings = value

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """`attention_mask` (b, n) is 1 at real tokens; padding is never attended to."""
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give either input_ids or inputs_embeds, and not both.")
        x = self.embeddings(input_ids, inputs_embeds, position_ids)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=x, attention_mask=attention_mask)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, **kwargs)
        return BaseModelOutput(last_hidden_state=x if self.final_norm is None else self.final_norm(x))


class IdentifiableForSequenceClassification(IdentifiablePreTrainedModel):
    """The encoder with a linear classifier on its first token (or on the mean of its tokens)."""

    def __init__(self, config: IdentifiableConfig) -> None:
        super().__init__(config)
        self.num_labels = int(config.num_labels or 2)
        self.model = IdentifiableModel(config)
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(rate)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits (b, num_labels), and with `labels` (b,) the mean cross-entropy."""
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        states = outputs.last_hidden_state
        if self.config.classifier_pooling == "cls":
            pooled = states[:, 0]
        else:
            real = torch.ones(states.shape[:2]) if attention_mask is None else attention_mask
            real = real.to(states)[..., None]
            pooled = (states * real).sum(1) / real.sum(1)
        logits = self.classifier(self.dropout(pooled))
        loss: Any = None if labels is None else nn.functional.cross_entropy(logits, labels.view(-1))
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


AutoConfig.register("identifiable", IdentifiableConfig, exist_ok=True)
AutoModel.register(IdentifiableConfig, IdentifiableModel, exist_ok=True)
AutoModelForSequenceClassification.register(IdentifiableConfig, IdentifiableForSequenceClassification, exist_ok=True)
