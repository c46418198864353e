"""bench.py: the recipes really run, results outlive failures and Ctrl-C, the arithmetic is
right."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import islice
from types import SimpleNamespace
from xml.etree import ElementTree

import make_results
import pytest
import torch
from conftest import ROOT, forked, load, run, wait_until
from torch.utils.flop_counter import FlopCounterMode

SMALL = ["--model", "simple_cnn", "--batch-size", "8", "--warmup-steps", "1", "--steps", "4"]
bench, plain = load("benchmarks/bench.py"), load("recipes/plain_ddp_cifar.py")


def measured(recipe, processes, *rates):
    made = bench.Configuration(recipe, processes)
    made.samples = [
        {"samples_per_second": rate, "peak_memory_bytes": 2**30, "start_seconds": 7}
        for rate in rates
    ]
    return made


@pytest.fixture
def main(tmp_path, monkeypatch):
    """bench.main with runs that last no time: `outcomes` has a list for each recipe, of rates,
    failures or errors to raise. Returns the exit status and what was written."""

    def call(outcomes, *flags):
        def run(self, args):
            if not self.outcome():
                what = outcomes[self.recipe][len(self.samples)]
                if isinstance(what, BaseException):
                    raise what
                self.failure = what if isinstance(what, str) else None
                self.samples += measured(self.recipe, 1, what).samples if not self.failure else []

        monkeypatch.setattr(bench.Configuration, "run", run)
        monkeypatch.setattr(bench.signal, "signal", lambda *_: None)
        monkeypatch.setattr(bench, "has_bf16", lambda: True)
        monkeypatch.setenv("COLUMNS", "80")
        command = [
            "bench.py",
            "--recipes",
            *outcomes,
            "--processes",
            "1",
            "--output-dir",
            tmp_path,
            *flags,
        ]
        monkeypatch.setattr(sys, "argv", list(map(str, command)))
        with pytest.raises(SystemExit) as exit:
            bench.main()
        paths = {path.suffix: path for path in tmp_path.iterdir()}
        return exit.value.code, json.loads(paths[".json"].read_text()) if paths else None, paths

    return call


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_measured_and_leaves_nothing_running(tmp_path):
    """A configuration that fails, the baseline, and Ctrl-C in the middle of a recipe that would
    train for an hour."""
    recipes = [
        "PYTHONHOME=/nowhere ddp_cifar",
        "plain_ddp_cifar --measure 4 0 --workers 0",
        "ddp_cifar",
    ]
    command = [
        sys.executable,
        ROOT / "benchmarks/bench.py",
        *SMALL,
        "--recipes",
        *recipes,
        "--processes",
        2,
    ]
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a script
    process = subprocess.Popen(
        list(map(str, [*command, "--seconds", 3600, "--output-dir", tmp_path / "out"])),
        env={**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "80"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    signal.signal(signal.SIGINT, ignored)

    def ranks():
        found = subprocess.run(
            ["pgrep", "-f", f"run 4 3600.0 ddp_cifar .*{tmp_path}"], capture_output=True, text=True
        )
        return found.stdout.split()

    def trains():
        assert process.poll() is None, process.communicate()
        return any(
            len(path.read_text().splitlines()) > 5 for path in tmp_path.glob("tmp*/metrics.jsonl")
        )

    try:
        wait_until(trains, 300)
        assert len(ranks()) == 3, subprocess.run(
            ["ps", "-ef"], capture_output=True, text=True
        ).stdout  # and the launcher
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=180)
    finally:
        process.terminate()  # and it ends what it has started
    assert process.returncode == 130 and "Traceback" not in errors
    wait_until(lambda: not ranks(), 15)  # they have sessions of their own and follow their launcher
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".md", ".svg"}

    (path,) = (tmp_path / "out").glob("*.json")
    failing, baseline, endless = json.loads(path.read_text())["configurations"]
    (sample,) = baseline["samples"]
    assert sample["measured_samples"] == (4 - 1) * 8 * 2
    rate = sample["measured_samples"] / sample["measured_seconds"]
    assert sample["samples_per_second"] == baseline["samples_per_second"] == pytest.approx(rate)
    assert 1 < sample["start_seconds"] < 300 and 2**26 < sample["peak_memory_bytes"] < 2**36
    assert failing["samples"] == endless["samples"] == [] and endless["failure"] is None
    assert "No module named 'encodings'" in failing["failure"] and failing["failure"] in errors
    assert "No whole round, then interrupted" in output
    assert "plain_ddp --measure" in output.partition("recipe ")[2]


def test_medians_over_the_rounds_and_ratios_within_them(monkeypatch):
    # The machine slows down fivefold: each round's ratio is what counts.
    baseline, one, two = (
        measured("plain_ddp_cifar", 2, 100, 50, 20),
        measured("ddp_cifar", 1, 100, 60, 30),
        measured("ddp_cifar", 2, 300, 100, 50),
    )
    empty = bench.Configuration("plain_ddp_cifar", 1)  # interrupted before its first run
    for gpus, efficiency, each in ((0, 5 / 3, 100 / bench.CORES), (2, 5 / 6, 50)):
        monkeypatch.setattr(bench, "GPUS", gpus)
        got = two.results([empty, baseline, one, two])
        assert (got["samples_per_second"], got["least"], got["most"], got["ratio"]) == (
            100,
            50,
            300,
            2.5,
        )
        assert got["efficiency"] == pytest.approx(efficiency) and got[
            "per_device"
        ] == pytest.approx(each)
    assert (
        baseline.results([empty, baseline])["efficiency"]
        is one.results([empty, one])["ratio"]
        is None
    )
    baseline.failure = "in a later round"
    assert two.results([baseline, two])["ratio"] is None and baseline.results([baseline]) == {}


def test_table_and_picture_show_every_configuration(main, capsys):
    outcomes = {
        "plain_ddp_cifar": [100, 200],
        "ddp_cifar --lr 1": [150, 100],
        "amp_cifar": ["exit code 7"],
    }
    code, content, paths = main(outcomes, "--rounds", 2, "--predict", 10)
    assert code == 1
    computed = [entry["recipe"] for entry in content["computed"]]
    assert set(computed) == ({"plain_ddp", "ddp --lr 1"} if bench.CORES > 1 else set())
    table = [line for line in paths[".md"].read_text().splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[:5] for line in table[2:5]] == [
        ["| plain_ddp", "1", "150", "100-200", "1.00"],
        ["| ddp --lr 1", "1", "125", "100-150", "1.00"],
        ["| amp", "1", "failed", "", ""],
    ]
    assert sum("| computed |" in line for line in table) == len(table) - 5 == len(computed)
    texts = [
        node.text for node in ElementTree.parse(paths[".svg"]).iter() if node.tag.endswith("text")
    ]
    assert "plain_ddp, 1" in texts and "ddp --lr 1, 1" in texts and "amp, 1" not in texts
    assert sum(text.endswith("(computed)") for text in texts) == len(computed)
    output, errors = capsys.readouterr()
    assert "bench: amp_cifar on 1 failed: exit code 7" in errors
    assert (
        output.count("round 2/2: ") == 3
        and "round 1/2: ddp_cifar --lr 1 on 1: 150 images/s" in output
    )
    shown = output.partition("recipe ")[2].partition("; torch")[0].rpartition("\n")[0]
    assert max(map(len, shown.splitlines())) <= 80


def test_a_crash_loses_nothing(main, tmp_path):
    with pytest.raises(OSError, match="disk"):
        main({"ddp_cifar": [100, 200], "amp_cifar": [300, OSError("disk full")]})
    (path,) = tmp_path.iterdir()
    rates = [
        [x["samples_per_second"] for x in one["samples"]]
        for one in json.loads(path.read_text())["configurations"]
    ]
    assert rates == [[100, 200], [300]]


def test_no_round_begins_that_would_not_end_in_time(main):
    code, content, _ = main({"ddp_cifar": [100, 200]}, "--minutes", 1e-9)
    assert code == 0 and len(content["configurations"][0]["samples"]) == 1


def test_an_interrupt_of_the_first_run_writes_no_figures(main):
    code, _, paths = main({"ddp_cifar": [KeyboardInterrupt()]})
    assert (code, paths) == (130, {})


def test_an_unusable_gpu_is_an_error_before_anything_runs(main, monkeypatch, capsys):
    monkeypatch.setattr(bench, "GPUS", 1)
    answer = SimpleNamespace(
        returncode=1, stderr="Traceback:\nRuntimeError: The NVIDIA driver is too old\n", stdout=""
    )
    monkeypatch.setattr(bench.subprocess, "run", lambda *_, **__: answer)
    code, _, paths = main({"ddp_cifar": [100] * 3})
    assert code == "bench: 1 GPU(s), but RuntimeError: The NVIDIA driver is too old" and paths == {}


TRACEBACK = "echo Traceback; exit 2"


@pytest.mark.parametrize(
    "script, failure, unavailable",
    [
        (
            f"echo amp_cifar: error: Tesla T4 has no bf16, choose another; {TRACEBACK}",
            None,
            "exit code 2\namp_cifar: error: Tesla T4 has no bf16, choose another",
        ),
        (
            f"echo amp_cifar: error: fp16 needs a GPU; {TRACEBACK}",
            None,
            "exit code 2\namp_cifar: error: fp16 needs a GPU",
        ),
        (
            f"echo amp_cifar: error: broken; {TRACEBACK}",
            "exit code 2\namp_cifar: error: broken",
            None,
        ),
        ("echo words; exit 3", "exit code 3\nwords", None),
        ("sleep 60", "exit code none after 0.5 s\n", None),
    ],
)
def test_how_a_run_may_end(script, failure, unavailable, monkeypatch):
    monkeypatch.setattr(bench, "has_bf16", lambda: True)
    one = bench.Configuration("amp_cifar", 1)
    monkeypatch.setattr(bench.Configuration, "command", lambda *_: ["sh", "-c", script])
    one.run(SimpleNamespace(timeout=0.5))
    assert one.failure == failure and one.outcome() == ("failed" if failure else "n/a")
    assert one.unavailable == unavailable
    one.run(None)  # not again


@pytest.fixture
def run_stub(tmp_path, monkeypatch):
    """Run the bench's configurations with these lines as their program; return the exit status and
    the table, as `main` writes it."""

    def call(lines, *recipes):
        stub = tmp_path / "stub.py"
        stub.write_text(lines)
        monkeypatch.setattr(bench, "has_bf16", lambda: True)
        command = [sys.executable, str(stub)]
        monkeypatch.setattr(bench.Configuration, "command", lambda self, *_: [*command, self.name])
        monkeypatch.setattr(bench.signal, "signal", lambda *_: None)
        flags = ["--rounds", "1", "--processes", "1", "--output-dir", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["bench.py", *flags, "--recipes", *recipes])
        with pytest.raises(SystemExit) as exit:
            bench.main()
        return exit.value.code

    return call


OUT_OF_MEMORY = """
import sys, torch
torch.manual_seed(0)
if sys.argv[1] == "ddp_cifar":
    {what}
