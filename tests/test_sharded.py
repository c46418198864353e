"""The sharded training is that of ddp_cifar.py, each process holds its share, and a checkpoint is
whole or not there."""

import json
import pickle
import re
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    CNN,
    COMPILER,
    FEW_IMAGES,
    IN_FLOAT64,
    ROUNDING,
    SHORT,
    Exit,
    assert_identical,
    assert_same_training,
    copy,
    load,
    project,
)
from processes import forked, train_forked
from safetensors.torch import load_file
from torch import nn
from weights import read_weights

recipe = load("recipes/sharded_cifar.py", exits=True)


def checkpoint(folder):
    """Return all tensors in a checkpoint: those of run.pt, and the shards of each rank."""
    states = torch.load(folder / "run.pt", weights_only=True)["states"]
    shards = {}
    for path in folder.glob("*.safetensors"):
        shards.setdefault(path.name[: len("shard-00001")], {}).update(load_file(path))
    return {**states["model"], "scheduler": states["scheduler"]["last_epoch"], **shards}


def files_of_ranks(folder):
    """Return the paths of the first rank's files, and of the second one's."""
    return [sorted(folder.glob(f"shard-0000{number}-*")) for number in (1, 2)]


def assert_equal(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def ddp_and_sharded(directory, text):
    """Copies of both, with the functions of a project."""
    names = "ddp", "sharded"
    return [copy(f"{x}_cifar", directory / f"{x}.py", *SHORT, project=text) for x in names]


FILES = "\nFILE_SIZE = 300\n"  # a small checkpoint has as many files as a large one
EQUAL = [  # processes and flags
    (1, ["--batch-size", 32]),
    (2, ["--batch-size", 4]),  # whole gradients
    (4, ["--batch-size", 4, "--sync-each-batch"]),  # in shards
    (4, ["--batch-size", 8, "--replicas", 2]),
]


def test_losses_and_weights_are_those_of_ddp_on_any_number_of_processes(tmp_path):
    """Also accumulated and clipped, of samples that weigh unequally. 2 x 2 continue a run of 4."""
    flags = [*CNN, "--global-batch-size", 32, "--max-steps", 5, "--lr", 0.2, "--clip-norm", 0.1]
    flags += ["--checkpoint-every", 3]
    text = project("sharded", compute_loss="weighted_loss") + IN_FLOAT64
    ddp, sharded = ddp_and_sharded(tmp_path, text)
    *runs, last = [(n, sharded, [*flags, *own]) for n, own in EQUAL]
    ddp, *ours = train_forked(tmp_path, (1, ddp, [*flags, "--batch-size", 32]), *runs)
    directory = tmp_path / "last"
    shutil.copytree(ours[-1].directory / "step-00000003", directory / "step-00000003")
    ours += train_forked(tmp_path, (*last, {"directory": directory}))
    assert ours[-1].summary["resumed_from"] == 3
    paths = ours[-1].directory.glob("step-00000005/*.safetensors")
    parts = Counter(name for path in paths for name in load_file(path))
    assert {*parts.values()} == {2}, "in each group of two processes"
    for run in ours:
        assert_same_training(run, ddp, ROUNDING)
    norms = [line["grad_norm"] for line in ddp.train]
    assert len(norms) == 5 and min(norms) > 0.1, "nothing was clipped"
    losses = [line["loss"] for line in ddp.train]
    assert max(losses) - min(losses) > 1e-3, "weights that have not moved prove nothing"


def test_mistakes_are_one_line():
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=4)
    with pytest.raises(Exit, match="--replicas: 4 process\\(es\\) do not make 3"):
        recipe.make_mesh(accelerator, 3)


TIED = """

def build_model(args):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10), nn.Linear(10, 10), nn.Linear(10, 10))
    model[3].weight = model[2].weight
    return model
"""


@pytest.mark.copied("sharded_cifar", project=TIED)
def test_weights_that_two_units_share_are_an_error_in_one_line(outcome):
    assert outcome.codes == [2], outcome.output
    assert "mine: error: shard_units: 3.weight is in more than one unit" in outcome.output


