"""Flags, files, and functions that a copier writes, if they are wrong: one line, before a result is
wrong. Most are told by a function that is called here with an `exit_with_error` that raises an
exception; some, of which processes have to tell each other, by a copy of the recipe."""

import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from conftest import ACCELERATE, CNN, CONFIGS, Exit, load, project
from processes import ROOT, forked, launch
from safetensors.torch import save_file
from torch.utils import data

RECIPE = ROOT / "recipes/ddp_cifar.py"
recipe = load(RECIPE, exits=True)

FLAGS = {
    "a flag that does not exist": ("--bath-size 4", "unrecognized arguments: --bath-size 4"),
    "a timeout that never comes": ("--hang-timeout inf", "--hang-timeout: inf is not above 0"),
    "a norm that is not a number": ("--clip-norm nan", "argument --clip-norm: nan is not above 0"),
    "negative epochs": ("--epochs -1", "argument --epochs: -1 is below 0"),
    "no global batch": ("--global-batch-size 0", "argument --global-batch-size: 0 is not"),
}


@pytest.mark.parametrize("case", FLAGS)
def test_a_wrong_flag_is_one_line_that_names_it(case, monkeypatch):
    flags, said = FLAGS[case]
    monkeypatch.setattr(sys, "argv", ["ddp_cifar.py", *flags.split()])
    with pytest.raises(Exit) as error:
        recipe.parse_args("", recipe.add_flags, recipe.add_technique_flags)
    assert said in str(error.value).replace("'", "")


def test_a_copys_own_defaults_and_flags_win(monkeypatch, capsys):
    def add_flags(parser):
        parser.set_defaults(epochs=3)
        parser.add_argument("--lr", type=float, default=3e-4, help="peak rate of AdamW")

    monkeypatch.setattr(sys, "argv", ["ddp_cifar.py", "--seed", "1"])
    args = recipe.parse_args("", recipe.add_technique_flags, add_flags)
    assert [args.epochs, args.lr, args.seed] == [3, 3e-4, 1]
    monkeypatch.setattr(sys, "argv", ["ddp_cifar.py", "--help"])
    with pytest.raises(SystemExit):
        recipe.parse_args("", recipe.add_technique_flags, add_flags)
    told = capsys.readouterr().out
    assert (
        "passes (3)" in told and "peak rate of AdamW" in told and "see make_optimizer" not in told
    )


def test_a_launcher_that_is_told_to_use_the_cpu_is_heard_if_it_starts_all_processes(monkeypatch):
    """As `accelerate launch --cpu --num_processes 2` does not: it sets a port, and starts one."""
    monkeypatch.setattr(sys, "argv", ["ddp_cifar.py"])
    parse = partial(recipe.parse_args, "", recipe.add_flags, recipe.add_technique_flags)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert parse().cpu
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(Exit, match="give --cpu to the recipe alone"):
        parse()
    monkeypatch.setattr(recipe, "WORLD_SIZE", 2)
    assert parse().cpu
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    assert not parse().cpu


def test_an_output_directory_that_cannot_be_written_is_one_line(tmp_path):
    one = {"processes": 1, "script": RECIPE, "directory": tmp_path}
    directories = [f"{RECIPE}/runs", "/proc/nowhere"]
    runs = [{**one, "flags": [*CNN, "--output-dir", directory]} for directory in directories]
    for directory, (codes, output) in zip(directories, forked(runs, tmp_path), strict=True):
        (line,) = output.splitlines()
        assert codes == [1] and line.startswith("ddp_cifar: error: ") and directory in line


def test_cifar10_that_is_missing_or_damaged_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    accelerator = MagicMock()
    with pytest.raises(Exit, match=f"--data-dir {tmp_path}: .*refused.*: use --data synthetic"):
        recipe.cifar10(tmp_path, accelerator)
    for first in (accelerator.main_process_first, accelerator.local_main_process_first):
        assert first().__enter__.called, "where machines share a directory, and where not"

    def read(*_, **__):
        raise RuntimeError("File not found or corrupted.")

    monkeypatch.setattr(recipe.torchvision.datasets, "CIFAR10", read)
    with pytest.raises(Exit, match=r"--data-dir x: File not found or corrupted\.: use --data syn"):
        recipe.cifar10("x", accelerator)


def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))


