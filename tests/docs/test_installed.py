"""What `make dist` builds can be installed into a new environment, and looks at a text there."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, **options: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=900, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr[-3000:]
    return str(done.stdout)


@pytest.mark.long
def test_the_wheel_in_a_new_environment_looks_at_a_text(tmp_path: Path, minilm_path: Path) -> None:
    dist = tmp_path / "dist"
    run(sys.executable, "-m", "venv", tmp_path / "build")
    builder = tmp_path / "build/bin/python"
    run(builder, "-m", "pip", "install", "-q", "build")
    run(builder, "-m", "build", "--outdir", dist, ROOT)  # as `make dist` does
    [wheel], [source] = dist.glob("whence-*.whl"), dist.glob("whence-*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    here = {f"whence/{p.relative_to(ROOT / 'src/whence')}" for p in (ROOT / "src/whence").rglob("*.py")}
    assert here | {"whence/page/main.js", "whence/page/style.css"} <= names
    with tarfile.open(source) as archive:
        assert any(name.endswith("/src/whence/page/main.js") for name in archive.getnames())

    run(sys.executable, "-m", "venv", tmp_path / "new")
    python, folder = tmp_path / "new/bin/python", tmp_path / "elsewhere"
    folder.mkdir()
    run(python, "-m", "pip", "install", "-q", "--no-deps", wheel)
    # What whence needs is taken from this environment, whence itself is not: a gigabyte less to fetch.
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(packages) / "needs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    place = run(python, "-c", "import whence; print(whence.__file__)", cwd=folder, env=clean).strip()
    assert place.startswith(packages)
    said = run(tmp_path / "new/bin/whence", "look", "The bank raised its rates.", cwd=folder, env=clean)
    assert "This text has 8 tokens" in said
    assert (folder / "whence-report.html").stat().st_size > 100_000