DISTURBED = project("disturbed") + FILES


def test_bf16_follows_fp32_and_activation_checkpointing_changes_nothing(tmp_path):
    """Not even the running statistics. bf16 leaves norms in fp32."""
    cases = [], ["--activation-checkpointing"], ["--precision", "bf16", "--sync-each-batch"]
    flags = [*CNN, "--batch-size", 8, "--global-batch-size", 32, "--max-steps", 3]
    text = DISTURBED + project("sharded", build_model="watched_model")
    script = copy("sharded_cifar", tmp_path / "mine.py", FEW_IMAGES, project=text)
    runs = train_forked(tmp_path, *((2, script, [*flags, *own]) for own in cases))
    fp32, twice, bf16 = runs
    assert_equal(twice.weights, fp32.weights)
    passes = [run.output.count("computes in") for run in runs]
    assert passes[1] - passes[0] == 2 * 3 * 2 * 2, "of ranks, steps, microbatches and layers"
    losses = [[line["loss"] for line in run.train] for run in (bf16, fp32)]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], abs=0.02)
    assert {x.dtype for x in bf16.weights.values()} == {torch.float32, torch.int64}
    types = set(re.findall("(\\w+) computes in (.*)", bf16.output))
    assert types == {("Conv2d", "torch.bfloat16"), ("BatchNorm2d", "torch.float32")}


@pytest.mark.slow
def test_compiled_units_are_the_eager_ones_and_a_resumed_run_repeats_them(tmp_path):
    """Also with activation checkpointing. Each unit is a graph, in training and in an evaluation:
    more than torch keeps of one function by default. "aot_eager" runs the graphs that are otherwise
    translated into C++, which takes most of the time."""
    text = project("sharded", build_model="model_of_five_units") + project("training")
    line = "dynamic=False)", 'dynamic=False, backend="aot_eager")'
    script = tmp_path / "mine.py"
    copy("sharded_cifar", script, FEW_IMAGES, line, project=text + IN_FLOAT64)
    flags = [*CNN, "--batch-size", 8, "--checkpoint-every", 2, "--keep", 9, "--max-steps", 4]
    own = [*flags, "--compile", "--activation-checkpointing"]
    eager, compiled = train_forked(tmp_path, (2, script, flags), (2, script, own), imports=COMPILER)
    graphs = [re.findall(r"graphs: (\d+)", run.output) for run in (eager, compiled)]
    assert graphs == [["0"] * 2, ["10"] * 2]
    assert_same_training(compiled, eager, ROUNDING)
    assert compiled.weights["1.1.num_batches_tracked"] == 4  # not those of recomputed activations

    directory = tmp_path / "again"
    shutil.copytree(compiled.directory / "step-00000002", directory / "step-00000002")
    (again,) = train_forked(tmp_path, (2, script, own, {"directory": directory}), imports=COMPILER)
    assert again.summary["resumed_from"] == 2
    assert_same_training(again, compiled, 0)


