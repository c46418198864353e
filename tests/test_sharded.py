"""The sharded training is that of ddp_cifar.py, a process holds its share, and a checkpoint is
whole or not there."""

import json
import pickle
import shutil
import sys

import pytest
import torch
import torchvision
from conftest import LITTLE_DATA, PROGRAMS, ROOT, answers, copy, forked, load, outputs
from safetensors.torch import load_file
from test_resume import MEASURED, assert_identical, batches, content, untimed
from torch import nn

sys.path.append(str(ROOT / "tests/programs"))
from disturbed_training import build_model

recipe = load("recipes/sharded_cifar.py")


def run_all(directory, runs, **common):
    """{name: what a run left behind}, of runs {name: (processes, recipe, flags)} that succeed; the
    rest is for programs/forked.py."""
    described = [
        {
            "processes": processes,
            "recipe": name,
            "flags": ["--log-every", 1, *flags],
            "directory": directory / case,
            "plain": True,
            **common,
        }
        for case, (processes, name, flags) in runs.items()
    ]
    for codes, output in forked(described, directory, together=2):
        assert set(codes) == {0}, output
    return {case: outputs(directory / case) for case in runs}


EQUAL = {  # processes, flags, and those of ddp_cifar.py on one process
    "1": (1, ["--batch-size", 32], []),
    "2": (2, ["--batch-size", 16], []),
    "4": (4, ["--batch-size", 8], []),
    "8": (8, ["--batch-size", 4], []),
    "accumulated": (2, ["--batch-size", 4, "--global-batch-size", 32], []),
    "accumulated in shards": (
        2,
        ["--batch-size", 8, "--global-batch-size", 32, "--sync-each-batch"],
        [],
    ),
    "accumulated 2x2": (4, ["--batch-size", 4, "--global-batch-size", 32, "--replicas", 2], []),
    "clipped 2x2": (
        4,
        ["--batch-size", 8, "--replicas", 2, "--clip-norm", 0.05],
        ["--clip-norm", 0.05],
    ),
}


@pytest.fixture(scope="module")
def equal_runs(tmp_path_factory):
    flags = ["--max-steps", 5, "--lr", 0.2]
    runs = {
        case: (processes, "sharded_cifar", [*flags, *own])
        for case, (processes, own, _) in EQUAL.items()
    }
    for _, _, theirs in EQUAL.values():
        runs[f"ddp {theirs}"] = 1, "ddp_cifar", [*flags, "--batch-size", 32, *theirs]
    return run_all(tmp_path_factory.mktemp("equal"), runs, fewer=16)


@pytest.mark.slow
@pytest.mark.parametrize("case", EQUAL)
def test_losses_and_weights_are_those_of_ddp(equal_runs, case):
    sharded, whole = equal_runs[case], equal_runs[f"ddp {EQUAL[case][2]}"]
    assert sharded["summary"]["global_batch_size"] == 32
    for key in ("loss", "accuracy", "learning_rate"):
        values, expected = ([line[key] for line in run["train"]] for run in (sharded, whole))
        assert len(values) == 5
        assert values == pytest.approx(expected, abs=1e-5, rel=0)
    assert sharded["summary"]["test_loss"] == pytest.approx(whole["summary"]["test_loss"], abs=1e-5)
    weights, expected = load_file(sharded["weights"]), load_file(whole["weights"])
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)
    torch.manual_seed(0)
    initial = recipe.build_model(type("Args", (), {"model": "simple_cnn"})).state_dict()
    moved = max((weights[name] - initial[name]).abs().max().item() for name in initial)
    assert moved > 1e-3, "weights that have not moved prove nothing"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["1", "2", "4", "8", "clipped 2x2"])
