"""Mutation run: change one operator or number of `core` at a time, and see whether the tests notice.

    python scripts/mutate.py                                   every file of src/whence/core: hours
    python scripts/mutate.py core/numerics/basis.py            one file: minutes
    python scripts/mutate.py core/numerics/basis.py --most 20  a sample, the same one every time
    python scripts/mutate.py core/numerics/basis.py --lines 60-90
    python scripts/mutate.py core/numerics/basis.py --tests tests/core/numerics/test_rank_tolerance.py

A mutant that no test kills is printed as a line of the table in docs/mutants.md. Those that stand there with a reason
are known; any other makes the run fail. Each mutant runs in a fork, its module compiled from the changed source; nothing on
disk changes. One run of the tests on the code as it is says which tests enter which function; a mutant is given to the
tests that enter its function, the quick ones first; outside functions, to those that enter any function of its file.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import pickle
import resource
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "whence"
CORE = str(PACKAGE / "core")
EXPLAINED = ROOT / "docs" / "mutants.md"
TESTS = (
    "tests/core",
    "tests/attention/test_verdict.py",
    "tests/attention/test_aimed.py",
    "tests/attention/test_uniqueness.py",
)
"""What judges mutants: the tests of core, and those of attention/ that need no weights and judge core by its callers."""

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "argmin": "argmax", "argmax": "argmin"}
NAMES |= {"zeros": "ones", "ones": "zeros", "minimum": "maximum", "maximum": "minimum"}


@dataclass(frozen=True)
class Mutant:
    """One change: the file, its line, that line as it is, the expression as it was and as it becomes, the whole source."""

    file: str
    line: int
    code: str
    before: str
    after: str
    source: str

    def number(self) -> str:
        """By which a sample is drawn: it stays the same when other lines of the file change."""
        return hashlib.sha256(f"{self.code} {self.before} {self.after}".encode()).hexdigest()

    def row(self, reason: str = "") -> str:
        """Its line of the table."""
        cells = (f"`{self.file}`", f"`{self.code}`", f"`{self.before}` → `{self.after}`", reason)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def mutants(path: Path) -> Iterator[Mutant]:
    """Every single change of the file."""
    text = path.read_text()
    lines = text.splitlines()
    count = len(list(_places(ast.parse(text))))
    for number in range(count):
        tree = ast.parse(text)
        node = list(_places(tree))[number]
        before = ast.unparse(node)
        for _ in _change(node):
            after, source = ast.unparse(node), ast.unparse(tree)
            name = str(path.relative_to(PACKAGE))
            yield Mutant(name, node.lineno, lines[node.lineno - 1].strip(), before, after, source)


def _places(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions that can be changed, outside annotations, decorators, messages and docstrings."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            parts.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            parts += [node.returns, *node.decorator_list]
        elif isinstance(node, ast.ClassDef):
            parts += node.decorator_list
        elif isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            parts.append(node)
        skipped |= {id(inner) for part in parts if part is not None for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) not in skipped and isinstance(node, ast.expr) and any(True for _ in _change(copy.deepcopy(node))):
            yield node


def _change(node: ast.expr) -> Iterator[None]:
    """Change the node in place, in each way in turn."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        node.ops[0] = SWAPS[type(node.ops[0])]()
        yield
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        node.op = SWAPS[type(node.op)]()
        yield
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        node.op, node.operand = ast.Not(), ast.UnaryOp(ast.Not(), node.operand)
        yield
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        node.value = (
            (not node.value)
            if isinstance(node.value, bool)
            else node.value + 1
            if node.value in (0, 1)
            else node.value * 2
        )
        yield
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in NAMES:
        node.func.attr = NAMES[node.func.attr]
        yield
    elif isinstance(node, ast.Call) and any(k.arg in NAMES for k in node.keywords):
        keyword = next(k for k in node.keywords if k.arg in NAMES)
        keyword.arg = NAMES[str(keyword.arg)]
        yield


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module from changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.name = "whence." + mutant.file.removesuffix(".py").replace("/", ".")

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        if name != self.name:
            return None
        return importlib.util.spec_from_loader(name, self, origin=str(PACKAGE / self.mutant.file))

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.mutant.source, str(PACKAGE / self.mutant.file), "exec"), module.__dict__)


