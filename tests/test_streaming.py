"""Streams: the order by lane, row groups, and files behind a server with delays and faults. That
copies with them train the same on any number of processes: test_adapting.py."""

import asyncio
import re
import threading
from collections import Counter
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import torch
import toy
from aiohttp import web
from conftest import Exit
from lazy import lib

from lib.order import ByLane

pytestmark = pytest.mark.slow

SETTINGS = [
    (processes, workers, batch, lanes, block)
    for processes in (1, 2, 4)
    for workers in (1, 2)
    for batch, lanes, block in ((8, 8, 8), (8, 16, 4), (4, 16, 4), (6, 5, 3))
]


def test_an_epoch_by_lane_has_each_sample_once_and_each_group_in_few_lanes():
    sizes = torch.randint(1, 60, (40,), generator=torch.Generator().manual_seed(0))
    group = torch.arange(40).repeat_interleave(sizes)
    for lanes, block in ((8, 8), (16, 4), (1, 1), (5, 3)):
        samples = ByLane(range(len(group)), 0, sizes, lanes, block)
        epochs = []
        for epoch in (0, 1, 0):
            samples.set_epoch(epoch)
            epochs.append(torch.tensor([samples[x] for x in range(len(samples))]))
            left_out = len(group) - len(epochs[-1].unique())
            assert left_out == len(group) - len(samples) < lanes * block
            in_lanes = group[epochs[-1]].view(-1, lanes, block).transpose(0, 1).flatten(1)
            changes = sum(len(x.unique_consecutive()) for x in in_lanes)
            assert changes <= 40 + lanes, "one group after the other"
            assert all(len(x.unique_consecutive()) == len(x.unique()) for x in in_lanes)
        assert epochs[0].equal(epochs[2]) and not epochs[0].equal(epochs[1])
        assert not {*epochs[0].diff().tolist()} <= {1}, "shuffled"


def write_rows(folder, files, rows):
    """Write numbers and texts, in row groups of 16. Return the pattern of the files."""
    for part in range(files):
        numbers = range(part * rows, (part + 1) * rows)
        table = pyarrow.table({"number": numbers, "text": [toy.LINES[x] for x in numbers]})
        pyarrow.parquet.write_table(table, folder / f"{part}.parquet", row_group_size=16)
    return str(folder / "*.parquet")


@pytest.mark.parametrize(("processes", "workers", "batch", "lanes", "block"), SETTINGS)
def test_each_row_group_is_read_once_where_lanes_divide_among_workers(
    processes, workers, batch, lanes, block, tmp_path, monkeypatch
):
    """And on any number of them all have the same batches, in as much memory as is said."""
    module = lib.row_groups
    monkeypatch.setattr(module, "WORLD_SIZE", processes)
    monkeypatch.setattr(module, "AHEAD", batch)  # fewer rows of a lane than a group has
    options = {"batch_size": batch, "lanes": lanes, "block": block, "workers": workers, "seed": 0}
    options |= {"global_batch_size": batch * processes, "output_dir": tmp_path}
    args = SimpleNamespace(**options)
    monkeypatch.setattr(module, "broadcast_object_list", lambda found: found)
    groups = module.row_groups(write_rows(tmp_path, 4, 128), args)
    order = ByLane(range(512), 0, torch.full((32,), 16), lanes, block)
    reads, rows, most = Counter(), {}, 0
    # Microbatches go to processes in turn, by Accelerate, and there to workers, by a DataLoader.
    stride = processes * workers * batch
    whole = len(order) // (processes * batch) * processes * batch
    for first in range(0, stride, batch):
        dataset = module.RowGroups(groups, {"number": "number"}, lambda row: row["number"])
        stream = module.Stream(dataset, args)
        read = dataset.read
        dataset.read = lambda group, read=read: reads.update([group]) or read(group)
        for position in [x + i for x in range(first, whole, stride) for i in range(batch)]:
            rows[position] = stream[position]
            most = max(most, len(dataset.tables))
        for table in dataset.tables.values():
            table.result()
    assert rows == {position: order[position] for position in rows}
    own = stream.lanes_of_a_worker()
    assert most <= 2 * own
    if lanes * block % stride == 0 and batch % block == 0:
        assert own == lanes // (processes * workers)
        assert reads.total() <= 32 + lanes, "a group that ends in another lane is read there, too"


STATUS = {"busy": 503, "missing": 404}


