"""Would a test notice if one operation of the losses or the metrics were another?

    python benchmarks/mutants.py             every mutant of losses/ and metrics.py; writes records/mutants.json
    python benchmarks/mutants.py --work FOLDER --minutes 30      a sample, to go on with; --again runs what survived

A mutant is a copy of a module in which one thing is changed: a comparison, an operator, a constant, a condition, a
name such as max to min, or a statement that is left out. It is killed when a test fails that passes without it. The
tests are collected once, in a process from which one child is forked per mutant. The child puts the mutated code into
the living functions and runs the tests that visit the changed line, one of each test function first, the fastest before
the slower, up to a budget of seconds. What lies outside of functions is mutated before the import instead. What
survives on purpose, because it changes no result, stands with its reason in benchmarks/mutants.toml.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib.util
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "records" / "mutants.json"
EXPLAINED = Path(__file__).with_suffix(".toml")
SOURCE = ROOT / "src" / "lopsided"
# The catalogue computes nothing: it holds names, ranges and texts, which the tests of recipes and of the command read.
FORMULAS = [path for path in sorted((SOURCE / "losses").rglob("*.py")) if path.name != "catalogue.py"]
TARGETS = [*FORMULAS, SOURCE / "evaluation" / "metrics.py"]
TESTS = ["src/lopsided/losses", "src/lopsided/evaluation", "tests/losses", "tests/evaluation/test_metrics.py"]
DESELECTED = (
    # It measures another process, in which there is no mutant.
    "tests/losses/test_contrastive_kernel.py::test_memory_stays_far_below_one_matrix_of_all_pairs",
    "tests/losses/test_fuzz.py",  # slow, and what it alone notices lacks a test that says what is wrong
)

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.MatMult: ast.Mult,
}  # fmt: skip
NAMES = {
    "max": "min", "min": "max", "amax": "amin", "argmax": "argmin", "maximum": "minimum", "log1p": "log", "all": "any",
    "any": "all", "new_zeros": "new_ones", "zeros": "ones", "zeros_like": "ones_like", "new_ones": "new_zeros",
    "expm1": "exp", "sum": "mean", "mean": "sum", "add_": "sub_", "sub_": "add_", "mul_": "div_", "div_": "mul_",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: where it is, what stood there and what stands there now."""

    file: str
    line: int
    function: str  # the outermost function it lies in, as "" or "name" or "Class.name"
    number: int  # in the order of the file
    before: str
    after: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line} #{self.number} in {self.function or 'the module'}"
        return f"{where}: {self.before} -> {self.after}"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node."""
    match node:
        case ast.Compare() | ast.BinOp() | ast.BoolOp() | ast.AugAssign():
            field = "ops" if isinstance(node, ast.Compare) else "op"
            for i, operator in enumerate(node.ops if isinstance(node, ast.Compare) else [node.op]):
                if type(operator) in OPERATORS:
                    other = copy.deepcopy(node)
                    new = OPERATORS[type(operator)]()
                    setattr(other, field, [*other.ops[:i], new, *other.ops[i + 1 :]] if field == "ops" else new)
                    yield other
            if isinstance(node, ast.AugAssign):
                yield ast.Pass()
        case ast.UnaryOp():
            yield node.operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float() as value):
            yield ast.Constant(2 * value if value else 1.0)
        case ast.Constant(value=str() as value):
            yield ast.Constant("XX" + value)
        case ast.Attribute(attr=name) if name in NAMES:
            yield ast.Attribute(node.value, NAMES[name], node.ctx)
        case ast.Name(id=name) if name in ("max", "min", "all", "any"):
            yield ast.Name(NAMES[name], node.ctx)
        case ast.Expr(value=ast.Call()) | ast.Raise():  # With super gone, a function would have another closure.
            yield ast.Expr(ast.Name("super", ast.Load())) if "super()" in ast.unparse(node) else ast.Pass()


def _children(node: ast.AST) -> Iterator[tuple[ast.AST, Callable[[ast.AST], None]]]:
    """The parts of a node that may be changed, each with the means to do it."""

    def put(where: Any, key: Any) -> Callable[[ast.AST], None]:
        if isinstance(where, list):
            return lambda new: where.__setitem__(key, new)
        return lambda new: setattr(where, key, new)

    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "format_spec", "ctx"):
            continue
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
            continue
        if isinstance(value, ast.AST):
            yield value, put(node, field)
        elif isinstance(value, list):
            for i, part in enumerate(value):
                is_docstring = field == "body" and isinstance(part, ast.Expr) and _is_text(part.value)
                later_text = isinstance(node, ast.JoinedStr) and any(_is_text(p) for p in value[:i]) and _is_text(part)
                if isinstance(part, ast.AST) and not is_docstring and not later_text:
                    yield part, put(value, i)


def _has_opposite(test: ast.AST) -> bool:
    """Whether negating a condition is what another mutant does already."""
    opposites = ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn
    return isinstance(test, ast.UnaryOp) or (isinstance(test, ast.Compare) and isinstance(test.ops[0], opposites))


def _changes(tree: ast.Module) -> Iterator[tuple[int, str, str, str, Callable[[], None]]]:
    """Every change of a module: line, outermost function, before, after, and the means to make it."""

    def visit(node: ast.AST, function: str, classes: str) -> Iterator[tuple[int, str, str, str, Callable[[], None]]]:
        for child, put in _children(node):
            if isinstance(child, ast.Import | ast.ImportFrom | ast.Assert):
                continue
            if isinstance(child, ast.Assign) and getattr(child.targets[0], "id", "") == "__all__":
                continue
            for new in _replacements(child):
                line = getattr(child, "lineno", 0)
                yield line, function, ast.unparse(child), ast.unparse(new), lambda put=put, new=new: put(new)
            if isinstance(child, ast.If | ast.IfExp | ast.While) and not _has_opposite(child.test):
                test = child.test
                negated = ast.UnaryOp(ast.Not(), test)

                def negate(child: Any = child, negated: ast.AST = negated) -> None:
                    child.test = negated

                yield test.lineno, function, f"if {ast.unparse(test)}", f"if {ast.unparse(negated)}", negate
            inner, outer = function, classes
            if isinstance(child, ast.FunctionDef) and not function:
                # Defaults are made when the function is, so that they belong to the module.
                yield from visit(child.args, "", classes)
                body = ast.Module(child.body, [])
                yield from visit(body, f"{classes}{child.name}", classes)
                continue
            if isinstance(child, ast.ClassDef):
                outer = f"{classes}{child.name}."
            yield from visit(child, inner, outer)

    yield from visit(tree, "", "")


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a module."""
    found = _changes(ast.parse(path.read_text(encoding="utf-8")))
    name = path.relative_to(SOURCE).as_posix()
    return [Mutant(name, line, function, i, a, b) for i, (line, function, a, b, _) in enumerate(found)]


