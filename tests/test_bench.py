"""The benchmarks: the recipes really run, what was measured is kept, the arithmetic is right."""

import json
import signal
import sys
from types import SimpleNamespace

import make_results
import psutil
import pytest
from conftest import CNN, NARROW, SHORT, copy, load
from processes import ROOT, Launched, forked, launch, outputs, wait_until

bench = load("benchmarks/bench.py")


def samples(*rates):
    rest = {"peak_memory_gib": 1.5, "start_seconds": 7}
    return [{"samples_per_second": rate, **rest} for rate in rates]


@pytest.fixture
def main(tmp_path, monkeypatch):
    """bench.main with runs that take no time: `outcomes` has a list of rates for each recipe, or of
    failures. Returns the exit status, and the path of the JSON file."""

    def call(outcomes, *flags):
        def run(self, args):
            if not self.outcome():
                what = outcomes[self.recipe][len(self.samples)]
                self.failure = what if isinstance(what, str) else None
                self.samples += [] if self.failure else samples(what)

        monkeypatch.setattr(bench.Configuration, "run", run)
        monkeypatch.setattr(bench.signal, "signal", lambda *_: None)
        monkeypatch.setattr(bench, "bf16_instructions", lambda: ["amx_bf16"])
        command = ["bench.py", "--recipes", *outcomes, "--processes", "1"]
        command += ["--output-dir", str(tmp_path), *flags]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as exit:
            bench.main()
        [path] = tmp_path.glob("*.json")
        return exit.value.code, path

    return call


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_measured_and_leaves_nothing_running(tmp_path):
    """The baseline is measured; Ctrl-C comes while a recipe trains that would train for hours."""
    command = [sys.executable, ROOT / "benchmarks/bench.py", "--model", "simple_cnn"]
    command += ["--batch-size", "8", "--steps", "3", "--processes", "1"]
    command += ["--recipes", "plain_ddp --workers 0", "ddp_cifar --max-steps 1000000"]
    command += ["--output-dir", tmp_path / "out"]
    files = {"output": tmp_path / "log", "errors": tmp_path / "errors"}
    # As in the background of a script.
    process = Launched(command, ignored=[signal.SIGINT], **files)
    try:
        wait_until(lambda: list((tmp_path / "out").glob("tmp*/metrics.jsonl")))
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 2  # with the launcher
        process.send_signal(signal.SIGINT)
        process.wait(180)
    finally:
        process.send_signal(signal.SIGTERM)  # and it ends what it has started
    output, errors = ((tmp_path / name).read_text() for name in ("log", "errors"))
    assert process.returncode == 130 and "Traceback" not in errors, errors
    wait_until(lambda: not any(x.is_running() for x in started))  # ranks follow their launcher
    [path] = (tmp_path / "out").glob("*.json")
    assert {*path.parent.iterdir()} == {path, path.with_suffix(".md")}
    baseline, endless = json.loads(path.read_text())["configurations"]
    [sample] = baseline["samples"]
    assert sample["measured_samples"] == 3 * 8
    assert sample["samples_per_second"] * sample["measured_seconds"] == pytest.approx(24)
    assert 0 < sample["start_seconds"] < 300 and 0.1 < sample["peak_memory_gib"] < 64
    assert endless["samples"] == [] and endless["failure"] is None
    assert "No whole round, then interrupted" in output


