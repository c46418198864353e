"""A launch is checked before anything starts: with fakes of GPUs that this machine does not have,
and with stand-ins for the commands of Slurm. kubernetes.yaml is valid by Kubernetes' schemas; its
command passes on statuses and signals."""

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import kubernetes_validate
import pytest
import torch
import yaml
from conftest import Exit, described_copy, load
from processes import ROOT, forked, free_port, run, wait_until, write_programs
from torch import distributed

NCCL = {"TORCH_DIST_USE_NCCL2": "0", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "21600"}
SECOND_RANK = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
TWO_GPUS = {"device_count": 2, "is_available": True, "init": None}


@pytest.fixture
def start(monkeypatch):
    """Make a recipe's `Run` with fakes of torch's GPUs and of the Accelerator."""

    def call(*flags, environment=(), sees=1, **fakes):
        os.environ.update(environment)
        module = load("recipes/ddp_cifar.py", exits=True)
        for name, value in fakes.items():
            fake = value if callable(value) else lambda value=value: value
            monkeypatch.setattr(torch.cuda, name, fake)

        def accelerator(**options):
            torch.set_num_threads(5)  # as Accelerate does for one process under torchrun
            return SimpleNamespace(**options, num_processes=sees, use_distributed=False)

        module.Accelerator = accelerator
        module.lock_output_directory = module.join_process_group = lambda *_: None
        monkeypatch.setattr(sys, "argv", ["mine.py", *flags])
        return module.Run(module.parse_args(""), "fp32")

    call.devices, call.threads, call.precisions = [], [], []
    monkeypatch.setattr(torch.cuda, "set_device", call.devices.append)
    monkeypatch.setattr(torch, "set_num_threads", call.threads.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", call.precisions.append)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(distributed, "new_group", lambda *_: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6), raising=False)
    environment = {"PATH": os.environ["PATH"], "TORCHINDUCTOR_CACHE_DIR": "/not/there/yet"}
    monkeypatch.setattr(os, "environ", environment)
    yield call
    faulthandler.cancel_dump_traceback_later()


def test_a_process_takes_its_own_gpu_and_its_share_of_the_cores(start):
    counted = []  # before CUDA is initialised, torch counts a GPU of which one part is used as one
    fakes = {"init": lambda: counted.append("init"), "device_count": lambda: len(counted) and 2}
    run = start(environment=SECOND_RANK, sees=2, **{**TWO_GPUS, **fakes})
    assert start.devices == [1] and not run.accelerator.cpu
    assert start.precisions == ["high"] and torch.backends.cudnn.benchmark
    assert start.threads[-1] == 3
    assert run.args.log_every == 50
    loading = run.accelerator.dataloader_config
    assert loading.non_blocking, "the host would wait at each batch for the step before it"
    assert {name: os.environ[name] for name in NCCL} == NCCL
    if hasattr(distributed, "ProcessGroupNCCL2"):  # from torch 2.15 on
        distributed.Backend._ensure_backend_registered("nccl")
        made_by = distributed.Backend._plugins["NCCL"].creator_fn.__name__
        assert made_by == "_create_nccl_process_group", "torch reads the variable at its import"


@pytest.mark.parametrize(
    ("environment", "flags", "threads"),
    [
        ({"OMP_NUM_THREADS": "1"}, [], 1),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "a launcher's default"}, [], 3),
        ({"OMP_NUM_THREADS": "4", "TORCHELASTIC_RUN_ID": "the user's own"}, [], 4),
        ({"OMP_NUM_THREADS": "4", "TORCHELASTIC_RUN_ID": "and a flag"}, ["--threads", "1"], 1),
        ({"LOCAL_WORLD_SIZE": "8"}, [], 1),
    ],
)
def test_the_users_number_of_threads_is_taken(start, environment, flags, threads):
    start(*flags, environment={"LOCAL_WORLD_SIZE": "2", **environment}, **TWO_GPUS)
    assert start.threads[-1] == threads


def test_a_rank_that_sees_its_own_gpu_alone_takes_it(start):
    """torchrun --virtual-local-rank and Slurm's --gpus-per-task show each rank one GPU. Accelerate
    would take the one with the number of the rank."""
    environment = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    start(environment=environment, sees=4, **{**TWO_GPUS, "device_count": 1})
    assert start.devices == [0] and os.environ["LOCAL_RANK"] == "0"