def mutated_code(mutant: Mutant) -> CodeType:
    """The module of a mutant, compiled."""
    path = SOURCE / mutant.file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for i, (*_, make) in enumerate(_changes(tree)):
        if i == mutant.number:
            make()
            break
    return compile(ast.fix_missing_locations(tree), str(path), "exec")


def _code_named(code: CodeType, name: str) -> CodeType:
    for part in name.split("."):
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == part)
    return code


def patch(mutant: Mutant, living: list[FunctionType]) -> None:
    """Put the mutated code into the living functions of this process."""
    original = compile((SOURCE / mutant.file).read_text(encoding="utf-8"), str(SOURCE / mutant.file), "exec")
    line = _code_named(original, mutant.function).co_firstlineno
    new = _code_named(mutated_code(mutant), mutant.function)
    file = str(SOURCE / mutant.file)
    key = file, new.co_name, line
    found = [f for f in living if (f.__code__.co_filename, f.__code__.co_name, f.__code__.co_firstlineno) == key]
    if not found:
        raise LookupError(f"no living function {mutant.function} of {mutant.file}")
    for function in found:
        function.__code__ = new


def living_functions() -> list[FunctionType]:
    """All functions of the targets, found once: looking touches every object, which a child would have to copy."""
    files = {str(path) for path in TARGETS}
    found = [thing for thing in gc.get_objects() if type(thing) is FunctionType]
    gc.collect()
    gc.freeze()
    return [function for function in found if function.__code__.co_filename in files]