def test_a_process_of_a_training_holds_its_share(equal_runs, case):
    """Of parameters, gradients and momentum, in fp32; with some padding of small tensors."""
    summary, processes = equal_runs[case]["summary"], EQUAL[case][0]
    whole = 4 * sum(value.numel() for value in load_file(equal_runs[case]["weights"]).values())
    share = whole / (2 if case == "clipped 2x2" else processes)
    for kind in ("parameter", "gradient", "optimizer"):
        held = summary[f"rank_{kind}_bytes"]
        assert len(held) == processes and share <= max(held) < 1.1 * share


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """{case: answer of programs/sharded_gradient.py}"""
    directory, runs = tmp_path_factory.mktemp("gradients"), []
    # Processes, replicas, whether activations are checkpointed.
    cases = {"2x2": (4, 2, False), "4": (4, 1, False), "2": (2, 1, True)}
    for case, (processes, *flags) in cases.items():
        script = ROOT / "tests/programs/sharded_gradient.py"
        flags = [str(flag) for flag in (directory / case, *flags)]
        runs.append(
            {"processes": processes, "script": str(script), "flags": flags, "directory": directory}
        )
    for codes, output in forked(runs, directory, together=2, **PROGRAMS):
        assert set(codes) == {0}, output
    return {case: json.loads((directory / case).read_text()) for case in cases}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["2", "4", "2x2"])
def test_gradients_of_resnet50_are_those_of_the_whole_model(gradients, case):
    assert (
        gradients[case]["deviation"] < 1e-9 * gradients[case]["largest"]
        and gradients[case]["largest"] > 0.1
    )


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_a_process_holds_its_share_and_at_most_one_block_more(gradients, processes):
    held, whole, unit = (gradients[str(processes)][key] for key in ("held", "whole", "unit"))
    assert len(held) == processes
    assert sum(held) >= whole == 3 * 8 * 1_492_874  # parameters, gradients, momentum in float64
    assert max(held) <= whole / processes + unit


@pytest.mark.slow
@pytest.mark.parametrize("case", ["2", "4", "2x2"])
def test_one_unit_is_whole_at_a_time_in_the_forward_and_the_backward_pass(gradients, case):
    """Beside the one that is prefetched, and the parameters that are in no unit."""
    unit, root, gathered = (gradients[case][key] for key in ("unit", "root", "gathered"))
    assert unit <= gathered <= 2 * unit + root < gradients[case]["whole"] / 3


@pytest.mark.slow
def test_two_replicas_hold_the_model_twice(gradients):
    held, whole = (gradients["2x2"][key] for key in ("held", "whole"))
    assert 2 * min(held) >= whole > max(held)


@pytest.fixture(scope="module")
def precisions(tmp_path_factory):
    """With BatchNorm and dropout, whose units repeat their forward pass or not."""
    flags = ["--batch-size", 32, "--max-steps", 10]
    runs = {}
    for precision in ("fp32", "bf16"):
        own = [*flags, "--precision", precision]
        runs[precision] = 2, "sharded_cifar", own
        runs[f"{precision} twice"] = 2, "sharded_cifar", [*own, "--activation-checkpointing"]
    return run_all(tmp_path_factory.mktemp("precisions"), runs, plain=False)


