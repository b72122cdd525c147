"""Models published as torch pickles, converted once: weights read with `weights_only=True`, tokenizers made from vocabularies.

Nothing of the packages they come in is imported or run. Each function has the form of `foreign_weights.CONVERTERS`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from whence.errors import ModelError
from whence.model.catalogue import EmbeddedModel

# Atoms, bonds, branches, rings and the arrow of a reaction SMILES, as RXNMapper's vocabulary has them.
SMILES = r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
RESIDUE = r"[A-Z]"


def read_pickle(path: Path) -> dict[str, Any]:
    """The tensors of a torch file; nothing else in it is given a chance to run."""
    import torch

    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content


def filled(model: Any, weights: Mapping[str, Any], unused: str) -> Any:
    """The model with these weights; refused if any is missing, or left over and not said to be unused."""
    wanted = {name: weights[name].float() for name in model.state_dict() if name in weights}
    missing, _ = model.load_state_dict(wanted, strict=False)
    tied = {name for name in missing if name.endswith(("decoder.weight", "decoder.bias", "proj_out.weight"))}
    model.tie_weights()
    left = [name for name in weights if name not in wanted and not re.search(unused, name)]
    if set(missing) - tied or left:
        raise ModelError(f"{type(model).__name__} wants {sorted(set(missing) - tied)} and has no use for {left}.")
    return model.eval()


def word_tokenizer(vocabulary: Sequence[str], pattern: str) -> Any:
    """A tokenizer whose tokens are the words of a vocabulary that a pattern finds, with BERT's special tokens."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Sequence as Steps
    from tokenizers.pre_tokenizers import Split, WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    numbers = {word: i for i, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Steps([WhitespaceSplit(), Split(Regex(pattern), "isolated")])
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, numbers[name]) for name in ("[CLS]", "[SEP]")],
    )
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def from_rxnmapper(_entry: EmbeddedModel, folder: Path, into: Path) -> None:
    """RXNMapper's ALBERT with its masked-language head and a tokenizer of reaction SMILES."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
    model = filled(AlbertForMaskedLM(config), read_pickle(folder / "pytorch_model.bin"), r"\.pooler\.")
    model.save_pretrained(into)
    words = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
    word_tokenizer([w for w in words if w], SMILES).save_pretrained(into)


def from_antiberty(_entry: EmbeddedModel, folder: Path, into: Path) -> None:
    """AntiBERTy's BERT with its masked-language head (species and chain heads left out); one token a residue."""
    from transformers import BertConfig, BertForMaskedLM

    part = folder / "AntiBERTy_md_smooth"
    config = BertConfig(**json.loads((part / "config.json").read_text(encoding="utf-8")))
    unused = r"\.pooler\.|position_ids|cls\.(species|chain|graft)"
    filled(BertForMaskedLM(config), read_pickle(part / "pytorch_model.bin"), unused).save_pretrained(into)
    words = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
    word_tokenizer([w.strip() for w in words if w.strip()], RESIDUE).save_pretrained(into)


# OpenAI's names of the parts of a Whisper model, and those of transformers.
_WHISPER_NAMES = (
    (".blocks.", ".layers."),
    (".mlp.0.", ".fc1."),
    (".mlp.2.", ".fc2."),
    (".mlp_ln.", ".final_layer_norm."),
    (".cross_attn_ln.", ".encoder_attn_layer_norm."),
    (".attn_ln.", ".self_attn_layer_norm."),
    (".cross_attn.", ".encoder_attn."),
    (".attn.", ".self_attn."),
    (".query.", ".q_proj."),
    (".key.", ".k_proj."),
    (".value.", ".v_proj."),
    (".out.", ".out_proj."),
    ("decoder.ln.", "decoder.layer_norm."),
    ("encoder.ln_post.", "encoder.layer_norm."),
    ("token_embedding.", "embed_tokens."),
    ("positional_embedding", "embed_positions.weight"),
)
# Which cross-attention heads follow the sound: published by OpenAI with the model, as (layer, head).
TINY_EN_ALIGNMENT = ((1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4))
_TEXT = 50256  # the vocabulary of text; <|endoftext|> is the first special token
_LANGUAGES = 99


