# SPDX-License-Identifier: Apache-2.0
"""Run public training scripts, and a copy of ours, through the same failures: docs/compared.md.

    make new COPY=../ours.py WITH=text_classification
    python benchmarks/others.py ../ours.py ../transformers/examples/pytorch/*/run_glue.py

Needs `pip install datasets evaluate`, and no network. The ranks, two of them, are forked with the
environment that torchrun sets, and watched by watched.py. Verdicts are added to others.json in
--output-dir, and the table to others.md; other processes may add the verdicts of other scripts.
"""

import argparse
import fcntl
import gc
import json
import os
import shutil
import signal
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

from bench import commit, hardware
from others_inputs import FIXED_BATCH, ONE_PROCESS, SCRIPTS, correct, prepare
from watched import Ranks, compared, files, has_nan, seen_as

TESTS = {
    "killed_and_resumed": "killed in mid-epoch (SIGKILL), resumed as documented",
    "killed_in_a_save": "killed in a save, resumed as documented",
    "terminated": "SIGTERM, then the same command",
    "nan_on_one_rank": "the loss of one rank is NaN in step 7",
    "two_starts": "a second start in the same directory",
    "one_process_and_two": "one process and two, at one global batch",
    "uneven_test_set": "a test set that two processes cannot halve",
    "stopped_rank": "a rank stops (SIGSTOP)",
}


