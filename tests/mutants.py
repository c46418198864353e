"""Change one thing of the recipes and tools at a time, and see which test notices: `make mutants`.

    python tests/mutants.py  # a sample of 200, in a clone of the last commit
    python tests/mutants.py --only Checkpoints --only tools/check.py --sample 9999

A mutant is a file with a statement deleted, a condition always or never true, one operand of `and`
or `or` dropped, one keyword argument dropped, one arm of a conditional expression, `<` for `<=`,
or a `suppress` of nothing. SMOKE runs first, then the files that TESTS names, until a test fails.
The results go into runs/mutants.jsonl. A later run takes up those of functions that have not
changed. A survivor that mutants.txt does not list, with its reason, is an error.
"""

import argparse
import ast
import hashlib
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
RESULTS, ACCEPTED = ROOT / "runs/mutants.jsonl", ROOT / "tests/mutants.txt"
FILES = [f"recipes/{name}_cifar.py" for name in ("ddp", "amp", "pipeline", "sharded")]
FILES += [f"tools/{name}.py" for name in ("check", "new", "shared_block", "sync")]
SMOKE = {"recipes": "checkpoints::test_stopped_and_resumed", "tools": "sync"}
# The test files that reach a function of this name, class or file, the quickest first. Others have
# those of `recipes`. Then come the REST.
REST = {
    "recipes": "sync configs data launch ranks recipes tokens others_files hangs readme",
    "tools": "readme",
}
TESTS = {
    "recipes": "errors training checkpoints interruption",
    "Checkpoints": "checkpoints sharded errors",
    "Watcher": "interruption hangs",
    "exit_if_ranks_differ": "ranks checkpoints",
    "choose_device": "launch devices configs",
    "join_process_group": "launch ranks errors interruption configs elastic",
    "make_accelerator": "launch training configs",
    "add_technique_flags": "recipes readme amp sharded",
    "parse_args": "errors readme",
    "set_batch_sizes": "configs",
    "ImageTensors": "data training",
    "SeededSamples": "data training errors recipes",
    "recipes/amp_cifar.py": "amp checkpoints training tokens",
    "recipes/pipeline_cifar.py": "pipeline errors checkpoints",
    "recipes/sharded_cifar.py": "sharded checkpoints errors",
    "tools/check.py": "check adapting",
    "tools/new.py": "new",
    "tools/shared_block.py": "sync new",
    "tools/sync.py": "sync",
}


def mutants(text):
    """Yield (function with its classes, its text, what is changed, text of the mutated file)."""
    data, starts = text.encode(), [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node):
        lines = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        return [starts[line - 1] + column for line, column in lines]

    def cut(begin, end, new=""):
        return (data[:begin] + new.encode() + data[end:]).decode()

    def visit(node, names, function):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [*names, node.name]
            is_method = isinstance(node, ast.FunctionDef)
            function = ast.get_source_segment(text, node) if is_method else function
        elif function:
            for operator, mutated in changes(node, span, cut):
                code = " ".join(ast.unparse(node).split())[:60]
                yield ".".join(names), function, f"{operator}: {code}", mutated
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.JoinedStr):  # of whose parts Python 3.11 knows no place
                yield from visit(child, names, function)

    yield from visit(ast.parse(text), [], "")


def changes(node, span, cut):
    """Yield (operator, text of the file) for what can be changed of one node."""
    parts = [ast.unparse(x) for x in getattr(node, "values", ())]
    match node:
        case ast.Expr(value=ast.Constant() | ast.Yield() | ast.YieldFrom()):
            pass  # a docstring, or what makes the function a generator
        case ast.Expr() | ast.AugAssign():
            yield "delete", cut(*span(node), "pass")
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "delete", cut(*span(node), "pass")
        case ast.If():
            for operator, value in (("never", "False"), ("always", "True")):
                yield operator, cut(*span(node.test), value)
        case ast.IfExp():
            for operator, arm in (("then", node.body), ("else", node.orelse)):
                yield operator, cut(*span(node), f"({ast.unparse(arm)})")
        case ast.BoolOp():
            word = " and " if isinstance(node.op, ast.And) else " or "
            for index, part in enumerate(parts):
                rest = word.join(f"({x})" for x in parts[:index] + parts[index + 1 :])
                yield f"without {part[:30]}", cut(*span(node), f"({rest})")
        case ast.Call():
            for keyword in filter(lambda x: x.arg, node.keywords):
                less = [x for x in node.keywords if x is not keyword]
                call = ast.unparse(ast.Call(node.func, node.args, less))
                yield f"without {keyword.arg}", cut(*span(node), call)
        case ast.Compare(ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE() as sign]):
            other = {"Lt": "<=", "LtE": "<", "Gt": ">=", "GtE": ">"}[type(sign).__name__]
            yield other, cut(span(node.left)[1], span(node.comparators[0])[0], f" {other} ")
        case ast.withitem(context_expr=ast.Call(func=ast.Name("suppress")) as call):
            yield "suppress nothing", cut(*span(call), "suppress()")


