"""plot.py: a panel for each metric of any run, from complete lines."""

import math

import plot
import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[results]'")


def test_runs_of_two_tasks_one_unfinished(tmp_path, monkeypatch):
    line = '{{"event": "{}", "epoch": 1, "step": {}, "time": 1, "{}": {}}}\n'.format
    lines = [line("train", 1, "loss", 2.5), line("train", 2, "loss", "null")]
    runs = {"a": [*lines, line("evaluation", 2, "test_accuracy", 0.5)]}
    runs["b"] = [line("train", 7, "loss", 1), line("evaluation", 9, "test_perplexity", 3), '{"ev']
    for name, texts in runs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(texts))
    monkeypatch.chdir(tmp_path)
    figure = plot.draw({name: plot.read(name) for name in runs})
    drawn = {x.get_ylabel(): [list(map(list, y.get_data())) for y in x.lines] for x in figure.axes}
    assert drawn.keys() == {"loss", "test accuracy", "test perplexity"}
    assert drawn["test perplexity"] == [[[], []], [[1], [3]]]
    assert drawn["loss"][0][0] == [0.5, 1] and math.isnan(drawn["loss"][0][1][1])
    assert drawn["loss"][1] == [[7 / 9], [1]]
    assert {axes.get_xlabel() for axes in figure.axes} == {"epoch"}, "they have 2 and 9 steps"
    (tmp_path / "b/metrics.jsonl").write_text(runs["b"][0])  # not yet evaluated
    figure = plot.draw({name: plot.read(name) for name in runs})
    assert {axes.get_xlabel() for axes in figure.axes} == {"step"}
    assert figure.axes[0].lines[1].get_xdata().tolist() == [7]
    seconds = '{{"event": "{}", "time": {}, "{}": {}}}\n'.format
    lines = [seconds("train", 12, "seconds", 9), seconds("train", 15, "seconds", 3)]
    lines += [seconds("checkpoint", 16, "save_seconds", 0.9), seconds("evaluation", 20, "x", 1)]
    lines += [seconds("train", 99, "seconds", 2), seconds("train", 100, "x", 1)]  # the baseline's
    (tmp_path / "b/metrics.jsonl").write_text("".join(lines) + '{"ev')
    assert list(plot.seconds_of("b").values()) == [9, 3 + 2 + 1, 20 - 16, 0.9]
    with pytest.raises(SystemExit, match=r"no metrics\.jsonl in c: name the --output-dir"):
        plot.read("c")


def test_the_picture_of_a_check_shows_the_loss_its_differences_and_the_kill():
    found = [(1, 3.0, 0.0), (2, 2.0, 0.0), (3, 1.0, 1e-6)]
    loss = {"event": "train", "metric": "loss"}
    lines = [{**loss, "step": x, "values": [y, 9], "difference": z} for x, y, z in found]
    tasks = ["step-00000001", "train"]
    runs = [{"name": "1 process", "differences": []}]
    runs += [{"name": "1 process, killed", "differences": lines, "tasks": tasks}]
    where = dict.fromkeys(("hardware", "date", "commit"), "")
    content = {"runs": runs, "command": ["a/mine.py"], "versions": {"torch": "2"}, **where}
    above, below = plot.draw_check(content).axes
    drawn = [[list(x) for x in line.get_data()] for line in (*above.lines, *below.lines)]
    assert drawn == [[[2], [2.0]], [[1, 2, 3], [3.0, 2.0, 1.0]], [[1, 2, 3], [0.0, 0.0, 1e-6]]]
