"""The benchmarks: the recipes really run, what was measured is kept, the arithmetic is right."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import make_results
import pytest
from conftest import NARROW, copy, load
from processes import ROOT, Launched, forked, launch, wait_until

bench = load("benchmarks/bench.py")


def measured(recipe, processes, *rates):
    made = bench.Configuration(recipe, processes)
    made.samples = [
        {"samples_per_second": rate, "peak_memory_gib": 1.5, "start_seconds": 7} for rate in rates
    ]
    return made


@pytest.fixture
def main(tmp_path, monkeypatch):
    """bench.main with runs that take no time: `outcomes` has a list of rates for each recipe, or of
    failures. Returns the exit status, and the files' content by suffix."""

    def call(outcomes, *flags):
        def run(self, args):
            if not self.outcome():
                what = outcomes[self.recipe][len(self.samples)]
                self.failure = what if isinstance(what, str) else None
                self.samples += [] if self.failure else measured(self.recipe, 1, what).samples

        monkeypatch.setattr(bench.Configuration, "run", run)
        monkeypatch.setattr(bench.signal, "signal", lambda *_: None)
        monkeypatch.setattr(bench, "bf16_instructions", lambda: ["amx_bf16"])
        monkeypatch.setenv("COLUMNS", "80")
        command = ["bench.py", "--recipes", *outcomes, "--processes", "1"]
        command += ["--output-dir", str(tmp_path / "out"), *flags]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as exit:
            bench.main()
        return exit.value.code, written(tmp_path)

    return call


def written(tmp_path):
    found = {path.suffix: path.read_text() for path in (tmp_path / "out").glob("*.*")}
    return found | ({".json": json.loads(found[".json"])} if found else {})


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_measured_and_leaves_nothing_running(tmp_path):
    """The baseline is measured; Ctrl-C comes while a recipe trains that would train for hours."""
    command = [sys.executable, ROOT / "benchmarks/bench.py", "--model", "simple_cnn"]
    command += ["--batch-size", "8", "--steps", "3", "--processes", "1"]
    command += ["--recipes", "plain_ddp --workers 0", "ddp_cifar --max-steps 1000000"]
    with open(tmp_path / "log", "w") as log, open(tmp_path / "errors", "w") as errors:
        # As in the background of a script.
        options = {"output": log, "errors": errors, "ignored": [signal.SIGINT]}
        process = Launched([*command, "--output-dir", tmp_path / "out"], **options)

    def ranks():
        pattern = f"run ddp_cifar .*{tmp_path}"
        return subprocess.run(["pgrep", "-f", pattern], capture_output=True).stdout.split()

    def trains():
        assert process.poll() is None, (tmp_path / "errors").read_text()
        return list((tmp_path / "out").glob("tmp*/metrics.jsonl"))

    try:
        wait_until(trains)
        assert len(ranks()) >= 2  # with the launcher
        process.send_signal(signal.SIGINT)
        process.wait(180)
    finally:
        process.send_signal(signal.SIGTERM)  # and it ends what it has started
    output, errors = ((tmp_path / name).read_text() for name in ("log", "errors"))
    assert process.returncode == 130 and "Traceback" not in errors, errors
    wait_until(lambda: not ranks())  # they have sessions of their own and follow their launcher
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".md"}
    baseline, endless = written(tmp_path)[".json"]["configurations"]
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
        directory = tmp_path / run["flags"][1]
        lines = [json.loads(x) for x in (directory / "metrics.jsonl").read_text().splitlines()]
        train = [line for line in lines if line["event"] == "train"]
        assert [line["step"] for line in train] == [2, 4] and {x["epoch"] for x in lines} == {1}
        summary = json.loads((directory / "summary.json").read_text())
        assert "test_accuracy" not in summary and not list(directory.glob("step-*"))
        # Over the same images again and again.
        assert summary.get("steps_per_epoch", 10**7) > 10**6
        sample = bench.sample_of_recipe(directory, train[0]["time"] - 5)
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


def test_medians_over_the_rounds_and_ratios_within_them(monkeypatch):
    # The machine slows down fivefold: each round's ratio is what counts.
    baseline = measured("plain_ddp", 2, 100, 50, 20)
    one = measured("ddp_cifar", 1, 100, 60, 30)
    two = measured("ddp_cifar", 2, 300, 100, 50)
    empty = bench.Configuration("plain_ddp", 1)  # interrupted before its first run
    for gpus, scaling in ((0, 5 / 3), (2, 5 / 6)):
        monkeypatch.setattr(bench, "GPUS", gpus)
        got = two.results([empty, baseline, one, two])
        assert got["scaling"] == pytest.approx(scaling) and got["ratio"] == 2.5
        assert (got["samples_per_second"], got["least"], got["most"]) == (100, 50, 300)
    assert bench.rows([one, two])[1][:2] == ["ddp", "2"]
    assert baseline.results([baseline])["scaling"] is one.results([empty, one])["ratio"] is None
    baseline.failure = "in a later round"
    assert two.results([baseline, two])["ratio"] is None and baseline.results([baseline]) == {}


