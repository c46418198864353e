"""The training step and the evaluation against independent references, and a run as a whole."""

import json
import os
import re
from types import SimpleNamespace
from unittest.mock import MagicMock

import accelerate
import pytest
import torch
import torchvision
from conftest import (
    CNN,
    COMPILER,
    FEW_IMAGES,
    IN_FLOAT64,
    ROUNDING,
    ROUNDING_FLOAT32,
    SHORT,
    SYNTHETIC_DATA,
    assert_same_training,
    copy,
    load,
    project,
)
from processes import forked, outputs, train_forked
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

recipe = load("recipes/ddp_cifar.py", exits=True)


def test_evaluation_counts_each_sample_once_by_its_weight_on_any_number_of_processes(tmp_path):
    """The main process gives the outputs of all to `test_metrics`, in the order of the test set.
    Random numbers are those of the batch."""
    ours = load("tests/programs/overrides/evaluation.py")
    script = copy("ddp_cifar", tmp_path / "mine.py", project=project("evaluation"))
    one = {"script": script, "directory": tmp_path}
    counts = 1, 2, 4
    flags = ["--cpu", "--batch-size", 4, "--output-dir"]
    runs = [{**one, "processes": count, "flags": [*flags, count]} for count in counts]
    for codes, output in forked(runs, tmp_path, together=2):
        assert set(codes) == {0}, output
    found = [json.loads((tmp_path / f"{count}/answers").read_text()) for count in counts]
    for case, first, *others in zip(ours.CASES, *found, strict=True):
        for other in others:
            assert other == pytest.approx(first, abs=ROUNDING), case
        del first["test_noise"]
        assert first == pytest.approx(exact_evaluation(ours, *case), abs=ROUNDING), case


def exact_evaluation(ours, size, kind):
    inputs, labels = ours.data(size)
    logits = ours.make_model().eval()(inputs)
    weight = (labels + 1 if kind == "objects" else torch.ones(size)).double()
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    values = {"test_loss": losses, "test_accuracy": logits.argmax(1) == labels}
    means = {name: ((x * weight).sum() / weight.sum()).item() for name, x in values.items()}
    return {**means, "test_places": sum(i * label for i, label in enumerate(labels.tolist()))}


def test_neither_many_samples_nor_weights_in_bf16_are_rounded():
    """From 2**24 on float32 has every second integer only. In bf16 a sum of 771 would be 772."""
    row = recipe.sample_rows({"loss": torch.ones(1)})
    samples = 2**24 + 1
    assert recipe.means(["loss"], (row * samples).sum(0), samples) == {"loss": 1}
    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight.grad = torch.full((1, 1), 3.0)
    accelerator = SimpleNamespace(reduce=lambda sums: sums)
    values = {"weight": torch.full((257,), 3.0, dtype=torch.bfloat16)}
    recipe.divide_by_mean_weight(accelerator, layer, [values])
    assert layer.weight.grad == 1


def test_statistics_of_batchnorm_are_not_broadcast_in_each_step():
    model = torchvision.models.resnet18()
    model.fc.register_buffer("level", torch.zeros(1))
    assert recipe.training_buffers(model) == [model.fc.level]
    recipe.set_buffers(model, {})  # a buffer that a first pass has registered stays


@pytest.mark.parametrize("name", ["ddp", "amp", "pipeline", "sharded"])
def test_a_microbatch_draws_by_seed_step_and_number_on_any_number_of_ranks_and_by_stage(name):
    def note(*_):
        numbers.append(torch.rand(()).item())
        return {"loss": torch.zeros(1)}

    def drawn(ranks, rank, microbatches, seed=0, step=1, stage=0):
        numbers.clear()
        run, model = MagicMock(step=step, line_due=False, data_parallel_size=ranks), MagicMock()
        run.args = SimpleNamespace(seed=seed, clip_norm=None)
        run.accelerator.num_processes, run.accelerator.process_index = ranks, rank
        model.data_parallel_group.rank.return_value, model.group.rank.return_value = rank, stage
        ours.train_step(run, model, MagicMock(), MagicMock(), range(microbatches))
        return [*numbers]

    ours, numbers = load(f"recipes/{name}_cifar.py"), []
    ours.compute_loss, ours.run_pipeline = note, lambda *_: (note(), None)
    one = drawn(1, 0, 4)
    assert [drawn(2, rank, 2) for rank in (0, 1)] == [one[::2], one[1::2]]
    others = [{"seed": 1}, {"step": 2}, {"stage": 1}][: 2 + (name == "pipeline")]
    every = sum((drawn(1, 0, 4, **other) for other in others), one)
    assert len(every) == len(set(every))