@pytest.mark.parametrize(
    ("gpu", "said"),
    [("RANK", "they join"), ("0", "2 processes, 1 GPU(s): start one per GPU, or add --cpu")],
)
def test_ranks_that_see_one_gpu_each_join_unless_it_is_the_same(gpu, said, tmp_path):
    text = "\n\nchoose_device = lambda args: (1, 1)"
    text += f"\ntorch.cuda.get_device_properties = lambda: argparse.Namespace(uuid={gpu})"
    text += "\ndistributed.init_process_group = lambda *_: exit_with_error('they join')"
    run = described_copy(tmp_path / "run", "ddp_cifar", project=text, processes=2, grace=30)
    [(_, output)] = forked([run], tmp_path)
    assert f"mine: error: {said}\n" in output


def test_gpus_that_are_not_used_are_told_once(start, capfd):
    """Without a launcher there is no LOCAL_RANK, by which Accelerate would make a process group."""
    four_gpus = {**TWO_GPUS, "device_count": 4}
    start(**four_gpus)
    assert start.devices == [0] and "LOCAL_RANK" not in os.environ
    start(environment=SECOND_RANK, sees=2, **four_gpus)
    assert capfd.readouterr().err.count("of 4 GPUs are unused: start one process per GPU") == 1


def test_gpus_that_torch_cannot_use_are_an_error(start, monkeypatch, tmp_path):
    """A driver that is too old, or an AMD GPU under a build for CUDA. Without GPUs, or if they are
    hidden, the Accelerator is told to use the CPU: or processes would not see each other."""
    assert start(device_count=0).accelerator.cpu
    old = {"device_count": 1, "is_available": False}
    exists, cannot = os.path.exists, r"torch cannot use the GPUs: update the driver.*ROCm; or add"
    with monkeypatch.context() as amd, pytest.raises(Exit, match=cannot):
        amd.setattr(os.path, "exists", lambda path: path == "/dev/kfd" or exists(path))
        start(**old)
    monkeypatch.setenv("PATH", write_programs(tmp_path, **{"nvidia-smi": ""}))
    with pytest.raises(Exit, match=cannot):
        start(**old)
    assert not start(**TWO_GPUS).accelerator.cpu
    run = start(environment={"CUDA_VISIBLE_DEVICES": ""}, **old)
    assert run.accelerator.cpu and run.args.log_every == 10 and start.devices == [0]


def test_processes_that_do_not_see_each_other_are_an_error(start):
    """Each would train alone, as the main process."""
    with pytest.raises(Exit, match=r"do not see each other.*accelerate launch"):
        start(environment={"WORLD_SIZE": "4"}, sees=1, device_count=0)


PLUGINS = "USE_FSDP USE_DEEPSPEED USE_MEGATRON_LM USE_PARALLELISM_CONFIG"
TOLD = {**dict.fromkeys(PLUGINS.split(), "true"), "MIXED_PRECISION": "bf16"}
TOLD |= {"GRADIENT_ACCUMULATION_STEPS": "4", "DYNAMO_BACKEND": "INDUCTOR"}


@pytest.mark.parametrize(("name", "value"), TOLD.items())
def test_a_launchers_setting_that_the_recipe_would_ignore_is_an_error(name, value, start):
    with pytest.raises(Exit, match=f"the launcher's {name.lower()} is {value.lower()}"):
        start(environment={f"ACCELERATE_{name}": value}, device_count=0)


