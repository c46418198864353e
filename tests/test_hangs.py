"""A rank that stalls is named, and the run ends; a slow one is not."""

import re
import socket

import pytest
from conftest import PROGRAMS, SMALL, copy, forked, outputs

pytestmark = pytest.mark.slow

HOST = socket.gethostname()
TIMEOUT = 10  # seconds: sixteen processes share the cores, and take a step in less
SLEEP, STOP = "time.sleep(1000)", "os.kill(os.getpid(), signal.SIGSTOP)"
HERE = """
calls = count(1)


def here(call):
    return int(os.environ.get("RANK", 0)) == RANK and next(calls) == call
"""
# A function of the copier's own is not taken for waiting or saving, whatever its name is.
IN_COMPUTE_LOSS = """
plain_loss = compute_loss


def log(call):
    if here(call):
        STALL


def compute_loss(model, batch, args):
    log(20)
    return plain_loss(model, batch, args)
"""
IN_EVALUATION = IN_COMPUTE_LOSS.replace("    log(20)", "    model.training or log(2)")
IN_WORKER = """
class Stalling(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        if here(100):
            STALL
        return super().__getitem__(index)


def load_data(args, accelerator):
    data = Stalling(torch.randn(320, 3, 8, 8), torch.zeros(320, dtype=torch.int64))
    loader = DataLoader(data, args.batch_size, shuffle=True, drop_last=True, num_workers=1)
    return loader, DataLoader(data, args.batch_size)
"""
# A collective that only one rank calls.
ONE_SIDED = """
plain_loss = compute_loss
group = None


def compute_loss(model, batch, args):
    global group
    group = group or distributed.new_group(backend="gloo")
    if here(9):
        distributed.barrier(group)
    return plain_loss(model, batch, args)
"""
# A device that executes all-reduces in order, four in a step, while the host runs ahead into the
# next step: there it waits for its queue in a function of its own.
RUNS_AHEAD = """
import queue

device = queue.Queue(maxsize=5)


def execute():
    group = distributed.new_group(backend="gloo")
    started.set()
    while True:
        distributed.all_reduce(device.get(), group=group)


started = threading.Event()


def launch(values):
    if not started.is_set():
        threading.Thread(target=execute, daemon=True).start()
        started.wait()
    while device.full():
        time.sleep(0.01)
    device.put(values)


def train_step(run, model, optimizer, scheduler, microbatches):
    if here(9):
        STALL
    for _ in range(4):
        launch(torch.zeros(1))
    values = [{"loss": torch.zeros(len(batch[1]))} for batch in microbatches]
    return values, None
"""
SETTING_UP = """
plain_choice = choose_device


def choose_device(args):
    if here(1):
        STALL
    return plain_choice(args)
"""
SLOW = f"""
import weakref

held = weakref.ref(set())  # which is gone
plain_load, plain_sync, plain_loss = load_data, sync, compute_loss
files, evaluations = count(1), count(1)


def load_data(args, accelerator):
    time.sleep({1.25 * TIMEOUT})
    return plain_load(args, accelerator)


def sync(path):
    if path.name == UNFINISHED and next(files) == 2:  # the first checkpoint, behind run.id
        time.sleep({1.25 * TIMEOUT})
    plain_sync(path)


def compute_loss(model, batch, args):
    global held
    assert held() is None, "the tensors of a function that has returned"
    tensor = torch.empty(1)
    held = weakref.ref(tensor)
    time.sleep(0 if model.training else {0.25 * TIMEOUT})
    return plain_loss(model, batch, args)


def test_metrics(outputs, args):
    time.sleep({1.25 * TIMEOUT} if next(evaluations) == 1 else 0)
    return {{}}
"""
# As a compilation, on one rank.
COMPILES = f"""
plain_loss = compute_loss
nn.Module.compile = lambda *_, **__: None


def compute_loss(model, batch, args):
    if here(1):
        time.sleep({1.25 * TIMEOUT})
    return plain_loss(model, batch, args)
"""
CASES = {  # (processes, recipe, where it stalls, how, the function that is named)
    "stalls in training": (2, "ddp_cifar", IN_COMPUTE_LOSS, SLEEP, "log"),
    "stalls in a pipeline": (4, "pipeline_cifar", IN_COMPUTE_LOSS, SLEEP, "log"),
    "stalls while the others wait for its shard": (2, "sharded_cifar", IN_EVALUATION, SLEEP, "log"),
    "stalls in a worker": (2, "pipeline_cifar", IN_WORKER, SLEEP, "timed_next"),
    "is stopped, of four": (4, "pipeline_cifar", IN_COMPUTE_LOSS, STOP, None),
    "calls a collective alone": (2, "ddp_cifar", ONE_SIDED, "", None),
    "stalls while another one runs ahead": (2, "ddp_cifar", RUNS_AHEAD, SLEEP, "train_step"),
    "stalls in training, of nine": (9, "ddp_cifar", IN_COMPUTE_LOSS, SLEEP, "log"),
    "is alone": (1, "ddp_cifar", IN_COMPUTE_LOSS, SLEEP, "log"),
}
OTHERS = {
    "is slow": (2, "ddp_cifar", SLOW, "", None),
    "compiles": (2, "ddp_cifar", COMPILES, "", None),
    "stalls while it is set up": (2, "ddp_cifar", SETTING_UP, SLEEP, None),
}


