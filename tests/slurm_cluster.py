"""A Slurm cluster of nodes on this machine, from Debian's packages: for test_slurm.py."""

import contextlib
import os
import random
import shutil
import socket
import stat
import subprocess
from pathlib import Path

import psutil
from processes import free_port, wait_until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "mungekey")
MISSING = [program for program in PROGRAMS if not shutil.which(program)]
# s1 and s2 are in two partitions, one of which goes first. g1 has two GPUs, as far as Slurm looks:
# files of that name.
NODES = ("n1", "s1", "s2", "g1")

CONFIGURATION = """
ClusterName=recipes
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=100
# More cores and memory than the machine has: nothing is bound to them.
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# A node is down when a test says so, not when this machine is busy.
SlurmdTimeout=600
KillWait=60
ReturnToService=2
# Not those of another cluster's jobs: submit_job.sh makes a port of it.
FirstJobId={first_job}
GresTypes=gpu
NodeName=DEFAULT CPUs=4 RealMemory=1000
{nodes}
PartitionName=low Nodes=n1 Default=YES
PartitionName=spare Nodes=s1,s2 PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=s1,s2 PriorityTier=2 PreemptMode=OFF
PartitionName=gpu Nodes=g1
"""


class Cluster:
    """Its files are in the directory, its ports are free ones, and no other Slurm on this machine
    matters to it."""

    def __init__(self, directory):
        self.directory, self.daemons = Path(directory), {}
        (self.directory / "state").mkdir(parents=True)
        controller_port, *ports = (free_port() for _ in range(1 + len(NODES)))
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
            + " Gres=gpu:2" * (node == "g1")
            for node, port in zip(NODES, ports, strict=True)
        ]
        values = {"directory": self.directory, "host": host, "controller_port": controller_port}
        values |= {"nodes": "\n".join(nodes), "first_job": random.randrange(1, 19_000)}
        (self.directory / "slurm.conf").write_text(CONFIGURATION.format(**values))
        for gpu in (0, 1):
            os.mknod(self.directory / f"gpu{gpu}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        gpus = f"NodeName=g1 Name=gpu AutoDetect=off File={self.directory}/gpu[0-1]\n"
        (self.directory / "gres.conf").write_text(gpus)
        # Without what a Slurm around this process has set.
        outer = ("SLURM", "SBATCH", "SCANCEL", "SINFO", "SQUEUE", "SRUN", "MUNGE")
        kept = {name: x for name, x in os.environ.items() if not name.startswith(outer)}
        self.environment = {**kept, "SLURM_CONF": str(self.directory / "slurm.conf")}

    def start(self):
        directory = self.directory
        subprocess.run(["mungekey", "--create", f"--keyfile={directory}/munge.key"], check=True)
        flags = [f"--{x}-file={directory}/munge.{x}" for x in ("pid", "log", "seed", "key")]
        flags.append(f"--socket={directory}/munge.socket")
        self.spawn("munged", "munged", "--foreground", "--force", *flags)
        wait_until((directory / "munge.socket").exists)
        self.spawn("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self.spawn(node, "slurmd", "-D", "-N", node)
        idle = {f"{node} idle" for node in NODES}
        states = ("sinfo", "-h", "-N", "-o", "%N %T")
        wait_until(lambda: {*self.run(*states).splitlines()} == idle)

    def spawn(self, name, *command):
        log = open(self.directory / f"{name}.out", "a")
        self.daemons[name] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def kill_node(self, node):
        """As a power failure does: the daemon, the step managers that it has started, and all that
        runs in them. The managers first: one that outlives its tasks reports how they ended. The
        controller would know after SlurmdTimeout; here `miss_node` tells it."""
        self.daemons.pop(node).kill()
        log = str(self.directory / f"{node}.log")
        for step in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if step.name() == "slurmstepd" and log in [file.path for file in step.open_files()]:
                    processes = step, *step.children(recursive=True)
                    subprocess.run(["kill", "-KILL", *(str(each.pid) for each in processes)])

    def miss_node(self, node):
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=dead")

    def stop(self):
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def run(self, *command, **options):
        options = {"env": self.environment, "capture_output": True, "text": True, **options}
        process = subprocess.run(list(map(str, command)), **options)
        return process.stdout if process.returncode == 0 else process.stdout + process.stderr