def test_the_losses_of_bf16_follow_those_of_fp32(precisions):
    losses, expected = (
        [line["loss"] for line in precisions[name]["train"]] for name in ("bf16", "fp32")
    )
    assert len(losses) == 10 and losses != expected
    assert losses == pytest.approx(expected, abs=0.02)
    assert (
        precisions["bf16"]["summary"]["rank_parameter_bytes"]
        == precisions["fp32"]["summary"]["rank_parameter_bytes"]
    )
    assert all(
        value.dtype != torch.bfloat16 for value in load_file(precisions["bf16"]["weights"]).values()
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_repeated_forward_passes_change_nothing_not_even_batchnorms_statistics(
    precisions, precision
):
    weights, expected = (
        load_file(precisions[name]["weights"]) for name in (f"{precision} twice", precision)
    )
    assert (
        expected["0.1.num_batches_tracked"] == 10 and expected["0.1.running_mean"].abs().max() > 0
    )
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


COUNTED = """
import inspect
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

plain_model, train = build_model, main
reduce, normalise = _fsdp_param_group.foreach_reduce, nn.InstanceNorm2d.forward
signature, dtypes, passes = inspect.signature(reduce), [], []


def build_model(args):
    model = plain_model(args)
    model[0].insert(1, nn.InstanceNorm2d(64, affine=True, track_running_stats=True))
    print("built on", next(model.parameters()).device.type)
    return model


def counted_reduce(*arguments, **options):
    dtypes.append(signature.bind(*arguments, **options).arguments["reduce_dtype"])
    return reduce(*arguments, **options)


def counted_forward(norm, x):
    passes.append(norm.training)
    return normalise(norm, x)


_fsdp_param_group.foreach_reduce, nn.InstanceNorm2d.forward = counted_reduce, counted_forward


def main():
    train()
    counted = [len(dtypes), str(set(dtypes)), sum(passes)]
    Path(f"counted.{os.environ['RANK']}").write_text(json.dumps(counted))
"""


@pytest.mark.slow
def test_what_is_built_reduced_and_repeated(tmp_path):
    """On two processes: who builds the model where, how often gradients are reduced, and in what
    precision, and how often a unit's forward pass runs. Three steps of four microbatches."""
    script = copy("sharded_cifar", tmp_path / "counted.py", LITTLE_DATA, project=COUNTED)
    flags = [
        "--cpu",
        "--data",
        "synthetic",
        "--model",
        "simple_cnn",
        "--batch-size",
        8,
        "--max-steps",
        3,
    ]
    flags += ["--global-batch-size", 64, "--output-dir", "run"]
    cases = {
        "bf16": ["--precision", "bf16"],
        "bf16 each": ["--precision", "bf16", "--sync-each-batch"],
        "fp32": [],
        "fp32 twice": ["--activation-checkpointing"],
    }
    runs = []
    for name, own in cases.items():
        (tmp_path / name).mkdir()
        runs.append(
            {
                "processes": 2,
                "script": script,
                "directory": tmp_path / name,
                "flags": [*flags, *own],
            }
        )
    for codes, output in forked(runs, tmp_path, together=2):
        assert codes == [0, 0], output
        assert (output.count("built on cpu"), output.count("built on meta")) == (1, 2)
    counted = {
        name: [json.loads((tmp_path / name / f"counted.{rank}").read_text()) for rank in (0, 1)]
        for name in cases
    }
    assert all(one == other for one, other in counted.values())
    reductions, dtypes, passes = (
        {name: count[0][part] for name, count in counted.items()} for part in range(3)
    )
    assert reductions["bf16"] >= 9 and reductions["bf16 each"] == 4 * reductions["bf16"]
    assert "bfloat16" not in dtypes["bf16"] and "float32" in dtypes["bf16"]
    assert (passes["fp32"], passes["fp32 twice"]) == (12, 24)
    weights, expected = (
        load_file(tmp_path / name / "run/model.safetensors") for name in ("fp32 twice", "fp32")
    )
    assert expected["0.1.running_mean"].abs().max() > 1e-3
    torch.testing.assert_close(
        weights, expected, rtol=0, atol=1e-6
    )  # torch averages InstanceNorm's copies again


@pytest.mark.slow
def test_the_weights_load_in_a_plain_torchvision_model_and_the_summary_says_what_a_process_holds(
    tmp_path,
):
    flags = ["--model", "resnet50", "--stem", "imagenet", "--batch-size", 8, "--max-steps", 1]
    result = run_all(tmp_path, {"run": (2, "sharded_cifar", flags)}, fewer=64)["run"]
    model = torchvision.models.resnet50(num_classes=10)
    model.load_state_dict(load_file(result["weights"]), strict=True)
    images = recipe.ImageTensors(*recipe.synthetic_images(16, seed=2), torch.device("cpu"))
    images, labels = images.__getitems__(list(range(16)))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model.eval()(images), labels).item()
    summary = result["summary"]
    assert loss == pytest.approx(summary["test_loss"], rel=1e-4)
    assert summary["holds"].startswith("11,764,261 of 23,528,522 parameters")
    for kind in ("parameter", "gradient", "optimizer"):
        assert all(
            23_528_522 * 2 <= held < 23_528_522 * 2.1 for held in summary[f"rank_{kind}_bytes"]
        )
    assert len(summary["rank_peak_memory_bytes"]) == 2