def described(directory, name, processes, recipe, where, how, _):
    directory = directory / name.replace(" ", "-")
    directory.mkdir()
    project = (HERE + where).replace("STALL", how).replace("== RANK", f"== {processes - 1}")
    little = "synthetic_images(5120", "synthetic_images(320"
    fewer = "synthetic_images(1024", "synthetic_images(160"
    script = copy(recipe, directory / "mine.py", little, fewer, project=project)
    flags = [*SMALL, "--output-dir", "run", "--hang-timeout", TIMEOUT, "--batch-size", 16]
    flags += ["--epochs", 2 if where in (SLOW, COMPILES) else 1000]
    flags += ["--compile"] if where == COMPILES else []
    run = {"processes": processes, "script": script, "directory": directory, "flags": flags}
    run["grace"] = 10
    if where == SETTING_UP:
        run["until"] = [f"Timeout (0:00:{TIMEOUT:02})!", processes]
    return run


@pytest.fixture(scope="module")
def stalled(tmp_path_factory):
    """{name: [exit codes, output], the copy}, of runs that mostly wait: eight at a time."""
    directory = tmp_path_factory.mktemp("hangs")
    cases = {**OTHERS, **CASES}  # the longest first
    runs = [described(directory, name, *case) for name, case in cases.items()]
    answers = forked(runs, directory, together=8, **PROGRAMS)
    return {x: (a, run["script"]) for x, a, run in zip(cases, answers, runs, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_the_rank_is_named_and_the_run_ends_where_one(stalled, name):
    processes, _, where, how, function = CASES[name]
    (codes, output), script = stalled[name]
    assert 0 not in codes, output
    error = rf"^mine: error: no step for {TIMEOUT} s because of (.*)$"
    (named,) = re.findall(error, output, re.MULTILINE)
    if processes > 8:  # they write their stacks into files, which the line names
        assert "rank 1 on" not in output, output
        named, files = named.split(", stacks in ")
        output = "".join(x.read_text() for x in script.parent.glob(files))
    if where == ONE_SIDED:
        assert re.findall(r"rank (\d)", named) == ["0", "1"], "each waits for the other"
    elif how == STOP:
        assert named == f"rank {processes - 1} on {HOST} (no report)"
    else:
        place = re.fullmatch(rf"rank {processes - 1} on {HOST} \(line (\d+), in (\w+)\)", named)
        assert place and place[2] == function, named
        line = SLEEP if where != IN_WORKER else "batch = next("
        assert line in script.read_text().splitlines()[int(place[1]) - 1]
    stacks = re.findall(
        rf"^mine: no step for {TIMEOUT} s, rank (\d) on {HOST} is at\n  File", output, re.M
    )
    assert set(stacks) == set(map(str, range(processes - (how == STOP)))), "each rank prints one"
    assert how == STOP or where in (ONE_SIDED, IN_WORKER) or output.count(f"    {SLEEP}\n") == 1


def test_what_is_slow_but_moves_is_no_stall_and_no_training_time(stalled):
    """Loading data takes longer than the timeout, an evaluation, and on one rank a save, and the
    metrics of the whole test set."""
    (codes, output), script = stalled["is slow"]
    assert codes == [0, 0] and ": error: " not in output, output
    first, second = outputs(script.parent / "run").train
    assert second["time"] - first["time"] > second["seconds"] + 3.75 * TIMEOUT


def test_a_first_step_that_compiles_may_take_longer_than_the_timeout(stalled):
    (codes, output), _ = stalled["compiles"]
    assert codes == [0, 0] and ": error: " not in output, output


def test_a_rank_that_stalls_before_the_first_step_prints_its_stack(stalled):
    """The others wait for it for long, since it may be downloading."""
    (codes, output), _ = stalled["stalls while it is set up"]
    assert codes == [-9, -9] and ": error: " not in output, output
    stacks = output.split(f"Timeout (0:00:{TIMEOUT:02})!\n")[1:]
    assert len(stacks) == 2 and all(" in __init__\n" in stack for stack in stacks)
    (stalling,) = [stack for stack in stacks if " in choose_device\n" in stack]
    assert stalling.index("choose_device") < stalling.index("__init__")
