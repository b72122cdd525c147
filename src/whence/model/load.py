"""Loading a model: an embedded one by name, a local folder, a hub id, or one that is already in memory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from whence.errors import InputError, ModelError, UnavailableError, WhenceError
from whence.model import catalogue
from whence.model.cache import locate
from whence.model.hub import hub_reachable, in_hub_cache
from whence.model.memory import fingerprint, lock_of
from whence.model.offload import device_of
from whence.model.quiet import quietly
from whence.model.unavailable import absent, explained, names


@dataclass(frozen=True)
class Model:
    """A transformers model with what is needed to feed it. Every measure takes one, or a bare transformers model.

    >>> import whence
    >>> model = whence.load()                    # the embedded MiniLM encoder
    >>> model.name
    'minilm'
    """

    model: Any  # a torch module, as a rule a transformers.PreTrainedModel
    tokenizer: Any = None
    processor: Any = None  # for images and sounds
    name: str = ""
    _hash: dict[int, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise InputError(f"a model must be a torch module, not a {type(self.model).__name__}: {self.model!r:.80}")
        object.__setattr__(self, "model", unwrapped(self.model))
        if not self.name:
            config = getattr(self.model, "config", None)
            name = getattr(config, "_name_or_path", "") or type(self.model).__name__
            object.__setattr__(self, "name", str(name))

    @property
    def weights_hash(self) -> str:
        """SHA-256 of every weight's name, dtype, shape and bytes, in the order of names. Computed when first asked."""
        return self.hashed[0]

    @property
    def mark(self) -> int:
        """The fingerprint of the model as it is now."""
        return fingerprint(self.model)

    @property
    def hashed(self) -> tuple[str, int]:
        """The hash of the weights as they are now, and the fingerprint of the model that has them."""
        with lock_of(self.model):
            mark = fingerprint(self.model)
            if mark not in self._hash:
                self._hash.clear()
                self._hash[mark] = hash_weights(self.model)
            return self._hash[mark], mark

    @property
    def pad_id(self) -> int:
        """A token id to fill a batch with; masked out, so that any id within the vocabulary serves."""
        for source in (self.tokenizer, getattr(self.model, "config", None)):
            for name in ("pad_token_id", "eos_token_id"):
                value = getattr(source, name, None)
                if isinstance(value, list):
                    value = value[0]
                if isinstance(value, int) and value >= 0:
                    return value
        return 0

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def __repr__(self) -> str:
        parameters = sum(p.numel() for p in self.model.parameters())
        return f"Model({self.name!r}, {type(self.model).__name__}, {parameters:,} parameters)"


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, out of `torch.compile` and data-parallel wrappers: compiled code cannot be overheard.

    The module inside computes the same, with the same weights.
    """
    while True:
        inside = getattr(model, "_orig_mod", None)
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inside = model.module
        if not isinstance(inside, nn.Module):
            return model
        model = inside


def hash_weights(model: nn.Module) -> str:
    """SHA-256 over every weight's name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    weights = model.state_dict()
    if any(tensor.is_meta for tensor in weights.values()):
        from accelerate.utils.modeling import get_state_dict_offloaded_model

        weights = get_state_dict_offloaded_model(model)
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def as_model(thing: Any) -> Model:
    """What a measure was given, as a `Model`: itself, a bare transformers model, or the name of one."""
    if isinstance(thing, Model):
        return thing
    if isinstance(thing, nn.Module):
        return Model(thing, *companions_of(thing))
    if is_pipeline(thing):
        return _of_pipeline(thing)
    if thing is None or isinstance(thing, (str, Path)):
        return load(thing)
    raise InputError(
        f"a model is what whence.load gives, a transformers model or pipeline, or the name of one; not a "
        f"{type(thing).__name__}."
    )


def is_pipeline(thing: Any) -> bool:
    """Whether it is a transformers pipeline: a model with its tokenizer or processor beside it."""
    return not isinstance(thing, Model) and isinstance(getattr(thing, "model", None), nn.Module)


