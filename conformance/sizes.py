"""The small sizes, by the name of the config field: what a field of that name becomes, in any family."""

from __future__ import annotations

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDE_HEAD_DIM = 64, 4, 2, 16, 24
VOCAB, POSITIONS, WINDOW = 120, 64, 5
FIRST_FREE_ID, LAST_FREE_ID = 6, 99  # ids 0-5 and 100-119 are special tokens; inputs are drawn from between

# A size, then the fields that take it (or keep their default, where that is smaller).
_TABLE = """
120  vocab_size src_vocab_size tgt_vocab_size decoder_vocab_size vocab_size_per_layer_input
     t2u_vocab_size char_vocab_size entity_vocab_size audio_vocab_size pronunciation_vocab_size
     shape_vocab_size encoder_hash_byte_group_vocab n_vocab
64   max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length
     max_encoder_position_embeddings max_decoder_position_embeddings max_source_positions
     max_target_positions t2u_max_position_embeddings max_2d_position_embeddings
     relative_attention_max_distance position_bias_max_distance relative_max_distance max_sequence_length
64   hidden_size d_model n_embd dim emb_dim embedding_size embedding_dim dim_model word_embed_proj_dim
     attention_hidden_size pooler_hidden_size backbone_hidden_size lru_width input_embedding_size
     output_embedding_size true_hidden_size intra_bottleneck_size prediction_head_size d_latents
     projection_dim projector_hidden_size embedding_rank text_hidden_size hidden_size_global
4    num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads
     decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads
     num_self_attention_heads num_cross_attention_heads t2u_encoder_attention_heads
     t2u_decoder_attention_heads speech_encoder_attention_heads swa_num_attention_heads num_query_groups
     linear_num_heads linear_num_value_heads encoder_num_attention_heads decoder_num_attention_heads
2    num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads
     encoder_num_key_value_heads decoder_num_key_value_heads num_global_key_value_heads
96   intermediate_size n_inner dff dim_ff d_ff d_inner ffn_dim encoder_ffn_dim decoder_ffn_dim hidden_dim
     ffn_hidden_size feed_forward_size intermediate_size_mlp dense_intermediate_size t2u_encoder_ffn_dim
     t2u_decoder_ffn_dim speech_encoder_intermediate_size inner_dim
48   moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
     shared_intermediate_size moe_shared_expert_intermediate_size
4    num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num
2    num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k hc_mult hc_count n_group
     num_expert_group altup_num_inputs
2    num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
     num_decoder_layers t2u_encoder_layers t2u_decoder_layers speech_encoder_layers num_blocks
     num_self_attends_per_block num_layers_per_stack max_window_layers
1    topk_group n_shared_experts num_shared_experts moe_num_shared_experts num_nextn_predict_layers
     num_dense_layers first_k_dense_replace mamba_n_groups n_groups mamba_ngroups
16   d_kv d_head dim_head kv_channels attention_head_size attention_head_dim swa_head_dim linear_head_dim
     linear_key_head_dim global_head_dim hidden_size_per_layer_input laurel_rank router_hidden_size
     hc_lowrank index_head_dim q_lora_rank qk_nope_head_dim mamba_d_state state_size ssm_state_size
     mamba_d_head mamba_headdim mamba_head_dim time_step_rank mamba_dt_rank segment_means_seq_len
     adapter_rank mlp_head_dim o_lora_rank entity_emb_size lang_embed_dim spkr_embed_dim
20   kv_lora_rank
12   v_head_dim
8    qk_rope_head_dim gated_norm_rank rotary_dim d_rel chunk_size mamba_chunk_size linear_value_head_dim
     relative_attention_num_buckets num_buckets position_bias_num_buckets
5    sliding_window sliding_window_size window_size attention_window_size attention_chunk_size
     swa_window_size
10   local_attention
6    index_topk
4    mamba_d_conv conv_kernel linear_conv_kernel_dim index_n_heads
"""


def _parsed(table: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    size = 0
    for line in table.strip().splitlines():
        words = line.split()
        if words[0].isdigit():
            size = int(words.pop(0))
        sizes |= dict.fromkeys(words, size)
    return sizes


SIZES = _parsed(_TABLE)

# Scalars that sit at 1 by default and would hide a mistake: give them a value that shows.
SCALARS: dict[str, float] = {
    "attention_in_multiplier": 0.9,
    "attention_multiplier": 0.35,
    "attention_out_multiplier": 0.8,
    "embedding_multiplier": 1.3,
    "key_multiplier": 0.7,
    "lm_head_multiplier": 0.8,
    "logits_scaling": 1.7,
    "query_pre_attn_scalar": HEAD_DIM,
    "residual_multiplier": 0.7,
}

# Special tokens every tokenizer has; any other `*_token_id` gets an id of its own above LAST_FREE_ID.
TOKEN_IDS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_bos_token_id": 1,
    "forced_eos_token_id": 2,
    "sep_token_id": 3,
    "unk_token_id": 3,
    "cls_token_id": 4,
    "mask_token_id": 5,
}
