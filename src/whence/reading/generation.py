"""A prompt and what follows it: chat templates, a given continuation, or what the model itself writes.

A decoder reads prompt and answer as one sequence, so a trace of both is the trace of the joined token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from whence.errors import InputError
from whence.model.load import Model
from whence.reading.capture.untouched import evaluating
from whence.reading.inputs import Prepared
from whence.reading.tokenised import check_ids, label_ids, position_limit
from whence.results.labels import Tokens


def is_chat(text: Any) -> bool:
    """Whether it is a list of messages, {"role": …, "content": …}."""
    return (
        isinstance(text, Sequence)
        and not isinstance(text, str)
        and len(text) > 0
        and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in text)
    )


def chat_text(model: Model, text: Any) -> str:
    """The prompt that the model's chat template makes of messages (or of a text, as the user's only message)."""
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    if not is_chat(messages):
        raise InputError(f"chat=True takes a text or a list of messages {{'role': …, 'content': …}}, not {text!r:.80}.")
    if model.tokenizer is None or not getattr(model.tokenizer, "chat_template", None):
        raise InputError(f"{model.name} has no chat template: write the prompt as the model expects it, as a text.")
    try:
        made = model.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as problem:  # a template is a program: whatever it raises, the messages do not fit it
        raise InputError(f"the chat template of {model.name} refuses these messages: {problem}") from problem
    return str(made)


def with_continuation(
    model: Model, prepared: Prepared, continuation: Any = None, max_new_tokens: int | None = None
) -> Prepared:
    """The prompt with what follows it: a text or ids that are given, else what the model writes, greedily."""
    _refuse_unfit(model, prepared, continuation, max_new_tokens)
    prompt = prepared.inputs["input_ids"]
    n = prompt.shape[1]
    if continuation is not None:
        following = continuation_ids(model, prepared, continuation)
    else:
        following = _written(model, prepared, int(max_new_tokens or 0))
    limit = position_limit(model.model)
    if limit is not None and n + len(following) > limit:
        raise InputError(
            f"prompt and continuation have {n} + {len(following)} tokens and {model.name} has positions for {limit}: "
            "shorten one of them."
        )
    check_ids(model, following)
    inputs = dict(prepared.inputs)
    for name, tensor in prepared.inputs.items():
        more = following[None] if name == "input_ids" else tensor[:, -1:].expand(-1, len(following))
        inputs[name] = torch.cat([tensor, more.to(tensor)], dim=1)
    tokens, text = _labels(model, prepared, following)
    return replace(prepared, inputs=inputs, tokens=tokens, text=text, prompt_length=n)


def _refuse_unfit(model: Model, prepared: Prepared, continuation: Any, max_new_tokens: int | None) -> None:
    if continuation is not None and max_new_tokens is not None:
        raise InputError(
            "continuation= says what follows the prompt, max_new_tokens= lets the model write it: give one."
        )
    if max_new_tokens is not None and (isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int)):
        raise InputError(f"max_new_tokens={max_new_tokens!r} is not a number of tokens.")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise InputError(f"max_new_tokens={max_new_tokens} writes nothing: give 1 or more.")
    can = getattr(model.model, "can_generate", None)
    if not callable(can) or not can():
        raise InputError(
            f"{model.name} ({type(model.model).__name__}) writes no text, so nothing follows its prompt: load a decoder "
            "with task='text-generation' (--task text-generation)."
        )
    ids = prepared.inputs.get("input_ids")
    odd = [name for name, t in prepared.inputs.items() if ids is None or t.shape != ids.shape]
    if ids is None or odd or prepared.shown is not None:
        raise InputError(
            f"a continuation follows a plain prompt: these inputs have {', '.join(odd) or 'hidden tokens'}."
        )


def continuation_ids(model: Model, prepared: Prepared, continuation: Any, name: str = "continuation") -> Tensor:
    """[token]: the ids that follow the prompt.

    A text is read together with the prompt. Where a token would span the seam, the continuation is read by itself, if
    the two then still spell the same text; otherwise it is refused.
    """
    if not isinstance(continuation, str):
        try:
            ids = torch.as_tensor(continuation).reshape(-1)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"{name}={continuation!r:.80} is neither a text nor token ids.") from None
        if ids.numel() == 0 or ids.is_floating_point():
            raise InputError(f"{name}={continuation!r:.80} holds no token ids.")
        return ids.long()
    tokenizer, text = model.tokenizer, prepared.text
    if tokenizer is None:
        raise InputError(f"{model.name} came without a tokenizer: give the {name} as token ids.")
    if not continuation:
        raise InputError(f"the {name} is empty: there is nothing after the prompt.")
    prompt = prepared.inputs["input_ids"][0].tolist()
    if text is not None:
        for special in (True, False):
            whole = tokenizer(text + continuation, add_special_tokens=special)["input_ids"]
            if whole[: len(prompt)] == prompt and len(whole) > len(prompt):
                return torch.tensor(_without_end(tokenizer, whole[len(prompt) :]))
    alone = tokenizer(continuation, add_special_tokens=False)["input_ids"]
    joined, start = decoded(tokenizer, prompt + alone), decoded(tokenizer, prompt)
    if not alone or joined != start + continuation:
        raise InputError(
            f"the {name} {continuation!r:.60} does not begin at a token's edge after this prompt (the two read "
            f"{joined[-60:]!r}): move the seam, for example the space, or give token ids."
        )
    return torch.tensor(alone)


def _without_end(tokenizer: Any, ids: list[int]) -> list[int]:
    """Without an end-of-text token that the tokenizer itself puts behind every text."""
    end = getattr(tokenizer, "eos_token_id", None)
    closes = tokenizer("a")["input_ids"][-1:] == [end]
    return ids[:-1] if closes and len(ids) > 1 and ids[-1] == end else ids


def _written(model: Model, prepared: Prepared, tokens: int) -> Tensor:
    """[token]: what the model writes after the prompt, the likeliest token at each step."""
    ids = prepared.inputs["input_ids"].to(model.device)
    with evaluating(model.model), torch.no_grad():
        made = model.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, max_new_tokens=tokens,
            pad_token_id=model.pad_id,
        )  # fmt: skip
    following: Tensor = made[0, ids.shape[1] :].cpu()
    if not len(following):
        raise InputError(f"{model.name} wrote nothing after the prompt {str(prepared.text)[:60]!r}.")
    return following


def decoded(tokenizer: Any, ids: list[int]) -> str:
    """The text of ids as they are: special tokens kept, spaces not tidied."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _labels(model: Model, prepared: Prepared, following: Tensor) -> tuple[Tokens, str | None]:
    """The tokens of both parts with their places in the joined text, and that text."""
    ids = [int(i) for i in following]
    prompt = prepared.tokens
    assert prompt is not None
    more = label_ids(model, following)
    text = prepared.text
    spans: tuple[tuple[int, int] | None, ...] | None = None
    words: tuple[int | None, ...] | None = None
    if text is not None and model.tokenizer is not None and prompt.ids is not None:
        before = list(prompt.ids)
        start = len(decoded(model.tokenizer, before))
        ends = [len(decoded(model.tokenizer, before + ids[: i + 1])) - start for i in range(len(ids))]
        added = decoded(model.tokenizer, before + ids)[start:]
        places = [(len(text) + a, len(text) + b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        if prompt.spans is not None:
            spans = (*prompt.spans, *(None if s else p for p, s in zip(places, more.special, strict=True)))
        if prompt.words is not None:
            words = (*prompt.words, *_words(prompt, more, added, ends))
        text = text + added
    return (
        Tokens(
            prompt.text + more.text,
            prompt.raw + more.raw,
            None if prompt.ids is None else (*prompt.ids, *ids),
            spans,
            words,
            prompt.special + more.special,
        ),
        text,
    )


def _words(prompt: Tokens, more: Tokens, added: str, ends: list[int]) -> list[int | None]:
    """Word numbers of the continuation: a new word where a token begins with white space, or after a mark."""
    word = 1 + max((w for w in prompt.words or () if w is not None), default=-1)
    numbers: list[int | None] = []
    for i, end in enumerate(ends):
        piece = added[ends[i - 1] if i else 0 : end]
        begins = i == 0 or not piece or not piece[:1].isalnum() or not added[: ends[i - 1]][-1:].isalnum()
        word += int(begins)
        numbers.append(None if more.special[i] else word)
    return numbers
