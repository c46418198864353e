"""What a person gets wrong: one line that says so and what to type instead, and an exit code that
is not 0."""

import pickle
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, at_once, forked, launch, run, the_error_line

RECIPE = ROOT / "recipes/ddp_cifar.py"
SYNTHETIC = ["--data", "synthetic", "--model", "simple_cnn", "--cpu", "--max-steps", "1"]
GOOD = "done/step-00000001.pt"

CASES = {
    "negative epochs": (["--epochs", "-1"], ["--epochs", "-1", "above -1"]),
    "negative batch": (["--batch-size", "-4"], ["--batch-size", "-4", "above 0"]),
    "no steps": (["--max-steps", "0"], ["--max-steps", "above 0"]),
    "no global batch": (["--global-batch-size", "0"], ["--global-batch-size", "above 0"]),
    "a prime global batch": (
        ["--global-batch-size", "257"],
        ["--global-batch-size: 257 cannot be divided among 1 replica", "choose 256 or 258"],
    ),
    "no hang timeout": (["--hang-timeout", "0"], ["--hang-timeout", "above 0"]),
    "infinite learning rate": (["--lr", "inf"], ["--lr", "inf"]),
    "learning rate that is no number": (["--lr", "fast"], ["--lr", "fast"]),
    "nan learning rate": (["--lr", "nan"], ["--lr", "nan"]),
    "negative seed": (["--seed", "-1"], ["--seed", "-1"]),
    "endless seed": (["--seed", str(2**70)], ["--seed", "below 4294967296"]),
    "half an epoch": (["--epochs", "0.5"], ["--epochs", "0.5"]),
    "no logging": (["--log-every", "-1"], ["--log-every", "above 0"]),
    "unknown model": (["--model", "resnet51"], ["--model", "resnet51", "resnet50", "simple_cnn"]),
    "unknown data": (["--data", "imagenet"], ["--data", "imagenet", "synthetic"]),
    "unknown stem": (["--stem", "tiny"], ["--stem", "tiny", "cifar", "imagenet"]),
    "unknown flag": (["--bath-size", "4"], ["--bath-size"]),
    "batch above the data": (["--batch-size", "100000"], ["5120 training samples", "--batch-size"]),
    "output under a file": (["--output-dir", f"{RECIPE}/runs"], ["--output-dir", "choose another"]),
    "output in nowhere": (["--output-dir", "/proc/nowhere"], ["--output-dir", "choose another"]),
    "no data": (
        ["--data", "cifar10", "--data-dir", "nowhere"],
        ["--data-dir nowhere", "--data synthetic"],
    ),
    "data under a file": (
        ["--data", "cifar10", "--data-dir", f"{RECIPE}/x"],
        ["--data-dir", "--data synthetic"],
    ),
    "half a download": (
        ["--data", "cifar10", "--data-dir", "half"],
        ["--data-dir half", "--data synthetic"],
    ),
    "wrong checksums": (
        ["--data", "cifar10", "--data-dir", "wrong"],
        ["--data-dir wrong", "--data synthetic"],
    ),
    "unreadable data": (
        ["--data", "cifar10", "--data-dir", "folders"],
        ["--data-dir folders", "--data synthetic"],
    ),
    "a tracker without its package": (
        ["--tracker", "clearml"],
        ["--tracker", "clearml", "tensorboard"],
    ),
    "weights from nowhere": (
        ["--weights", "nowhere.safetensors"],
        ["--weights", "nowhere.safetensors", "No such file"],
    ),
    "weights that are none": (["--weights", "text.pt"], ["--weights", "cannot load text.pt"]),
    "weights that run code": (
        ["--weights", "evil.pickle"],
        ["--weights", "cannot load evil.pickle"],
    ),
    "weights that fit nothing": (
        ["--weights", "other.pt"],
        ["--weights", "other.pt does not fit", "0.0.weight"],
    ),
    "weights to evaluate that do not fit": (
        ["--weights", "head.pt", "--epochs", "0"],
        ["--weights", "head.pt does not fit this model: 2.1.bias, 2.1.weight"],
    ),
    "no checkpoints kept": (["--keep", "0"], ["--keep", "above 0"]),
    "checkpoints at no step": (["--checkpoint-every", "0"], ["--checkpoint-every", "above 0"]),
    "resume from nowhere": (["--resume", "nowhere.pt"], ["--resume", "nowhere.pt", "No such file"]),
    "resume from a directory": (
        ["--resume", "done"],
        ["--resume", "cannot load done", "Is a directory"],
    ),
    "resume from nothing": (
        ["--resume", "empty.pt"],
        ["--resume", "cannot load empty.pt", "not a zip file"],
    ),
    "truncated checkpoint": (
        ["--resume", "truncated.pt"],
        ["--resume", "cannot load truncated.pt", "not a zip file"],
    ),
    "one wrong byte": (
        ["--resume", "flipped.pt"],
        ["--resume", "cannot load flipped.pt", "is damaged"],
    ),
    "another kind of file": (
        ["--resume", "text.pt"],
        ["--resume", "cannot load text.pt", "not a zip file"],
    ),
    "weights alone": (["--resume", "weights.pt"], ["--resume", "cannot load weights.pt", "format"]),
    "a checkpoint that runs code": (
        ["--resume", "evil.pt"],
        ["--resume", "cannot load evil.pt", "UnpicklingError"],
    ),
    "a pickle that runs code": (
        ["--resume", "evil.pickle"],
        ["--resume", "cannot load evil.pickle"],
    ),
    "another version's": (
        ["--resume", "future.pt"],
        ["--resume", "cannot load future.pt", "not of format 4"],
    ),
    "another recipe's": (
        ["--resume", "foreign.pt"],
        ["--resume", "recipe is amp_cifar there, ddp_cifar here: choose another --output-dir"],
    ),
    "another model's": (
        ["--resume", GOOD, "--model", "resnet50", "--stem", "imagenet"],
        ["model is simple_cnn there, resnet50 here", "stem is cifar there, imagenet here"],
    ),
    "other hyper-parameters": (
        ["--resume", GOOD, "--lr", "0.5", "--seed", "1"],
        [
            "lr is 0.1 there, 0.5 here; seed is 0 there, 1 here: "
            "continue it with --lr 0.1 --seed 0, or choose another --output-dir"
        ],
    ),
    "a flag that was not set": (
        ["--resume", GOOD, "--clip-norm", "3", "--seed", "1"],
        ["continue it with --seed 0 and without --clip-norm, or choose another --output-dir"],
    ),
    "another global batch": (
        ["--resume", GOOD, "--batch-size", "64"],
        ["global_batch_size is 128 there, 64 here: continue it with --global-batch-size 128, or"],
    ),
    "other weights": (["--resume", "misfit.pt"], ["--resume", "does not fit this model"]),
    "only damaged checkpoints": (
        ["--resume", "auto", "--output-dir", "damaged"],
        ["cannot load damaged/step-00000001.pt", "--output-dir"],
    ),
    "another run in the output directory": (
        ["--output-dir", "done", "--lr", "0.5"],
        ["done/step-00000001.pt is of another run: lr is 0.1 there", "--output-dir"],
    ),
    "an earlier checkpoint of the output directory": (
        ["--output-dir", "later", "--resume", "later/step-00000001.pt"],
        [
            "later/step-00000002.pt is later than later/step-00000001.pt",
            "choose another --output-dir to begin there, or leave --resume out",
        ],
    ),
}


