"""Shared by the tests: the recipes as modules, copies of them, comparisons, fixtures. What starts
processes: processes.py."""

import gc
import importlib.util
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import ROOT, fork_server, forked
from torch.utils import _pytree as pytree
from xdist.scheduler import LoadFileScheduling

import ddp_cifar

CONFIGS = {n: ROOT / f"accelerate_configs/{n}gpu.yaml" for n in (1, 2, 4, 8)}
ACCELERATE = Path(sys.executable).with_name("accelerate")
REAL_DATA = Path(os.environ.get("CIFAR10_DIR", ROOT.parent / "shared/data"))

# What a user prints is lost at an end without a flush, which this variable would hide.
os.environ.pop("PYTHONUNBUFFERED", None)
# Threads of OpenMP that wait for each other sleep. Spinning, they take two thirds of the processor
# time of a training on one process where others want the cores, too.
os.environ["OMP_WAIT_POLICY"] = "passive"
torch.set_num_threads(1)  # in this process, which has read the variable already
# glibc's: keep freed memory. Given back after each layer, it costs a page fault per 4 KiB in the
# next one, a third of the processor time of a short training.
os.environ["MALLOC_TRIM_THRESHOLD_"] = os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**30)
# In one cache torch.compile confuses code for instructions that this variable forbids with code for
# others, and computes NaN.
CACHE = f"torchinductor-{os.environ.get('ATEN_CPU_CAPABILITY', 'native')}"
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), CACHE)
# Two equal runs differ in these of metrics.jsonl.
MEASURED = {"time", "seconds", "samples_per_second", "data_wait", "slowest_rank"}
MEASURED |= {"peak_memory_gib", "save_seconds"}
CONFIG = ("output_dir", "checkpoint_every", "keep")  # flags in which two equal runs may differ

needs_real_data = pytest.mark.skipif(
    not (REAL_DATA / "cifar-10-batches-py").is_dir(),
    reason=f"no CIFAR-10 in {REAL_DATA} (set CIFAR10_DIR)",
)
CNN = ["--data", "synthetic", "--model", "simple_cnn", "--cpu"]


class Exit(Exception):
    """The error line of a recipe that was loaded with `exits=True`."""


def load(path, exits=False):
    """Return a recipe as a module. With `exits` its `exit_with_error` raises `Exit`, so that a test
    can call a function that exits with an error in its own process."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    arguments, sys.argv = sys.argv, [str(ROOT / path)]  # as if it were run
    spec.loader.exec_module(module)
    sys.argv = arguments
    if exits:
        module.exit_with_error = exit_by_exception
    return module


def exit_by_exception(message):
    assert "\n" not in str(message)
    raise Exit(message)


ddp_cifar.exit_with_error = exit_by_exception  # before an example imports it


def assert_same_training(ours, theirs, atol, ignored=()):
    """Two trainings have the same weights, and the same lines but for what is measured."""
    for lines, expected in ((ours.train, theirs.train), (ours.evaluations, theirs.evaluations)):
        for line, other in zip(lines, expected, strict=True):
            for name in (line.keys() | other.keys()) - {*MEASURED, *ignored}:
                same = line[name] == other[name] or abs(line[name] - other[name]) <= atol
                assert same, f"{name} {line[name]} and {other[name]} in step {other['step']}"
    assert theirs.train, "nothing was trained"
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=0, atol=atol)


def content(path):
    """A checkpoint, without the values in which two equal runs differ."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    for name in CONFIG:
        del checkpoint["config"][name]
    return {**checkpoint, "metrics": untimed(checkpoint["metrics"])}


def untimed(metrics):
    """The lines of metrics.jsonl that two equal runs have in common."""
    lines = [json.loads(line) for line in metrics.splitlines()]
    lines = [line for line in lines if line["event"] != "checkpoint"]
    return [{key: x for key, x in line.items() if key not in MEASURED} for line in lines]


def begin_of(output):
    """The step from which a run resumed: it says so at its start and at its end."""
    (begin,) = set(re.findall('"resumed_from": ([0-9]+)', output))
    return int(begin)


def assert_identical(one, other):
    """Compare tensors, and containers of them, to the last bit."""
    (ones, structure), (others, same) = map(pytree.tree_flatten_with_path, (one, other))
    assert structure == same
    for (path, x), (_, y) in zip(ones, others, strict=True):
        if torch.is_tensor(x):
            assert x.stride() == y.stride() and torch.equal(x, y), path
        else:
            assert x == y, path