class Server:
    """Serves the files of a folder, also as the Hub does, and parts of them 20 ms after each
    request. `faults` are in turn what happens to the first two requests of each seventh part."""

    def __init__(self, folder, faults=()):
        self.folder = folder
        self.faults = faults
        self.requests = Counter()  # of each part: (path, begin, whether it is a footer)
        self.failed = self.waiting = self.together = 0
        app = web.Application(middlewares=[self.disturb])
        app.router.add_get("/api/datasets/me/mine{rest:.*}", self.describe)
        app.router.add_static("/datasets/me/mine/resolve/main", folder)
        app.router.add_static("/", folder, show_index=True)
        loop, runner = asyncio.new_event_loop(), web.AppRunner(app)
        loop.run_until_complete(runner.setup())
        loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        threading.Thread(target=loop.run_forever, daemon=True).start()

    def fault_of(self, part):
        """Return what happens to this request of a part, or None."""
        self.requests[part] += 1
        place = [*self.requests].index(part)
        if not self.faults or place % 7 or self.requests[part] > 2:
            return None
        self.failed += 1
        return self.faults[self.failed % len(self.faults)]

    @web.middleware
    async def disturb(self, request, handler):
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        if not wanted:
            return await handler(request)
        content = (self.folder / request.path.rpartition("/")[2]).read_bytes()
        begin, end = int(wanted[1]), int(wanted[2]) + 1
        is_footer = end == len(content)
        self.waiting += not is_footer
        self.together = max(self.together, self.waiting)
        fault = self.fault_of((request.path, begin, is_footer))
        await asyncio.sleep(8 if fault == "slow" else 0.02)
        self.waiting -= not is_footer
        if fault in STATUS:
            return web.Response(status=STATUS[fault])
        part = content[begin : (begin + end) // 2 if fault == "short" else end]
        return web.Response(body=part, status=206)

    async def describe(self, request):
        """Return what the Hub says of a dataset, and of its files."""
        files = [x for x in self.folder.iterdir() if x.is_file()]
        files = [{"path": x.name, "size": x.stat().st_size, "oid": "0" * 40} for x in files]
        tree = [{"type": "file", **file} for file in files]
        return web.json_response(tree if "/tree/main" in request.path else {"id": "me/mine"})


@pytest.fixture
def read(tmp_path, monkeypatch):
    """A function that returns the samples of a stream: texts in small letters."""
    monkeypatch.setattr(lib.row_groups, "WAITS", (0.01, 0.01, 0.01))
    monkeypatch.setattr(lib.row_groups, "REQUEST_SECONDS", 2)
    options = {"batch_size": 16, "global_batch_size": 16, "lanes": 4, "block": 4, "workers": 0}
    options |= {"seed": 0, "test": None, "output_dir": tmp_path}

    def read(source, columns=None):
        args = SimpleNamespace(columns=columns, **options)
        makes = 2 * [lambda row: row["text"].lower()]
        train, test = lib.row_groups.stream(args, str(source), ["text"], *makes, list)
        return [[loader.dataset[i] for i in range(len(loader.dataset))] for loader in (train, test)]

    return read


def test_a_stream_has_the_same_samples_by_each_network_also_with_faults(
    read, tmp_path, monkeypatch
):
    """By huggingface_hub, and by aiohttp from a server with faults."""
    pattern = write_rows(tmp_path, 3, 176)
    hub, faulty = Server(tmp_path), Server(tmp_path, ["busy", "slow", "short"])
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    train, test = read(pattern)
    expected = {text.lower() for text in toy.LINES[: 3 * 176]}
    assert (len(train), len(test)) == (32 * 16, 16) and {*train, *test} == expected
    for source in ("hf://datasets/me/mine@main", faulty.url):
        assert read(f"{source}/*.parquet") == [train, test]
    for server in (hub, faulty):
        groups = [count for part, count in server.requests.items() if not part[2]]
        assert len(groups) == 33, "each row group is one request"
        assert server.requests.total() - server.failed <= 3 + 33 + 4, "and each footer"
        assert server.together > 2, "in threads"
    assert faulty.failed == 2 * 6, "of 3 footers and 33 row groups"


def test_files_that_are_missing_changed_or_wrong_are_one_line_with_their_name(
    read, tmp_path, monkeypatch
):
    pattern = write_rows(tmp_path, 3, 32)
    text, null = tmp_path / "text.json", tmp_path / "null.pq"
    text.write_text("{}" * 99)
    rows = pyarrow.table({"text": ["a"] * 32 + [None] + ["b"] * 32})
    pyarrow.parquet.write_table(rows, null, row_group_size=32)
    server = Server(tmp_path, ["missing"])
    read(pattern)
    (tmp_path / "1.parquet").write_bytes((tmp_path / "2.parquet").read_bytes())
    cases = {
        "1.parquet is new, missing or changed since this run began": [pattern],
        ".parquet: FileNotFoundError": [f"{server.url}/*.parquet"],
        f"cannot read {text}: OSError('file://{text} is no Parquet file')": [text],
        "cannot read nosuch://a.parquet: ": ["nosuch://a.parquet"],
        "null.pq, row group 1, row 0: ": [null],
        "null.pq has the columns text, not body: name others by --columns": [null, ["body"]],
        "0.0 GB of memory, 0.0 GB are free: set fewer --lanes": [null],
    }
    for said, arguments in cases.items():
        if "memory" in said:
            monkeypatch.setattr(lib.row_groups, "available_memory", lambda: 1)
        with pytest.raises((Exit, OSError)) as error:
            read(*arguments)
        assert said in str(error.value) and "\n" not in str(error.value)
