"""Whatever happens while a checkpoint is written, the last good one stays and the run goes on from it."""

import pytest
from test_resume import STEPS, assert_identical, content, forked

# Even numbers are before an operation, odd ones after it. A save has hundreds of writes; the first open is the
# file's, the second the directory's, and so with fsync; old checkpoints are deleted from the third save on.
KILLS = [
    *[("open", moment) for moment in range(4)],
    *[("write", moment) for moment in (0, 1, 2, 51, 250, 601)],
    *[("fsync", moment) for moment in range(6)],
    *[("replace", moment) for moment in range(4)],
    *[("unlink", moment) for moment in range(3)],
]


@pytest.mark.parametrize(
    ("recipe", "processes", "kills"),
    [
        ("ddp_cifar", 2, KILLS),
        ("amp_cifar", 1, KILLS[::2]),
        ("data_parallel_cifar", 1, KILLS[1::2]),
        ("pipeline_cifar", 2, KILLS[::2]),
    ],
)
def test_killed_at_any_moment_of_a_save_the_run_goes_on_to_the_same_end(recipe, processes, kills, tmp_path):
    """One run, killed over and over while it saves and resumed each time; and an undisturbed one."""
    share = 64 * (2 if recipe == "pipeline_cifar" else 1) // processes
    common = {"recipe": recipe, "processes": processes}
    flags = ["--batch-size", share, "--checkpoint-every", 1, "--keep", 2]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    resumed = {**common, "directory": killed, "flags": [*flags, "--resume", "auto"]}
    runs = [{**resumed, "save": kill} for kill in kills]
    outcomes = forked([{**common, "directory": whole, "flags": flags}, *runs, resumed], tmp_path)
    begins = []
    for (codes, output), expected in zip(outcomes, (0, *[-9] * len(kills), 0), strict=True):
        assert codes[0] == expected, output
        assert "passed over" not in output, "a checkpoint under its final name was not complete"
        begins.append(int(output.partition("resumed_from: ")[2].split()[0]))
    assert begins == sorted(begins), "a checkpoint was lost"
    assert 3 < begins[-1] < STEPS, "the kills came too early or too late to prove anything"
    for step in (STEPS - 1, STEPS):
        assert_identical(*(content(directory / f"step-{step:08}.pt") for directory in (whole, killed)))
    assert sorted(path.name for path in killed.glob("*")) == sorted(path.name for path in whole.glob("*"))
