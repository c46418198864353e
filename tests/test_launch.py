"""A launch is checked before anything starts: with fakes of GPUs that this machine does not have,
and with the scripts that a Slurm job runs on its nodes."""

import faulthandler
import os
from types import SimpleNamespace

import pytest
import torch
from conftest import Exit, load
from processes import ROOT, run, write_programs
from torch import distributed

NCCL = {"TORCH_DIST_USE_NCCL2": "0", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "21600"}
TWO_GPUS = {"device_count": 2, "is_available": True, "init": None}
TWO_GPUS["get_device_properties"] = SimpleNamespace(uuid="GPU-0")


@pytest.fixture
def start(monkeypatch):
    """Make a recipe's `Run` with fakes of torch's GPUs and of the Accelerator."""

    def call(environment=(), sees=1, cpu=False, threads=None, **fakes):
        for name, value in dict(environment).items():
            monkeypatch.setenv(name, value)
        module = load("recipes/ddp_cifar.py", exits=True)
        monkeypatch.setattr(torch.cuda, "set_device", call.devices.append)
        flags = {"cpu": cpu, "threads": threads, "log_every": None, "tracker": None, "seed": 0}
        flags |= {"batch_size": 8, "global_batch_size": None, "hang_timeout": 600}
        for name, value in fakes.items():
            fake = value if callable(value) else lambda value=value: value
            monkeypatch.setattr(torch.cuda, name, fake)
        told = {}  # all ranks tell what the first one does
        store = SimpleNamespace(set=told.__setitem__, set_timeout=lambda _: None)
        store.add = lambda key, _: call.ranks_by_gpu.get(key, 1)
        store.get = lambda key: told.get(key, told["flags 0"]).encode()
        store.multi_get = lambda keys: [store.get(key) for key in keys]
        module.distributed = SimpleNamespace(
            rendezvous=lambda *_, **__: iter([(store, None, None)]),
            PrefixStore=lambda _, store: store,
            HashStore=lambda: None,
            init_process_group=lambda *_: None,
            new_group=lambda *_: None,
            set_debug_level_from_env=lambda: None,
        )

        def accelerator(**options):
            torch.set_num_threads(5)  # as Accelerate does for one process under torchrun
            return SimpleNamespace(**options, num_processes=sees, use_distributed=False)

        module.Accelerator = accelerator
        module.lock_output_directory = lambda directory: None
        return module.Run(SimpleNamespace(**flags, output_dir="x"), "fp32")

    call.devices, call.ranks_by_gpu = [], {}
    # Set by `choose_device`: monkeypatch undoes it only if it knows of it.
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "LOCAL_RANK", *NCCL):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6), raising=False)
    for name in ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    precision = torch.get_float32_matmul_precision()
    yield call
    faulthandler.cancel_dump_traceback_later()
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark
    torch.set_float32_matmul_precision(precision)


def test_a_process_takes_its_own_gpu_and_its_share_of_the_cores(start):
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    counted = []  # before CUDA is initialised, torch counts a GPU of which one part is used as one
    fakes = {"init": lambda: counted.append("init"), "device_count": lambda: len(counted) and 2}
    run = start(environment=ranks, sees=2, **{**TWO_GPUS, **fakes})
    assert start.devices == [1] and not run.accelerator.cpu
    assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.benchmark
    assert torch.get_num_threads() == 3
    assert run.args.log_every == 50
    loading = run.accelerator.dataloader_config
    assert loading.non_blocking, "the host would wait at each batch for the step before it"
    assert {name: os.environ[name] for name in NCCL} == NCCL
    if hasattr(distributed, "ProcessGroupNCCL2"):  # from torch 2.15 on
        distributed.Backend._ensure_backend_registered("nccl")
        made_by = distributed.Backend._plugins["NCCL"].creator_fn.__name__
        assert made_by == "_create_nccl_process_group", "torch reads the variable at its import"


@pytest.mark.parametrize(
    ("environment", "flag", "threads"),
    [
        ({"OMP_NUM_THREADS": "1"}, None, 1),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "a launcher's default"}, None, 3),
        ({"OMP_NUM_THREADS": "4"}, 2, 2),
        ({"LOCAL_WORLD_SIZE": "8"}, None, 1),
    ],
)
def test_the_users_number_of_threads_is_taken(start, environment, flag, threads):
    start(environment={"LOCAL_WORLD_SIZE": "2", **environment}, threads=flag, **TWO_GPUS)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("rank", ["0", "3"])
def test_a_rank_may_see_its_own_gpu_alone_and_not_that_of_another(start, rank):
    """torchrun --virtual-local-rank and Slurm's --gpus-per-task show each rank one GPU. Accelerate
    would take the one with the number of the rank."""
    environment = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": rank}
    alone = {**TWO_GPUS, "device_count": 1, "environment": environment, "sees": 4}
    start(**alone)
    assert start.devices == [0] and os.environ["LOCAL_RANK"] == "0"
    start.ranks_by_gpu["GPU-0"] = 2
    with pytest.raises(Exit, match=r"4 processes, 1 GPU\(s\): start one per GPU, or add --cpu"):
        start(**alone)