def test_the_table_has_every_configuration_and_a_failure_fails_the_whole(main, capsys):
    outcomes = {
        "plain_ddp": [100, 200],
        "plain_ddp --tuned": [200, 200],
        "ddp_cifar --lr 1": [150, 100],
        "amp_cifar": ["exit code 7"],
    }
    code, files = main(outcomes, "--rounds", "2")
    assert code == 1
    table = [line for line in files[".md"].splitlines() if line.startswith("| ")]
    assert table[2:] == [
        "| plain_ddp | 150 | 100-200 | 1.00 (1.00-1.00) | 0.75 (0.50-1.00) | 1.5 |",
        "| plain_ddp --tuned | 200 | 200-200 | 1.50 (1.00-2.00) | 1.00 (1.00-1.00) | 1.5 |",
        "| ddp --lr 1 | 125 | 100-150 | 1.00 (0.50-1.50) | 0.62 (0.50-0.75) | 1.5 |",
        "| amp | failed |  |  |  |  |",
    ]
    assert files[".json"]["configurations"][2]["ratio"] == 1.0
    output, errors = capsys.readouterr()
    assert "bench: amp_cifar on 1 failed: exit code 7" in errors
    assert "round 1/2: ddp_cifar --lr 1 on 1: 150 images/s" in output
    shown = output.partition("recipe ")[2].partition("; torch")[0].rpartition("\n")[0]
    assert max(map(len, shown.splitlines())) <= 80


def test_no_round_begins_that_would_not_end_in_time(main):
    code, files = main({"ddp_cifar": [100, 200]}, "--minutes", "1e-9")
    assert code == 0 and len(files[".json"]["configurations"][0]["samples"]) == 1


SAID = "amp_cifar: error: {}; choose another"
OUT_OF_MEMORY = "RuntimeError: DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("script", "failure", "unavailable"),
    [
        (f"echo '{SAID}'; seq 30; exit 2", f"exit code 2\n{SAID}", None),
        ("echo words; exit 3", "exit code 3\nwords", None),
        ("sleep 60", "exit code none after 0.5 s\n", None),
        (f"echo '{SAID}'".format("Tesla T4 has no bf16"), None, "Tesla T4 has no bf16"),
        # Far from the end of the log, as in that of a launcher.
        (f'echo "{OUT_OF_MEMORY}"; seq 50', None, OUT_OF_MEMORY),
        ("echo 'torch.OutOfMemoryError: CUDA out of memory.'", None, "CUDA out of memory"),
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
    """With a mocked number of GPUs."""
    monkeypatch.setattr(bench, "GPUS", 8)
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    args = bench.parse_args()
    commands = {
        name: " ".join(bench.Configuration(name, 8).command(args, "out")) for name in args.recipes
    }
    assert not any("--cpu" in command for command in commands.values())
    assert commands["data_parallel_cifar"].endswith("--batch-size 4096")
    assert "/1gpu.yaml " in commands["data_parallel_cifar"]
    assert "/8gpu.yaml " in commands["pipeline_cifar"]
    assert commands["pipeline_cifar"].endswith("--batch-size 1024")
    assert "/plain_ddp.py --processes 8 --samples 409600 " in commands["plain_ddp"]
    monkeypatch.setattr(bench, "GPUS", 0)  # the ImageNet stem, and the pipeline's fastest cut there
    assert "pipeline_cifar --split layer4.0 --chunks 4" in bench.parse_args().recipes


def test_a_published_table_is_the_measured_one(main, tmp_path):
    """Measurements are in runs/; `--publish` copies them, unless they are incomplete."""
    main({"ddp_cifar": [100], "amp_cifar": [200]}, "--rounds", "1")
    [path] = (tmp_path / "out").glob("*.json")
    results = tmp_path / "results"
    results.mkdir()
    for change, words in (
        (lambda x: x["settings"].update(measured="1 of 3 rounds, then interrupted"), "interrupted"),
        (lambda x: x["settings"].update(measured="No whole round"), "not complete"),
        (lambda x: x["configurations"][1].update(failure="broken"), "has failures: amp_cifar"),
    ):
        content = json.loads(path.read_text())
        change(content)
        (tmp_path / "changed.json").write_text(json.dumps(content))
        assert words in make_results.publish(tmp_path / "changed.json", results)
    assert "is not a file that bench.py has written" in make_results.publish(tmp_path, results)
    assert list(results.iterdir()) == []
    assert make_results.publish(path, results) is None
    assert sorted(file.suffix for file in results.iterdir()) == [".json", ".md"]
    for file in results.iterdir():
        assert file.read_bytes() == path.with_suffix(file.suffix).read_bytes()


def test_the_pages_show_the_results():
    for page in make_results.PAGES:
        assert make_results.filled(page.read_text()) == page.read_text(), "run make results"
    published = (make_results.RESULTS / "accuracy.md").read_text()
    assert published == make_results.accuracy_table()


def test_the_table_of_other_scripts_is_that_of_their_results():
    others = load("benchmarks/others.py")
    content = json.loads((make_results.RESULTS / "others.json").read_text())
    assert (make_results.RESULTS / "others.md").read_text() == others.table(content)