def test_cpu_means_no_gpu_however_many_torch_counts(start):
    """They are hidden before torch looks for them: Accelerate's barriers would go to a GPU."""
    rocm = {"HIP_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "0,1"}
    visible = []

    def is_available():
        visible.append([os.environ.get(f"{name}_VISIBLE_DEVICES") for name in ("CUDA", "HIP")])
        return True

    run = start("--cpu", environment=rocm, **{**TWO_GPUS, "is_available": is_available})
    assert run.accelerator.cpu and start.devices == []
    assert all(x == ["-1", "-1"] for x in visible)


# On each node of three, "1" to "3", at the address 10.0.0.NODE.
SLURM = {
    "scontrol": '[ "$2" = node ] && echo "NodeAddr=${ADDRESS:-10.0.0.$3}" || seq 3',
    "srun": 'echo "srun $@"; while [ "$1" != bash ]; do shift; done; "$@"',
    "ip": '[ "$3" ] && echo "$3 via 10.0.0.9 dev to-$3 src x"',
    "accelerate": "echo ${GLOO_SOCKET_IFNAME:-none} ${NCCL_SOCKET_IFNAME:-none} $@ > said; exit 7",
}


@pytest.mark.parametrize(
    ("environment", "interfaces"),
    [
        ({}, "to-10.0.0.3 =to-10.0.0.3"),
        ({"SLURM_NODEID": "1"}, "to-10.0.0.1 =to-10.0.0.1"),
        ({"GLOO_SOCKET_IFNAME": "chosen"}, "chosen =chosen"),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, "to-10.0.0.3 ib0"),
        ({"ADDRESS": "nowhere.invalid"}, "none none"),
    ],
)
def test_a_slurm_job_tells_each_node_its_part_and_the_interface_to_the_others(
    tmp_path, environment, interfaces
):
    """By the route to the first node, or from there to the last: not the loopback interface. A
    process per GPU, and of each node as many cores as the node has that has the fewest. The job
    ends with the status of the training."""
    job = {"SLURM_JOB_ID": "20007", "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "n[1-3]"}
    job |= {"SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_CPUS_PER_NODE": "32(x2),8", "SLURM_NODEID": "0"}
    job |= {"PATH": write_programs(tmp_path, **SLURM), **environment}
    process = run(["bash", ROOT / "clusters/submit_job.sh"], tmp_path, check=False, **job)
    assert "srun --ntasks=3 --ntasks-per-node=1 --cpus-per-task=8 " in process.stdout
    assert " --gpus-per-node=4 bash " in process.stdout and process.returncode == 7
    expected = f"{interfaces} launch --machine_rank {job['SLURM_NODEID']} --config_file "
    expected += "accelerate_configs/nodes.yaml --num_machines 3 --num_processes 12 "
    expected += f"--main_process_ip {environment.get('ADDRESS', '10.0.0.1')} "
    assert (tmp_path / "said").read_text().startswith(expected)


MANIFEST = (ROOT / "clusters/kubernetes.yaml").read_text()


@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_the_manifest_is_valid(version):
    for document in yaml.safe_load_all(MANIFEST):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_numbers_of_pods_the_names_and_the_times_to_save_fit_together():
    service, job, policy = yaml.safe_load_all(MANIFEST)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["completions"] == spec["parallelism"]
    assert f"--nnodes={spec['completions']}" in container["args"]
    selected = {"job-name": job["metadata"]["name"]}
    assert service["spec"]["selector"] == selected
    (rule,) = policy["spec"]["ingress"]
    allowed = [policy["spec"]["podSelector"], *(x["podSelector"] for x in rule["from"])]
    assert allowed == [{"matchLabels": selected}] * 2
    assert service["metadata"]["name"] == pod["subdomain"]
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    assert int(env["PET_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    # Status 2 would come again; 143 is a stop; a pod may be evicted before it has saved.
    rules = spec["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJob", "Ignore", "Ignore"]
    assert [rule["onExitCodes"]["values"] for rule in rules[:2]] == [[2], [143]]
    assert rules[2]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


# What a rank does: a wrong flag, a stop because another pod is evicted, and because this one is.
STOPS = "import signal, time\nsignal.signal(15, lambda *_: exit(143))"
RANKS = {"wrong": ("exit(2)", 2), "saved": ("exit(143)", 143), "stopped": (STOPS, 143)}
RANKS["waits"] = "", 143  # nothing: torchrun waits for another pod


@pytest.mark.slow
@pytest.mark.parametrize("case", RANKS)
def test_the_command_ends_with_the_status_of_the_rank_and_passes_sigterm_on(case, tmp_path):
    """Also before torchrun has a handler for SIGTERM, which PID 1 would ignore."""
    text, status = RANKS[case]
    script, started = tmp_path / "rank.py", tmp_path / "started"
    waits = "time.sleep(99)" * (case == "stopped")
    script.write_text(f"{text}\nopen({str(started)!r}, 'w')\n{waits}")
    _, job, _ = yaml.safe_load_all(MANIFEST)
    _, *command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    port, pods = free_port(), 1 + (case == "waits")
    flags = [f"--nnodes={pods}", "--node_rank=0", "--master_addr=127.0.0.1"]
    pod = subprocess.Popen([sys.executable, *command, *flags, f"--master_port={port}", script])
    try:
        if case in ("waits", "stopped"):
            wait_until(lambda: listens(port) if case == "waits" else started.exists())
            pod.send_signal(signal.SIGTERM)
        wait_until(lambda: pod.poll() is not None)
        assert pod.returncode == status
    finally:
        pod.kill()


def listens(port):
    with contextlib.suppress(OSError):
        return not socket.create_connection(("127.0.0.1", port)).close()
