"""A Slurm cluster of two nodes on this machine, from Debian's packages: for test_slurm.py, or to try things by hand.

python tests/slurm_cluster.py DIRECTORY      # starts it, prints the variable that sbatch needs, waits for Ctrl-C
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "mungekey")
MISSING = [program for program in PROGRAMS if not shutil.which(program)]
NODES = ("n1", "n2")

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
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# More cores than the machine has: nothing is bound to them.
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=defer_batch,batch_sched_delay=0,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=5
SlurmctldTimeout=10
KillWait=30
ReturnToService=2
NodeName=n[1-2] NodeAddr=127.0.0.1 NodeHostname={host} Port=[{node_ports}] CPUs=4 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    def __init__(self, directory, first_port=17000):
        self.directory, self.daemons = Path(directory), {}
        (self.directory / "state").mkdir(parents=True)
        configuration = CONFIGURATION.format(
            directory=self.directory,
            host=socket.gethostname().partition(".")[0],
            controller_port=first_port,
            node_ports=f"{first_port + 1}-{first_port + 2}",
        )
        (self.directory / "slurm.conf").write_text(configuration)
        self.environment = {**os.environ, "SLURM_CONF": str(self.directory / "slurm.conf")}

    def start(self):
        directory = self.directory
        subprocess.run(["mungekey", "--create", f"--keyfile={directory}/munge.key"], check=True)
        files = ("socket", "key-file=munge.key", "pid-file=munge.pid", "log-file=munge.log", "seed-file=munge.seed")
        flags = [f"--{name.partition('=')[0]}={directory}/{name.partition('=')[2] or 'munge.socket'}" for name in files]
        self.spawn("munged", "munged", "--foreground", "--force", *flags)
        self.wait(lambda: (directory / "munge.socket").exists(), "munged's socket")
        self.spawn("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        self.wait_for_idle_nodes()

    def wait_for_idle_nodes(self):
        idle = f"{len(NODES)} idle\n"
        self.wait(lambda: self.run("sinfo", "-h", "-p", "low", "-o", "%D %T") == idle, "idle nodes")

    def start_node(self, node):
        self.spawn(node, "slurmd", "-D", "-N", node)

    def spawn(self, name, *command):
        log = open(self.directory / f"{name}.out", "a")
        self.daemons[name] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def kill_node(self, node):
        """As a power failure does: the daemon, the step managers that it has started, and all that runs in them."""
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        steps = [pid for pid in pids if self.step_of(pid) == node]
        self.daemons.pop(node).kill()
        for pid in {pid for step in steps for pid in [step, *descendants(step)]}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def step_of(self, pid):
        """Return the node whose step this slurmstepd manages, or None: it was forked by that node's daemon."""
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == "slurmstepd\n":
                links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
                return next(
                    (node for node in NODES if any(f"{self.directory}/{node}.log" in link for link in links)), None
                )
        return None

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

    def wait(self, condition, what, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = "".join(path.read_text()[-2000:] for path in self.directory.glob("*.log"))
                raise TimeoutError(f"no {what} after {seconds} s\n{logs}")
            time.sleep(0.2)


def descendants(pid):
    children = subprocess.run(["pgrep", "--parent", str(pid)], capture_output=True, text=True).stdout.split()
    return [found for child in map(int, children) for found in [child, *descendants(child)]]


if __name__ == "__main__":
    cluster = Cluster(sys.argv[1])
    try:
        cluster.start()
        print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        cluster.stop()