@pytest.mark.slow
def test_weights_that_are_there_survive_a_kill_and_can_be_evaluated(tmp_path):
    """A finished run that is resumed writes them again, and is killed before the first tensor."""
    line = "            whole = whole.detach().cpu()"
    death = line, f"            os.kill(os.getpid(), signal.SIGKILL)\n{line}"
    original = copy("sharded_cifar", tmp_path / "original.py", LITTLE_DATA)
    (tmp_path / "killed").mkdir()
    killed = copy("sharded_cifar", tmp_path / "killed/original.py", LITTLE_DATA, death)
    flags = [
        "--cpu",
        "--data",
        "synthetic",
        "--model",
        "simple_cnn",
        "--batch-size",
        32,
        "--max-steps",
        3,
    ]
    again, weights = ["--output-dir", "run"], ["--weights", "run/model.safetensors"]
    common = {"processes": 2, "directory": tmp_path}
    first, evaluated = (
        ["--output-dir", "run"],
        ["--output-dir", "evaluated", "--epochs", 0, *weights],
    )
    steps = (original, first), (killed, again), (original, evaluated), (original, again)
    answers = forked(
        [{**common, "script": script, "flags": [*flags, *own]} for script, own in steps], tmp_path
    )
    assert [set(codes) for codes, _ in answers] == [{0}, {-9}, {0}, {0}], answers
    ours, theirs = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("evaluated", "run")
    )
    assert ours["test_loss"] == theirs["test_loss"] and ours["steps"] == 0
    assert not list((tmp_path / "run").glob("*.tmp"))


def checkpoint(folder):
    """A checkpoint's content, without what differs between two equal runs: the header of a shard is
    in any order."""
    rest = content(folder / "run.pt")
    return {**rest, "checksums": {name: load_file(folder / name) for name in rest["checksums"]}}


