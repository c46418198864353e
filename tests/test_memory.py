"""What `bench.py --memory` computes is what real trainings on CPU hold."""

import json
import sys

import memory
import pytest
import torch
from conftest import LITTLE_DATA, PROGRAMS, ROOT, copy, forked, load
from memory import LiveBytes, Need, Training

MLP = """

def build_model(args):
    blocks = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(12)]
    pool = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 512))
    return nn.Sequential(pool, *blocks, nn.Linear(512, 10))
"""

LARGE = """

def build_model(args):
    blocks = [nn.Linear(8192, 8192, bias=False) for _ in range(2)]
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 8192), *blocks, nn.Linear(8192, 10))
"""


def test_a_storage_counts_once_and_while_it_lives():
    with LiveBytes() as counter:
        x = torch.zeros(1000)
        views = x[:10], x.view(10, 100), x.detach()
        assert counter.live == 4000
        y = x + 1
        y.untyped_storage().resize_(0)
        assert counter.live == 4000
        y.untyped_storage().resize_(400)
        assert counter.live == 4400
        del x, views
        assert counter.live == 400
    assert max(counter.timeline) == 8000


def test_what_a_layer_saves():
    """At the step's peak, counted by hand."""
    recipe = load("recipes/ddp_cifar.py")
    recipe.build_model = lambda args: torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(100, 3000), torch.nn.ReLU(), torch.nn.Linear(3000, 10)
    )
    args = parsed(recipe, [])
    (need,) = Training(recipe, args, 1, (torch.zeros(2, 100), torch.zeros(2).long())).needs()
    # ReLU's output, its gradient and that of its input; two batches; a loss and a correct guess.
    assert need.per_sample() == 3 * 4 * 3000 + 2 * (4 * 100 + 8) + 5
    weights = 4 * (101 * 3000 + 3001 * 10)
    assert need.bytes(0) == pytest.approx(3 * weights, rel=0.01)


def test_the_largest_batch_is_the_last_that_fits():
    need = Need((2, 4), ([100, 120, 30], [100, 140, 50]))
    assert need.bytes(0) == 100 and need.bytes(20) == 300 and need.per_sample() == 10
    for available in range(100, 1000, 7):
        largest = need.largest_batch(available)
        assert need.bytes(largest) <= available < need.bytes(largest + 1)
    assert need.largest_batch(99) == 0
    with pytest.raises(RuntimeError, match="not the same for each batch size"):
        Need((2, 4), ([100, 120], [100]))


def parsed(recipe, flags):
    return memory.parsed(recipe, ["--data", "synthetic", *flags])


CASES = [
    ("ddp_cifar", 2, "", "allocator"),
    ("ddp_cifar", 2, "--global-batch-size 256", "allocator"),
    ("amp_cifar", 2, "--precision bf16", "allocator"),
    ("data_parallel_cifar", 1, "", "allocator"),
    ("pipeline_cifar", 2, "", "allocator"),
    # CPU's max-pooling copies what it gets: much of what a stage holds of few microbatches.
    ("pipeline_cifar", 4, "--schedule 1f1b", "tensors"),
    # gloo allocates for its own threads, too.
    ("sharded_cifar", 2, "", "tensors"),
    ("sharded_cifar", 2, "--precision bf16", "tensors"),
    ("sharded_cifar", 2, "--activation-checkpointing", "tensors"),
]


@pytest.mark.slow
@pytest.mark.parametrize("project", ["", MLP], ids=["simple_cnn", "mlp"])
def test_the_prediction_is_what_processes_hold(tmp_path, project):
    """Within a tenth, of each process of all recipes: simple_cnn, mostly activations, and a copy's
    own model, mostly weights."""
    runs = []
    for index, (recipe, processes, flags, _) in enumerate(CASES):
        directory = tmp_path / str(index)
        directory.mkdir()
        script = copy(recipe, directory / "mine.py", LITTLE_DATA, project=project)
        flags = [*flags.split(), "--model", "simple_cnn", "--batch-size", 64, "--data", "synthetic"]
        flags += ["--cpu", "--max-steps", 3, "--log-every", 1, "--output-dir", directory / "run"]
        program = ROOT / "tests/programs/allocated.py"
        run = {"processes": processes, "script": program, "directory": directory}
        runs.append({**run, "flags": ["held", script, *flags]})
    answers = forked(runs, tmp_path, **PROGRAMS)
    errors = {}
    for case, run, (codes, output) in zip(CASES, runs, answers, strict=True):
        assert set(codes) == {0}, output
        recipe = load(run["flags"][1])
        args = memory.parsed(recipe, [str(flag) for flag in run["flags"][2:]])
        example = memory.example_batch(recipe, args)
        training = Training(recipe, args, run["processes"], example, on_cuda=False)
        needs = training.needs()
        for rank in range(run["processes"]):
            held = json.loads((run["directory"] / f"held-{rank}.json").read_text())[case[3]]
            predicted = needs[rank % len(needs)].bytes(args.batch_size)
            errors[*case[:3], rank] = round(predicted / held - 1, 3)
    assert max(map(abs, errors.values())) <= 0.1, errors


def table_of(capsys, script, *flags):
    """The cells of the rows that are printed for a copy, and the notes below them."""
    memory.main([str(script), *flags])
    table, _, notes = capsys.readouterr().out.partition("\n\n")
    return [row.strip("| ").split(" | ") for row in table.splitlines()[2:]], notes