sys.exit("another error")
"""


@pytest.mark.parametrize(
    "what",
    [
        "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')",
        "torch.empty(2**60)",
    ],
)
def test_what_runs_out_of_memory_is_no_failure_of_the_bench(what, run_stub, capsys):
    """The error is far from the end of the log, as in that of a launcher."""
    many_lines = "\n    finally: print('\\n'.join(map(str, range(50))))"
    program = OUT_OF_MEMORY.format(what=f"try: {what}{many_lines}")
    assert run_stub(program, "ddp_cifar") == 0
    output, errors = capsys.readouterr()
    assert "round 1/1: ddp_cifar on 1: n/a\n" in output and "n/a: ddp on 1: " in output
    (line,) = [line for line in errors.splitlines() if line.startswith("bench: ")]
    assert line.startswith("bench: ddp_cifar on 1 n/a: ") and "allocate" in line
    assert run_stub(program, "ddp_cifar", "amp_cifar") == 1
    assert "amp_cifar on 1 failed: exit code 1\nanother error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "emulates"),
    [
        ("amp_cifar", True),
        ("amp_cifar --precision bf16", True),
        ("pipeline_cifar --precision=bf16 --microbatches 4", True),
        ("amp_cifar --precision fp32", False),
        ("sharded_cifar", False),
        ("plain_ddp_cifar", False),
    ],
)
def test_emulated_bf16_is_not_measured(recipe, emulates, monkeypatch):
    monkeypatch.setattr(bench, "has_bf16", lambda: False)
    one = bench.Configuration(recipe, 2)
    assert one.outcome() == ("n/a" if emulates else "")
    assert not emulates or "no bf16 instructions" in one.unavailable
    if emulates:
        one.run(None)  # takes no time: the rounds go to the others
    monkeypatch.setattr(bench, "GPUS", 2)  # of which the recipes know themselves
    assert bench.Configuration(recipe, 2).outcome() == ""
    monkeypatch.setattr(bench, "GPUS", 0)
    monkeypatch.setattr(bench, "has_bf16", lambda: True)
    assert bench.Configuration(recipe, 2).outcome() == ""


def test_bf16_is_asked_of_the_recipes(monkeypatch):
    for has in (True, False):
        bench.has_bf16.cache_clear()
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: {"avx512_bf16": has})
        assert bench.has_bf16() == has
    bench.has_bf16.cache_clear()


def test_the_recipes_still_say_so_where_hardware_is_missing():
    text = (ROOT / "recipes/amp_cifar.py").read_text()
    errors = re.findall(r"exit_with_error\((.*)\)", text)
    assert len([error for error in errors if bench.UNAVAILABLE.search(error)]) == 2


def test_on_gpus_the_defaults_keep_them_busy(monkeypatch):
    monkeypatch.setattr(bench, "GPUS", 8)
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    args = bench.parse_args()
    assert (args.stem, args.batch_size, args.processes, args.seconds) == ("cifar", 512, [1, 8], 10)
    expected = {"ddp_cifar", "ddp_cifar --compile", "amp_cifar", "amp_cifar --compile"}
    assert {*expected, "plain_ddp_cifar", "plain_ddp_cifar --workers 8"} < set(args.recipes)
    commands = {
        name: " ".join(bench.Configuration(name, 8).command(args, "out")) for name in args.recipes
    }
    assert not any("--cpu" in command for command in commands.values())
    assert commands["data_parallel_cifar"].endswith("--batch-size 4096")
    assert "/1gpu.yaml " in commands["data_parallel_cifar"]
    assert "/8gpu.yaml " in commands["pipeline_cifar"] and commands["pipeline_cifar"].endswith(
        "--batch-size 1024"
    )
    assert " run 40 10 ddp_cifar --log-every 20 " in commands["ddp_cifar --compile"]
    assert commands["ddp_cifar --compile"].endswith(" --compile")
    assert " --world_size 8 --warmup-steps 20 --measure 40 10 " in commands["plain_ddp_cifar"]


@pytest.mark.parametrize(("visible", "expected"), [(None, "0,1"), ("4,5,6,7", "4,5")])
def test_data_parallel_sees_as_many_of_the_visible_gpus_as_it_is_measured_on(
    monkeypatch, visible, expected
):
    monkeypatch.setattr(bench, "GPUS", 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    assert bench.Configuration("data_parallel_cifar", 2).environment == {
        "CUDA_VISIBLE_DEVICES": expected
    }
    own = bench.Configuration("CUDA_VISIBLE_DEVICES=7 data_parallel_cifar", 1)
    assert own.environment == {"CUDA_VISIBLE_DEVICES": "7"}
    assert bench.Configuration("ddp_cifar", 2).environment == {}


def test_runs_are_one_epoch_without_evaluations_and_the_loops_inside_one_process(
    tmp_path, monkeypatch
):
    flags = [
        "--data",
        "synthetic",
        "--model",
        "simple_cnn",
        "--batch-size",
        16,
        "--cpu",
        "--log-every",
        2,
        "--epochs",
        1,
    ]
    runs = [
        {"processes": 1, "flags": ["run", 6, 0, "data_parallel_cifar", *flags]},
        {"processes": 2, "flags": ["run", 4, 0.5, "pipeline_cifar", *flags]},
        {"processes": 2, "flags": ["--overhead", "ddp_cifar", *SMALL, "--rounds", 1]},
        {"processes": 1, "flags": ["--overhead", "amp_cifar", *SMALL, "--rounds", 1]},
    ]
    for index, described in enumerate(runs):
        described |= {"script": ROOT / "benchmarks/bench.py", "directory": tmp_path / str(index)}
        described["flags"] = list(map(str, described["flags"]))
        described["directory"].mkdir()
    answers = forked(runs, tmp_path)
    for codes, output in answers:
        assert set(codes) == {0}, output
    for index, name, least in ((0, "data_parallel_cifar", 0), (1, "pipeline_cifar", 0.5)):
        directory = tmp_path / str(index) / "runs" / name
        lines = [
            json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()
        ]
        summary = json.loads((directory / "summary.json").read_text())
        steps = [line["step"] for line in lines if line["event"] == "train"]
        assert steps == list(range(2, steps[-1] + 1, 2)) and {line["epoch"] for line in lines} == {
            1
        }
        assert [line["event"] for line in lines] == ["train"] * len(steps) + ["evaluation"]
        assert "test_accuracy" not in summary and not list(directory.glob("step-*"))
        assert (
            summary["steps_per_epoch"] >= 10**6
        )  # in which one has to take the same images again and again
        assert summary["measured_samples"] == (steps[-1] - 2) * summary["global_batch_size"]
        assert summary["measured_seconds"] >= least and steps[-1] >= 4
        assert steps[-1] == 6 or least
    one = bench.Configuration(
        "data_parallel_cifar", 1
    )  # its files are what Configuration.run reads
    monkeypatch.setattr(
        one,
        "command",
        lambda args, output_dir: ["cp", "-r", f"{tmp_path}/0/runs/{one.name}/.", output_dir],
    )
    before = time.time()
    one.run(SimpleNamespace(timeout=60))
    after = time.time()
    (sample,), directory = one.samples, tmp_path / "0/runs/data_parallel_cifar"
    summary = json.loads((directory / "summary.json").read_text())
    assert sample["samples_per_second"] == pytest.approx(4 * 16 / summary["measured_seconds"])
    assert sample["peak_memory_bytes"] == summary["peak_memory_bytes"]
    warmed_up_at = json.loads((directory / "metrics.jsonl").open().readline())["time"]
    assert warmed_up_at - after <= sample["start_seconds"] <= warmed_up_at - before < 0
    for (_, output), words in zip(answers[2:], ("2 processes", "1 processes"), strict=True):
        assert words in output
        for loop in ("full", "cached", "bare", "alone", "convolutions", "recipe"):
            assert f"  {loop:12} " in output, output
        for meaning in (
            "fed one cached batch",
            "bare torch",
            "with DDP / without",
            "/ of the convolutions alone",
        ):
            assert meaning in output
    assert list((tmp_path / "2").iterdir()) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rate_of_the_loader_alone(workers, tmp_path):
    """In two processes side by side; the sum of both."""
    flags = ["--world_size", 2, "--data", "synthetic", "--cpu", "--batch-size", 4]
    command = bench.loader_command([*flags, "--workers", workers, "--measure", 4, 0])
    process = run(command, cwd=tmp_path)
    rate = float(process.stdout)
    assert rate > 1 and list(tmp_path.iterdir()) == []


def test_the_rate_of_the_loader_is_measured_once_and_said(monkeypatch, run_stub, capsys):
    """A stub for the training, which writes what the baseline would."""
    summary = dict.fromkeys(
        ("samples_per_second", "measured_samples", "measured_seconds", "warmed_up_at"), 1.0
    )
    summary |= {"peak_memory_bytes": 1, "device": "cpu"}
    commands = []

    def execute(self, command, log, timeout):
        commands.append(command)
        text = "warning\n4321.0\n" if "loader" in command else ""
        log.write_text(text)
        (log.parent / "summary.json").write_text(json.dumps(summary))
        return True

    monkeypatch.setattr(bench.Configuration, "execute", execute)
    monkeypatch.setattr(bench, "loader_command", lambda flags: ["loader", *flags])
    assert run_stub("", "plain_ddp_cifar", "plain_ddp_cifar --workers 8", "ddp_cifar") == 0
    assert sum("loader" in command for command in commands) == 2
    text = "images/s of the DataLoader alone, without training: plain_ddp on 1: 4,321; "
    assert f"{text}plain_ddp --workers 8 on 1: 4,321.\n" in capsys.readouterr().out


def test_the_convolutions_alone_are_those_of_the_model():
    with torch.device("meta"):  # nothing is computed
        model = bench.load("ddp_cifar").build_model(
            SimpleNamespace(model="resnet50", stem="imagenet")
        )
        images = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)

    def flops(function):
        with FlopCounterMode(display=False) as counter:
            function()
        counts = counter.get_flop_counts()["Global"]
        return {str(name): count for name, count in counts.items() if "convolution" in str(name)}

    expected = flops(lambda: model(images).sum().backward())
    assert flops(bench.convolutions(model, images, torch.float32)) == expected
    assert len(expected) == 2 and 0.49e9 < sum(expected.values()) / 2 < 0.51e9  # for an image


def test_the_baseline_shares_the_cores_and_its_measured_epoch_does_not_end(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(plain.mp, "spawn", lambda train, args, nprocs: seen.append(args[0]))
    common = ["plain_ddp_cifar.py", "--data", "synthetic", "--model", "simple_cnn", "--cpu"]
    for flags in (
        ["--world_size", "2"],
        ["--world_size", "999"],
        ["--world_size", "2", "--threads", "5"],
    ):
        monkeypatch.setattr(sys, "argv", [*common, *flags])
        plain.main()
    assert [args.threads for args in seen] == [max(1, bench.CORES // 2), 1, 5]

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    threads = torch.get_num_threads()
    monkeypatch.setattr(plain.mp, "spawn", lambda train, args, nprocs: train(0, *args))
    flags = [
        "--world_size",
        "1",
        "--workers",
        "1",
        "--batch-size",
        "8",
        "--warmup-steps",
        "2",
        "--threads",
        "3",
    ]
    monkeypatch.setattr(
        sys, "argv", [*common, *flags, "--measure", "5", "0.2", "--output-dir", str(tmp_path)]
    )
    try:
        plain.main()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["test_accuracy"] is None and summary["measured_seconds"] >= 0.2
    assert summary["steps"] >= 6 and summary["steps"] % 2 == 0
    assert summary["measured_samples"] == 8 * (summary["steps"] - 2)

    sampler = iter(plain.EndlessSampler(range(10), 2, 0))
    passes = [set(islice(sampler, 5)) for _ in range(3)]
    assert passes[0] == passes[1] == passes[2] and len(passes[0]) == 5


@pytest.mark.parametrize(
    "devices, bandwidth, overlap, expected",
    [
        # 100 MiB of gradients, a step of 0.1 s for 100 images, of which 1/15 s is backward.
        (
            2,
            1000,
            2 / 3,
            200 / (0.1 + 0.1 - 1 / 15),
        ),  # the ring takes 0.1 s: what outlasts the backward pass
        (4, 1000, 2 / 3, 400 / (0.1 + 0.15 - 1 / 15)),  # 1.5 times the gradient instead of once
        (2, 10_000, 2 / 3, 200 / (0.1 + 0.01 / 4)),  # all hides but the last bucket, 25 MiB
        (2, 1000, 0, 200 / 0.2),  # nothing hides
        (1, 1000, 2 / 3, 1000),  # one device sends nothing
    ],
)
def test_the_prediction_by_hand(devices, bandwidth, overlap, expected):
    rate = bench.predicted_rate(1000, 100, devices, 100 * 2**20, bandwidth * 2**20, overlap)
    assert rate == pytest.approx(expected)


def test_a_gradient_of_one_bucket_hides_nothing():
    assert bench.predicted_rate(1000, 100, 2, 10 * 2**20, 100 * 2**20) == pytest.approx(
        200 / (0.1 + 0.1)
    )


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--recipes", "ddp"], "is none of plain_ddp_cifar"),
        (["--steps", "2", "--warmup-steps", "2"], "--steps at one more than the warm-up"),
        (["--predict", "0"], "give the bandwidth of a link"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", *flags])
    with pytest.raises(SystemExit) as exit:
        bench.main()
    assert exit.value.code == 2 and words in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def measurement(main, tmp_path):
    """What the bench has written, after `change`; and where results are."""
    results = tmp_path / "results"
    _, content, paths = main({"ddp_cifar": [100], "amp_cifar": [200]}, "--rounds", 1)
    results.mkdir()

    def changed(change):
        change(content)
        paths[".json"].write_text(json.dumps(content))
        return paths[".json"], results

    return changed


def test_a_complete_measurement_is_published_with_its_table_and_picture(measurement):
    path, results = measurement(lambda content: None)
    assert make_results.publish(path, results) is None
    assert sorted(file.suffix for file in results.iterdir()) == [".json", ".md", ".svg"]
    for file in results.iterdir():
        assert file.read_bytes() == path.with_suffix(file.suffix).read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x["settings"].update(measured="1 of 3 rounds, then interrupted"), "interrupted"),
        (lambda x: x["settings"].update(measured="No whole round"), "not complete"),
        (lambda x: x["configurations"][1].update(failure="broken"), "has failures: amp_cifar"),
    ],
)
def test_an_incomplete_measurement_is_not_published(change, words, measurement):
    path, results = measurement(change)
    assert words in make_results.publish(path, results)
    assert "is not a file that bench.py has written" in make_results.publish(path.parent, results)
    assert list(results.iterdir()) == []


def test_the_bench_leaves_the_published_results_alone(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    directory = bench.parse_args().output_dir
    assert directory == "runs/bench" and "runs/\n" in (ROOT / ".gitignore").read_text()


def test_the_command_of_a_result_repeats_its_global_batch():
    summary = {"world_size": 2, "recipe": "ddp_cifar", "stem": "cifar", "epochs": 1}
    accumulated = {"batch_size": 64, "accumulation": 2, "global_batch_size": 256}
    plain = "recipes/ddp_cifar.py --stem cifar --epochs 1"
    assert make_results.launch_line({**summary, "global_batch_size": 256}).endswith(plain)
    line = make_results.launch_line({**summary, **accumulated})
    assert line.endswith(f"{plain} --global-batch-size 256 --batch-size 64")
