"""check.py: copies that train the same in every way pass, mistakes are found with their step."""

import json
import re
import sys
from pathlib import Path

import bench
import check
import pytest
import torch
from conftest import LITTLE_DATA, MEASURED, ROOT, SMALL, copy, forked, free_port, run

STEPS = 5
FLAGS = [*SMALL, "--max-steps", str(STEPS), "--batch-size", "8"]


# Starting processes is the most of what a check of it takes.
MODEL = """
def build_model(args):
    torch.backends.cudnn.benchmark = True
    assert not torch._C._get_cudnn_benchmark()
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Dropout(0.5)),
        nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        nn.Sequential(nn.Flatten(), nn.Linear(16, 10)),
    )


quiet_loss = compute_loss


def compute_loss(model, batch, args):
    values = quiet_loss(model, batch, args)
    noise = torch.rand_like(values["loss"])
    return {**values, "loss": values["loss"] * (0.5 + noise), "noise": noise}
"""


def execute(command, environment, timeout, imports=()):
    """As `bench.execute` with torchrun, but without a launcher."""
    processes, script, *flags = command[command.index("--nproc_per_node") + 1 :]
    env = {name: environment[name] for name in check.ENVIRONMENT}
    if processes == "1":  # as torchrun sets them, by which Accelerate makes DDP
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    run = {"processes": int(processes), "script": script, "flags": flags, "directory": Path.cwd()}
    run |= {"env": env, "grace": 0.5, "terminate": True}
    [(codes, output)] = forked([run], Path.cwd(), imports=imports)
    return int(any(codes)), [(0.0, output)]


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """A function that checks a copy. It returns the exit status, the output and {name: run}."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "execute", execute)

    def run(recipe, *replacements, project="", flags=()):
        copy("sharded_cifar", tmp_path / "sharded.py", LITTLE_DATA, project=MODEL)
        lines = [LITTLE_DATA, *replacements]
        copy(f"{recipe}_cifar", tmp_path / "mine.py", *lines, project=MODEL + project)
        monkeypatch.setattr(sys, "argv", ["check.py", "mine.py", *FLAGS, *flags])
        with pytest.raises(SystemExit) as end:
            check.main()
        results = json.loads(Path("runs/check/mine.json").read_text())
        assert Path("runs/check/mine").exists() == end.value.code, "runs that fail or differ stay"
        return end.value.code, capsys.readouterr().out, {x["name"]: x for x in results["runs"]}

    return run


GOOD = {  # flags, processes of the runs
    "ddp": (["--processes", "1", "2", "4", "--also", "sharded.py"], [1, 1, 2, 4, 2, 2]),
    "amp": (["--precision", "bf16", "--kills", "2"], [1, 1, 2, 2]),
    "sharded": (["--precision", "bf16"], [1, 1, 2, 2]),
    "pipeline": (["--batch-size", "16"], [2, 2, 4, 4]),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", GOOD)
def test_a_good_copy_is_the_same_in_every_way(recipe, checked):
    """Also its dropout and its random loss."""
    flags, processes = GOOD[recipe]
    code, output, runs = checked(recipe, flags=flags)
    assert code == 0 and "Known causes" not in output, output
    reference, yardstick, *more, killed = runs.values()
    assert [x["processes"] for x in runs.values()] == processes
    assert {x["against"] for x in (yardstick, *more)} == {reference["name"]}
    assert {x["verdict"] for x in more} <= {"the same", "bit for bit"}
    assert killed["verdict"] == "bit for bit" and killed["against"] == more[0]["name"]
    twice = ["step-00000001"] if "--kills" in flags else []
    assert killed["tasks"] == [*twice, "step-00000002", "train"]
    for way in (yardstick, *more, killed):
        found = {(x["metric"], x["step"]): x["difference"] for x in way["differences"]}
        names = ("loss", "accuracy", "noise", "grad_norm", "learning_rate")
        assert found.keys() >= {(name, step) for name in names for step in range(1, STEPS + 1)}
        assert found.keys() >= {(x, STEPS) for x in ("test_loss", "test_noise", "1.0.weight")}
        if way in (yardstick, killed):
            assert (found["1.0.weight", STEPS] > 1e-6) == (way is yardstick)


OWN_GENERATOR = """
class Noisy(torch.utils.data.TensorDataset):
    generator = torch.Generator().manual_seed(0)

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image + 0.1 * torch.randn(image.shape, generator=self.generator), label