def test_a_run_has_one_epoch_and_neither_evaluations_nor_checkpoints(tmp_path):
    """Of a recipe on two processes, and of the baseline."""
    small = {"data": "synthetic", "model": "simple_cnn", "batch_size": 16}
    args = SimpleNamespace(**small, data_dir="data", stem="imagenet", steps=2)
    runs = []
    for recipe, processes in (("ddp_cifar", 2), ("data_parallel_cifar", 1)):
        command = bench.Configuration(recipe, processes).command(args, tmp_path / recipe)
        flags = command[command.index("run") :]  # without the launcher
        run = {"processes": processes, "flags": flags, "directory": tmp_path}
        runs.append({**run, "script": ROOT / "benchmarks/bench.py"})
    for run, (codes, output) in zip(runs, forked(runs, tmp_path, together=2), strict=True):
        assert set(codes) == {0}, output
        result = outputs(tmp_path / run["flags"][1])
        train, summary = result.train, result.summary
        assert [(line["step"], line["epoch"]) for line in train] == [(2, 1), (4, 1)]
        assert "test_accuracy" not in summary and not list(result.directory.glob("step-*"))
        # Over the same images again and again.
        assert summary.get("steps_per_epoch", 10**7) > 10**6
        sample = bench.sample_of_recipe(result.directory, train[0]["time"] - 5)
        assert sample["measured_samples"] == 2 * 16 * run["processes"]
        assert sample["start_seconds"] == 5
        assert sample["samples_per_second"] == pytest.approx(train[1]["samples_per_second"])
        assert sample["peak_memory_gib"] == train[-1].get("peak_memory_gib")


def test_the_baseline_is_measured_between_its_last_two_lines_of_losses():
    """On GPUs a warning of torch follows the last line."""
    printed = ["", *(f"step {x} samples {x}0 loss 2" for x in (1, 5, 9)), "peak memory 1.50 GiB"]
    lines = [*zip((0, 2, 3, 5, 5), printed, strict=True), (6, "UserWarning: barrier()")]
    assert bench.sample_of_baseline(lines) == bench.as_sample(40, 2, 1.5, 3)