class Evil:
    def __reduce__(self):
        return print, ("executed",)


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """What the cases find in their directory: data and checkpoints that are not what they should
    be."""
    disk = tmp_path_factory.mktemp("disk")
    run([sys.executable, RECIPE, *SYNTHETIC, "--output-dir", "done"], cwd=disk)
    for name, entry in {
        "half": "cifar-10-python.tar.gz",
        "wrong": "cifar-10-batches-py/data_batch_1",
    }.items():
        disk.joinpath(name, entry).parent.mkdir(parents=True)
        disk.joinpath(name, entry).write_bytes(b"half")
    disk.joinpath("folders/cifar-10-batches-py/data_batch_1").mkdir(parents=True)
    good = (disk / GOOD).read_bytes()
    content = torch.load(disk / GOOD, weights_only=True)
    (disk / "empty.pt").write_bytes(b"")
    (disk / "text.pt").write_text("weights")
    (disk / "truncated.pt").write_bytes(good[:-1000])
    (disk / "flipped.pt").write_bytes(good[:200_000] + bytes([good[200_000] ^ 1]) + good[200_001:])
    for step in (1, 2):
        (disk / "later").mkdir(exist_ok=True)
        (disk / f"later/step-0000000{step}.pt").write_bytes(good)
    (disk / "damaged").mkdir()
    (disk / "damaged/step-00000001.pt").write_bytes(good[:-1000])
    (disk / "evil.pickle").write_bytes(pickle.dumps(Evil()))
    weights = content["states"]["model"]
    torch.save(weights, disk / "weights.pt")
    torch.save({f"other.{name}": value for name, value in weights.items()}, disk / "other.pt")
    torch.save(
        {**weights, "2.1.weight": torch.zeros(7, 128), "2.1.bias": torch.zeros(7)}, disk / "head.pt"
    )
    torch.save({**content, "metrics": Evil()}, disk / "evil.pt")
    torch.save({**content, "format": 5}, disk / "future.pt")
    torch.save(
        {**content, "config": {**content["config"], "recipe": "amp_cifar"}}, disk / "foreign.pt"
    )
    content["states"]["model"].popitem()
    torch.save(content, disk / "misfit.pt")
    return disk