def test_a_model_may_name_a_part_of_its_own_as_a_wrapper_does():
    own = {"module.weight": torch.ones(2)}
    assert recipe.fitting(own, own).keys() == own.keys()


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def test_weights_of_which_nothing_can_be_loaded_are_an_error_and_run_no_code(tmp_path, capsys):
    path = tmp_path / "pickle"
    path.write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(Exit, match=f"argument --weights: cannot load {path}"):
        recipe.load_weights(model(), str(path))
    assert "executed" not in capsys.readouterr().out
    path = tmp_path / "misfit.safetensors"
    save_file({"0.weight": torch.zeros(7, 4), "body": torch.zeros(3, 4)}, path)
    with pytest.raises(Exit, match=f"argument --weights: .*{path} .* it has 0.weight, body"):
        recipe.load_weights(model(), str(path))


def test_weights_of_a_wrapped_model_load_whole_from_a_checkpoint(tmp_path, capsys):
    """As DDP and `torch.compile` name them in their state dicts."""
    saved = model().state_dict()
    states = {"model": {f"_orig_mod.module.{name}": x for name, x in saved.items()}}
    states["optimizer"] = {"state": {0: torch.ones(3)}}
    torch.save({"buffers": {}, "states": states}, tmp_path / "weights.pt")
    loaded = recipe.load_weights(model(), str(tmp_path / "weights.pt")).state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in loaded.items())
    assert "loaded 4 of 4 tensors" in capsys.readouterr().err


def test_weights_with_the_head_of_another_task_load_as_far_as_they_fit(tmp_path, capsys):
    saved = {**model().state_dict(), "1.weight": torch.zeros(7, 3), "1.bias": torch.zeros(7)}
    save_file(saved, tmp_path / "weights.safetensors", metadata={"format": "pt"})
    mine = model()
    head = mine[1].weight.clone()
    recipe.load_weights(mine, str(tmp_path / "weights.safetensors"))
    assert torch.equal(mine[0].weight, saved["0.weight"]) and torch.equal(mine[1].weight, head)
    said = capsys.readouterr().err
    assert "loaded 2 of 4 tensors" in said and "1.weight" in said and "1.bias" in said


@pytest.mark.slow
def test_the_last_lines_on_the_screen_are_the_error():
    """The launcher prints 40 lines after those of the recipe."""
    command = [ACCELERATE, "launch", "--config_file", CONFIGS[2], RECIPE, *CNN, "--lr", 0]
    process = launch(command, check=False)
    lines = process.stderr.strip().splitlines()
    assert process.returncode and "argument --lr: 0.0 is not above 0" in lines[-2], process.stderr
    assert len(lines) > 20 and lines[0] == "ddp_cifar: error: argument --lr: 0.0 is not above 0"
    assert process.stderr.count("ddp_cifar: error: ") == 1, "by the first rank"
    assert "warning" not in process.stderr.lower() and "error_handler" not in process.stderr


LOSS = torch.rand(8, requires_grad=True)

RETURNED = {
    "the scalar of model(...).loss": (LOSS.mean(), "Tensor: ()"),
    "no loss in eval mode": ({"accuracy": LOSS}, "accuracy: (8,)"),
    "a mean": ({"loss": LOSS.mean()}, "loss: ()"),
    "a row per sample": ({"loss": LOSS[:, None]}, "loss: (8, 1)"),
    "a number": ({"loss": LOSS, "iou": 0.5}, "loss: (8,), iou: ()"),
    "other outputs": ({"loss": LOSS, "outputs": [1, 2]}, "loss: (8,), outputs: (2,)"),
}


@pytest.mark.parametrize("case", RETURNED)
def test_a_loss_that_is_not_one_value_per_sample_is_an_error(case):
    returned, told = RETURNED[case]
    with pytest.raises(Exit, match=rf"compute_loss returned {re.escape(told)}: return") as error:
        recipe.split_values(returned)
    assert 'one value per sample (reduction="none")' in str(error.value)


def test_metrics_that_differ_between_batches_are_an_error():
    metrics = SimpleNamespace(names=[], sums=0)
    with pytest.raises(Exit, match="compute_loss: return the same keys"):
        recipe.Metrics.add(metrics, [{"loss": LOSS}, {"loss": LOSS, "hit": LOSS}])


@pytest.mark.parametrize("counted", [7, 9, 16])
def test_samples_that_are_left_out_or_counted_twice_or_all_weigh_nothing_are_an_error(counted):
    sums = recipe.sample_rows({"loss": torch.ones(counted)}).sum(0)
    with pytest.raises(Exit, match=f"{counted} values of compute_loss for 8 samples: "):
        recipe.means(["loss"], sums, 8)
    sums = recipe.sample_rows({"loss": torch.ones(8), "weight": torch.zeros(8)}).sum(0)
    with pytest.raises(Exit, match='every "weight" of compute_loss is 0'):
        recipe.means(["loss"], sums, 8)


class RandomSubset(data.RandomSampler):
    """Of another type than RandomSampler, it may do anything."""