class Trials:
    """The tests of one script: each returns what was seen, in a few words."""

    def __init__(self, path, directory, inputs, limit):
        self.path, self.name = path, path.name
        self.directory, self.inputs, self.limit = directory, inputs, limit
        self.command, self.resume, self.epoch, self.total, self.saved = SCRIPTS[path.name]
        self.processes = 1 if self.name in ONE_PROCESS else 2
        self.stopped = self.start("stopped", stop_at=7)  # it waits while the others run
        self.whole = self.start("whole")
        self.whole.wait_for(lambda: len(self.whole.steps()) == self.total)
        self.whole.wait()

    def start(self, tag, out=None, resume=False, processes=None, model="bert", **plan):
        """Start the script. `out` is another run's directory."""
        processes = processes or self.processes
        out = out or self.directory / tag / "out"
        values = {"out": out, "model": model, "batch": 8 // processes, "step": self.saved}
        words = f"{self.command} {self.resume if resume else ''}".format(**values).split()
        return Ranks(self.path, words, processes, self.directory / tag, self.inputs, out, **plan)

    def resumed(self, tag, out):
        run = self.start(tag, out, resume=True)
        run.wait()
        return run, f"ends with {run.error()}" if not run.steps() else ""

    def killed_and_resumed(self):
        killed = self.start("killed", pause_at=self.saved + 2)
        killed.wait_for(lambda: all(map(killed.waits, range(self.processes))))
        killed.send(signal.SIGKILL)
        resumed, error = self.resumed("resumed", killed.out)
        if error:
            return error
        first = self.saved // self.epoch * self.epoch  # of the epoch that was interrupted
        last = first + self.epoch
        whole = self.whole.samples()[first:last]
        seen = killed.samples()[first : self.saved] + resumed.samples()[: last - self.saved]
        data = seen_as(whole, seen)
        weights = compared(self.whole.weights(), resumed.weights())
        return f"{weights}; {data}"

    def killed_in_a_save(self):
        killed = self.start("cut", half_save_at=self.saved)
        killed.wait_for(lambda: killed.waits(0))
        killed.send(signal.SIGKILL)
        resumed, error = self.resumed("after-cut", killed.out)
        return error or f"resumes; {compared(self.whole.weights(), resumed.weights())}"

    def terminated(self):
        first = self.start("terminated", pause=0.3)
        first.wait_for(lambda: len(first.steps()) >= self.saved + 2)
        began = time.time()
        first.send(signal.SIGTERM)
        first.wait(limit=30)
        steps, before = len(first.steps()), files(first.out)
        saves = "saves" if max(before.values()) > began else "does not save"
        again = self.start("again", first.out)
        again.wait()
        after = files(first.out)
        changed = [path for path in before.keys() & after.keys() if after[path] > before[path]]
        if not again.steps():
            return f"{saves}; then ends with {again.error()}"
        if len(again.steps()) == self.total - steps:
            return f"{saves}; then goes on after the last step"
        begin = self.total - len(again.steps()) + 1
        return f"{saves}; then begins at step {begin}, overwrites {len(changed)} files"

    def nan_on_one_rank(self):
        run = self.start("nan", nan_at=7)
        run.wait()
        bad = sum(map(has_nan, files(run.out)))
        codes = ", ".join(sorted({str(code) for code in run.codes}))
        return f"exit code {codes} after {len(run.steps())} steps; {bad or 'no'} files with NaN"

    def stopped_rank(self):
        if self.processes == 1:
            self.stopped.send(signal.SIGKILL)
            return "not possible: one process"
        seconds, words = self.stopped.seconds_after_stop(self.limit)
        if not seconds:
            return f"no word in {self.limit / 60:.0f} minutes"
        names = "names" if "rank 1" in words else "does not name"
        return f"ends after {seconds / 60:.0f} minutes, {names} the rank"

    def two_starts(self):
        first = self.start("first", pause=0.3)
        first.wait_for(lambda: len(first.steps()) >= 3)
        second = self.start("second", first.out)
        second.wait()
        first.wait()
        steps = [len(run.steps()) for run in (first, second)]
        if steps == [self.total, self.total]:
            return "both train to the end, and write"
        return f"second: {second.error()}" if not steps[1] else f"steps: {steps}"

    def one_process_and_two(self):
        if self.name in FIXED_BATCH:
            reason = "one process" if self.processes == 1 else "its batch size is a constant"
            return f"not possible: {reason}"
        runs = [self.start(f"on-{n}", None, False, n, "bert-without-dropout") for n in (1, 2)]
        [run.wait() for run in runs]
        losses = [f"{run.first_loss():.4f}" for run in runs]
        first, last = (compared(*(run.weights(x) for run in runs)) for x in ("first", "last"))
        return f"loss of step 1: {' and '.join(losses)}; after it {first}, at the end {last}"

    def uneven_test_set(self):
        if self.processes == 1:
            return "not possible: one process"
        hits, samples = correct(self.name, self.whole)
        is_whole = abs(hits - round(hits)) < 0.01 and 0 < hits < samples
        return "each sample counts once" if is_whole else f"{hits:.2f} of {samples} are right"


def table(content):
    """Return the table (Markdown): of each test a row per verdict, with the scripts that had it. Two
    verdicts of a script that differ stand side by side."""
    results = {name: content["results"][name] for name in SCRIPTS if name in content["results"]}
    lines = [["test", "script", "result"], ["---"] * 3]
    for name, title in TESTS.items():
        scripts = {}
        for script, tests in results.items():
            once = " (seen once)" * (len(tests.get(name, [])) == 1)
            verdict = " / ".join(dict.fromkeys(tests.get(name, []))) or "-"
            scripts.setdefault(verdict + once, []).append(script)
        lines += [["", ", ".join(names), verdict] for verdict, names in scripts.items()]
        lines[-len(scripts)][0] = title
    counts = ", ".join(f"{name} {content['lines'][name]}" for name in results)
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    text += f"\n- Lines of code: {counts}.\n- {content['hardware']}; {versions}.\n"
    return text + f"- {content['date']}; commit {content['commit']}.\n"


def note(directory, trials, test):
    """Add a verdict to the results: the last two stay."""
    verdict = getattr(trials, test)()
    print(f"{trials.name}: {TESTS[test]}: {verdict}", flush=True)
    path = directory / "others.json"
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = json.loads(path.read_text()) if path.exists() else {"results": {}, "lines": {}}
        content |= {"date": str(date.today()), "commit": commit(), "hardware": hardware(0)}
        names = ("torch", "accelerate", "transformers", "datasets", "evaluate")
        content["versions"] = {name: version(name) for name in names}
        content["lines"][trials.name] = trials.path.read_text().count("\n")
        verdicts = content["results"].setdefault(trials.name, {}).setdefault(test, [])
        verdicts[:] = [*verdicts, verdict][-2:]
        path.write_text(json.dumps(content, indent=2) + "\n")
        path.with_suffix(".md").write_text(table(content))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("scripts", nargs="+", type=Path, help=f"paths of {', '.join(SCRIPTS)}")
    add("--tests", nargs="+", choices=TESTS, default=list(TESTS), metavar="TEST", help="some")
    add("--rounds", type=int, default=2, help="how often: 2, of which both verdicts are kept")
    add("--limit", type=float, default=2000, help="seconds to wait for a stopped rank (2000)")
    add("--output-dir", type=Path, default="runs/others", help="folder (runs/others)")
    args = parser.parse_args()
    directory = args.output_dir.resolve()
    inputs = directory / f"inputs-{os.getpid()}"
    prepare(inputs, directory / "cache")
    gc.freeze()  # no garbage for the ranks
    started = []
    for number in range(args.rounds):
        for path in map(Path.resolve, args.scripts):
            if path.name == "train.py":  # it reads this from the current directory
                shutil.copy(path.with_name("configurator.py"), inputs)
            own = directory / f"{path.stem}-{os.getpid()}-{number}"
            started.append(Trials(path, own, inputs, args.limit))
            for test in args.tests:
                if test != "stopped_rank":
                    note(directory, started[-1], test)
    for trials in started:
        if "stopped_rank" in args.tests:
            note(directory, trials, "stopped_rank")
        trials.stopped.send(signal.SIGKILL)


if __name__ == "__main__":
    main()