def test_gpus_that_are_not_used_are_told_once(start, capfd):
    """Without a launcher there is no LOCAL_RANK, with which Accelerate would make a process group,
    for which it has no address."""
    processes = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    start(**{**TWO_GPUS, "device_count": 4})
    assert start.devices == [0] and "LOCAL_RANK" not in os.environ
    start(environment=processes, sees=2, **{**TWO_GPUS, "device_count": 4})
    assert capfd.readouterr().err.count("of 4 GPUs are unused: start one process per GPU") == 1


def test_gpus_that_torch_cannot_use_are_an_error(start, monkeypatch, tmp_path):
    """A driver that is too old: NVML counts the GPUs, and CUDA does not start. Without GPUs, or if
    they are hidden, the Accelerator is told to use the CPU: else processes would not see each
    other."""
    assert start(device_count=0).accelerator.cpu
    monkeypatch.setenv("PATH", write_programs(tmp_path, **{"nvidia-smi": ""}))
    old = {"device_count": 1, "is_available": False}
    with pytest.raises(Exit, match=r"torch cannot use the GPUs: update the driver.*; or add --cpu"):
        start(**old)
    run = start(environment={"CUDA_VISIBLE_DEVICES": ""}, **old)
    assert run.accelerator.cpu and run.args.log_every == 10 and start.devices == []


def test_processes_that_do_not_see_each_other_are_an_error(start):
    """Each would train alone, as the main process."""
    with pytest.raises(Exit, match=r"do not see each other.*accelerate launch"):
        start(environment={"WORLD_SIZE": "4"}, sees=1, device_count=0)


PLUGINS = "USE_FSDP USE_DEEPSPEED USE_MEGATRON_LM USE_PARALLELISM_CONFIG"
TOLD = {**dict.fromkeys(PLUGINS.split(), "true"), "MIXED_PRECISION": "bf16"}
TOLD |= {"GRADIENT_ACCUMULATION_STEPS": "4", "DYNAMO_BACKEND": "INDUCTOR"}


def test_a_launchers_setting_that_the_recipe_would_ignore_is_an_error(start, monkeypatch):
    for name, value in TOLD.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
        with pytest.raises(Exit, match=f"the launcher's {name.lower()} is {value.lower()}"):
            start(device_count=0)
        monkeypatch.delenv(f"ACCELERATE_{name}")


def test_cpu_means_no_gpu_however_many_torch_counts(start):
    """They are hidden before torch looks for them: Accelerate's barriers would go to a GPU."""
    rocm = {"HIP_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "0,1"}
    visible = []

    def is_available():
        visible.append([os.environ.get(f"{name}_VISIBLE_DEVICES") for name in ("CUDA", "HIP")])
        return True

    run = start(cpu=True, environment=rocm, **{**TWO_GPUS, "is_available": is_available})
    assert run.accelerator.cpu and start.devices == []
    assert all(x == ["-1", "-1"] for x in visible)


def test_an_amd_gpu_under_a_build_for_cuda_is_an_error(start, monkeypatch):
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/kfd" or exists(path))
    with pytest.raises(Exit, match=r"torch cannot use the GPUs: .*ROCm.*; or add --cpu"):
        start(device_count=0, is_available=False)


def test_a_slurm_job_has_a_process_per_gpu_and_of_each_node_as_many_cores(tmp_path):
    """Those of the node that has the fewest."""
    job = {"SLURM_JOB_ID": "20007", "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "n[1-3]"}
    job |= {"SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_CPUS_PER_NODE": "32(x2),8"}
    job["PATH"] = write_programs(tmp_path, scontrol="echo NodeAddr=10.0.0.1", srun='echo "$@"')
    said = run(["bash", ROOT / "clusters/submit_job.sh"], **job).stdout
    assert "--num_machines 3 --num_processes 12 --main_process_ip 10.0.0.1" in said
    assert "--ntasks=3 --ntasks-per-node=1 --cpus-per-task=8 " in said


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "to-10.0.0.2 =to-10.0.0.2"),
        ({"SLURM_NODEID": "1"}, "to-10.0.0.1 =to-10.0.0.1"),
        ({"GLOO_SOCKET_IFNAME": "chosen"}, "chosen =chosen"),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, "to-10.0.0.2 ib0"),
        ({"last_node": "nowhere.invalid"}, "none none"),
    ],
)
def test_a_node_tells_gloo_and_nccl_the_interface_to_the_others(tmp_path, environment, expected):
    """By the route to the first node, or from there to the last: not the loopback interface. This
    runs what submit_job.sh runs on each node, with another program in the place of accelerate."""
    script = (ROOT / "clusters/submit_job.sh").read_text()
    script = script.partition("on_node='")[2].partition("\n'\n")[0]
    called = 'accelerate launch --machine_rank "$SLURM_NODEID"'
    assert called in script
    route = '[ "$3" ] && echo "$3 via 10.0.0.9 dev to-$3 src x"'
    tell = 'echo "${GLOO_SOCKET_IFNAME:-none} ${NCCL_SOCKET_IFNAME:-none}"'
    job = {"SLURM_NODEID": "0", "SLURM_JOB_ID": "1", "SLURM_NNODES": "2"}
    job |= {"first_node": "10.0.0.1", "last_node": "10.0.0.2", **environment}
    job["PATH"] = write_programs(tmp_path, ip=route, told=tell)
    command = ["bash", "-c", script.replace(called, "told > said"), "on_node"]
    run(command, cwd=tmp_path, **job)
    assert (tmp_path / "said").read_text() == f"{expected}\n"