RESUMED = {"1": (1, []), "2x2": (4, ["--replicas", 2])}  # on two: the run that is killed, below


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Twenty steps of a model with BatchNorm and dropout; and the same, stopped in mid-epoch and
    resumed."""
    directory, runs = tmp_path_factory.mktemp("resumed"), []
    for case, (processes, flags) in RESUMED.items():
        common = {"recipe": "sharded_cifar", "processes": processes}
        flags = [
            *flags,
            "--batch-size",
            64 // processes,
            "--log-every",
            1,
            "--checkpoint-every",
            15,
            "--keep",
            9,
        ]
        runs.append({**common, "flags": flags, "directory": directory / f"{case}-whole"})
        common |= {"directory": directory / f"{case}-broken"}
        runs.append(
            {**common, "flags": flags, "disturbances": {str(processes - 1): [4, "SIGTERM"]}}
        )
        runs.append({**common, "flags": flags})
    return directory, forked(runs, directory)


@pytest.mark.slow
@pytest.mark.parametrize("case", RESUMED)
def test_stopped_and_resumed_is_uninterrupted_bit_for_bit(resumed, case):
    directory, outcomes = resumed
    index, processes = 3 * list(RESUMED).index(case), RESUMED[case][0]
    for (codes, output), code in zip(outcomes[index : index + 3], (0, 143, 0), strict=True):
        assert codes == [code] * processes, output
    parameters = sum(p.numel() for p in build_model(None).parameters())
    stop = 4 if processes == 1 else 5  # the votes of one step are counted after the next
    assert f"resumed_from: {stop}\n" in outcomes[index + 2][1]
    whole, broken = directory / f"{case}-whole", directory / f"{case}-broken"
    assert sorted(path.name for path in broken.glob("*/")) == [
        f"step-{step:08}" for step in (stop, 15, 20)
    ]
    for step in (15, 20):
        one, other = (checkpoint(run / f"step-{step:08}") for run in (whole, broken))
        assert_identical(one, other)
        assert len({name.partition("-model")[0] for name in one["checksums"]}) == processes
        saved = sum(
            value.numel() for shards in one["checksums"].values() for value in shards.values()
        )
        assert saved == 2 * parameters, "nothing twice, of replicas neither"
    assert (whole / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()
    assert untimed((whole / "metrics.jsonl").read_text()) == untimed(
        (broken / "metrics.jsonl").read_text()
    )
    for rank in range(processes):
        assert len(batches(whole, rank)) == 20 and batches(whole, rank) == batches(broken, rank)


CHANGES = {"2 to 4": (2, 4, []), "4 to 1": (4, 1, []), "4 to 2x2": (4, 4, ["--replicas", 2])}


@pytest.mark.slow
def test_another_number_of_processes_goes_on_with_the_same_steps(tmp_path):
    flags = ["--checkpoint-every", 6, "--keep", 9]
    runs = {f"from {n}": (n, "sharded_cifar", [*flags, "--batch-size", 32 // n]) for n in (2, 4)}
    for change, (before, after, own) in CHANGES.items():
        checkpoint = tmp_path / f"from {before}/step-00000006"
        runs[change] = (
            after,
            "sharded_cifar",
            [*own, "--batch-size", 32 // after, "--resume", checkpoint],
        )
    results = run_all(
        tmp_path,
        {name: (n, recipe, ["--max-steps", 9, *own]) for name, (n, recipe, own) in runs.items()},
        fewer=16,
    )
    for change, (before, *_) in CHANGES.items():
        assert results[change]["summary"]["resumed_from"] == 6
        for event in ("train", "evaluations"):
            lines, expected = results[change][event], results[f"from {before}"][event]
            assert len(lines) == len(expected) == (9 if event == "train" else 1)
            for key in lines[0].keys() - {*MEASURED, "event"}:
                values = [line[key] for line in expected]
                assert [line[key] for line in lines] == pytest.approx(values, abs=1e-5, rel=0)
        weights = load_file(results[change]["weights"])
        torch.testing.assert_close(
            weights, load_file(results[f"from {before}"]["weights"]), rtol=0, atol=1e-5
        )


KILLS = [  # rank, what it is about to do, how often it has come there then
    (0, "os.mkdir checkpoint.tmp", 1),
    (0, "fsync .*00001-of-00008.safetensors", 1),
    (0, "os.rmdir checkpoint.tmp", 1),  # the remains of the one before
    (0, "open .*00005-of-00008.safetensors", 1),
    (0, "open run.pt", 1),
    (0, "fsync run.pt", 1),
    (0, "fsync checkpoint.tmp", 1),
    (0, "os.rename checkpoint.tmp", 1),
    (1, "os.mkdir checkpoint.tmp", 1),
    (1, "fsynced .*00003-of-00008.safetensors", 1),
    (0, "fsync checkpoint.tmp", 2),  # it has its name
    (0, "os.mkdir checkpoint.tmp", 2),
    (0, "os.rename step-.*", 1),  # to what is deleted
    (0, "os.rmdir deleted.tmp", 1),
    (0, "os.rmdir deleted.tmp", 1),  # the remains of the one before
]


@pytest.mark.slow
def test_killed_at_any_moment_of_a_save_the_run_goes_on_to_the_same_end(tmp_path):
    """One run, killed over and over while it saves and continued each time; and an undisturbed
    one."""
    common = {"recipe": "sharded_cifar", "processes": 2}
    flags = ["--batch-size", 32, "--checkpoint-every", 1, "--keep", 2, "--max-steps", 10]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    resumed = {**common, "directory": str(killed), "flags": flags}
    program = ROOT / "tests/programs/sharded_killed.py"
    run = {"script": program, "processes": 2, "directory": tmp_path, "grace": 1}
    runs = [{**run, "flags": [json.dumps({**resumed, "kill": kill})]} for kill in KILLS]
    outcomes = forked(
        [{**common, "directory": whole, "flags": flags}, *runs, resumed], tmp_path, **PROGRAMS
    )
    begins = []
    for (codes, output), kill in zip(outcomes, (None, *KILLS, None), strict=True):
        assert codes == [0, 0] if kill is None else codes[kill[0]] == -9, (kill, output)
        assert "cannot load" not in output, "a checkpoint under its final name was not complete"
        assert "saved over" not in output, output
        begins.append(int(output.partition("resumed_from: ")[2].split()[0]))
    assert begins == sorted(begins), "a checkpoint was lost"
    assert 3 < begins[-1] < 10, "the kills came too early or too late to prove anything"
    for step in (9, 10):
        assert_identical(
            *(checkpoint(directory / f"step-{step:08}") for directory in (whole, killed))
        )
    assert (whole / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()
    assert sorted(path.name for path in killed.glob("*")) == sorted(
        path.name for path in whole.glob("*")
    )


class Hostile:
    """A pickle that writes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_and_a_hostile_one_runs_no_code(tmp_path):
    flags = ["--batch-size", 64, "--checkpoint-every", 2, "--max-steps", 4, "--keep", 9]
    common = {"recipe": "sharded_cifar", "processes": 1}
    first, executed = tmp_path / "first", tmp_path / "executed"
    ((codes, output),) = forked([{**common, "directory": first, "flags": flags}], tmp_path)
    assert codes == [0], output
    shard = min(path.name for path in (first / "step-00000004").glob("*.safetensors"))

    def flip(folder):
        data = bytearray((folder / shard).read_bytes())
        data[-10] ^= 1
        (folder / shard).write_bytes(data)

    def hostile_shard(folder):  # by somebody who knows of the checksums
        (folder / shard).write_bytes(pickle.dumps(Hostile(executed)))
        rest = torch.load(folder / "run.pt", weights_only=True)
        rest["checksums"][shard] = recipe.checksum(folder / shard)
        torch.save(rest, folder / "run.pt")

    cases = {
        "flipped": (flip, "is damaged"),
        "missing": (lambda folder: (folder / shard).unlink(), "is damaged, missing"),
        "another": (
            lambda folder: shutil.copy(folder / shard, folder / "b.safetensors"),
            "b.safetensors is",
        ),
        "torn": (lambda folder: (folder / "run.pt").write_bytes(b"PK"), "BadZipFile"),
        "hostile": (
            lambda folder: torch.save(Hostile(executed), folder / "run.pt"),
            "UnpicklingError",
        ),
        "hostile shard": (hostile_shard, "does not fit this model"),
        "hostile .metadata": (
            lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Hostile(executed))),
            "",
        ),
    }
    for name, (spoil, _) in cases.items():
        shutil.copytree(first, tmp_path / name, ignore=shutil.ignore_patterns("run.lock"))
        spoil(tmp_path / name / "step-00000004")
    runs = [{**common, "directory": tmp_path / name, "flags": flags} for name in cases]
    for (name, (_, words)), (codes, output) in zip(
        cases.items(), forked(runs, tmp_path, together=2), strict=True
    ):
        assert words in output, output
        assert not executed.exists(), name
        begins = {"hostile shard": None, "hostile .metadata": 4}.get(name, 2)
        assert codes == [0 if begins else 2] and (
            not begins or f"resumed_from: {begins}\n" in output
        ), output
        names = sorted(path.name for path in (tmp_path / name).glob("step-*"))
        assert names == ["step-00000002", "step-00000004"]
        if begins:
            checkpoint(tmp_path / name / "step-00000004")  # written anew, over what was damaged
    pickle.loads(pickle.dumps(Hostile(executed))).close()
    assert executed.exists(), "the hostile file was harmless"