class OwnBatchSampler(data.BatchSampler):
    pass


class Stream(data.IterableDataset):
    def __iter__(self):
        return iter([])


ARGS = SimpleNamespace(batch_size=8, seed=0)
SAMPLES = list(range(24))  # a list is a dataset, too
loader = partial(data.DataLoader, SAMPLES)
TRAIN = loader(8, shuffle=True, drop_last=True)
TEST = loader(6)  # of any size
RANDOM = RandomSubset(SAMPLES)
OWN_BATCHES = OwnBatchSampler(data.RandomSampler(SAMPLES), 8, True)
OWN_SAMPLER = "training needs a map-style Dataset, and no sampler"
LOADERS = {
    "a batch size": (r"training needs batch_size=.* \(8\)$", loader(4, drop_last=True), TEST),
    "an incomplete test": ("test needs drop_last=False$", TRAIN, loader(8, drop_last=True)),
    "a smaller last batch": ("training needs drop_last=True$", TEST, TEST),
    "a test in another order": ("test needs .* no sampler", TRAIN, loader(8, shuffle=True)),
    "an empty test set": ("test needs samples$", TRAIN, data.DataLoader(SAMPLES[:0], 8)),
    "own sampler": (OWN_SAMPLER, loader(8, sampler=RANDOM, drop_last=True), TEST),
    "own batch sampler": (OWN_SAMPLER, loader(batch_sampler=OWN_BATCHES), TEST),
    "three": ("return two DataLoaders", TRAIN, TEST, TEST),
    "a test that is a stream": ("test needs .* no sampler", TRAIN, data.DataLoader(Stream(), 8)),
    "a stream without batches": ("test needs .* no sampl", TRAIN, data.DataLoader(Stream(), None)),
}


@pytest.mark.parametrize("case", LOADERS)
def test_loaders_that_cannot_be_resumed_exactly_are_an_error(case):
    recipe.make_reproducible((TRAIN, TEST), ARGS)
    problem, *loaders = LOADERS[case]
    with pytest.raises(Exit, match=rf"load_data: .*{problem}"):
        recipe.make_reproducible(loaders, ARGS)


def test_a_training_set_of_which_an_order_leaves_nothing_is_none_of_these_errors():
    """As that of by_length, which drops what fills no global batch: see test_configs.py."""
    none = data.DataLoader(data.Subset(SAMPLES, []), 8, drop_last=True)
    assert recipe.make_reproducible((none, TEST), ARGS)


def test_a_model_in_eval_mode_is_an_error():
    """As from_pretrained returns it: dropout and BatchNorm would not train."""
    with pytest.raises(Exit, match=r"build_model: .* eval mode.*return model.train\(\)"):
        recipe.load_weights(torch.nn.Linear(2, 2).eval(), None)


@pytest.mark.parametrize(
    ("value", "error"), [(Path("x"), "UnpicklingError"), (lambda: 0, "lambda")]
)
def test_a_state_that_could_not_be_written_or_read_again_is_not_saved(value, error, tmp_path):
    states = {"own": SimpleNamespace(state_dict=lambda: {"value": value})}
    run = SimpleNamespace(directory=tmp_path, config={}, methods={})
    checkpoints = recipe.Checkpoints(run, states)
    with pytest.raises(Exit, match=rf"cannot write .*step-00000001.*{error}"):
        checkpoints.save(1, "")
    assert list(tmp_path.iterdir()) == []


def mistake(*replacements, recipe="ddp_cifar", processes=2, **run):
    return pytest.mark.copied(recipe, *replacements, processes=processes, **run)


def params(cases):
    """Those of {id: (value, mark)}."""
    return [pytest.param(value, marks=mark, id=name) for name, (value, mark) in cases.items()]