def listed(only):
    """Return {name: (path, mutated text, digest of the function)}; a function that an earlier file
    has, too, is left out."""
    found, seen = {}, set()
    for path in FILES:
        functions = set()
        show = ["git", "-C", ROOT, "show", f"HEAD:{path}"]
        text = subprocess.run(show, check=True, capture_output=True, text=True).stdout
        for name, function, change, mutated in mutants(text):
            functions.add(function)
            key = f"{path} {name} {change}"
            while key in found:
                key += " (again)"
            wanted = not only or any(x in (path, *name.split(".")) for x in only)
            if function not in seen and wanted:
                found[key] = path, mutated, hashlib.sha256(function.encode()).hexdigest()[:12]
        seen |= functions
    return found


def tests_of(key):
    """Return the tests of a mutant: the quickest first, then those of its function, the REST."""
    path, name, *_ = key.split(" ")
    folder = path.partition("/")[0]
    names = *name.split(".")[::-1], path, "recipes"
    chosen = next(TESTS[x] for x in names if x in TESTS)
    return list(dict.fromkeys([SMOKE[folder], *chosen.split(), *REST[folder].split()]))


def failed(clone, test, limit):
    """Return the first test of a file that fails, "hung", or None."""
    file, _, name = test.partition("::")
    words = [f"tests/test_{file}.py", *(["-k", name] if name else []), "--basetemp", f"{clone}/tmp"]
    words += ["-qx", "-m", "not redundant and not cluster", "-p", "no:cacheprovider"]
    words += ["--deselect", "tests/test_sync.py::test_the_block_that_is_compared_is_the_whole"]
    with tempfile.TemporaryFile("w+") as output:
        options = {"cwd": clone, "stdout": output, "stderr": output, "start_new_session": True}
        process = subprocess.Popen([sys.executable, "-m", "pytest", *words], **options)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "hung"
        output.seek(0)
        found = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", output.read(), re.MULTILINE)
    return None if status == 0 else (found or [test])[0]


def examine(clone, key, path, mutated, limit):
    """Return what notices a mutant: the name of a test, "hung", "make sync", or None."""
    (clone / path).write_text(mutated)
    if subprocess.run([sys.executable, "tools/sync.py"], cwd=clone, capture_output=True).returncode:
        return "make sync"
    return next(filter(None, (failed(clone, test, limit) for test in tests_of(key))), None)


def run(chosen, found, known, limit):
    """Examine the chosen mutants in a clone, and note the results."""
    with tempfile.TemporaryDirectory() as temporary, RESULTS.open("a", buffering=1) as file:
        clone = Path(temporary, "clone")
        subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], check=True)
        (clone / ".venv").symlink_to((ROOT / ".venv").resolve())
        for path in (clone / "pyproject.toml", *clone.glob("constraints*.txt")):
            os.utime(path, (0, 0))  # or make would install the clone
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # mutants of one size and second are different
        sys.path[:1] = [str(clone / "tests"), str(clone / "recipes")]
        server = importlib.import_module("conftest").fork_server()
        for key in chosen:
            path, mutated, function = found[key]
            began = time.monotonic()
            seen = known[key, function] = examine(clone, key, path, mutated, limit)
            for process in psutil.Process(server.pid).children(recursive=True):
                with suppress(psutil.Error):  # it has ended
                    if "resource_tracker" not in " ".join(process.cmdline()):  # the server's own
                        process.kill()
            subprocess.run(["git", "checkout", "--quiet", *FILES], cwd=clone, check=True)
            seconds = round(time.monotonic() - began)
            line = {"mutant": key, "function": function, "seen": seen, "seconds": seconds}
            file.write(json.dumps(line) + "\n")
            print(f"{seen or 'SURVIVED'}: {key}, {seconds} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", help="a file, class or function; repeatable")
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one test file")
    args = parser.parse_args()
    found = listed(args.only)
    chosen = random.Random(1).sample(sorted(found), min(args.sample, len(found)))
    print(f"{len(chosen)} of {len(found)} mutants", flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.touch()
    lines = map(json.loads, RESULTS.read_text().splitlines())
    known = {(line["mutant"], line["function"]): line["seen"] for line in lines}
    if new := [key for key in chosen if (key, found[key][2]) not in known]:
        run(new, found, known, args.limit)
    reasons = dict(x.split(" | ") for x in ACCEPTED.read_text().splitlines())
    survivors = [key for key in chosen if known[key, found[key][2]] is None]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} are seen")
    print(dict(Counter(reasons.get(key, "not listed") for key in survivors)))
    sys.exit("\n".join(key for key in survivors if key not in reasons) or 0)


if __name__ == "__main__":
    main()