class _Watch:
    """A pytest plugin: how long each test takes, and the functions of core that it enters, as (file, first line)."""

    def __init__(self) -> None:
        self.entered: dict[str, set[tuple[str, int]]] = {}
        self.took: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        calls: set[tuple[str, int]] = set()

        def enter(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(CORE):
                calls.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

        started = time.process_time()
        threading.setprofile(enter)
        sys.setprofile(enter)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            self.entered[item.nodeid], self.took[item.nodeid] = calls, time.process_time() - started


def watched(tests: Sequence[str]) -> _Watch:
    """The tests run once on the code as it is."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        watch, code = _Watch(), 1
        try:
            code = _pytest(tests, [watch])
        finally:
            with os.fdopen(writer, "wb") as file:
                pickle.dump((code, watch.entered, watch.took), file)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        code, entered, took = pickle.load(file)
    os.waitpid(process, 0)
    if code:
        raise SystemExit("The tests fail on the code as it is; what they would say of mutants means nothing.")
    watch = _Watch()
    watch.entered, watch.took = entered, took
    return watch


def tests_of(mutant: Mutant, watch: _Watch) -> list[str]:
    """The tests that enter the innermost function around the mutant, the quick ones first."""
    path = PACKAGE / mutant.file
    around = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= mutant.line <= (node.end_lineno or 0)
    ]
    if not around:
        return entering(path, watch)
    inner = max(around, key=lambda node: node.lineno)
    first = min([inner.lineno, *(decorator.lineno for decorator in inner.decorator_list)])
    return [test for test in entering(path, watch) if (str(path), first) in watch.entered[test]]


def entering(path: Path, watch: _Watch) -> list[str]:
    """The tests that enter any function of the file, the quick ones first."""
    tests = sorted(watch.took, key=watch.took.__getitem__)
    return [test for test in tests if any(file == str(path) for file, _ in watch.entered[test])]


def _pytest(tests: Sequence[str], plugins: Sequence[object] = ()) -> int:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not long"]
        return int(pytest.main([*options, *tests], plugins=list(plugins)))


def killed(mutant: Mutant, tests: Sequence[str], seconds: int) -> bool:
    """Whether a test fails, or they do not end in time, with the mutant in the place of its module."""
    if not tests:
        return False
    process = os.fork()
    if process == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # of the processor: a busy machine kills no mutant
        for name in [name for name in sys.modules if name.startswith(("whence", "tests"))]:
            del sys.modules[name]
        sys.meta_path.insert(0, _Changed(mutant))
        code = 1
        try:
            code = _pytest(tests)
        finally:
            os._exit(0 if code == 0 else 1)
    _, status = os.waitpid(process, 0)
    return status != 0


def explained() -> dict[str, str]:
    """The rows of docs/mutants.md without their reasons, and the reasons."""
    rows = {}
    for line in EXPLAINED.read_text().splitlines() if EXPLAINED.exists() else ():
        if line.startswith("| `core/"):
            head, _, reason = line.rstrip(" |").rpartition(" | ")
            rows[head] = reason.strip()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="under src/whence, as core/numerics/basis.py; all of core without one")
    parser.add_argument("--most", type=int, help="a sample of so many mutants of each file")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="those that judge, where not all should: quicker")
    parser.add_argument("--lines", metavar="FIRST-LAST", help="only mutants of these lines of each file")
    parser.add_argument(
        "--seconds", type=int, default=300, help="of the processor, after which a mutant counts as killed: it hangs"
    )
    given = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    os.environ["HF_HUB_OFFLINE"] = os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = (
        "1"  # plugins take longer than the tests
    )
    for name in ("torch", "numpy", "scipy.optimize", "highspy", "hypothesis", "transformers", "whence.model.load"):
        importlib.import_module(name)  # once, before the forks
    importlib.import_module("torch").set_num_threads(1)
    paths = [PACKAGE / file for file in given.files] or sorted((PACKAGE / "core").rglob("*.py"))
    known, new, watch = explained(), 0, watched(given.tests)
    begin, _, end = (given.lines or "0-").partition("-")
    first, last = int(begin), int(end or (10**9 if given.lines is None else begin))
    for path in paths:
        every = [mutant for mutant in mutants(path) if first <= mutant.line <= last]
        sample = sorted(every, key=Mutant.number)[: given.most]
        control = Mutant(str(path.relative_to(PACKAGE)), 0, "", "", "", ast.unparse(ast.parse(path.read_text())))
        if killed(control, entering(path, watch)[:20], given.seconds):
            raise SystemExit(f"{control.file}: the tests fail on the file as it is, parsed and compiled again.")
        started, alive = time.monotonic(), 0
        for mutant in sorted(sample, key=lambda m: m.line):
            if killed(mutant, tests_of(mutant, watch), given.seconds):
                continue
            alive += 1
            reason = known.get(mutant.row().rstrip(" |").rstrip())
            new += reason is None
            print(f"{'new' if reason is None else 'known'} line {mutant.line}: {mutant.row(reason or '')}", flush=True)
        took = time.monotonic() - started
        print(f"{control.file}: {len(sample)} of {len(every)} mutants, {alive} alive, {took:.0f} s", flush=True)
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
