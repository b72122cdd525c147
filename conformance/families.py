"""Which families there are: every text model type of transformers' auto-mappings, once each."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

from conformance.overrides import NOT_ALONE

CAUSAL, SEQ2SEQ, MASKED, BASE = "CausalLM", "Seq2SeqLM", "MaskedLM", "base"
_MAPPINGS: dict[str, Mapping[str, str | Sequence[str]]] = {
    CAUSAL: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    SEQ2SEQ: modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MASKED: modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    BASE: modeling_auto.MODEL_MAPPING_NAMES,
}

# Text models that only AutoModel reaches: their forward takes input_ids and can do without an image. An older
# transformers lacks some of them.
TEXT_BASES = [
    "bros", "canine", "clip_text_model", "cosmos3_edge_text", "dpr", "embedding_gemma2_text",
    "glm4v_moe_text", "glm4v_text", "glm5_next_text", "glm_image_text", "glm_ocr_text", "hunyuan_vl_text",
    "layoutlmv3", "lilt", "markuplm", "mistral4", "mistral_large4_text", "molmo2_text",
    "muse_glimmer_text", "muse_spark_text", "openai_privacy_filter", "qwen2_5_vl_text", "qwen2_vl_text",
    "qwen3_vl_moe_text", "qwen3_vl_text", "sam3_lite_text_text_model", "splinter", "t5gemma2_encoder",
    "tipsv2_text_model", "udop", "visual_bert", "voxtral_realtime_text",
]  # fmt: skip
VISION = ["vit", "deit", "beit", "clip_vision_model", "dinov2"]
SPEECH = ["whisper"]


@dataclass(frozen=True)
class Family:
    """One model type and the class that stands for it; `skip` says why it is not built, where it is not."""

    name: str
    model_type: str
    head: str
    class_name: str
    kind: str = "text"
    skip: str | None = None

    def model_class(self) -> type[PreTrainedModel]:
        """The modelling class, imported on demand."""
        folder = model_type_to_module_name(self.model_type)
        found = getattr(importlib.import_module("transformers"), self.class_name, None)
        if found is None:  # in the auto-mapping but not exported
            module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
            found = getattr(module, self.class_name)
        return found  # type: ignore[no-any-return]

    def config_class(self) -> type[PretrainedConfig]:
        """The config the class itself asks for: often the text part of the family's config."""
        own: type[PretrainedConfig] | None = self.model_class().config_class
        mapped: type[PretrainedConfig] = CONFIG_MAPPING[self.model_type]
        return mapped if own is None or mapped in getattr(own, "sub_configs", {}).values() else own


def _class_name(head: str, model_type: str) -> str:
    entry = _MAPPINGS[head][model_type]
    return entry if isinstance(entry, str) else entry[0]


def _native_head(model_type: str) -> str:
    """The first of CausalLM, Seq2SeqLM, MaskedLM, base that has it, unless the family is by nature another.

    BART is also offered as a bare decoder and BERT as a left-to-right model; a reader is proved on what
    people run, so an encoder-decoder takes its Seq2SeqLM head, and a family with a MaskedLM head that is not
    a decoder takes that. `variants()` lists the passed-over causal heads.
    """
    offered = [head for head in (CAUSAL, SEQ2SEQ, MASKED, BASE) if model_type in _MAPPINGS[head]]
    if CAUSAL in offered and len(offered) > 1:
        fields = CONFIG_MAPPING[model_type]
        if SEQ2SEQ in offered and getattr(fields, "is_encoder_decoder", False):
            return SEQ2SEQ
        if MASKED in offered and not getattr(fields, "is_decoder", False):
            return SEQ2SEQ if SEQ2SEQ in offered else MASKED
    return offered[0]


def _kind(model_type: str) -> str:
    return "vision" if model_type in VISION else "speech" if model_type in SPEECH else "text"


def _duplicate_of(family: Family, listed: set[str]) -> str | None:
    """Why a multimodal wrapper is not built: its text part is a family of its own."""
    if family.model_type in NOT_ALONE:
        return NOT_ALONE[family.model_type]
    mapped = CONFIG_MAPPING[family.model_type]
    if mapped.model_type == family.model_type and not getattr(mapped, "sub_configs", {}):
        return None  # plainly its own; do not import the model to learn it
    try:
        config_class = family.config_class()
    except (ImportError, AttributeError):  # said again, in full, when it is built
        return None
    if config_class.model_type != family.model_type:
        if config_class.model_type in listed:
            return f"its head takes {config_class.__name__}, listed as {config_class.model_type}"
        return None
    text = getattr(config_class, "sub_configs", {}).get("text_config")
    if text is None:
        return None
    inner = getattr(_default(config_class), "text_config", None)
    if inner is not None and inner.model_type in listed:
        return f"multimodal wrapper; its text model is listed as {inner.model_type}"
    return None


def _default(config_class: type[PretrainedConfig]) -> PretrainedConfig | None:
    try:
        return config_class()
    except Exception:  # a config without usable defaults is judged when it is built, with its true error
        return None


@cache
def _families() -> tuple[Family, ...]:
    bases = [name for name in (*TEXT_BASES, *VISION) if name in _MAPPINGS[BASE]]
    types = dict.fromkeys([*_MAPPINGS[CAUSAL], *_MAPPINGS[SEQ2SEQ], *_MAPPINGS[MASKED], *bases])
    found = []
    for name in types:
        head = _native_head(name)
        family = Family(name, name, head, _class_name(head, name), _kind(name))
        if name in SPEECH:
            family = Family(name, name, SEQ2SEQ, "WhisperForConditionalGeneration", "speech")
        found.append(replace(family, skip=_duplicate_of(family, types.keys() - {name})))
    return tuple(sorted(found, key=lambda family: (family.kind, family.name)))


def families() -> list[Family]:
    """Every text family and a few of vision and speech, one per model type, sorted by kind and name."""
    return list(_families())


def variants() -> list[Family]:
    """The causal heads that `families` passed over for the native one: `bert:causal`, `bart:causal`, …"""
    return [
        Family(f"{family.name}:causal", family.model_type, CAUSAL, _class_name(CAUSAL, family.model_type))
        for family in families()
        if family.head in (SEQ2SEQ, MASKED) and family.model_type in _MAPPINGS[CAUSAL] and family.skip is None
    ]