def test_the_table_of_a_copy(tmp_path, capsys, monkeypatch):
    """With its own model and flags, on those numbers of GPUs that it can have, without a second
    row for what it is itself."""
    monkeypatch.setattr(memory, "VARIANTS", [("sharded", ""), ("sharded", "--precision bf16")])
    script = copy("sharded_cifar", tmp_path / "mine.py", LITTLE_DATA, project=LARGE)
    cells, _ = table_of(capsys, script, "--batch-size", "16", "--replicas", "2")
    assert [row[:3] for row in cells] == [
        ["mine.py", f"sharded --batch-size 16 --replicas 2{more}", count]
        for more in ("", " --precision bf16")
        for count in ("2", "4", "8")
    ]
    assert [row[3:7] for row in cells[:3]] == [
        ["0.59", "0.59", "0.59", "0.50"],  # two replicas, each whole
        ["0.30", "0.30", "0.30", "0.50"],
        ["0.15", "0.15", "0.15", "0.50"],
    ]


WIDE = """

def add_flags(add):
    add("--width", "of the layers", type=int, default=8)


def build_model(args):
    layers = nn.Linear(3072, args.width), nn.Linear(args.width, args.width)
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(args.width, 10))


def load_data(args, accelerator):
    images = torch.zeros(256, 3, 32, 32), torch.zeros(256, dtype=torch.int64)
    return [DataLoader(torch.utils.data.TensorDataset(*images), args.batch_size)] * 2


def make_optimizer(model, args, total_steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / args.width)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
"""


@pytest.mark.slow
def test_the_model_of_a_copy_in_each_recipe(tmp_path, capsys, monkeypatch):
    """With its own flags, data and optimizer, of which AdamW has two states; and the techniques'
    flags, not its own of that name."""
    monkeypatch.setattr(memory, "COUNTS", (1, 2))
    script = copy("amp_cifar", tmp_path / "mine.py", project=WIDE)
    flags = ["--width", "8192", "--batch-size", "16"]
    cells, notes = table_of(capsys, script, *flags)
    assert {row[0] for row in cells} == {"mine.py"}
    own = " ".join(flags)
    assert list(dict.fromkeys(row[1] for row in cells)) == [
        f"amp {own}",
        "data_parallel",
        "ddp",
        f"amp {own} --precision bf16",
        *(" ".join(variant).strip() for variant in memory.VARIANTS[3:]),
    ]
    needs = {(row[1], row[2]): row[3:6] for row in cells}
    whole = ["0.34", "0.34", "0.69"]
    assert needs[f"amp {own}", "1"] == needs["data_parallel", "1"] == needs["ddp", "1"] == whole
    assert needs["pipeline", "2"] == ["0.25", "0.25", "0.50"]
    assert needs["sharded", "2"] == ["0.17", "0.17", "0.34"]
    fits = {row[1]: int(row[9].replace(",", "")) for row in cells if row[2] in ("1", "2")}
    assert fits[f"amp {own}"] > 1.2 * fits["data_parallel"] >= 1.2 * fits["ddp"] > 0
    assert "all\n  of it with 16 samples per GPU" in notes and "two GPUs, here 32," in notes
    assert "n/a" not in notes


OF_TEXTS = """

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).mean(1))


def build_model(args):
    return Model()


def load_data(args, accelerator):
    rows = [{"tokens": torch.arange(7), "label": torch.tensor(1)}] * 256
    return [DataLoader(rows, args.batch_size)] * 2


def compute_loss(model, batch):
    logits = model(batch["tokens"])
    return {"loss": F.cross_entropy(logits, batch["label"], reduction="none")}
"""


def test_a_recipe_that_cannot_have_the_model_says_why(tmp_path, capsys, monkeypatch):
    """The others have it."""
    variants = [("pipeline", ""), ("sharded", "--precision bf16")]
    monkeypatch.setattr(memory, "VARIANTS", variants)
    monkeypatch.setattr(memory, "COUNTS", (1, 2))
    script = copy("ddp_cifar", tmp_path / "mine.py", project=OF_TEXTS)
    cells, notes = table_of(capsys, script)
    labels = ["ddp", "ddp", "pipeline", "sharded --precision bf16", "sharded --precision bf16"]
    assert [row[1] for row in cells] == labels
    assert cells[2] == ["mine.py", "pipeline", *["n/a"] * (len(memory.HEAD) - 2)]
    assert notes.splitlines()[-1] == (
        "- n/a: pipeline: cannot cut Model: make it an nn.Sequential, or edit model_blocks"
    )


def test_what_is_not_computed_is_refused():
    with pytest.raises(SystemExit, match="--cpu-offload: what it needs is not computed"):
        memory.main([str(ROOT / "recipes/sharded_cifar.py"), "--cpu-offload"])


def test_bench_passes_its_words_on(monkeypatch):
    words = ["mine.py", "--model", "own", "--batch-size", "3"]
    monkeypatch.setattr(sys, "argv", ["bench.py", "--memory", *words])
    monkeypatch.setattr(memory, "main", lambda given: given)
    assert load("benchmarks/bench.py").main() == words


def test_the_page_begins_with_what_eight_gpus_hold():
    one = ["1", *(["0.1"] * 4), "5.0", "0.3", "1", "2", "3", "4", "5"]
    eight = ["2, 4, 8", *(["0.2"] * 4), "6.0", "0.4", "6", "7", "8", "9", "10"]
    rows = [[model, "ddp", *cells] for model in ("A", "B") for cells in (one, eight)]
    short, command, notes, full = memory.page(rows).split("\n\n")
    assert short.splitlines()[2:] == ["| ddp | 6.0 | 6 | 7 | 9 | 6.0 | 6 | 7 | 9 |"]
    assert command == "`python benchmarks/bench.py --memory`"
    assert notes.startswith("- computed, not measured") and len(full.splitlines()) == 2 + 4
