"""From what the user gives (a text, texts, an image, ready tensors) to one model input per sequence, unpadded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from whence.errors import InputError
from whence.model.load import Model
from whence.reading.datasets import dataset_texts, is_dataset
from whence.reading.texts import Texts
from whence.reading.tokenised import check_ids, label_ids, position_limit, quoted, tokens_of, warn_of_unknown
from whence.results.labels import Tokens

GENERATE = 32  # how many tokens an encoder–decoder writes when no target is given


@dataclass(frozen=True)
class Prepared:
    """One sequence as the model takes it (batch of one, no padding), with its tokens."""

    inputs: dict[str, Tensor]
    tokens: Tokens | None
    target_tokens: Tokens | None = None
    text: str | None = None
    text_pair: str | None = None
    target: str | None = None
    given: Mapping[str, Tensor] | None = None  # the batch of ready tensors this sequence came in, where it was changed
    row: int = 0  # its row there
    prompt_length: int | None = None  # how many of the tokens are the prompt, where a continuation follows

    @property
    def shown(self) -> Tensor | None:
        """The positions that a mask among the inputs leaves to be seen; None where it hides none."""
        mask = self.inputs.get("attention_mask")
        if mask is None or mask.dim() != 2 or mask.shape[0] != 1 or bool(mask.bool().all()):
            return None
        return mask[0].bool().nonzero()[:, 0]

    @property
    def length(self) -> int:
        ids = self.inputs.get("input_ids")
        return 0 if ids is None else ids.shape[1]


def prepare(
    model: Model, text: Any, text_pair: Any = None, target: Any = None, *, truncate: bool = False, special: bool = True,
    max_new_tokens: int | None = None,
) -> tuple[list[Prepared], bool]:  # fmt: skip
    """Every sequence given, and whether it was a single one (so that a single trace goes back).

    special: add special tokens to texts (a chat template has written them already). max_new_tokens: how many an
    encoder–decoder writes when there is no target.
    """
    options = TextOptions(truncate, special, max_new_tokens)
    if isinstance(text, Prepared):
        return [text], True
    if is_dataset(text):
        text = dataset_texts(text)
    if isinstance(text, Texts):
        text = [pair if len(pair) == 2 else pair[0] for pair in text.sequences]
    if _is_pair(text) and text_pair is None:
        text, text_pair = text
    if isinstance(text, str):
        return [_from_text(model, text, text_pair, target, options)], True
    if isinstance(text, list) and text and all(_is_pair(t) for t in text) and text_pair is None:
        text, text_pair = [t[0] for t in text], [t[1] for t in text]
    if isinstance(text, Mapping) or hasattr(text, "input_ids"):
        if _is_ragged(text):
            rows = [{k: [v[i]] for k, v in dict(text).items()} for i in range(len(text["input_ids"]))]
            return [_from_tensors(model, row, target)[0][0] for row in rows], False
        return _from_tensors(model, text, target)
    if isinstance(text, Tensor) and not text.is_floating_point():
        return _from_tensors(model, {"input_ids": text if text.dim() == 2 else text[None]}, target)
    if isinstance(text, Sequence) and text and all(isinstance(t, str) for t in text):
        pairs = _one_each("text_pair", text_pair, len(text))
        targets = _one_each("target", target, len(text))
        return [_from_text(model, t, p, g, options) for t, p, g in zip(text, pairs, targets, strict=True)], False
    if isinstance(text, Sequence) and text and all(isinstance(t, int) for t in text):
        return _from_tensors(model, {"input_ids": torch.tensor([list(text)])}, target)
    if isinstance(text, Sequence) and not isinstance(text, str) and len(text) == 0:
        raise InputError("an empty list was given: there is nothing to trace. Give at least one text.")
    if model.processor is not None:
        return _from_processor(model, text, target), not isinstance(text, (list, tuple))
    raise InputError(
        f"a {type(text).__name__} cannot be traced: give a text, a list of texts, token ids, or a dict of ready "
        "tensors (input_ids, pixel_values, …)."
    )


@dataclass(frozen=True)
class TextOptions:
    """How texts are read; see `prepare`."""

    truncate: bool = False
    special: bool = True
    max_new_tokens: int | None = None


def _is_pair(text: Any) -> bool:
    return isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)


def _is_ragged(given: Any) -> bool:
    """Whether these are lists of ids of different lengths: what a tokenizer gives for several texts unless told to pad."""
    ids = dict(given).get("input_ids")
    return isinstance(ids, list) and len({len(row) for row in ids if isinstance(row, list)}) > 1


def _one_each(name: str, given: Any, n: int) -> Sequence[Any]:
    if given is None or isinstance(given, str):
        return [given] * n
    if len(given) != n:
        raise InputError(f"{name} has {len(given)} entries for {n} texts: give one for each, or a single one for all.")
    return list(given)


def _from_text(model: Model, text: str, pair: str | None, target: Any, options: TextOptions) -> Prepared:
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InputError(
            f"{model.name} came without a tokenizer, and none is found by its name, so the text {quoted(text)} cannot be "
            "read. Give one: whence.Model(model, tokenizer), or give ready tensors: {'input_ids': …}."
        )
    if not text.strip():
        raise InputError(f"the text {quoted(text)} is empty: there is nothing to trace. Give at least one word.")
    if pair is not None and not isinstance(pair, str):
        raise InputError(f"text_pair is a {type(pair).__name__}; with one text it must be one text.")
    limit = position_limit(model.model)
    encoded = tokenizer(
        text,
        pair,
        return_tensors="pt",
        add_special_tokens=options.special,
        truncation=options.truncate and limit is not None,
        max_length=limit if options.truncate else None,
    )
    length = encoded["input_ids"].shape[1]
    if limit is not None and length > limit:
        raise InputError(
            f"the text {quoted(text)} has {length} tokens and {model.name} has positions for {limit}. Shorten it, or "
            "pass truncate=True (--truncate) to use its first part."
        )
    tokens = tokens_of(tokenizer, encoded, 0, text, pair)
    if length == 0 or all(tokens.special):
        raise InputError(f"the text {quoted(text)} gives no tokens besides special ones: there is nothing to trace.")
    keep = {name: value for name, value in encoded.items() if isinstance(value, Tensor)}
    check_ids(model, keep["input_ids"])
    warn_of_unknown(model, tokens, text)
    prepared = Prepared(keep, tokens, None, text, pair)
    return _with_target(model, prepared, target, options.max_new_tokens)


def _with_target(model: Model, prepared: Prepared, target: Any, max_new_tokens: int | None = None) -> Prepared:
    """For encoder–decoders: what the decoder reads. None: what the model itself writes, greedily."""
    if not getattr(getattr(model.model, "config", None), "is_encoder_decoder", False):
        if target is not None:
            raise InputError(f"{model.name} is no encoder–decoder, so it takes no target; the text alone is enough.")
        return prepared
    if "decoder_input_ids" in prepared.inputs:
        return prepared
    config = model.model.config
    if isinstance(target, str):
        if model.tokenizer is None:
            raise InputError("a target text needs a tokenizer: give target token ids instead.")
        ids = model.tokenizer(text_target=target, return_tensors="pt")["input_ids"]
        start = config.decoder_start_token_id
        if start is not None and int(ids[0, 0]) != start:
            ids = torch.cat(
                [torch.tensor([[start]]), ids[:, :-1] if int(ids[0, -1]) == config.eos_token_id else ids], dim=1
            )
    elif target is not None:
        ids = torch.as_tensor(target).reshape(1, -1)
    elif _can_generate(model.model):
        from whence.reading.capture.untouched import evaluating

        with evaluating(model.model):
            given = {k: v.to(model.device) for k, v in prepared.inputs.items()}
            ids = model.model.generate(
                **given, do_sample=False, num_beams=1, max_new_tokens=max_new_tokens or GENERATE
            ).cpu()
    else:
        return prepared  # the model itself derives what its decoder reads (sequence classification in BART)
    check_ids(model, ids)
    inputs = {**prepared.inputs, "decoder_input_ids": ids}
    tokens = label_ids(model, ids[0])
    return replace(prepared, inputs=inputs, target_tokens=tokens, target=target if isinstance(target, str) else None)


def _can_generate(model: nn.Module) -> bool:
    can = getattr(model, "can_generate", None)
    return bool(can()) if callable(can) else False


def _from_tensors(model: Model, given: Any, target: Any) -> tuple[list[Prepared], bool]:
    """Ready tensors: one sequence per row. Padding on the right is removed by the mask; any other input stays whole.

    Positions are counted by the model, so tokens before or between others cannot be taken out without moving the rest.
    """
    encodings = given
    tensors: dict[str, Tensor] = {}
    for name, value in dict(given).items():
        if value is None:
            continue
        try:
            tensors[name] = value if isinstance(value, Tensor) else torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise InputError(f"the input {name!r} is no tensor and cannot be made one: {problem}") from None
    if not tensors:
        raise InputError("no tensor was given: a dict of ready inputs needs at least input_ids or pixel_values.")
    tensors = {n: t[None] if n.endswith("ids") and t.dim() == 1 else t for n, t in tensors.items()}
    if (
        labels := tensors.pop("labels", None)
    ) is not None:  # only the loss is made of them, and in some a decoder's input
        shifted = getattr(model.model, "prepare_decoder_input_ids_from_labels", None)
        if shifted is not None and not {"decoder_input_ids", "decoder_inputs_embeds"} & set(tensors):
            tensors["decoder_input_ids"] = shifted(labels)
    mask = tensors.pop("attention_mask", None)
    target_mask = tensors.pop("decoder_attention_mask", None)
    if mask is not None and mask.dim() == 1:
        mask = mask[None]
    many = max((t.shape[0] for t in tensors.values()), default=1)
    if mask is not None and mask.dim() > 2 and mask.shape[0] == 1:
        mask = mask.expand(many, *mask.shape[1:])
    if "position_ids" in tensors and tensors["position_ids"].shape[0] == 1:
        tensors["position_ids"] = tensors["position_ids"].expand(many, -1)
    whole = mask is not None and not _only_padded(mask, tensors)
    if whole and mask is not None:
        tensors["attention_mask"], mask = mask, None
    masks = {"attention_mask": mask, "decoder_attention_mask": target_mask}
    tensors_and_masks = tensors | {name: m for name, m in masks.items() if m is not None}
    counts = {name: tensor.shape[0] for name, tensor in tensors_and_masks.items()}
    rows = next(iter(counts.values()))
    if len(set(counts.values())) > 1:
        if min(counts.values()) > 1:
            raise InputError(
                f"the inputs disagree on how many sequences there are: {counts}. Give as many rows of each."
            )
        # One sequence that takes several rows of something (MusicGen's codebooks): nothing to split, nothing padded.
        return [Prepared(tensors_and_masks, None)], True
    masked = any(m is not None and not bool(m.bool().all()) for m in masks.values())
    unusual = whole or masked or set(tensors) - {"input_ids", "token_type_ids", "decoder_input_ids", "pixel_values"}
    prepared = []
    for row in range(rows):
        inputs = {}
        for name, tensor in tensors.items():
            one = tensor[row : row + 1]
            if name.startswith("decoder_") and target_mask is not None and one.shape[1:2] == target_mask.shape[1:]:
                one = one[:, target_mask[row].bool()]
            elif not name.startswith("decoder_") and mask is not None and one.shape[1:2] == mask.shape[1:]:
                one = one[:, mask[row].bool()]
            inputs[name] = one
        tokens: Tokens | None = None
        if "input_ids" in inputs:
            ids = inputs["input_ids"]
            shown = Prepared(inputs, None).shown
            if ids.shape[1] == 0 or (shown is not None and len(shown) == 0):
                raise InputError(
                    f"sequence {row} of the given input_ids has no tokens left once its padding is removed."
                )
            check_ids(model, ids)
            limit = position_limit(model.model)
            if limit is not None and ids.shape[1] > limit:
                raise InputError(
                    f"sequence {row} has {ids.shape[1]} tokens and {model.name} has positions for {limit}: shorten it."
                )
            tokens = label_ids(model, ids[0] if shown is None else ids[0][shown])
            complete = shown is None and (mask is None or bool(mask[row].bool().all()))
            if complete and model.tokenizer is not None and getattr(encodings, "encodings", None):
                tokens = replace(tokens, words=tuple(encodings.encodings[row].word_ids))
        one_prepared = Prepared(inputs, tokens, given=tensors_and_masks if unusual else None, row=row)
        if "decoder_input_ids" in inputs:
            one_prepared = replace(one_prepared, target_tokens=label_ids(model, inputs["decoder_input_ids"][0]))
            check_ids(model, inputs["decoder_input_ids"])
        elif tokens is not None or target is not None:
            one_prepared = _with_target(model, one_prepared, target)
        prepared.append(one_prepared)
    return prepared, rows == 1


def _only_padded(mask: Tensor, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a mask only marks padding on the right, which nothing that comes before it notices."""
    if mask.dim() != 2 or "position_ids" in tensors or bool((mask != mask.bool()).any()):
        return False
    falling = mask.bool().long()
    return bool((falling[:, 1:] <= falling[:, :-1]).all() and falling[:, :1].all())


