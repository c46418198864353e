"""What a launch is checked for before anything starts, with fakes of GPUs that this machine does
not have."""

import faulthandler
import os
import socket
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import CONFIGS, ROOT, forked, free_port, load, run, the_error_line

SMALL = ["--data", "synthetic", "--model", "simple_cnn", "--max-steps", "2"]


class Stopped(Exception):
    pass


def stop(message="would start", **_):
    raise Stopped(message)


@pytest.fixture
def start(monkeypatch):
    """Call `make_accelerator` of a recipe with fakes, until it exits with an error or would make
    the Accelerator."""

    def call(
        recipe="ddp_cifar", precision="fp32", environment=(), cpu=False, threads=None, **fakes
    ):
        module = load(f"recipes/{recipe}.py")
        call.devices = []
        monkeypatch.setattr(torch.cuda, "set_device", call.devices.append)
        monkeypatch.setattr(module, "exit_with_error", stop)
        monkeypatch.setattr(
            module, "Accelerator", lambda **options: vars(args).update(options) or stop()
        )
        for name, value in dict(environment).items():
            monkeypatch.setenv(name, value)
        for name, value in fakes.items():
            fake = value if callable(value) else lambda *_, value=value, **__: value
            monkeypatch.setattr(torch.cuda, name, fake)
        args = {"cpu": cpu, "log_every": None, "seed": 0, "tracker": None}
        args = SimpleNamespace(**args, output_dir="x", threads=threads, hang_timeout=600)
        with pytest.raises(Stopped) as stopped:
            module.make_accelerator(args, precision)
        return str(stopped.value), args

    # Set by `make_accelerator`: monkeypatch undoes it only if it knows of it.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    yield call
    faulthandler.cancel_dump_traceback_later()
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark


H100 = {"device_count": 2}


def test_a_gpu_that_can_be_used_starts_with_a_line_every_50_steps(start):
    said, args = start(**H100)
    assert said == "would start" and args.log_every == 50
    assert args.dataloader_config.non_blocking, (
        "the host would wait at each batch until the step before has ended"
    )


def test_processes_share_the_cores_also_on_gpus(start, monkeypatch):
    """For what is computed on the host, such as an offloaded optimizer: the launcher leaves each
    process one thread."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6), raising=False)
    torch.set_num_threads(1)
    start(**H100, environment={"LOCAL_WORLD_SIZE": "2"})
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("environment", "flag", "threads"),
    [
        ({"OMP_NUM_THREADS": "4"}, None, 4),
        ({"OMP_NUM_THREADS": "1"}, None, 1),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "a launcher's default"}, None, 3),
        ({"OMP_NUM_THREADS": "4"}, 2, 2),
    ],
)
def test_the_users_number_of_threads_is_taken(start, monkeypatch, environment, flag, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6), raising=False)
    for name in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    environment = {"LOCAL_WORLD_SIZE": "2", **environment}
    start(**H100, environment=environment, threads=flag)
    assert torch.get_num_threads() == threads


def test_a_gpu_that_this_torch_cannot_use_is_an_error_and_not_training_on_cpu(start):
    def unusable(device):
        raise RuntimeError("The NVIDIA driver on your system is too old")

    with pytest.raises(RuntimeError, match="too old"):
        start(device_count=1, set_device=unusable)


def test_each_process_tries_its_own_gpu(start):
    start(**H100, environment={"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert start.devices == [1]


def test_a_slurm_step_without_the_jobs_gpus_is_an_error(start):
    slurm = {"SLURM_GPUS_ON_NODE": "8"}
    assert "this Slurm job has GPUs" in start(environment=slurm, device_count=0)[0]
    assert start(environment=slurm, device_count=0, cpu=True)[0] == "would start"


TOLD = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_USE_MEGATRON_LM": "true",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
}


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("recipe", ["ddp_cifar", "pipeline_cifar"])
def test_what_the_launcher_was_told_is_not_ignored(start, recipe, name):
    said, _ = start(recipe, environment={name: TOLD[name]}, device_count=0)
    assert f"{name.removeprefix('ACCELERATE_').lower()} is {TOLD[name].lower()}" in said


def test_what_the_launcher_says_by_default_and_what_the_recipe_does_is_no_error(start):
    said = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_USE_FSDP": "false",
    }
    said["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "1"
    assert start("amp_cifar", "bf16", said, device_count=0)[0] == "would start"


def test_ranks_whose_launcher_has_ended_while_they_start_do_not_look_for_it_for_hours(start):
    """It was killed; or, on the first machine, a rank has ended with an error before those here are
    up."""
    address = launched_at(free_port())
    assert "the first machine, has ended" in start(environment=address, device_count=0)[0]
    with socket.create_server(("127.0.0.1", int(address["MASTER_PORT"]))):
        assert start(environment=address, device_count=0)[0] == "would start"


def launched_at(port, processes=1, **more):
    """What torch's launcher tells a process on a machine of one process."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sizes = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": "1"}
    return {**address, **sizes, "TORCHELASTIC_USE_AGENT_STORE": "True", **more}