@pytest.mark.slow
def test_where_a_checkpoint_cannot_be_written_or_is_not_finite_all_processes_end(tmp_path):
    """A file is in the folder's place, a batch of the second process is not finite, and the weights
    are no weights."""
    common = {"recipe": "sharded_cifar", "processes": 2}
    flags = ["--batch-size", 32, "--checkpoint-every", 5]
    runs = [
        {**common, "directory": tmp_path / name, "flags": flags}
        for name in ("full", "nan", "weights")
    ]
    runs[1]["disturbances"] = {"1": [7, "nan"]}
    runs[2] |= {"flags": [*flags, "--weights", str(tmp_path / "full/checkpoint.tmp")], "grace": 0.5}
    (tmp_path / "full").mkdir()
    (tmp_path / "full/checkpoint.tmp").write_text("in the way")
    expected = (
        ([1, 1], "cannot write step-00000005 ("),
        ([1, 1], "not finite on ranks [0, 1], since a step between 7 and 9, "),
        ([2], ""),
    )
    for (codes, words), (found, output) in zip(
        expected, forked(runs, tmp_path, together=2), strict=True
    ):
        assert found[: len(codes)] == codes and words in output, output
        assert output.count("error:") == 1 and "Traceback" not in output, output
    assert [path.name for path in tmp_path.glob("*/step-*")] == ["step-00000005"]