def _of_pipeline(pipeline: Any) -> Model:
    parts = (getattr(pipeline, name, None) for name in ("image_processor", "feature_extractor", "processor"))
    processor = next((part for part in parts if part is not None), None)
    found = getattr(pipeline, "tokenizer", None), processor
    return Model(pipeline.model, *(found if any(found) else companions_of(pipeline.model)))


_companions_by_model: WeakKeyDictionary[nn.Module, tuple[Any, Any]] = WeakKeyDictionary()


def companions_of(model: nn.Module) -> tuple[Any, Any]:
    """The tokenizer and processor that lie where a live model came from: a folder, or the hub's cache; looked up once."""
    inner = unwrapped(model)
    place = str(getattr(getattr(inner, "config", None), "_name_or_path", "") or "")
    if not place:
        return None, None
    if inner not in _companions_by_model:
        _companions_by_model[inner] = _companions(place, {"local_files_only": True})
    return _companions_by_model[inner]


def load(
    name: str | Path | nn.Module | Any | None = None,
    task: str | None = None,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Model:
    """Load a model to look into.

    `name`: nothing or "minilm", the embedded encoder; "smollm2", the embedded decoder (both without any network once
    fetched); a folder; a hub id; a pipeline; or a live transformers model, with its `tokenizer` or `processor` beside
    it, or found by its `name_or_path` (in that folder or the hub's cache).
    `task`: the head to load ("text-classification", "fill-mask", "text-generation", "base", …); None: the class
    that the configuration names. Weights are read from safetensors only, unless `allow_pickle`; code that comes
    with a model is run only with `trust_remote_code`.
    """
    if isinstance(name, nn.Module) or is_pipeline(name):
        live = as_model(name)
        return Model(live.model, tokenizer or live.tokenizer, processor or live.processor)
    if name is None:
        name = "minilm"
    if not isinstance(name, (str, Path)):
        raise InputError(f"whence.load takes a name, a folder or a transformers model, not a {type(name).__name__}.")
    found = catalogue.find(str(name))
    if found is not None and not Path(name).exists():
        loaded = _load_embedded(found, task, dtype)
    else:
        loaded = _load_from(str(name), task, dtype, allow_pickle, trust_remote_code)
    if tokenizer is not None or processor is not None:
        loaded = Model(loaded.model, tokenizer or loaded.tokenizer, processor or loaded.processor, loaded.name)
    if device is not None:
        loaded.model.to(device)
    return loaded


def _load_embedded(entry: catalogue.EmbeddedModel, task: str | None, dtype: Any) -> Model:
    from transformers import AutoTokenizer

    if entry.kind == "vocabulary":
        raise InputError(f"{entry.name!r} is no model: {entry.description}.")
    folder = locate(entry.name)
    if entry.converter is not None:
        from whence.model.foreign_weights import unpacked

        folder = unpacked(entry, folder)
    head = _head_class(task or entry.task or ("text-generation" if entry.kind == "decoder" else "base"), None)
    with quietly():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model, info = head.from_pretrained(
            folder, local_files_only=True, dtype=dtype or torch.float32, output_loading_info=True
        )
    _check_complete(entry.name, model, info)
    model.eval()
    processor = _companions(str(folder), {"local_files_only": True})[1] if entry.positions == "frames" else None
    return Model(model, tokenizer, processor, entry.name)


TASKS = {
    "base": "AutoModel",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
    "fill-mask": "AutoModelForMaskedLM",
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "translation": "AutoModelForSeq2SeqLM",
    "summarization": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "automatic-speech-recognition": "AutoModelForSpeechSeq2Seq",
}


def _head_class(task: str | None, config: Any) -> Any:
    """The class to load: the one for the task asked for, else the one the configuration names, else the base model."""
    import transformers

    if task is not None:
        if task not in TASKS:
            raise InputError(f"no task is called {task!r}; there are: {', '.join(TASKS)}.")
        return getattr(transformers, TASKS[task])
    own = whence_models() if str(getattr(config, "model_type", None)).startswith("identifiable") else None
    for architecture in getattr(config, "architectures", None) or ():
        head = getattr(transformers, architecture, None) or getattr(own, architecture, None)
        if head is not None:
            return head
    return transformers.AutoModel


def whence_models() -> Any:
    """whence's own architectures; importing them makes them known to transformers' Auto classes."""
    import whence.identifiable

    return whence.identifiable


def _is_ours(folder: Path) -> bool:
    """Whether a saved folder holds one of whence's own architectures, which transformers does not know by itself."""
    try:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # what is wrong with it is said when it is loaded
    return isinstance(saved, dict) and str(saved.get("model_type")).startswith("identifiable")


def _load_from(name: str, task: str | None, dtype: Any, allow_pickle: bool, trust_remote_code: bool) -> Model:
    from transformers import AutoConfig

    folder = Path(name).expanduser()
    local = folder.is_dir()
    if folder.exists() and not local:
        raise InputError(f"{name!r} is a file; give the folder that holds config.json and the weights.")
    check_model(name)
    if local and _is_ours(folder):
        whence_models()
    place = str(folder) if local else name
    options = {"trust_remote_code": trust_remote_code}
    if local:
        options["local_files_only"] = True
    try:
        with quietly():
            config = AutoConfig.from_pretrained(place, **options)
            head = _head_class(task, config)
            if getattr(config, "auto_map", None) and trust_remote_code:
                import transformers

                head = transformers.AutoModel if task is None else head
            model, info = head.from_pretrained(
                place,
                config=config,
                dtype=dtype or "auto",
                use_safetensors=None if allow_pickle else True,
                output_loading_info=True,
                **options,
            )
    except WhenceError:
        raise
    except (OSError, ValueError, ImportError) as problem:
        raise explained(name, local, allow_pickle, problem) from problem
    _check_complete(name, model, info)
    model.eval()
    tokenizer, processor = _companions(place, options)
    return Model(model, tokenizer, processor, name if not local else folder.resolve().name)


def _check_complete(name: str, model: nn.Module, info: dict[str, Any]) -> None:
    """Refuse a head or a layer that the files had no weights for: it would be random, and so would its numbers."""
    missing = sorted(key for key in info.get("missing_keys", ()) if "pooler" not in key)
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelError(
            f"{name!r} has no weights for {shown} of {type(model).__name__}; filled with random numbers they would give "
            "random answers. Load it with task='base' (--task base), or a task it was trained for."
        )


def _companions(source: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """The tokenizer and the image or sound processor, whichever the folder has."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

    found = []
    for auto in (AutoTokenizer, AutoImageProcessor, AutoFeatureExtractor):
        try:
            with quietly():
                found.append(auto.from_pretrained(source, **options))
        except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError):
            found.append(None)  # a model may come without; what needs it says so
    tokenizer = found[0]
    # Without tokenizer files transformers makes up one that knows only special tokens: that is none.
    if tokenizer is not None and len(tokenizer) <= len(tokenizer.all_special_tokens) + 1:
        tokenizer = None
    return tokenizer, found[1] or found[2]


def check_model(name: str) -> None:
    """Refuse a name that no model can be loaded by, in a moment: before a server starts to listen, for example."""
    folder = Path(name).expanduser()
    found = catalogue.find(name)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise InputError(f"the folder {name!r} has no config.json, so it is not a saved transformers model.")
    elif found is not None:
        if found.kind == "vocabulary":
            raise InputError(f"{found.name!r} is no model: {found.description}.")
        locate(found.name)
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"there is no folder {name!r}. Give an existing folder, a hub id, or one of: {names()}.")
    elif not in_hub_cache(name) and not hub_reachable():
        raise UnavailableError(absent(name, "the hub cannot be reached"))
