"""What the generic shrinking cannot guess, family by family. Read it as a list of remarks.

Each entry wins over the shrunken value; a sub-config's name holds overrides for that sub-config.
"""

from __future__ import annotations

from typing import Any

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
# Half of a 16-wide head, shared out between time, height and width (and depth).
_MROPE = {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}}
_MROPE_4 = {"rope_parameters": _ROPE | {"mrope_section": [2, 2, 2, 2]}}
_WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "layer_types": [FULL, SLIDING]}
_PLAIN_HEADS = {"num_key_value_heads": 4}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16}  # heads x size = expand x width
_ZAMBA = {"num_hidden_layers": 4, "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"],
          "num_key_value_heads": 4, "attention_hidden_size": 128, "attention_head_dim": 32}  # fmt: skip

OVERRIDES: dict[str, dict[str, Any]] = {
    # -- layer patterns that are not lists in the config, or whose default shows one kind only
    "bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "granitemoehybrid": _MAMBA2 | {"layer_types": [LINEAR, FULL]},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 128},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA | {"num_mem_blocks": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "lfm2": {"layer_types": ["conv", FULL], "full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", FULL], "num_dense_layers": 1},
    "gemma3n_text": {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL],
                     "num_kv_shared_layers": 2, "intermediate_size": [96] * 4,
                     "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "cohere_compass_text": {"layer_types": [SLIDING, FULL], "rope_parameters": {SLIDING: _ROPE, FULL: _ROPE}},
    "dots1": {"layer_types": [SLIDING, FULL], "first_k_dense_replace": 1, "n_routed_experts": 4,
              "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ministral": {"layer_types": [SLIDING, FULL], "head_dim": 16},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mllama": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "qwen2": _WINDOWED,
    "qwen3": _WINDOWED,
    "laguna": {"layer_types": [FULL, SLIDING], "num_attention_heads_per_layer": [4, 6]},
    "mellum": {"layer_types": [FULL, SLIDING]},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 5, "num_experts_per_tok": 1},
    "minimax_m3_vl_text": {"layer_types": [FULL, "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"],
                           "index_block_size": 2, "index_topk_blocks": 3},
    "deepseek_v4": {"head_dim": 16, "qk_rope_head_dim": 8, "o_groups": 2,
                    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
    "sam3_lite_text_text_model": {"num_hidden_layers": 3},  # its first and last layers are convolutions
    "inkling_text": {"logits_mup_width_multiplier": 2.0, "rel_extent": 8, "log_scaling_n_floor": 4},
    "encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "minicpm3": {"scale_emb": 1.5, "dim_model_base": 48},
    # -- heads: no default, or no grouping allowed
    "esmc": _PLAIN_HEADS | {"vocab_size": 120},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "hunyuan_vl_text": {"head_dim": 16} | _MROPE_4,
    "nemotron": {"num_key_value_heads": 2},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "mistral4": {"qk_nope_head_dim": 8, "head_dim": 16},  # rotates half of head_dim
    "glm5_next_text": {"index_kpool": 2},
    # -- rotary sections without a default
    "glm4v_text": _MROPE,
    "glm_image_text": _MROPE,
    "glm_ocr_text": _MROPE,
    "qwen2_vl_text": _MROPE,
    "qwen2_5_vl_text": _MROPE,
    "glm4v_moe_text": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
             "ffn_config": {"moe_top_k": 2}},
    # -- sizes that must agree with each other
    "esm": {"vocab_size": 120, "pad_token_id": 0, "mask_token_id": 5, "position_embedding_type": "rotary"},
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8, "visual_embed": False},
    "lilt": {"hidden_size": 96},  # a multiple of 6 for the boxes and of 4 x 4 for the narrow layout stream
    "led": {"attention_window": 4},
    "longformer": {"attention_window": 4},
    "mpnet": {"relative_attention_num_buckets": 32},  # the buckets are written into the code
    "nystromformer": {"num_landmarks": 4, "segment_means_seq_len": 12, "conv_kernel_size": 3},
    "reformer": {"axial_pos_shape": (8, 8), "axial_pos_embds_dim": (32, 32), "num_buckets": 4, "hash_seed": 0,
                 "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 24,
                       "indexer_budget": 6, "indexer_compress_ratio": 2},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0, "attn_logit_softcapping": None}},
    "blt": {"patching_threshold": 4.3},  # some patches of several bytes: its patcher is near log 120
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip

# Families that do not stand alone: built, they could only be run on another model's tensors.
NOT_ALONE: dict[str, str] = {
    "gemma4_assistant": "a drafting head: its forward needs the shared keys and values of a gemma4 model",
    "gemma4_unified_assistant": "a drafting head: its forward needs the keys and values of another model",
}

# True of the specimen, and worth saying beside whatever the reader makes of it.
NOTES: dict[str, str] = {
    "big_bird": "short input: block-sparse attention falls back to full attention",
    "bigbird_pegasus": "short input: block-sparse attention falls back to full attention",
    "falcon_mamba": "no attention: selective state space",
    "fnet": "no attention: Fourier mixing",
    "led": "the encoder's attention is banded (window 4), without global tokens",
    "longformer": "banded attention (window 4), without global tokens",
    "mamba": "no attention: selective state space",
    "mamba2": "no attention: selective state space",
    "mra": "without its CUDA kernel transformers returns zeros for the attention",
    "nystromformer": "approximate attention: a product of three softmax matrices over 4 landmarks",
    "reformer": "local and hashed attention in chunks of 4; hash seed fixed",
    "rwkv": "no attention: weighted key-value recurrence",
    "xlstm": "no attention: matrix memory recurrence",
    "yoso": "no softmax: the expectation of a Bernoulli sampling of hash collisions",
}