@pytest.fixture(scope="module")
def weighted(tmp_path_factory):
    """{processes: answer of programs/sharded_weights.py}"""
    return answers("sharded_weights", (1, 2, 4), tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_weights_are_exact_however_the_batch_is_divided(weighted, processes):
    """Also accumulated, in shards or whole, clipped, and where a microbatch or a whole share weighs
    nothing."""
    cases = weighted[processes]
    assert len(cases) == 2 * 3 * 2 * {1: 4, 2: 3, 4: 2}[processes]
    for case, found in cases.items():
        assert found["update"] < 1e-6, case
        assert found["norm"] is None or found["norm"] < 1e-6, case
        assert found["clipped"] == ("clipped to 0.02" in case)


BLOCKED = """
plain_accelerator, plain_barrier = make_accelerator, distributed.barrier


def make_accelerator(*arguments):
    accelerator = plain_accelerator(*arguments)
    distributed.barrier = barrier
    return accelerator


def barrier(group=None, *more, **options):
    if group in (None, distributed.group.WORLD):
        time.sleep(600)  # as NCCL's, when another process has ended
    return plain_barrier(group, *more, **options)
"""
ENDS = """

def load_weights(*_):
    os._exit(3)
"""
STOPS = """

plain_step = train_step


def train_step(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    return plain_step(*arguments)
"""


@pytest.mark.slow
def test_all_end_together_where_the_default_groups_barrier_would_block(tmp_path):
    """When the main process has ended, and when all are stopped by a signal."""
    flags = ["--cpu", "--data", "synthetic", "--model", "simple_cnn", "--batch-size", 32]
    runs = []
    for name, project in (("ends", ENDS), ("stops", STOPS)):
        script = copy("sharded_cifar", tmp_path / name, LITTLE_DATA, project=BLOCKED + project)
        common = {"processes": 2, "directory": tmp_path, "grace": 30, "patience": 60}
        runs.append({**common, "script": script, "flags": [*flags, "--output-dir", f"{name}-run"]})
    (codes, output), (stopped, printed) = forked(runs, tmp_path, together=2)
    assert codes == [3, 1], output
    assert "rank 1 ends: another process has ended" in output and "Traceback" not in output
    assert stopped == [143, 143] and "the same command continues" in printed, printed


TIED = """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 10)
        self.second = nn.Linear(10, 10)
        self.third = nn.Linear(10, 10)
        self.third.weight = self.second.weight

    def forward(self, x):
        return self.third(torch.relu(self.second(torch.relu(self.first(x.mean((2, 3)))))))


def build_model(args):
    return Tied()
"""


@pytest.mark.slow
def test_tied_weights_are_written_once_as_ddp_writes_them_and_load_again(tmp_path):
    flags = ["--cpu", "--data", "synthetic", "--batch-size", 16, "--max-steps", 3]
    runs = []
    for recipe_name in ("ddp_cifar", "sharded_cifar"):
        script = copy(recipe_name, tmp_path / f"{recipe_name}.py", LITTLE_DATA, project=TIED)
        own = ["--output-dir", recipe_name, "--checkpoint-every", 1, "--keep", 9]
        runs.append({"processes": 2, "script": script, "flags": [*flags, *own]})
    own = ["--output-dir", "again", "--epochs", 0, "--weights", "sharded_cifar/model.safetensors"]
    runs.append({**runs[1], "flags": [*flags[:-2], *own]})
    begin = "sharded_cifar/step-00000002"
    runs.append({**runs[1], "flags": [*flags, "--output-dir", "resumed", "--resume", begin]})
    for codes, output in forked([{**one, "directory": tmp_path} for one in runs], tmp_path):
        assert codes == [0, 0], output
        if "loaded" in output:
            assert "names that do not fit: none" in output
    assert "resumed_from: 2\n" in output
    paths = [tmp_path / name / "model.safetensors" for name in ("sharded_cifar", "resumed")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    theirs, ours = (
        load_file(tmp_path / f"{name}_cifar/model.safetensors") for name in ("ddp", "sharded")
    )
    assert ours.keys() == theirs.keys() and "third.weight" not in ours
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    losses = [
        json.loads((tmp_path / name / "summary.json").read_text())["test_loss"]
        for name in ("sharded_cifar", "again")
    ]
    assert losses[0] == losses[1]


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """The answers of the four processes of programs/sharded_groups.py"""
    return answers("sharded_groups", (4,), tmp_path_factory.mktemp("groups"))[4]


def test_all_process_groups_have_the_same_timeout(groups):
    """The default one, the hosts', two of replicas, one of an offload."""
    for answer in groups:
        assert answer["timeouts"] == [recipe.TIMEOUT.total_seconds()] * 5


def test_norms_stay_in_fp32_in_their_units_group(groups):
    """Where torch can do it. The results are those of norms in groups of their own: of a norm that
    is a unit, and of one that is in a unit."""
    can = hasattr(torch.distributed.fsdp.MixedPrecisionPolicy, "param_dtype_override_fn")
    for answer in groups:
        assert answer["groups"] == [17 if can else 34, 34, 4]
        assert answer["deviation"] == 0 < answer["largest"]


def test_a_buffer_of_two_modules_and_a_model_that_is_false_as_a_condition_are_sent(groups):
    assert [answer["odd"] for answer in groups] == [[]] * 4


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.SyncBatchNorm, nn.InstanceNorm2d])
def test_a_repeated_forward_pass_counts_no_batch_twice(kind):
    """Of SyncBatchNorm `num_batches_tracked` may not be None."""
    norm = kind(4, track_running_stats=True)
    unit = nn.Sequential(nn.Conv2d(3, 4, 3), norm)
    images = torch.randn(2, 3, 8, 8)
    unit(images)
    expected = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    assert expected["running_mean"].abs().max() > 0
    norm.reset_running_stats()
    recipe.checkpoint_activations(unit, [norm])
    unit(images).sum().backward()
    assert unit[0].weight.grad is not None
    torch.testing.assert_close(dict(norm.named_buffers()), expected, rtol=0, atol=0)