@pytest.mark.parametrize(
    ("processes", "more", "refused"),
    [
        (2, {"TORCHELASTIC_MAX_RESTARTS": "3"}, True),
        (2, {"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        (2, {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "False"}, False),
        (1, {"TORCHELASTIC_MAX_RESTARTS": "3"}, False),
    ],
)
def test_restarts_that_could_not_work_are_an_error_at_the_start(start, processes, more, refused):
    """On several machines those that start again would find the addresses of the dead, and wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = launched_at(server.getsockname()[1], processes, **more)
        said, _ = start(environment=environment, device_count=0)
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in said) == refused
    assert refused or said == "would start"


T4 = {"is_available": True, "is_bf16_supported": False, "get_device_name": "Tesla T4"}


@pytest.mark.parametrize(
    ("asked", "config", "expected"),
    [
        (None, "no", ("fp16", "because this GPU has no bf16")),
        (None, "fp16", ("fp16", "by the config")),
        ("fp32", "no", ("fp32", "by --precision")),
        ("bf16", "no", "Tesla T4 has no bf16, choose another --precision"),
        (None, "bf16", "Tesla T4 has no bf16, choose another --precision"),
    ],
)
def test_amp_on_a_gpu_without_bf16_takes_fp16_where_nobody_chose(
    monkeypatch, asked, config, expected
):
    recipe = load("recipes/amp_cifar.py")
    for name, value in T4.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(recipe, "exit_with_error", stop)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", config)
    args = SimpleNamespace(precision=asked, cpu=False)
    if isinstance(expected, str):
        assert recipe.choose_precision(args)[0] == "bf16"
        with pytest.raises(Stopped, match=expected):
            recipe.check_bf16(on_gpu=True)
    else:
        assert recipe.choose_precision(args) == expected


def test_amp_on_cpu_does_not_ask_cuda(monkeypatch):
    """Once asked, CUDA sees the GPUs that are hidden afterwards."""
    recipe = load("recipes/amp_cifar.py")
    monkeypatch.setattr(torch.cuda, "is_available", stop)
    monkeypatch.setattr(recipe, "has_bf16", lambda on_gpu: not on_gpu)
    args = SimpleNamespace(precision=None, cpu=True)
    assert recipe.choose_precision(args) == ("bf16", "by default")


@pytest.mark.slow
def test_cpu_processes_leave_a_gpu_alone(tmp_path):
    """With a GPU as far as torch can tell, Accelerate's barriers would go to it unless it is
    hidden."""
    script = tmp_path / "with_a_gpu.py"
    script.write_text(
        "import os, runpy, torch\n"
        "original = torch._C._get_accelerator\n"
        "visible = lambda: os.environ['CUDA_VISIBLE_DEVICES'] != ''\n"
        "asked = lambda check=None: torch.device('cuda') if visible() else original()\n"
        "torch._C._get_accelerator = asked\n"
        f"runpy.run_path('{ROOT}/recipes/pipeline_cifar.py', run_name='__main__')\n"
    )
    training = {"processes": 2, "script": script, "flags": [*SMALL, "--cpu"], "directory": tmp_path}
    ((codes, output),) = forked([{**training, "env": {"CUDA_VISIBLE_DEVICES": "0"}}], tmp_path)
    assert codes == [0, 0] and "step 2/2" in output


def test_a_launchers_precision_is_an_error_through_the_launcher(tmp_path):
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--config_file",
        CONFIGS[1],
    ]
    command += ["--mixed_precision", "bf16", ROOT / "recipes/ddp_cifar.py", *SMALL, "--cpu"]
    line = the_error_line(run(command, cwd=tmp_path, check=False))
    assert "mixed_precision is bf16" in line


LAUNCHER = """#!/usr/bin/env bash
caught() { sed -n "s/SigCgt:[[:space:]]*//p" /proc/$PPID/status; }
until (( 0x$(caught) >> 9 & 1 )); do sleep 0.1; done  # it catches SIGUSR1
[ "$1" = unwarned ] || kill -USR1 $PPID
sleep 1
exit "$2"
"""


def on_node(directory, accelerate, *arguments, **environment):
    """Run what submit_job.sh runs on each node, with another program in the place of accelerate."""
    (directory / "accelerate").write_text(accelerate)
    (directory / "accelerate").chmod(0o755)
    script = (ROOT / "recipes/submit_job.sh").read_text()
    script = script.partition("on_node='")[2].partition("\n'\n")[0]
    called = 'accelerate launch --machine_rank "$SLURM_NODEID"'
    assert called in script
    defaults = {"SLURM_NODEID": "0", "SLURM_JOB_ID": "1", "SLURM_NNODES": "1"}
    environment = {"PATH": f"{directory}:{os.environ['PATH']}", **defaults, **environment}
    command = ["bash", "-c", script.replace(called, "accelerate"), "on_node", *arguments]
    return run(command, cwd=directory, check=False, **environment)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_what_a_node_of_a_slurm_job_answers(tmp_path):
    """submit_job.sh goes back into the queue on 138: not where the training was complete before it
    could stop."""
    cases = {("unwarned", 0): 0, ("unwarned", 2): 2, ("warned", 0): 0, ("warned", 1): 138}
    for case, expected in cases.items():
        assert on_node(tmp_path, LAUNCHER, *case).returncode == expected, case


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_NNODES": "2"}, "to-10.0.0.2"),
        ({"SLURM_NNODES": "2", "SLURM_NODEID": "1"}, "to-10.0.0.1"),
        ({"SLURM_NNODES": "2", "GLOO_SOCKET_IFNAME": "chosen"}, "chosen"),
        ({"SLURM_NNODES": "2", "last_node": "nowhere.invalid"}, "none"),
        ({}, "none"),
    ],
)
def test_a_node_tells_gloo_the_interface_to_the_others(tmp_path, environment, expected):
    """By the route to the first node, or from there to the last: that to itself is the loopback
    interface."""
    (tmp_path / "ip").write_text('#!/bin/sh\n[ "$3" ] && echo "$3 via 10.0.0.9 dev to-$3 src x"\n')
    (tmp_path / "ip").chmod(0o755)
    nodes = {"first_node": "10.0.0.1", "last_node": "10.0.0.2"}
    tell = '#!/bin/sh\necho "interface: ${GLOO_SOCKET_IFNAME:-none}" | tee said\n'
    process = on_node(tmp_path, tell, **{**nodes, **environment})
    assert process.returncode == 0
    assert (tmp_path / "said").read_text() == f"interface: {expected}\n"
