"""bench.py: the arms really run, the figures are those of the samples, failures are seen, the arithmetic is right."""

import json
import os
import signal
import subprocess
import sys
from statistics import median
from xml.etree import ElementTree

import pytest
from conftest import ROOT, launch, load, run, wait_until

BENCH = [sys.executable, ROOT / "recipes/bench.py", "--model", "simple_cnn", "--batch-size", 32]
bench = load("recipes/bench.py")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A small bench, one of whose recipes must fail: there is no fp16 without a GPU."""
    directory = tmp_path_factory.mktemp("bench")
    recipes = ["plain_ddp_cifar", "ddp_cifar --lr 0.01", "amp_cifar --precision fp16", "pipeline_cifar"]
    flags = ["--rounds", 1, "--processes", 1, 2, "--steps", 4, "--warmup-steps", 1, "--predict", 10]
    process = run([*BENCH, "--recipes", *recipes, *flags, "--output-dir", directory], check=False, COLUMNS="80")
    (path,) = directory.glob("*.json")
    return process, path, json.loads(path.read_text())


@pytest.mark.skipif(bench.GPUS > 0, reason="the failing arm fails on CPU only")
def test_every_arm_is_measured_in_every_round_and_a_failed_one_fails_the_whole(result):
    process, _, content = result
    assert process.returncode == 1
    outcomes = {(arm["recipe"], arm["processes"]): (len(arm["samples"]), arm["failure"]) for arm in content["arms"]}
    failures = {arm: failure for arm, (_, failure) in outcomes.items() if failure}
    assert set(failures) == {("amp_cifar --precision fp16", n) for n in (1, 2)}
    for failure in failures.values():
        assert "fp16 needs a GPU" in failure and failure in process.stderr
    measured = {arm: samples for arm, (samples, failure) in outcomes.items() if not failure}
    expected = [("plain_ddp_cifar", 1), ("plain_ddp_cifar", 2), ("pipeline_cifar", 2)]
    assert measured == dict.fromkeys([*expected, *(("ddp_cifar --lr 0.01", n) for n in (1, 2))], 1)
    shown = [line for line in process.stdout.splitlines() if line.startswith("round 1/1: ")]
    assert len(shown) == 7 and sum(line.endswith(": failed") for line in shown) == 2


def test_medians_over_the_rounds_and_ratios_within_them():
    def arm(recipe, processes, *rates):
        made = bench.Arm(recipe, processes)
        others = {"peak_memory_bytes": 1, "data_wait_share": 0, "seconds_to_first_step": 1}
        made.samples = [{"images_per_second": rate, **others} for rate in rates]
        return made

    # The machine slows down fivefold: each round's ratio is what counts.
    arms = [arm("plain_ddp_cifar", 2, 100, 50, 20), arm("ddp_cifar", 1, 100, 60, 30), arm("ddp_cifar", 2, 300, 100, 50)]
    got = arms[2].results(arms)
    assert (got["images_per_second"], got["least"], got["most"], got["ratio"]) == (100, 50, 300, 2.5)
    assert got["efficiency"] == pytest.approx(5 / 3 / (2 if bench.GPUS else 1))
    assert arms[0].results(arms)["efficiency"] is None


def test_the_figures_are_those_of_the_samples(result):
    _, _, content = result
    arms = {(arm["recipe"].split()[0], arm["processes"]): arm for arm in content["arms"]}
    rates = {
        key: [sample["images_per_second"] for sample in arm["samples"]]
        for key, arm in arms.items()
        if not arm["failure"]
    }
    for (name, processes), values in rates.items():
        arm = arms[name, processes]
        assert (arm["least"], arm["images_per_second"], arm["most"]) == (min(values), median(values), max(values))
        ratios = [a / b for a, b in zip(values, rates["plain_ddp_cifar", processes], strict=True)]
        assert arm["ratio"] == pytest.approx(median(ratios))
        assert 0 < arm["data_wait_share"] < 1
        assert 1 < arm["seconds_to_first_step"] < 120
        assert 2**26 < arm["peak_memory_bytes"] < 2**36
    assert arms["pipeline_cifar", 2]["efficiency"] is None
    scaling = [two / one for one, two in zip(rates["ddp_cifar", 1], rates["ddp_cifar", 2], strict=True)]
    assert arms["ddp_cifar", 2]["efficiency"] == pytest.approx(median(scaling))


def test_the_prediction_is_marked_and_near_the_measurement(result):
    _, path, content = result
    (computed,) = (entry for entry in content["computed"] if entry["recipe"].startswith("ddp"))
    (measured,) = (
        a for a in content["arms"] if a["recipe"].startswith("ddp") and a["processes"] == computed["processes"]
    )
    assert computed["processes"] == 2
    assert 0.4 < computed["images_per_second"] / measured["images_per_second"] < 2.5  # a step of 10 ms: noise
    assert "| ddp --lr 0.01 | 2 | " in path.with_suffix(".md").read_text()
    assert path.with_suffix(".md").read_text().count("| computed |") == len(content["computed"]) == 2


def test_table_and_picture_show_every_arm(result):
    process, path, content = result
    table = [line.split() for line in path.with_suffix(".md").read_text().splitlines() if line.startswith("| ")]
    assert len(table) == 2 + 7 + 2
    assert sum("failed" in cells for cells in table) == 2
    texts = [node.text for node in ElementTree.parse(path.with_suffix(".svg")).iter() if node.tag.endswith("text")]
    for arm in content["arms"]:
        label = f"{arm['recipe'].replace('_cifar', '')}, {arm['processes']}"
        assert (label in texts) == (not arm["failure"])
    assert sum(text.endswith("(computed)") for text in texts) == 2
    shown = process.stdout.partition("recipe ")[2].partition("; torch")[0].rpartition("\n")[0]
    assert "plain_ddp" in shown and "failed" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "warm-up and left out" in process.stdout


@pytest.mark.parametrize(
    "devices, bandwidth, overlap, expected",
    [
        # 100 MiB of gradients, a step of 0.1 s for 100 images, of which 1/15 s is backward.
        (2, 1000, 2 / 3, 200 / (0.1 + 0.1 - 1 / 15)),  # the ring takes 0.1 s: what outlasts the backward pass
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
    assert bench.predicted_rate(1000, 100, 2, 10 * 2**20, 100 * 2**20) == pytest.approx(200 / (0.1 + 0.1))


def test_the_loops_inside_one_process(tmp_path):
    flags = ["--overhead", "ddp_cifar", "--model", "simple_cnn", "--batch-size", 32, "--rounds", 2, "--steps", 2]
    output = launch(2, ROOT / "recipes/bench.py", *flags, "--warmup-steps", 1, cwd=tmp_path).stdout
    assert "2 processes" in output
    for words in ("full", "cached", "bare", "alone", "fed one cached batch", "bare torch", "with DDP / without"):
        assert output.count(words) >= 1, output
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_hangs_is_given_up(tmp_path):
    flags = ["--recipes", "ddp_cifar", "--processes", 2, "--timeout", 1, "--output-dir", tmp_path]
    process = run([*BENCH, *flags], check=False)
    assert process.returncode == 1
    assert "ddp_cifar on 2 failed: exit code none after 1.0 s" in process.stderr


def test_an_interrupt_leaves_nothing_running(tmp_path):
    command = [*BENCH, "--recipes", "ddp_cifar", "--processes", 2, "--steps", 10**6, "--output-dir", tmp_path / "out"]
    process = subprocess.Popen(
        list(map(str, command)),
        env={**os.environ, "TMPDIR": str(tmp_path)},
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    def ranks():
        found = subprocess.run(["pgrep", "-f", f"ddp_cifar.py .*{tmp_path}"], capture_output=True, text=True)
        return found.stdout.split()

    wait_until(lambda: len(ranks()) == 3)  # the launcher and its two processes
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1 and errors == "bench: interrupted, nothing written\n"
    wait_until(lambda: not ranks(), 15)  # they have sessions of their own and follow their launcher
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--recipes", "ddp"], "is none of plain_ddp_cifar"),
        (["--steps", 2, "--warmup-steps", 2], "--steps at one more than the warm-up"),
        (["--predict", 0], "give the bandwidth of a link"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags, words, tmp_path):
    process = run([*BENCH, *flags], cwd=tmp_path, check=False)
    assert process.returncode == 2 and words in process.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