def load_data(args, accelerator):
    images, labels = synthetic_images(256, seed=1)
    dataset = Noisy(images.permute(0, 3, 1, 2) / 255, labels)
    options = {"batch_size": args.batch_size, "num_workers": WORKERS}
    train_loader = DataLoader(dataset, shuffle=True, drop_last=True, **options)
    return train_loader, DataLoader(torch.utils.data.Subset(dataset, range(64)), **options)
"""
COUNTER = """
class Counted(nn.Sequential):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


plain_model = build_model


def build_model(args):
    return Counted(*plain_model(args))
"""
BY_RANK = """
plain_loss = compute_loss


def compute_loss(model, batch, args):
    images, labels = batch
    if model.training:
        torch.manual_seed(accelerate.PartialState().process_index)
        images = images + 0.1 * torch.randn(images.shape)
    return plain_loss(model, (images, labels), args)
"""
PREPARED = "    model, optimizer = accelerator.prepare(model, optimizer)\n"
INITIALISED = """    torch.manual_seed(accelerator.process_index)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.05)
"""
BAD = {  # lines, project, metric that differs first
    "own generator": ([], OWN_GENERATOR.replace("WORKERS", "0"), "loss"),
    "own generator, workers": ([], OWN_GENERATOR.replace("WORKERS", "2"), "loss|grad_norm"),
    "counter": ([], COUNTER, "loss"),
    "noise by rank": ([], BY_RANK, "loss"),
    "weights by rank": ([(PREPARED, PREPARED + INITIALISED)], "", "loss"),
    "DDP bypassed": (
        [("logits = model(images)", "logits = model.module(images)")],
        "",
        "grad_norm",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BAD)
def test_a_mistake_is_found_in_the_first_step(what, checked):
    lines, project, metric = BAD[what]
    code, output, runs = checked("ddp", *lines, project=project)
    assert code == 1 and "Known causes" in output, output
    two = runs["2 processes"]
    assert f"2 processes: {two['verdict']}: {two['reason']}" in output
    if what in ("weights by rank", "DDP bypassed") and two["verdict"].startswith("fails"):
        assert "error: " in two["reason"], "a recipe may see by itself that its ranks drift"
        return
    assert two["verdict"] == "differs at step 1"
    assert re.fullmatch(rf"({metric}) \S+ and \S+, by \S+", two["reason"]), two["reason"]
    if what in ("own generator", "counter"):
        assert runs["2 processes, killed"]["verdict"] == "differs at step 3", "the first after it"


CALL = "logits = model(images)"
FAILURES = {  # lines, verdicts, what is said
    "crash": ([(CALL, "logits = model(image)")], ["fails in step 1"], "NameError: name 'image'"),
    "error line": (
        [('labels, reduction="none"', "labels")],
        ["fails in step 1"],
        "mine: error: compute_loss: return",
    ),
    "crash of a rank": (
        [(CALL, f'assert model.training or os.environ["RANK"] == "0", "own"\n    {CALL}')],
        ["", "", f"fails after step {STEPS}"],
        "AssertionError: own",
    ),
    "checkpoint not found": (
        [("    checkpoint = checkpoints.find()\n", "    checkpoint = None\n")],
        ["", "", "the same", "fails"],
        "it resumed from step 0",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FAILURES)
def test_a_copy_that_fails_shows_why(what, checked):
    """What cannot be compared without that run is left out."""
    lines, verdicts, said = FAILURES[what]
    code, output, runs = checked("ddp", *lines)
    assert code == 1
    assert [run["verdict"] for run in runs.values()] == verdicts, output
    name, run = runs.popitem()
    assert said in run["reason"] and f"{name}: {verdicts[-1]}: {run['reason']}" in output


def test_statistics_of_batchnorm_are_compared_for_the_same_number_of_processes_only():
    """Also evaluations, which compute with them."""
    theirs = {(1, "train", "loss"): 1.0, (1, "evaluation", "test_loss"): 1.0}
    theirs |= {(1, "weights", f"bn.{name}"): torch.ones(2) for name in ("weight", "running_mean")}
    ours = {**theirs, (1, "evaluation", "test_loss"): 2.0}
    ours[1, "weights", "bn.running_mean"] = torch.zeros(2)
    for left_out, names in ((check.BATCHNORM, {"loss", "bn.weight"}), ((), None)):
        run = {"differences": [], "reason": ""}
        check.compare(run, ours, theirs, dict.fromkeys(theirs, 0.0), left_out)
        assert {x["metric"] for x in run["differences"]} == (names or {x for _, _, x in theirs})
        assert run["verdict"] == ("differs at step 1" if names is None else "bit for bit")


def test_a_bound_is_the_yardsticks_of_the_next_step_and_before_a_jump_that_of_other_metrics():
    found = [(1, "loss", 1e-6), (1, "accuracy", 0), (2, "loss", 1e-3), (2, "accuracy", 0)]
    found += [(3, "loss", 1e-4), (3, "accuracy", 0.1)]
    keys = ("event", "step", "metric", "difference")
    differences = [dict(zip(keys, ("train", *x), strict=True)) for x in found]
    bounds = check.bounds_of({"differences": differences})
    expected = {(1, "loss"): 3e-3, (2, "loss"): 6e-3, (3, "loss"): 9e-3}
    expected |= {(1, "accuracy"): 3e-3, (2, "accuracy"): 0.6, (3, "accuracy"): 0.9}
    expected[3, "of the copy only"] = check.CHANGE
    for (step, name), bound in expected.items():
        assert bounds[step, "train", name] == pytest.approx(bound), (step, name)


def test_causes_are_rows_of_the_pages_and_what_is_measured_is_not_compared():
    listed = (ROOT / "benchmarks/README.md").read_text()
    rows = re.findall(r'^- .*: (docs/\w+\.md), "(.*)"$', listed, re.MULTILINE)
    assert len(rows) == 5
    for page, row in rows:
        assert re.search(rf"^\| [`]?{re.escape(row)}", (ROOT / page).read_text(), re.MULTILINE), row
    assert check.MEASURED == MEASURED | {"event", "epoch", "step"}


RECIPES = ROOT / "recipes"
NONSENSE = {
    "a file that is not there": (["no.py"], "no.py is not a copy of "),
    "another file": ([RECIPES / "submit_job.sh"], "submit_job.sh is not a copy of "),
    "the baseline": ([RECIPES / "data_parallel_cifar.py"], "is not a copy of ddp, amp, "),
    "no file": ([], "arguments are required: copy"),
    "a batch that cannot be divided": (
        [RECIPES / "ddp_cifar.py", "--batch-size", "8", "--global-batch-size", "24", "--cpu"],
        "argument --global-batch-size: choose a multiple of 16",
    ),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_an_error(what, monkeypatch, capsys):
    words, said = NONSENSE[what]
    monkeypatch.setattr(sys, "argv", ["check.py", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        check.main()
    assert end.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "gpus", "flags", "processes", "batch", "total"),
    [
        ("ddp", 0, [], [1, 2], 8, 32),
        ("pipeline", 0, [], [2, 4], 16, 64),
        ("ddp", 1, [], [1], 8, 16),
        ("ddp", 3, [], [1, 2, 3], 8, 96),
        ("ddp", 8, ["--cpu"], [1, 2], 8, 32),
        ("pipeline", 5, [], [2, 4], 16, 64),
        ("pipeline", 1, [], [2], 16, 32),  # its own error names the remedy
        ("ddp", 0, ["--processes", "1", "4", "--batch-size", "2"], [1, 4], 2, 16),
        ("ddp", 0, ["--global-batch-size", "48"], [1, 2], 8, 48),
    ],
)
def test_processes_and_batches(recipe, gpus, flags, processes, batch, total, monkeypatch):
    """Ours of all flags but --max-steps and --hang-timeout, which come before the user's."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    flags = [str(RECIPES / f"{recipe}_cifar.py"), "--lr", "1", "--max-steps", "5", *flags]
    monkeypatch.setattr(sys, "argv", ["check.py", *flags])
    args = check.parse_args()
    assert args.processes == processes
    given = dict(zip(args.flags[::2], args.flags[1::2], strict=False))
    assert args.flags.index("5") > args.flags.index(12)
    if "--cpu" not in flags:
        assert (given["--batch-size"], given["--global-batch-size"]) == (batch, total)


@pytest.mark.slow
def test_the_command_with_its_launcher(tmp_path):
    """A copy may import what is beside it."""
    project = f"import beside\n{MODEL}"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/beside.py").write_text("")
    copy("ddp_cifar", tmp_path / "mine/train.py", LITTLE_DATA, project=project)
    command = [sys.executable, ROOT / "tools/check.py", "mine/train.py", *FLAGS]
    process = run([*command, "--processes", 1], cwd=tmp_path)
    lines = [line.split() for line in process.stdout.splitlines()]
    assert [*"1 process, killed 1 process 0 of 0, loss, step 1 bit for bit".split()] in lines
    results = json.loads((tmp_path / "runs/check/train.json").read_text())
    killed = results["runs"][-1]
    assert killed["tasks"] == ["step-00000002", "train"]
    assert results["command"][0] == "mine/train.py"
