"""Several runs of watched.py, or of any script, one after the other, each as its number of processes, no launcher.

    forked.py RUNS.json ANSWER.json

The processes are forked from this one, in the environment that a launcher would give them: with torch imported already,
fifty trainings take a minute. Answers [exit codes by rank, output] for each run; when a process fails the others have
five seconds.
"""

import json
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import accelerate  # noqa: F401
import torchvision  # noqa: F401
from conftest import free_port
from watched import train


def fork(run, rank, port, output):
    if pid := os.fork():
        return pid
    processes = run["processes"]
    if processes > 1:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        os.environ.update(zip(names, map(str, (rank, rank, processes, processes, port)), strict=True))
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    code = 1
    try:
        if "script" in run:
            os.chdir(run["directory"])
            sys.argv = [run["script"], *run["flags"]]
            runpy.run_path(run["script"], run_name="__main__")
        else:
            train(run)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def execute(run):
    port = free_port()
    with tempfile.TemporaryFile() as output:
        pids = {fork(run, rank, port, output): rank for rank in range(run["processes"])}
        codes, patience = {}, 120.0
        while len(codes) < len(pids):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                codes[pids[pid]] = os.waitstatus_to_exitcode(status)
                if codes[pids[pid]]:
                    patience = min(patience, 5.0)
                continue
            time.sleep(0.02)
            patience -= 0.02
            if patience < 0:
                for pid, rank in pids.items():
                    if rank not in codes:
                        os.kill(pid, signal.SIGKILL)
                patience = 120.0
        output.seek(0)
        return [codes[rank] for rank in sorted(codes)], output.read().decode()


Path(sys.argv[2]).write_text(json.dumps([execute(run) for run in json.loads(Path(sys.argv[1]).read_text())]))