def from_whisper(_entry: EmbeddedModel, folder: Path, into: Path) -> None:
    """OpenAI's Whisper tiny.en as a transformers model, with tokenizer, feature extractor and alignment heads."""
    from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    from whence.model.cache import locate

    saved = read_pickle(folder / "tiny.en.pt")
    dims = saved["dims"]
    start, quiet = _TEXT + 1, _TEXT + 1 + _LANGUAGES + 6
    config = WhisperConfig(
        vocab_size=dims["n_vocab"],
        num_mel_bins=dims["n_mels"],
        d_model=dims["n_text_state"],
        encoder_layers=dims["n_audio_layer"],
        encoder_attention_heads=dims["n_audio_head"],
        decoder_layers=dims["n_text_layer"],
        decoder_attention_heads=dims["n_text_head"],
        encoder_ffn_dim=4 * dims["n_audio_state"],
        decoder_ffn_dim=4 * dims["n_text_state"],
        max_source_positions=dims["n_audio_ctx"],
        max_target_positions=dims["n_text_ctx"],
        decoder_start_token_id=start,
        bos_token_id=_TEXT,
        eos_token_id=_TEXT,
        pad_token_id=_TEXT,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    weights = {}
    for name, tensor in saved["model_state_dict"].items():
        for theirs, ours in _WHISPER_NAMES:
            name = name.replace(theirs, ours)
        weights[f"model.{name}"] = tensor
    model = filled(WhisperForConditionalGeneration(config), weights, r"^$")
    model.generation_config = GenerationConfig(
        decoder_start_token_id=start,
        bos_token_id=_TEXT,
        eos_token_id=_TEXT,
        pad_token_id=_TEXT,
        no_timestamps_token_id=quiet,
        is_multilingual=False,
        alignment_heads=[list(pair) for pair in TINY_EN_ALIGNMENT],
        begin_suppress_tokens=[220, _TEXT],  # not a space, not the end, to begin with
        max_length=dims["n_text_ctx"],
        max_initial_timestamp_index=50,
        return_timestamps=False,
    )
    model.save_pretrained(into)
    WhisperFeatureExtractor(feature_size=dims["n_mels"]).save_pretrained(into)
    ranks = (locate("gpt2-bpe") / "gpt2.tiktoken").read_text(encoding="ascii")
    _whisper_tokenizer(ranks, dims["n_vocab"]).save_pretrained(into)


def byte_pairs(ranks: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A tiktoken list of ranks as GPT-2's vocabulary and merges, bytes written as GPT-2 writes them.

    A token's merge is the last step of byte-pair encoding its own bytes with the merges of lower rank.
    """
    letters = {b: chr(b) for b in [*range(33, 127), *range(161, 173), *range(174, 256)]}
    letters |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in letters)}
    rank = {
        base64.b64decode(token): int(number) for token, number in (line.split() for line in ranks.split("\n") if line)
    }

    def written(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    merges = []
    for token, limit in sorted(rank.items(), key=lambda pair: pair[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [rank.get(a + b, limit) for a, b in pairwise(parts)]
            i = pairs.index(min(pairs))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append((written(parts[0]), written(parts[1])))
    return {written(token): number for token, number in rank.items()}, merges


def _whisper_tokenizer(ranks: str, size: int) -> Any:
    """GPT-2's byte pairs and Whisper's special tokens, as many as the model has embeddings for."""
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    vocabulary, merges = byte_pairs(ranks)
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tasks = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
    names = ["endoftext", "startoftranscript", *list(LANGUAGES)[:_LANGUAGES], *tasks]
    special = [f"<|{name}|>" for name in names]
    times = [f"<|{i * 0.02:.2f}|>" for i in range(size - len(vocabulary) - len(special))]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special + times])
    number = tokenizer.token_to_id
    tokenizer.post_processor = TemplateProcessing(
        single="<|startoftranscript|> <|notimestamps|> $A <|endoftext|>",
        special_tokens=[(n, number(n)) for n in ("<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>")],
    )
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end, pad_token=end
    )