@pytest.mark.parametrize("total_steps", [*range(9), 100])
def test_the_learning_rate_warms_up_then_decays_and_is_above_0_in_each_step(total_steps):
    args = SimpleNamespace(lr=0.1, global_batch_size=256)
    weight = torch.nn.Parameter(torch.zeros(1))
    model = SimpleNamespace(parameters=lambda: [weight])
    optimizer, scheduler = recipe.make_optimizer(model, args, total_steps)
    rates = []
    for _ in range(total_steps):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert all(0 < rate <= 0.2 for rate in rates)
    assert scheduler.get_last_lr()[0] < 1e-5
    assert optimizer.param_groups[0]["momentum"] == 0.9, "some schedules change it"
    if total_steps == 100:
        peak = rates.index(max(rates))
        assert peak == 29 and rates[0] == pytest.approx(0.2 / 25)
        assert rates[peak:] == sorted(rates[peak:], reverse=True)


@pytest.mark.parametrize("name", ["ddp", "sharded"])  # the others have ddp's function
def test_param_groups_keep_the_rates_that_they_were_given(name):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    groups[1]["lr"] = 0.001
    args = SimpleNamespace(lr=0.1, global_batch_size=256)
    make_optimizer = load(f"recipes/{name}_cifar.py").make_optimizer
    model = SimpleNamespace(parameters=lambda: groups)
    optimizer, _ = make_optimizer(model, args, 10)
    assert [group["max_lr"] for group in optimizer.param_groups] == [0.2, 0.001]


def control_characters(text):
    return re.findall(r"[^\x20-\x7e\n]", text)


NARROW_RESNET = {"num_classes": 10, "width_per_group": 8}


@pytest.fixture(scope="module")
def resnet_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("resnet")
    data = SYNTHETIC_DATA, "synthetic_images(640, seed=1), synthetic_images(128, seed=2)"
    narrow = "resnet50(num_classes=10, ", f"resnet50(**{NARROW_RESNET}, "
    script = copy("ddp_cifar", directory / "mine.py", data, narrow)
    flags = ["--data", "synthetic", "--cpu", "--stem", "imagenet", "--batch-size", 16]
    flags += ["--max-steps", 6, "--log-every", 10, "--checkpoint-every", 2]
    (result,) = train_forked(directory, (2, script, flags), together=1)
    return result


def test_weights_load_in_a_plain_torchvision_model(resnet_run):
    model = torchvision.models.resnet50(**NARROW_RESNET)
    model.load_state_dict(resnet_run.weights, strict=True)
    model.eval()
    dataset = recipe.ImageTensors(*recipe.synthetic_images(128, seed=2), torch.device("cpu"))
    with torch.no_grad():
        images, labels = dataset.__getitems__(list(range(128)))
        logits = model(images)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert loss == pytest.approx(resnet_run.summary["test_loss"], rel=10 * ROUNDING_FLOAT32)
    accuracy = (logits.argmax(1) == labels).float().mean().item()
    assert accuracy == pytest.approx(resnet_run.summary["test_accuracy"], abs=0.01)


def test_summary_and_metrics_hold_what_is_documented(resnet_run):
    summary = resnet_run.summary
    expected = {"model": "resnet50", "device": "cpu", "world_size": 2, "global_batch_size": 32}
    expected |= {"steps": 6, "steps_per_epoch": 20, "peak_learning_rate": 0.025}
    expected["versions"] = f"torch {torch.__version__}, accelerate {accelerate.__version__}"
    assert {name: summary[name] for name in expected} == expected

    assert [line["step"] for line in resnet_run.train] == [2, 4, 6], "before each checkpoint"
    head = {"event", "epoch", "step", "time"}
    results = {"loss", "accuracy", "learning_rate", "samples_per_second", "grad_norm"}
    measured = {"seconds", "data_wait", "slowest_rank", "peak_memory_gib"}
    for line in resnet_run.train:
        assert line.keys() == head | results | measured
        assert line["samples_per_second"] == pytest.approx(2 * 32 / line["seconds"])
        assert line["grad_norm"] > 0 and 0 < line["data_wait"] < 1
        assert 0.1 < line["peak_memory_gib"] < 100
    # The peak of six steps is between the second and the third; after the last one it is 0.
    rates = [line["learning_rate"] / 0.025 for line in resnet_run.train]
    assert rates == pytest.approx([0.04 + 0.96 / 1.1, 3 / 4.9, 1 / 4.9], abs=1e-4)
    (evaluation,) = resnet_run.evaluations
    assert evaluation.keys() == head | {"test_loss", "test_accuracy"}
    newest = {**resnet_run.train[-1], **evaluation}
    names = newest.keys() - head - {"seconds"}
    assert {name: summary[name] for name in names} == {name: newest[name] for name in names}
    assert summary["seconds"] > sum(line["seconds"] for line in resnet_run.train)