def files(directory):
    """{path: content}, without the lock's, in which every run writes who it is."""
    paths = [path for path in directory.rglob("*") if path.name != "run.lock"]
    return {path.relative_to(directory): path.is_file() and path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def errors(disk, tmp_path_factory):
    """{case: (exit code, output, files left)}, without importing torch anew for each."""
    runs = []
    for flags, _ in CASES.values():
        directory = tmp_path_factory.mktemp("case") / "disk"
        shutil.copytree(disk, directory)
        run = {"processes": 1, "script": str(RECIPE), "directory": directory}
        runs.append({**run, "flags": [*SYNTHETIC, *flags]})
    # No route to the network: a download must fail here as it does on a machine without one.
    answers = forked(
        runs, tmp_path_factory.mktemp("forked"), together=2, https_proxy="http://127.0.0.1:9"
    )
    return {
        case: (*codes, output, files(described["directory"]))
        for case, described, (codes, output) in zip(CASES, runs, answers, strict=True)
    }


@pytest.mark.parametrize("case", CASES)
def test_an_error_in_one_line_and_nothing_lost(errors, disk, case):
    code, output, after = errors[case]
    line = the_error_line(SimpleNamespace(returncode=code, stdout="", stderr=output))
    assert all(word in line for word in CASES[case][1]), line
    assert "Traceback" not in output
    assert code == 2
    assert files(disk).items() <= after.items()
    assert "executed" not in output, "a checkpoint ran code"


def test_the_evil_checkpoint_would_run_code_if_it_were_let(disk, capsys):
    torch.load(disk / "evil.pt", weights_only=False)
    assert capsys.readouterr().out == "executed\n"


@pytest.mark.slow
def test_swapped_stages_are_refused(tmp_path):
    common = {"recipe": "pipeline_cifar", "processes": 2, "grace": 0.5}
    flags = ["--batch-size", 64, "--max-steps", 1]
    ((codes, output),) = forked(
        [{**common, "directory": tmp_path / "run", "flags": flags}], tmp_path
    )
    assert codes == [0, 0], output
    content = torch.load(tmp_path / "run/step-00000001.pt", weights_only=True)
    content["states"].reverse()
    torch.save(content, tmp_path / "swapped.pt")
    flags += ["--resume", tmp_path / "swapped.pt"]
    ((codes, output),) = forked(
        [{**common, "directory": tmp_path / "other", "flags": flags}], tmp_path
    )
    assert codes[0] == 2 and output.count("error:") == 1
    assert "swapped.pt does not fit this model" in output and "stage 0: " in output


@pytest.mark.slow
def test_a_rank_that_is_late_for_an_error_leaves_when_it_is_told_to(tmp_path):
    """The launcher ends it as soon as the first rank has: before it knows of the error itself."""
    source = RECIPE.read_text()
    line = "    if counted != samples:\n"
    assert source.count(line) == 1
    late = f"    time.sleep(2 * int(os.environ['RANK']))\n    counted -= 1\n{line}"
    script = tmp_path / "late.py"
    script.write_text(source.replace(line, late))
    run = {"processes": 2, "directory": tmp_path, "script": script, "flags": SYNTHETIC}
    ((codes, output),) = forked([{**run, "grace": 0.5, "terminate": True}], tmp_path)
    assert codes == [2, 2] and output.count("error:") == 1, output


@pytest.mark.slow
@at_once
def test_refused_once_by_two_processes(directory):
    process = launch(2, RECIPE, *SYNTHETIC, "--epochs", "-1", cwd=directory, check=False)
    assert "--epochs" in the_error_line(process)


@pytest.mark.slow
@at_once
def test_missing_data_is_told_once_by_two_processes(directory):
    flags = ["--data", "cifar10", "--data-dir", directory / "nowhere", "--cpu"]
    process = launch(
        2, RECIPE, *flags, cwd=directory, check=False, https_proxy="http://127.0.0.1:9"
    )
    assert "--data synthetic" in the_error_line(process)


@at_once
def test_processes_that_do_not_see_each_other_are_refused(directory):
    process = run(
        [sys.executable, RECIPE, *SYNTHETIC], cwd=directory, check=False, SLURM_STEP_NUM_TASKS="4"
    )
    line = the_error_line(process)
    assert "4 processes were started, this one sees 1" in line and "accelerate launch" in line


@at_once
def test_more_processes_than_gpus_are_refused_before_any_collective(directory):
    """A machine with one GPU, as far as the recipe can tell; a collective would wait for the other
    rank for ever."""
    fake = directory / "sitecustomize.py"
    fake.write_text(
        "import torch\n"
        "torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1\n"
        "def forbidden(*args, **kwargs):\n    raise AssertionError('a process group was started')\n"
        "torch.distributed.init_process_group = forbidden\n"
    )
    flags = [flag for flag in SYNTHETIC if flag != "--cpu"]
    launched = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    process = run(
        [sys.executable, RECIPE, *flags],
        cwd=directory,
        check=False,
        PYTHONPATH=str(directory),
        **launched,
    )
    line = the_error_line(process)
    assert "2 processes, 1 GPU" in line and "--num_processes 1" in line and "--cpu" in line
    assert not Path(directory, "runs/ddp_cifar/summary.json").exists()


def test_it_trains_without_docstrings_and_assertions(tmp_path):
    """As by `python -OO`, which would compile all of torch once more."""
    script = tmp_path / "optimized.py"
    script.write_text(f'exec(compile(open("{RECIPE}").read(), "{RECIPE}", "exec", optimize=2))')
    run = {"processes": 1, "script": script, "flags": SYNTHETIC, "directory": tmp_path}
    ((codes, output),) = forked([run], tmp_path)
    assert codes == [0] and "step 1/1" in output