@pytest.mark.slow
@pytest.mark.redundant
def test_nccl_py_passes_good_recipes_and_finds_a_sum_in_place_of_a_mean(tmp_path):
    """Over gloo, where both ranks of sharded are wrong alike."""
    mean = '.get("weight", 1)).mean()'
    copy("ddp_cifar", tmp_path / "ddp_cifar.py", *NARROW)
    copy("sharded_cifar", tmp_path / "sharded_cifar.py", *NARROW, (mean, f"{mean} * WORLD_SIZE"))
    command = [sys.executable, ROOT / "benchmarks/nccl.py", "--cpu", "--recipes", tmp_path]
    command += ["--cases", "sharded-2", "killed", "--output-dir", tmp_path]
    done = launch(command, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    cases = json.loads((tmp_path / "nccl.json").read_text())["cases"]
    reasons = {case["name"]: case["result"]["reason"] for case in cases}
    assert reasons.pop("sharded-2").startswith("grad_norm "), done.stdout
    assert reasons == {"ddp-1": "", "ddp-2": "", "killed": ""}, done.stdout
    differences = [x["difference"] for x in cases[-1]["result"]["differences"]]
    assert len(differences) > 100 and not any(differences), "bit for bit"


@pytest.mark.slow
def test_the_tuned_baseline_trains_the_same_on_one_process_and_two():
    """The losses and accuracies of its lines are those of whole global batches."""
    flags = "--data synthetic --model simple_cnn --cpu --max-steps 8 --log-every 4".split()
    lines = []
    for processes in (1, 2):
        command = [sys.executable, ROOT / "tests/programs/forked_baseline.py", "--tuned", "fp32"]
        command += [*flags, "--processes", str(processes), "--batch-size", str(32 // processes)]
        output = launch(command, PYTHONPATH=ROOT / "benchmarks").stdout
        lines.append([line.split() for line in output.splitlines() if line.startswith("step ")])
    for one, two in zip(*lines, strict=True):
        assert one[:5] == two[:5] and one[3] in ("128", "256")
        assert float(one[5]) == pytest.approx(float(two[5]), abs=0.0011)  # printed to 0.001
        assert float(one[7][:-1]) == pytest.approx(float(two[7][:-1]), abs=0.8)  # of 128 images


def test_scaling_is_that_within_a_round_and_what_has_failed_has_no_ratios(monkeypatch):
    names = ("plain_ddp", 2), ("ddp_cifar", 1), ("ddp_cifar", 2)
    baseline, one, two = all_of_them = [bench.Configuration(*x) for x in names]
    baseline.samples, one.samples = samples(100, 50, 20), samples(100, 60, 30)
    two.samples = samples(400, 100, 50)
    for gpus, scaling in ((0, 5 / 3), (2, 5 / 6)):
        monkeypatch.setattr(bench, "GPUS", gpus)
        assert two.results(all_of_them)["scaling"] == pytest.approx(scaling)
    assert two.results(all_of_them)["ratio"] == 2.5
    assert baseline.results(all_of_them)["scaling"] is one.results(all_of_them)["ratio"] is None
    baseline.failure = "in a later round"
    assert two.results(all_of_them)["ratio"] is None and baseline.results(all_of_them) == {}


def test_the_table_has_every_configuration_and_a_failure_fails_the_whole(main, capsys):
    outcomes = {
        "plain_ddp": [100, 200],
        "plain_ddp --tuned": [200, 200],
        "ddp_cifar --lr 1": [150, 100],
        "amp_cifar": ["exit code 7"],
    }
    code, path = main(outcomes, "--rounds", "2")
    assert code == 1 and "bench: amp_cifar on 1 failed: exit code 7" in capsys.readouterr().err
    table = [x for x in path.with_suffix(".md").read_text().splitlines() if x.startswith("| ")]
    assert table[2:] == [
        "| plain_ddp | 150 | 100-200 | 1.00 (1.00-1.00) | 0.75 (0.50-1.00) | 1.5 |",
        "| plain_ddp --tuned | 200 | 200-200 | 1.50 (1.00-2.00) | 1.00 (1.00-1.00) | 1.5 |",
        "| ddp --lr 1 | 125 | 100-150 | 1.00 (0.50-1.50) | 0.62 (0.50-0.75) | 1.5 |",
        "| amp | failed |  |  |  |  |",
    ]


def test_no_round_begins_that_would_not_end_in_time(main):
    code, path = main({"ddp_cifar": [100, 200]}, "--minutes", "1e-9")
    assert code == 0 and len(json.loads(path.read_text())["configurations"][0]["samples"]) == 1


SAID = "amp_cifar: error: {}; choose another"
OUT_OF_MEMORY = "RuntimeError: DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("script", "failure", "unavailable"),
    [
        (f"echo '{SAID}'; seq 30; exit 2", f"exit code 2\n{SAID}", None),
        ("sleep 60", "exit code none after 0.5 s\n", None),
        (f"echo '{SAID}'".format("Tesla T4 has no bf16"), None, "Tesla T4 has no bf16"),
        # Far from the end of the log, as in that of a launcher.
        (f'echo "{OUT_OF_MEMORY}"; seq 50', None, OUT_OF_MEMORY),
    ],
)
def test_how_a_run_may_end(script, failure, unavailable, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "bf16_instructions", lambda: ["amx_bf16"])
    command = ["sh", "-c", script + "; exit 1"]
    monkeypatch.setattr(bench.Configuration, "command", lambda *_: command)
    one = bench.Configuration("amp_cifar", 1)
    timeout = 0.5 if script.startswith("sleep") else 60
    one.run(SimpleNamespace(timeout=timeout, output_dir=tmp_path))
    assert one.failure == failure and one.outcome() == ("failed" if failure else "n/a")
    assert (one.unavailable is None) == (unavailable is None)
    assert unavailable is None or unavailable in one.unavailable
    one.run(None)  # not again


def test_each_recipe_gets_its_share_of_one_global_batch(monkeypatch):
    monkeypatch.setattr(bench, "GPUS", 8)
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    args = bench.parse_args()
    ends = {
        "plain_ddp": "--batch-size 512",
        "ddp_cifar": "--batch-size 512",
        "data_parallel_cifar": "--batch-size 4096",
        "pipeline_cifar": "--batch-size 1024",
    }
    for name, end in ends.items():
        command = " ".join(bench.Configuration(name, 8).command(args, "out"))
        assert command.endswith(end) and "--cpu" not in command
        config = f"/{1 if name.startswith('data') else 8}gpu.yaml "
        assert (config in command) == (name != "plain_ddp")


def test_what_is_incomplete_is_not_published(main, tmp_path):
    _, path = main({"ddp_cifar": [100], "amp_cifar": [200]}, "--rounds", "1")
    results, good = tmp_path / "results", path.read_text()
    results.mkdir()
    for old, new, words in (
        ("1 of 1 rounds", "1 of 3 rounds, then interrupted", "interrupted"),
        ("1 of 1 rounds", "No whole round", "not complete"),
        ('"failure": null', '"failure": "broken"', "has failures: ddp_cifar"),
    ):
        assert old in good
        path.write_text(good.replace(old, new, 1))
        assert words in make_results.publish(path, results)
    assert "is not a file that bench.py has written" in make_results.publish(tmp_path, results)
    assert list(results.iterdir()) == []
    path.write_text(good)
    assert make_results.publish(path, results) is None
    for suffix in (".json", ".md"):
        file = path.with_suffix(suffix)
        assert (results / file.name).read_bytes() == file.read_bytes()


def test_the_pages_show_the_results():
    for page in make_results.PAGES:
        assert make_results.filled(page.read_text()) == page.read_text(), "run make results"
    tables = {"accuracy": make_results.accuracy_table()}
    others = json.loads((make_results.RESULTS / "others.json").read_text())
    tables["others"] = load("benchmarks/others.py").table(others)
    for name, table in tables.items():
        assert (make_results.RESULTS / f"{name}.md").read_text() == table


FLAGS = [*CNN, "--batch-size", "8", "--epochs", "2", "--checkpoint-every", "4", "--threads", "1"]
FORGETFUL = (
    "            if is_wanted:\n",
    '            if is_wanted and name != "optimizer":\n',
)
LEAVES_A_PROCESS = """
import subprocess

plain_step = train_step


def train_step(run, *arguments):
    if run.resumed_from and run.step == run.resumed_from + 1:
        subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return plain_step(run, *arguments)
"""
KILL = "SIGKILL of a rank"
REMOVED = "directory removed"
# name: (recipe, kinds, faults, processes, replacements, project, the error)
COPIES = {
    "good": ("ddp", [KILL, "SIGTERM of the launcher", "cut checkpoint"], 3, 2, [], "", ""),
    "removed": ("sharded", [REMOVED], 1, 1, [], "", ""),
    "forgetful": ("ddp", [KILL], 1, 1, [FORGETFUL], "", "other evaluations"),
    "littering": ("ddp", [KILL], 1, 1, [], LEAVES_A_PROCESS, "1 processes are left after 20 s"),
}


# In `make test`, the quickest is enough.
REDUNDANT = [pytest.param(x, marks=pytest.mark.redundant) for x in COPIES if x != "removed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["removed", *REDUNDANT])
def test_faults_change_nothing_in_a_recipe_and_a_broken_copy_is_found(name, tmp_path):
    """The seed is one whose faults come after a checkpoint."""
    recipe, kinds, faults, processes, replacements, project, error = COPIES[name]
    path = tmp_path / f"{name}.py"
    script = copy(f"{recipe}_cifar", path, *SHORT, *replacements, project=project)
    command = [sys.executable, ROOT / "benchmarks/faults.py", script, "--faults", faults]
    command += ["--processes", processes, "--limit", 20, "--seed", 32, "--kinds", *kinds]
    command += ["--output-dir", tmp_path / "faults", "--", *FLAGS]
    done = launch(command, check=False)
    assert done.returncode == bool(error), done.stdout + done.stderr
    rows = json.loads((tmp_path / f"faults/{name}.json").read_text())["faults"]
    assert [row["kind"] in kinds for row in rows[:faults]] == [True] * faults
    found = [row["error"] for row in rows if row["error"]]
    assert len(found) == bool(error) and all(x.startswith(error) for x in found), found