def test_a_file_gets_plain_lines_of_at_most_100_columns_from_the_main_process_only(resnet_run):
    assert control_characters(resnet_run.output) == []
    shown = [line for line in resnet_run.output.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in shown] == ["2/6"] * 2 + ["4/6"] * 2 + ["6/6"] * 3
    assert max(map(len, shown)) <= 100
    assert f" loss {resnet_run.train[1]['loss']:.3g} " in shown[2]
    assert "eta" in shown[2] and "test_accuracy" in shown[6], "the whole line"
    assert resnet_run.output.count('"world_size": 2') == 1, "the config is printed once"


def test_a_terminal_gets_one_live_display_and_a_dumb_one_plain_lines(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    script = copy("ddp_cifar", tmp_path / "mine.py", *SHORT)
    flags = [*CNN, "--max-steps", 4, "--log-every", 2, "--batch-size", 16]
    terminal = {"TERM": "xterm-256color", "COLUMNS": "80"}
    runs = [
        (2, script, flags, {"terminal": True, "env": terminal}),
        (1, script, flags, {"terminal": True, "env": {"TERM": "dumb"}}),
    ]
    live, dumb = (x.output.replace("\r\n", "\n") for x in train_forked(tmp_path, *runs))
    assert live.count("\x1b[?25l") == 1, "from one process"
    assert live.index("\x1b[?25h") < live.index("step 2/4"), "a kill would leave no cursor"
    assert re.search(r"\x1b\[38;5;\d+m━", live)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", live)
    assert re.search("steps ━+ 100%", text) and "eta" not in text and text.endswith("}\n")
    lines = [x for x in re.split(r"[\r\n]+", text) if x.startswith("step ")]
    assert [line[:8] for line in lines] == ["step 2/4", "step 4/4", "step 4/4", "step 4/4"]
    assert control_characters(dumb) == [] and dumb.count("step 4/4 epoch 1") == 3


COMPILATION = (
    'mode="reduce-overhead" if run.accumulation == 1 else "default"',
    'backend="aot_eager"',
)


@pytest.mark.slow
@pytest.mark.parametrize("lines", [[COMPILATION], pytest.param([], marks=pytest.mark.redundant)])
def test_a_compiled_model_learns_the_same_and_keeps_its_names(lines, tmp_path):
    """By aot_eager the same graphs run without C++, whose compiler takes most of the time."""
    flags = [*CNN, "--max-steps", 3, "--batch-size", 16]
    text = project("training", build_model="model_to_compile")
    script = copy("ddp_cifar", tmp_path / "ddp.py", FEW_IMAGES, *lines, project=text + IN_FLOAT64)
    runs = (1, script, [*flags, "--compile"]), (1, script, flags)
    compiled, eager = train_forked(tmp_path, *runs, imports=COMPILER)
    graphs = [re.findall(r"graphs: (\d+)", run.output) for run in (eager, compiled)]
    assert graphs == [["0"], ["2"]], "in training and in the evaluation"
    assert_same_training(compiled, eager, ROUNDING)


NAN = '"accuracy": logits.argmax(1) == labels}', '"[iou]": logits[:, 0] * math.nan}'
SLOW = (
    "        batch = next(batches)\n",
    "        batch = next(batches)\n        time.sleep(RANK / 5)\n",
)
TWO = {"processes": 2, "flags": ["--batch-size", 64]}  # both steps in one epoch
PRINTS = project("own_mistakes", main="main_that_prints")


@pytest.mark.slow
@pytest.mark.copied("ddp_cifar", NAN, SLOW, project=PRINTS, **TWO)
def test_a_line_names_the_slowest_rank_nan_is_null_in_json_and_what_is_printed_is_kept(outcome):
    assert outcome.codes == [0, 0], outcome.output
    for line in outputs(outcome.directory / "run").train:
        assert line["slowest_rank"] == 1 and line["data_wait"] * line["seconds"] > 0.2
    assert outcome.output.count("a last line that is not flushed\n") == 2
    assert outcome.output.count(" [iou] nan ") == 2
    text = (outcome.directory / "run/metrics.jsonl").read_text()
    assert [text.count(f'"{name}": null') for name in ("[iou]", "test_[iou]")] == [2, 1]
    assert "NaN" not in text + (outcome.directory / "run/summary.json").read_text()


def test_tensorboard_has_the_lines_of_metrics_and_no_epochs_evaluate_weights(tmp_path):
    """As their training did. No file changes."""
    names = "ddp", "pipeline", "sharded"
    own = '\naccelerate.tracking.TensorBoardTracker.finish = lambda tracker: print("finished")'
    owns = "", own, ""  # the others finish it as Accelerate does
    scripts = [
        copy(f"{name}_cifar", tmp_path / f"{name}.py", *SHORT, project=text)
        for name, text in zip(names, owns, strict=True)
    ]
    flags = [*CNN, "--batch-size", 64, "--epochs", 1, "--tracker", "tensorboard"]
    trained = train_forked(tmp_path, *((2, script, flags) for script in scripts))
    assert_tensorboard_has_the_lines(trained[0])
    assert "finished" in trained[1].output  # Weights & Biases sends its last lines then
    files = [path for run in trained for path in run.directory.rglob("*") if path.is_file()]
    before = [path.read_bytes() for path in files]
    runs = []
    for script, run in zip(scripts, trained, strict=True):
        weights = ["--epochs", 0, "--weights", run.directory / "model.safetensors"]
        where = {"directory": tmp_path / f"again-{script.stem}"}
        where["directory"].mkdir()
        (where["directory"] / "summary.json").write_text("of an earlier evaluation")
        runs.append((2, script, [*CNN, "--batch-size", 64, *weights], where))
    for evaluated, result in zip(train_forked(tmp_path, *runs), trained, strict=True):
        (line,) = evaluated.evaluations
        assert evaluated.train == [] and evaluated.output.count(": loaded ") == 1
        for name in ("test_loss", "test_accuracy"):
            assert line[name] == evaluated.summary[name] == result.summary[name]
        assert not list(evaluated.directory.glob("step-*"))
    assert [path.read_bytes() for path in files] == before


def assert_tensorboard_has_the_lines(result):
    events = EventAccumulator(str(result.directory / "ddp")).Reload()
    tags = events.Tags()["scalars"]
    assert {tag.partition("/")[0] for tag in tags} == {"train", "checkpoint", "evaluation"}
    for event, lines in (("train", result.train), ("evaluation", result.evaluations)):
        names = lines[-1].keys() - {"event", "step", "epoch", "time"}
        assert {f"{event}/{name}" for name in names} == {x for x in tags if x.startswith(event)}
        for name in names:
            tracked = {scalar.step: scalar.value for scalar in events.Scalars(f"{event}/{name}")}
            assert tracked == pytest.approx({line["step"]: line[name] for line in lines})


def test_a_resumed_training_continues_its_run_in_weights_and_biases(tmp_path, monkeypatch):
    """The library reads its run's id from the environment, where a user may have set another."""
    recipe = load("recipes/ddp_cifar.py")
    monkeypatch.setenv("WANDB_RESUME", "")
    monkeypatch.delenv("WANDB_RESUME")

    def told(own=""):
        monkeypatch.setenv("WANDB_RUN_ID", own)  # monkeypatch undoes what the recipe sets
        if not own:
            monkeypatch.delenv("WANDB_RUN_ID")
        recipe.lock_output_directory(tmp_path)
        return os.environ["WANDB_RUN_ID"]

    first, second = told(), told()
    assert first != second and len(first) == 16, "without a checkpoint"
    (tmp_path / "step-00000001.pt").touch()
    assert told() == second and os.environ["WANDB_RESUME"] == "allow"
    assert told("mine") == "mine"
    for content in (b"a\0b", b"\xff\xfe", b""):  # no id: it gets another one
        (tmp_path / "run.id").write_bytes(content)
        assert len(bytes.fromhex(told())) == 8