def pytest_configure(config):
    """Hide the GPUs: only test_gpu.py uses them, the other tests are the same as on a machine
    without."""
    config.addinivalue_line("markers", "copied(recipe, ...): see the fixture `outcome`")
    if config.getoption("numprocesses", None):  # pytest-xdist's workers run the tests
        fork_server()
        return
    global GPUS, VISIBLE
    GPUS = torch.cuda.device_count()
    all_of_them = ",".join(map(str, range(GPUS)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", all_of_them)
    VISIBLE = {"CUDA_VISIBLE_DEVICES": visible}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


LONGEST = "slurm check recipes hangs new sharded interruption adapting bench".split()


def pytest_collection_modifyitems(items):
    """The files that take longest begin first: at the end no worker waits for another one."""
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


class ByFile(LoadFileScheduling):
    """A worker takes the tests of a file, which share runs, but those of test_adapting.py take
    longest by far and share none: it takes those of one recipe."""

    def _split_scope(self, nodeid):
        path, _, name = nodeid.partition("::")
        recipe = name.split("-")[1:2] if path.endswith("test_adapting.py") else []
        return "::".join([path, *recipe])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)


def pytest_collection_finish():
    gc.freeze()  # what is imported is no garbage: the recipes' gc.collect() is faster


def pytest_sessionfinish():
    gc.unfreeze()  # or libraries warn that it was not freed
    if fork_server.cache_info().currsize and fork_server():
        fork_server().communicate()


def copy(recipe, path, *replacements, project=""):
    """Write a copy of a recipe with lines replaced, and a project's functions behind its own. Each
    replaced text is in it once, or as often as a third element says."""
    source = (ROOT / f"recipes/{recipe}.py").read_text()
    for old, new, *times in replacements:
        found = source.count(old)
        assert [found] == (times or [1]), f"{found} times in {recipe}: {old}"
        source = source.replace(old, new)
    end = '\n\nif __name__ == "__main__":'
    assert source.count(end) == 1
    path.write_text(source.replace(end, f"{project}\n{end}"))
    return path


def project(name, **chosen):
    """The text of programs/overrides/NAME.py for a copy, which has what that file imports of a
    recipe. There `chosen` are set: a name of the copy, or of the file, to an expression."""
    text = (ROOT / f"tests/programs/overrides/{name}.py").read_text()
    text = re.sub(r"^from \w+_cifar import .*\n", "", text, flags=re.MULTILINE)
    return "\n".join(["", text, *(f"{key} = {value}" for key, value in chosen.items())])


SYNTHETIC_DATA = "synthetic_images(5120, seed=1), synthetic_images(1024, seed=2)"
FEW_IMAGES = SYNTHETIC_DATA, "synthetic_images(256, seed=1), synthetic_images(64, seed=2)"
# The layers of simple_cnn, which would take most of a short training's time, with fewer channels.
NARROW = (
    ("nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()", "nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()"),
    ("nn.Conv2d(64, 128, 3", "nn.Conv2d(8, 16, 3"),
    ("nn.Linear(128, 10)", "nn.Linear(16, 10)"),
)
SHORT = FEW_IMAGES, *NARROW

# What torch.compile imports in a training, for `forked`.
COMPILER = ["torch._inductor.compile_fx", "torch._inductor.codegen.cpp"]

# In float32 the order of a sum can move an activation over the edge of a ReLU, and so much of a
# gradient: in float64 two trainings are the same or are not, on any CPU.
IN_FLOAT64 = project("in_float64")
# Float64 rounds to 1e-16 of a value, a sum has up to 1e5 terms in any order, and ten steps follow
# each other. One float32 value among them, 1e-7, would be seen.
ROUNDING = 1e-10
# 100 roundings of a value of order one, where a test has to compute in float32.
ROUNDING_FLOAT32 = 100 * torch.finfo(torch.float32).eps


def described_copy(directory, recipe, *replacements, project="", flags=(), **run):
    directory.mkdir()
    script = copy(recipe, directory / "mine.py", *SHORT, *replacements, project=project)
    flags = [*CNN, "--max-steps", 2, "--log-every", 1, "--output-dir", "run", *flags]
    common = {"processes": 1, "script": script, "directory": directory, "flags": flags}
    # As under a launcher, which ends all processes soon after the first has failed.
    return {**common, "grace": 0.5, "terminate": True, **run}


@pytest.fixture
def outcome(request, tmp_path):
    """Exit codes, output and directory of the copy that the test's mark describes: of which recipe,
    (old, new) lines, `project`, `flags`, and what `forked` knows. It is called mine.py,
    takes two steps and leaves its results in run/."""
    marker = request.node.get_closest_marker("copied")
    run = described_copy(tmp_path / "copy", *marker.args, **marker.kwargs)
    ((codes, output),) = forked([run], tmp_path)
    return SimpleNamespace(codes=codes, output=output, directory=run["directory"])