class MutatedImport:
    """A finder that gives one module its mutated code."""

    def __init__(self, mutant: Mutant) -> None:
        stem = mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.name, self.mutant = f"lopsided.{stem}", mutant

    def pytest_collection(self) -> None:
        """Come before pytest, which imports for itself the modules whose doctests it collects."""
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of the mutated module alone."""
        if name != self.name:
            return None
        code = mutated_code(self.mutant)

        class Loader(SourceFileLoader):
            def get_code(self, fullname: str) -> CodeType:
                return code

        file = str(SOURCE / self.mutant.file)
        return importlib.util.spec_from_file_location(name, file, loader=Loader(name, file))


class Tracer:
    """Which lines of the targets a test visits."""

    def __init__(self) -> None:
        self.files = {str(path): path.relative_to(SOURCE).as_posix() for path in TARGETS}
        self.lines: set[tuple[str, int]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        """The global trace function: enters frames of the targets only."""
        file = self.files.get(frame.f_code.co_filename)
        if file is None:
            return None
        lines = self.lines

        def local(frame: FrameType, event: str, argument: Any) -> Any:
            lines.add((file, frame.f_lineno))
            return local

        return local(frame, event, argument)


class Runner:
    """A pytest plugin that, in place of running all tests, measures them and then runs mutants."""

    def __init__(self, work: Callable[[Runner], None]) -> None:
        self.work = work
        self.failed = False
        self.session: Any = None

    def pytest_runtestloop(self, session: Any) -> bool:
        """Do the work and report success."""
        self.session = session
        self.work(self)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a failure."""
        self.failed = self.failed or report.failed

    def run(self, item: Any) -> bool:
        """Whether a test passes."""
        self.failed = False
        self.session.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return not self.failed