class Hostile:
    """A pickle that writes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.slow
def test_damaged_checkpoints_are_passed_over_and_hostile_ones_run_no_code(tmp_path):
    """One run continues before six damaged ones. In another one a checksum is forged, too."""
    script = copy("sharded_cifar", tmp_path / "mine.py", FEW_IMAGES, project=DISTURBED)
    flags = [*CNN, "--batch-size", 16, "--checkpoint-every", 1, "--max-steps", 8, "--keep", 99]
    one = {"script": script, "processes": 2, "directory": tmp_path, "grace": 0.5}
    whole, *runs = (
        {**one, "flags": [*flags, "--output-dir", name]} for name in ("whole", "damaged", "forged")
    )
    forked([whole], tmp_path)
    whole, executed = tmp_path / "whole", tmp_path / "executed"
    for name in ("damaged", "forged"):
        shutil.copytree(whole, tmp_path / name)
    folders = [tmp_path / f"damaged/step-{step:08}" for step in range(9)]
    shards = [files[1].name for files in files_of_ranks(folders[8])]
    for step, shard in ((8, shards[0]), (7, shards[1])):
        data = bytearray((folders[step] / shard).read_bytes())
        data[-10] ^= 1
        (folders[step] / shard).write_bytes(data)
    (folders[6] / shards[1]).unlink()
    shutil.copy(folders[5] / shards[0], folders[5] / "b.safetensors")
    (folders[4] / "run.pt").write_bytes(b"PK")
    torch.save(Hostile(executed), folders[3] / "run.pt")
    (folders[2] / ".metadata").write_bytes(pickle.dumps(Hostile(executed)))
    forged = tmp_path / "forged/step-00000008"
    (forged / shards[0]).write_bytes(pickle.dumps(Hostile(executed)))
    content = torch.load(forged / "run.pt", weights_only=True)
    content["checksums"][shards[0]] = recipe.checksum(forged / shards[0])
    torch.save(content, forged / "run.pt")

    (codes, output), (failed, _) = forked(runs, tmp_path, together=2)
    assert not executed.exists() and codes == [0, 0] and failed != [0, 0], output
    assert output.count("skipping damaged") == 6
    assert "resuming from damaged/step-00000002" in output
    assert_equal(checkpoint(folders[8]), checkpoint(whole / "step-00000008"))
    pickle.loads(pickle.dumps(Hostile(executed))).close()
    assert executed.exists(), "the hostile file was harmless"


@pytest.mark.copied("sharded_cifar", processes=2, flags=["--weights", __file__], grace=20)
def test_weights_that_the_main_process_cannot_load_are_one_line_of_each(outcome):
    """On another machine, its launcher does not end a rank at once."""
    assert outcome.codes == [2, 2] and "Traceback" not in outcome.output, outcome.output
    first, second = re.findall("error: (.*)", outcome.output)
    assert first.startswith("argument --weights: cannot load")
    assert second == "rank 1: the main process has not built the model"


def test_a_module_of_two_units_is_an_error_that_names_it_if_it_has_parameters(monkeypatch):
    """All units sum their gradients in fp32. The loss is computed in fp32."""

    def shard(shared):
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), shared) for _ in range(2))
        flags = {"precision": "bf16", "compile": False, "activation_checkpointing": False}
        recipe.shard(blocks, SimpleNamespace(**flags), None)

    policies = []
    monkeypatch.setattr(recipe, "shard_unit", lambda *arguments: policies.append(arguments[-1]))
    shard(nn.ReLU())
    assert [policy.reduce_dtype for policy in policies] == [torch.float32] * 3
    assert policies[-1].output_dtype == torch.float32
    with pytest.raises(Exit, match=r"shard_units: 0\.1 is in more than one unit"):
        shard(nn.Linear(4, 4))
    assert len(recipe.shard_units(recipe.torchvision.models.resnet50())) == 16, "its blocks"
    inner = nn.ModuleList([nn.Linear(4, 4)])
    assert recipe.shard_units(nn.ModuleList([inner])) == [*inner], "it has no forward pass"


@pytest.mark.slow
def test_tied_weights_and_buffers_are_those_of_ddp(tmp_path):
    """A weight with two names is written once. A buffer of two modules is in no state dict. Ranks
    share one that a module replaces; of BatchNorm they evaluate with that of the main process."""
    scripts = ddp_and_sharded(tmp_path, project("sharded", build_model="Tied") + IN_FLOAT64)
    flags = [*CNN, "--global-batch-size", 64, "--batch-size", 16, "--max-steps", 3]
    ddp, sharded = train_forked(tmp_path, *((2, script, flags) for script in scripts))
    assert "third.weight" not in sharded.weights
    assert_same_training(sharded, ddp, ROUNDING)


def test_shards_in_lists_are_written_as_shards_too(monkeypatch):
    """Some optimizers keep lists of matrices."""
    monkeypatch.setattr(recipe, "DTensor", torch.Tensor)
    state, shards = {"factors": [torch.ones(2), (torch.zeros(3), 7)]}, {}
    rest = recipe.without_shards(state, shards)
    assert rest == {"factors": [None, (None, 7)]} and len(shards) == 2
    assert_identical(recipe.with_shards(rest, shards), state)


@pytest.mark.slow
def test_shards_of_any_state_are_saved_and_resumed(tmp_path):
    """Tied and frozen weights, on 1, 2 and 3 processes, which divide 10 rows unevenly. The resumed
    runs divide shards among files, the first one does not."""
    replaced = {"build_model": "Tied", "Tied.moves": False, "evaluate": "evaluate_and_shard_again"}
    text = project("sharded", **replaced) + IN_FLOAT64
    script = copy("sharded_cifar", tmp_path / "mine.py", FEW_IMAGES, project=text)
    flags = [*CNN, "--global-batch-size", 48, "--batch-size", 48, "--max-steps", 4]
    flags += ["--checkpoint-every", 2, "--keep", 9]
    (whole,) = train_forked(tmp_path, (2, script, flags))
    copy("sharded_cifar", script, FEW_IMAGES, project=text + FILES)
    again = {n: tmp_path / f"again on {n}" for n in (1, 2, 3)}
    for directory in again.values():
        shutil.copytree(whole.directory, directory)
        shutil.rmtree(directory / "step-00000004")
    runs = [(n, script, flags, {"directory": directory}) for n, directory in again.items()]
    for n, run in zip(again, train_forked(tmp_path, *runs), strict=True):
        assert run.summary["resumed_from"] == 2
        assert_same_training(run, whole, 0 if n == 2 else ROUNDING)
    folders = [x / "step-00000004" for x in (again[2], whole.directory)]
    assert_equal(*map(checkpoint, folders))
    weights = read_weights(folders[0])
    assert_equal({name: weights[name] for name in whole.weights}, whole.weights)
    many, one = ([len(files) for files in files_of_ranks(folder)] for folder in folders)
    assert one == [1, 1] and min(many) > 3


def test_a_rank_that_cannot_read_counts_before_a_damage_that_another_one_finds(monkeypatch):
    """The folder may be intact: it is not skipped."""
    others = [((True, "a damage"), None), (None, None)]

    def gather(rows, own, group):
        rows[:] = [*others, own]

    monkeypatch.setattr(recipe.distributed, "all_gather_object", gather)
    with pytest.raises(OSError, match="timed out"):
        recipe.gather_or_raise(SimpleNamespace(cpu_group=None), OSError("timed out"))


FILE_SIZE = 2**21


@pytest.mark.slow
def test_a_save_copies_two_files_in_host_memory(tmp_path):
    """Not all shards: the peak of a process's resident memory in a save, and when a run that
    resumes reads. A file has less than FILE_SIZE and a tensor, at most half of a layer."""
    text = project("sharded_measured", FILE_SIZE=FILE_SIZE)
    script = copy("sharded_cifar", tmp_path / "mine.py", FEW_IMAGES, project=text)
    flags = [*CNN, "--batch-size", 8, "--max-steps", 2, "--checkpoint-every", 1]
    where = {"directory": tmp_path / "run"}
    (run,) = train_forked(tmp_path, (2, script, flags, where))
    shutil.rmtree(run.directory / "step-00000002")
    (run,) = train_forked(tmp_path, (2, script, flags, where))
    assert run.summary["resumed_from"] == 1
    most = 2 * (FILE_SIZE + 4 * 1024 * 1024 // 2) + 2**22  # and 4 MiB for what is not of shards
    for rank, files in enumerate(files_of_ranks(run.directory / "step-00000002")):
        peaks = json.loads((run.directory / f"measured.{rank}").read_text())
        size = sum(path.stat().st_size for path in files)
        assert most < size / 2, "a copy of all shards would be as small"
        assert len(peaks) == 3 and max(peaks.values()) < most, peaks