def _from_processor(model: Model, thing: Any, target: Any) -> list[Prepared]:
    """Images and sounds, through the model's own processor."""
    processor = model.processor
    assert processor is not None
    prepared = []
    for item in thing if isinstance(thing, (list, tuple)) else [thing]:
        try:
            encoded = processor(item, return_tensors="pt")
        except (TypeError, ValueError, AttributeError, KeyError) as problem:
            raise InputError(f"{type(processor).__name__} cannot read a {type(item).__name__}: {problem}") from problem
        inputs = {k: v for k, v in encoded.items() if isinstance(v, Tensor)}
        prepared.append(_with_target(model, Prepared(inputs, None), target))
    return prepared


def pad_together(model: Model, sequences: Sequence[Prepared]) -> dict[str, Tensor]:
    """One batch from several sequences, padded on the right, with masks; real tokens keep their positions."""
    pad = model.pad_id
    batch: dict[str, Tensor] = {}
    for name in sequences[0].inputs:
        parts = [s.inputs[name] for s in sequences]
        width = max(p.shape[1] for p in parts) if parts[0].dim() >= 2 else 0
        if all(p.shape == parts[0].shape for p in parts):
            batch[name] = torch.cat(parts)
            continue
        fill = pad if name.endswith("input_ids") else 0
        batch[name] = torch.cat([nn.functional.pad(p, (0, width - p.shape[1]), value=fill) for p in parts])
    for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        if ids in batch:
            lengths = torch.tensor([s.inputs[ids].shape[1] for s in sequences])
            batch[mask] = (torch.arange(batch[ids].shape[1])[None] < lengths[:, None]).long()
    return batch


def beginning(inputs: Mapping[str, Tensor], length: int = 12, target: int = 7) -> dict[str, Tensor]:
    """The first tokens of a sequence: enough to prove the wiring on, and cheap for any text."""
    ids = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if ids is None:
        return dict(inputs)
    n = ids.shape[1]
    short = {}
    mask = inputs.get("attention_mask")
    first = 0
    if mask is not None and mask.dim() == 2 and mask.shape[1] == n and bool(mask[0].any()):
        first = min(int(mask[0].bool().long().argmax()), max(0, n - length))  # not on padding alone
    piece = slice(first, first + length)
    for name, tensor in inputs.items():
        if name.startswith("decoder_") and tensor.dim() == 2:
            short[name] = tensor[:, :target]
        elif "mask" in name and tensor.dim() > 2 and tensor.shape[-2:] == (n, n):
            short[name] = tensor[..., piece, piece]
        elif tensor.dim() >= 2 and tensor.shape[1] == n:
            short[name] = tensor[:, piece]
        else:
            short[name] = tensor
    return short
