"""memory.py computes what real trainings on CPU hold."""

import sys

import memory
import pytest
from conftest import SYNTHETIC_DATA, copy, load, project
from processes import ROOT, train_forked

import ddp_cifar

MODEL = project("memory_models")
IMAGES = SYNTHETIC_DATA, "synthetic_images(768, seed=1), synthetic_images(64, seed=2)"
CASES = {
    "ddp": [],
    "sharded": ["--global-batch-size", "256"],  # gradients stay whole until the last microbatch
    "pipeline": ["--batch-size", "128", "--schedule", "1f1b"],
}


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    """memory.py imports recipes anew, and examples of other tests import ddp_cifar by its name."""
    monkeypatch.setitem(sys.modules, "ddp_cifar", ddp_cifar)


def test_the_prediction_is_what_each_of_two_processes_holds(tmp_path):
    runs = []
    for technique, flags in CASES.items():
        script, text = tmp_path / f"{technique}.py", MODEL + project("memory_counted")
        copy(f"{technique}_cifar", script, IMAGES, project=text)
        flags = ["--data", "synthetic", "--cpu", "--max-steps", 3, "--batch-size", 64, *flags]
        runs.append((2, script, flags))
    trained = train_forked(tmp_path, *runs, PYTHONPATH=f"{ROOT}/benchmarks")
    for (technique, flags), run in zip(CASES.items(), trained, strict=True):
        held = [int((run.directory / f"peak-{rank}").read_text()) for rank in (0, 1)]
        recipe = load(copy(f"{technique}_cifar", tmp_path / "plain.py", project=MODEL))
        args = memory.parsed(recipe, ["--batch-size", "64", *flags])
        loader, _ = recipe.load_data(args, memory.Accelerator(cpu=True))
        model = recipe.build_model(args).to("meta")
        training = memory.Training(technique, recipe, args, model, next(iter(loader)), gpus=2)
        stages = (0, 1) if technique == "pipeline" else (0, 0)
        computed = [training.peak(64, stage) for stage in stages]
        assert computed == pytest.approx(held, rel=0.1), technique


def test_the_table_of_a_copy(tmp_path, monkeypatch, capsys):
    """With its model in each recipe, and its optimizer, which has two states: with DDP's buckets
    and a gradient 3.2 GB five times, which 24 GB hold. A recipe that cannot have it says why."""
    text = project("memory_models", build_model="large_model", make_optimizer="adamw")
    script = copy("ddp_cifar", tmp_path / "mine.py", project=text)
    monkeypatch.setattr(sys, "argv", ["memory.py", str(script), "--batch-size", "4"])
    memory.main()
    lines = capsys.readouterr().out.splitlines()
    cells = {row[0]: row[1:] for row in (line.strip("| ").split(" | ") for line in lines[2:9])}
    variants = memory.VARIANTS
    assert list(cells) == [f"{technique} {flags}".strip() for technique, flags in variants]
    assert cells["pipeline"] == [
        "n/a: cannot cut Model: make it an nn.Sequential, or edit model_blocks"
    ]
    assert cells["ddp"][1] == "0" and cells["ddp"][2] != "0"
    assert cells["sharded"][1] not in ("0", cells["ddp"][2])


def test_a_pipeline_is_cut_where_its_stages_take_equal_time(tmp_path, monkeypatch, capsys):
    """Before a large head, not in the middle, and each stage has parameters. With known seconds per
    block (the last ones of the loss) the idle share is 1 / (chunks + 1)."""
    text = project("memory_models", build_model="model_with_a_large_head")
    script = copy("pipeline_cifar", tmp_path / "mine.py", project=text)
    flags = ["--batch-size", "4", "--cpu"]
    monkeypatch.setattr(sys, "argv", ["memory.py", "--cuts", str(script), *flags])
    with monkeypatch.context() as patch:
        patch.setattr(memory.Training, "peak", lambda *_: 0)  # the other tests compute it
        memory.main()
    table = capsys.readouterr().out.splitlines()[2:]
    assert len(table) == 5 and table[0].startswith("| --split 8 --chunks ")
    known = [1, 1, 1, 1, 1, 1, 1, 1, 5, 1, 2]
    monkeypatch.setattr(memory, "time_blocks", lambda _, chunk: [len(chunk) * x for x in known])
    lines = memory.lines_of_cuts(script, flags)
    row = [next(lines), next(lines)][1]
    assert row.startswith("| --split 8 --chunks 4 | 32.00 + 32.00 | 20% | 0 |")
    with pytest.raises(SystemExit, match="--cuts takes a copy of pipeline"):
        next(memory.lines_of_cuts(ROOT / "recipes/ddp_cifar.py", []))


def test_the_table_of_chat_models(monkeypatch, capsys):
    """Of one whose weights are nearly all of its memory: 16 bytes each, or with lora those of its
    type."""
    shape = {"hidden_size": 16384, "num_hidden_layers": 1, "head_dim": 64, "vocab_size": 8192}
    monkeypatch.setattr(memory, "LLAMAS", {"1B": shape})
    monkeypatch.setattr(memory, "TOKENS", 8)
    monkeypatch.setattr(memory, "NUMBERS", (1,))
    monkeypatch.setattr(memory, "CHATS", [memory.CHATS[i] for i in (0, 2, 4)])
    monkeypatch.setattr(sys, "argv", ["memory.py", "--chat"])
    memory.main()
    rows = capsys.readouterr().out.splitlines()[2:5]
    whole, lora, sharded = [float(row.rpartition("| ")[2].strip("* |")) for row in rows]
    layer = 16384 * (2048 + 2 * 512 + 2048 + 3 * 8192) / 2**30
    largest = 8192 * 16384 / 2**30
    weights = layer + largest
    # In fp32 weight, gradient and AdamW's two states; besides temporaries, of one tensor at a time.
    assert 16 * weights <= whole <= 16 * weights + 4 * 4 * largest
    assert lora == pytest.approx(2 * weights, rel=0.1)
    # Whole are a copy in bf16, two gradients in bf16 of the tied tensor and one of the layer, and
    # their sums in fp32.
    assert 16 * weights / 8 <= sharded <= 16 * weights / 8 + 10 * largest + 8 * layer
    assert all("**" in row for row in rows)