def test_shards_do_not_go_through_pinned_memory(groups):
    assert [answer["saving"] for answer in groups] == [None] * 4


@pytest.mark.slow
def test_the_optimizer_of_gpus_makes_the_same_update(tmp_path):
    """There torch takes the `foreach` variant for sharded tensors, here a loop over them."""
    option = '"nesterov": True}', '"nesterov": True, "foreach": True}'
    flags = ["--cpu", "--data", "synthetic", "--model", "simple_cnn", "--batch-size", 16]
    runs = []
    for name, replaced in (("loop", []), ("foreach", [option])):
        script = copy("sharded_cifar", tmp_path / f"{name}.py", LITTLE_DATA, *replaced)
        own = ["--max-steps", 6, "--output-dir", name]
        runs.append({"processes": 2, "script": script, "flags": [*flags, *own]})
    for codes, output in forked([{**one, "directory": tmp_path} for one in runs], tmp_path):
        assert codes == [0, 0], output
    loop, foreach = (
        load_file(tmp_path / name / "model.safetensors") for name in ("loop", "foreach")
    )
    torch.testing.assert_close(foreach, loop, rtol=0, atol=1e-7)


REFUSALS = {
    "replicas": (
        {"WORLD_SIZE": "4"},
        ["--replicas", "3"],
        "argument --replicas: 3 do not divide the 4 process",
    ),
    "more replicas": (
        {},
        ["--replicas", "2"],
        "argument --replicas: 2 do not divide the 1 process",
    ),
    "offload": (
        {},
        ["--cpu-offload"],
        "argument --cpu-offload: there is nothing to offload without a GPU",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_in_one_line_before_a_process_group_starts(case, tmp_path, monkeypatch, capsys):
    env, flags, message = REFUSALS[case]
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        sys, "argv", ["sharded_cifar.py", "--cpu", "--output-dir", str(tmp_path), *flags]
    )
    monkeypatch.setattr(recipe.os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="2"):
        recipe.main()
    error = capsys.readouterr().err
    assert error.startswith(f"sharded_cifar: error: {message}") and error.count("\n") == 1


def test_units_are_the_elements_of_lists_and_nothing_inside_them():
    resnet, vit = torchvision.models.resnet50(), torchvision.models.vit_b_16()
    assert [len(recipe.shard_units(model)) for model in (resnet, vit)] == [3 + 4 + 6 + 3, 12 + 1]
    assert {type(unit).__name__ for unit in recipe.shard_units(resnet)} == {"Bottleneck"}
    nested = nn.ModuleDict(
        {"a": nn.ModuleList([nn.ModuleList([nn.Linear(1, 1)]), nn.ReLU()]), "b": nn.Linear(1, 1)}
    )
    assert recipe.shard_units(nested) == [nested["a"][0][0]]