def start_pytest(work: Callable[[Runner], None], *plugins: object) -> None:
    """Collect all tests, quietly and repeatably, and hand them to ``work``."""
    from hypothesis import Phase, settings

    settings.register_profile("mutants", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("mutants")
    options = ["-q", "-s", "--no-header", "--no-summary", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    options += [f"--deselect={test}" for test in DESELECTED]
    pytest.main([*options, *[str(ROOT / test) for test in TESTS]], plugins=[Runner(work), *plugins])


def fork(work: Callable[[], int], seconds: float) -> int | None:
    """Run work in a child and return its exit code, or None after so many seconds; a signal counts as its number."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            if not os.environ.get("MUTANTS_DEBUG"):
                os.dup2(null, 2)
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def measure(runner: Runner, path: Path) -> None:
    """Write the time of each test and the lines that it visits, as far as not known; tests that fail are left out."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = {item.nodeid: known[item.nodeid] for item in runner.session.items if item.nodeid in known}
    for item in runner.session.items:
        if item.nodeid in found:
            continue
        tracer, begin = Tracer(), time.perf_counter()
        passed = runner.run(item)  # once without the tracer, for its time
        seconds = time.perf_counter() - begin
        sys.settrace(tracer)
        passed = runner.run(item) and passed
        sys.settrace(None)
        if passed:
            found[item.nodeid] = {"seconds": seconds, "lines": sorted(tracer.lines)}
    path.write_text(json.dumps(found), encoding="utf-8")


class Choice:
    """Which tests to run for a mutant."""

    def __init__(self, path: Path) -> None:
        found = json.loads(path.read_text(encoding="utf-8"))
        self.seconds: dict[str, float] = {name: test["seconds"] for name, test in found.items()}
        self.cheap = float(statistics.median(self.seconds.values()))
        self.by_line: dict[tuple[str, int], list[str]] = defaultdict(list)
        self.by_file: dict[str, set[str]] = defaultdict(set)
        for name, test in found.items():
            for file, line in test["lines"]:
                self.by_line[file, line].append(name)
                self.by_file[file].add(name)

    def tests(self, mutant: Mutant, budget: float) -> list[str]:
        """Tests that visit the line: the faster half and one of each function first, fast before slow, to a budget."""
        names = self.by_line.get((mutant.file, mutant.line), [])
        if not names:  # A module's own lines run at its import; a part of a long expression has another line.
            names = sorted(self.by_file[mutant.file]) if mutant.file in self.by_file else sorted(self.seconds)
        groups: dict[str, list[str]] = defaultdict(list)
        for name in sorted(names, key=lambda name: self.seconds[name]):
            groups[name.split("[")[0]].append(name)
        ranked = [
            (rank if self.seconds[name] > self.cheap else 0, self.seconds[name], name)
            for group in groups.values()
            for rank, name in enumerate(group)
        ]
        chosen, total = [], 0.0
        for _, seconds, name in sorted(ranked):
            if total + seconds <= budget or not chosen:
                chosen.append(name)
                total += seconds
        return chosen


def patient(choice: Choice, tests: list[str]) -> float:
    """How long a mutant may take before it counts as hanging."""
    return 30 + 5 * sum(choice.seconds[name] for name in tests)


def run_patched(runner: Runner, mutant: Mutant, tests: list[str], living: list[FunctionType]) -> int:
    """In a child: 0 if all tests pass with the mutated function, 1 if one fails."""
    patch(mutant, living)
    items = {item.nodeid: item for item in runner.session.items}
    return 0 if all(runner.run(items[name]) for name in tests) else 1


def run_imported(mutant: Mutant, tests: list[str]) -> int:
    """In a child that has not imported the package: the same with a mutated module."""
    finder = MutatedImport(mutant)
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]  For what pytest imports before it collects.
    wanted, verdict = set(tests), [1]  # A module that cannot be imported fails its tests.

    def work(runner: Runner) -> None:
        items = {item.nodeid: item for item in runner.session.items if item.nodeid in wanted}
        if len(items) == len(wanted):
            verdict[0] = 0 if all(runner.run(items[name]) for name in tests) else 1

    start_pytest(work, finder)
    return verdict[0]


def preload() -> None:
    """Import what every child needs and no mutant is in."""
    import mpmath  # noqa: F401
    import pytorch_metric_learning.losses  # noqa: F401
    import scipy.stats  # noqa: F401
    import sklearn.metrics  # noqa: F401
    import torch
    import torch._dynamo
    import torchvision.ops  # noqa: F401

    torch.set_num_threads(1)


def explanations() -> list[dict[str, str]]:
    """Why some survive."""
    return tomllib.loads(EXPLAINED.read_text(encoding="utf-8"))["mutant"] if EXPLAINED.exists() else []


def reason_of(mutant: Mutant, known: list[dict[str, str]]) -> str | None:
    """The reason for which a mutant may survive, by its text and not by its line."""
    key = (mutant.file, mutant.function, mutant.before, mutant.after)
    return next((e["reason"] for e in known if (e["file"], e["function"], e["before"], e["after"]) == key), None)


def read_results(path: Path, mutants: list[Mutant]) -> dict[Mutant, str]:
    """What was found before, as far as it concerns these mutants."""
    by_key = {(mutant.file, mutant.number, mutant.after): mutant for mutant in mutants}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {by_key[file, number, after]: word for file, number, after, word in rows if (file, number, after) in by_key}


def main() -> None:
    """Run all mutants, print those that live, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="mutants whose description holds this text, as tiled.py or tiled.py:120")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tests per mutant (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long; the rest is not run")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--out", type=Path, default=RECORD, help="record to write (default: records/mutants.json)")
    parser.add_argument("--work", type=Path, help="folder that keeps what was measured and found, to go on from there")
    parser.add_argument("--again", action="store_true", help="with --work: run once more what survived")
    options = parser.parse_args()
    known = explanations()
    mutants = [mutant for path in TARGETS for mutant in mutants_of(path)]
    if options.only:
        mutants = [mutant for mutant in mutants if options.only in str(mutant)]
    random.Random(0).shuffle(mutants)  # so that a run that ends early has tried a sample
    if options.list:
        print(*mutants, f"{len(mutants)} mutants", sep="\n")
        return
    preload()
    begin = time.monotonic()
    outcome: dict[Mutant, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        measured, results = folder / "tests.json", folder / "results.jsonl"
        outcome |= read_results(results, mutants)
        if options.again:
            lived = {mutant for mutant, word in outcome.items() if word in ("survived", "error")}
            outcome = {mutant: word for mutant, word in outcome.items() if mutant not in lived}
            mutants.sort(key=lambda mutant: (mutant not in lived, reason_of(mutant, known) is not None))

        def note(mutant: Mutant, code: int | None) -> None:
            word = {0: "survived", 1: "killed", None: "hung", 99: "error"}.get(code, "crashed")
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps([mutant.file, mutant.number, mutant.after, word]) + "\n")
            outcome[mutant] = word
            if word in ("survived", "error"):
                print(word, mutant, flush=True)

        def inside(runner: Runner) -> None:
            assert fork(lambda: measure(runner, measured) or 0, 3600) == 0
            choice, living = Choice(measured), living_functions()
            print(f"{len(choice.seconds)} tests, {len(mutants)} mutants, {time.monotonic() - begin:.0f} s", flush=True)
            for mutant in mutants:
                late = time.monotonic() - begin > 60 * options.minutes
                if mutant.function and mutant not in outcome and not late:
                    tests = choice.tests(mutant, options.budget)
                    work = lambda mutant=mutant, tests=tests: run_patched(runner, mutant, tests, living)  # noqa: E731
                    note(mutant, fork(work, patient(choice, tests)))

        pid = os.fork()
        if pid == 0:
            try:
                start_pytest(inside)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        outcome |= read_results(results, mutants)
        choice = Choice(measured)
        for mutant in mutants:
            late = time.monotonic() - begin > 60 * options.minutes
            if not mutant.function and mutant not in outcome and not late:
                tests = choice.tests(mutant, options.budget)
                work = lambda mutant=mutant, tests=tests: run_imported(mutant, tests)  # noqa: E731
                note(mutant, fork(work, 60 + patient(choice, tests)))
    write_record(options, mutants, outcome, known, (time.monotonic() - begin) / 60)


def write_record(
    options: argparse.Namespace,
    mutants: list[Mutant],
    outcome: dict[Mutant, str],
    known: list[dict[str, str]],
    minutes: float,
) -> None:
    """Write what happened to all of them, and the survivors one by one."""
    outcome = {m: outcome.get(m, "not run") for m in sorted(mutants, key=lambda m: (m.file, m.number))}
    survivors = [m for m in outcome if outcome[m] in ("survived", "error")]
    by_file = {file: dict(Counter(outcome[m] for m in mutants if m.file == file)) for file in {m.file for m in mutants}}
    record = {
        "command": "python benchmarks/mutants.py"
        + (f" --only {options.only}" if options.only else "")
        + f" --budget {options.budget:g}",
        "minutes": round(minutes, 1),
        "mutants": len(mutants),
        "outcomes": dict(Counter(outcome.values())),
        "by_file": dict(sorted(by_file.items())),
        "unexplained": sum(reason_of(m, known) is None for m in survivors),
        "survivors": [
            {"file": m.file, "line": m.line, "function": m.function, "before": m.before, "after": m.after}
            | {"reason": reason_of(m, known)}
            for m in survivors
        ],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print({name: record[name] for name in ("mutants", "outcomes", "unexplained", "minutes")})


if __name__ == "__main__":
    main()