RETURN = '    return {"loss": loss, "accuracy": logits.argmax(1) == labels}\n'
ON_RANK_1 = "    if accelerate.PartialState().process_index == 1 and model.training:\n"
NOT_FINITE = "not finite between steps 0 and ., nothing was saved: the "
SPOILED_LOSS = f"{ON_RANK_1}        loss = loss / 0\n"
SIGNALLED = "    os.kill(os.getpid(), signal.SIGTERM)\n    logits.register_hook(torch.log)\n"
LONG = ["--log-every", 9, "--max-steps", 9, "--batch-size", 8]
LAST_STAGE = project("own_mistakes", train_step="step_that_spoils_the_last_stage")
PATIENT = {"grace": 30, "terminate": False, "flags": ["--max-steps", 1]}
STAGE = "    optimizer = accelerator.prepare(optimizer)\n"
OWN_WEIGHTS = "    draw_weights_by_rank(accelerator, model)\n"  # of two that hold the same stage
OF_FOUR = {"recipe": "pipeline_cifar", "project": project("own_mistakes"), "processes": 4}
UNUSED = project("own_mistakes", build_model="model_with_an_unused_layer")
MISTAKES = {
    "a loss that is not finite": (
        rf"{NOT_FINITE}loss of ranks \[1\], the weights of ranks \[0, 1\]: ",
        mistake((RETURN, SPOILED_LOSS + RETURN)),
    ),
    "one at a stop between two lines": (
        rf"{NOT_FINITE}loss of ranks \[0\], the weights of ranks \[0\]: ",
        mistake((RETURN, SIGNALLED + RETURN), processes=1, flags=LONG),
    ),
    "a stage, and all ranks end by themselves": (
        rf"{NOT_FINITE}weights of ranks \[1\]: ",
        mistake(recipe="pipeline_cifar", project=LAST_STAGE, **PATIENT),
    ),
    "weights that drift apart": (
        r"ranks \[2, 3\] have other weights than rank 0 at step 1, not saved: call model\(...\)",
        mistake((STAGE, STAGE + OWN_WEIGHTS), **OF_FOUR),
    ),
    "parameters without gradients": (
        ".* did not receive grad for rank 0: 2.extra.bias, 2.extra.weight",
        mistake(project=UNUSED, flags=["--log-every", 9, "--batch-size", 16]),
    ),
}


@pytest.mark.parametrize("said", params(MISTAKES))
def test_a_mistake_is_an_error_that_names_ranks_before_anything_is_saved(outcome, said):
    assert re.search(f"^mine: error: {said}", outcome.output, re.MULTILINE), outcome.output
    assert "step 1/" not in outcome.output and {0, -9}.isdisjoint(outcome.codes), outcome.output
    assert not list((outcome.directory / "run").glob("step-*"))


RAISES = {
    "on all ranks": (
        "TypeError: a mistake, in compute_loss, line",
        mistake((RETURN, f"    raise TypeError('a mistake.')\n{RETURN}")),
    ),
    "on one rank": (
        "rank 1: TypeError: a mistake, in compute_loss, line",
        mistake((RETURN, f"{ON_RANK_1}        raise TypeError('a mistake')\n{RETURN}")),
    ),
    "in a DataLoader's worker": (
        "ValueError: Caught ValueError in DataLoader worker process 0. ... "
        "ValueError: an image ... is corrupt, in __getitem__, line",
        mistake(project=project("own_mistakes", load_data="corrupt_data")),
    ),
}


@pytest.mark.parametrize("said", params(RAISES))
def test_an_exception_is_one_traceback_and_a_line_with_its_place(outcome, said):
    """A rank that waits before it prints the error ends on SIGTERM."""
    assert -9 not in outcome.codes, outcome.output
    (line,) = re.findall("^mine: error: (.*)$", outcome.output, re.MULTILINE)
    assert re.fullmatch(re.escape(said) + r" \d+ of mine.py", line), line
    tracebacks = {"Valu": 2}.get(said[:4], 1)  # a worker's is in that of its rank
    assert outcome.output.count("Traceback (most recent call last)") == tracebacks
    number = int(re.search(r"line (\d+) of", line)[1])
    line = (outcome.directory / "mine.py").read_text().splitlines()[number - 1]
    assert "raise" in line


def test_an_error_in_a_thread_ends_the_process_or_is_raised_where_a_rank_waits(monkeypatch):
    """The main thread alone can set the handler of a signal that ends the wait. Neither needs the
    launcher's file, which may not be writable."""
    ours = load(RECIPE)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/proc/none")
    monkeypatch.setattr(ours, "exit_now", lambda _: sys.exit("ended"))
    for rank, said in enumerate(("ended", "a mistake")):
        monkeypatch.setattr(ours, "LOCAL_RANK", rank)
        with ThreadPoolExecutor(1) as pool, pytest.raises(SystemExit, match=said):
            pool.submit(ours.exit_with_error, "a mistake").result()


EXITS = project("interruption", load_data="data_of_persistent_workers")
EXITS += project("own_mistakes", compute_loss="loss_that_exits")


@pytest.mark.copied("ddp_cifar", project=EXITS, flags=["--batch-size", 16])
def test_an_exit_in_a_function_ends_the_run_with_its_message_and_what_was_printed(outcome):
    """multiprocessing would wait for workers that block its signal."""
    assert outcome.codes == [1] and "mine: error: bad data\n" in outcome.output, outcome.output
    assert "a line that is not flushed\n" in outcome.output
