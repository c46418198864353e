"""Streams: the order by lane, row groups, and trainings on files behind a server with delays and
faults. That copies with them resume exactly: test_adapting.py."""

import http.server
import json
import re
import socket
import struct
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
import torch
import toy
from composed import assert_one_line, make
from conftest import assert_same_training
from lazy import lib
from processes import train_forked

from lib.order import ByLane

pytestmark = pytest.mark.slow

SETTINGS = [
    (processes, workers, batch, lanes, block)
    for processes in (1, 2, 4)
    for workers in (1, 2)
    for batch, lanes, block in ((8, 8, 8), (8, 16, 4), (4, 16, 4), (6, 5, 3))
]


def taken(samples, processes, workers, batch):
    """{(rank, worker): the positions that it reads}, as Accelerate and a DataLoader divide them."""
    found = {}
    for number in range(len(samples) // (batch * processes) * processes):
        key = number % processes, number // processes % workers
        begin = number * batch
        found.setdefault(key, []).extend(range(begin, begin + batch))
    return found


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


def write_rows(folder, files=4, rows=128, size=16):
    for part in range(files):
        table = pyarrow.table({"number": range(part * rows, (part + 1) * rows)})
        table = table.append_column("other", pyarrow.array([f"{part}" * 99] * rows))
        pyarrow.parquet.write_table(table, folder / f"{part}.parquet", row_group_size=size)
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
    groups = module.row_groups(write_rows(tmp_path), args)
    order = ByLane(range(512), 0, torch.full((32,), 16), lanes, block)
    reads, rows, most = Counter(), {}, 0
    for positions in taken(order, processes, workers, batch).values():
        dataset = module.RowGroups(groups, {"number": "number"}, lambda row: row["number"])
        stream = module.Stream(dataset, args)
        read = dataset.read
        dataset.read = lambda group, read=read: reads.update([group]) or read(group)
        for position in positions:
            rows[position] = stream[position]
            most = max(most, len(dataset.tables))
        for table in dataset.tables.values():
            table.result()
    assert rows == {position: order[position] for position in rows}
    own = stream.lanes_of_a_worker()
    assert most <= 2 * own
    stride = processes * workers * batch
    if lanes * block % stride == 0 and batch % block == 0:
        assert own == lanes // (processes * workers)
        assert reads.total() <= 32 + lanes, "a group that ends in another lane is read there, too"


class Server(http.server.ThreadingHTTPServer):
    """Serves the files of a folder, also as the Hub does, and parts of them 20 ms after each
    request. `faults` are in turn what happens to the first two requests of each seventh part."""

    daemon_threads = True
    faults = ()
    missing = b""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.parts = []
        self.places = {}  # of parts, in the order of their first requests
        self.failed = Counter()
        self.lock = threading.Lock()
        self.waiting = self.together = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, address):
        pass  # a client that has gone away


class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, request, address, server):
        super().__init__(request, address, server, directory=server.folder)

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.path = self.path.removeprefix("/datasets/me/mine/resolve/main")
        if self.path.startswith("/api/datasets/me/mine/"):
            return self.answer(self.of_the_hub())
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not wanted:
            return super().do_GET()
        begin, end = int(wanted[1]), int(wanted[2]) + 1
        server = self.server
        with open(self.translate_path(self.path), "rb") as file:
            content = file.read()
        is_footer = end == len(content)
        if self.path == server.missing and not is_footer:
            return self.send_error(404)
        server.parts.append((self.path, begin, is_footer))
        part, fault = (self.path, begin), None
        with server.lock:
            server.waiting += 1
            server.together = max(server.together, server.waiting)
            place = server.places.setdefault(part, len(server.places))
            if server.faults and place % 7 == 0 and server.failed[part] < 2:
                fault = server.faults[server.failed.total() % len(server.faults)]
                server.failed[part] += 1
        time.sleep(0.02)
        with server.lock:
            server.waiting -= 1
        self.answer(content[begin:end], fault)

    def of_the_hub(self):
        """What the Hub says of a dataset, and of its files."""
        files = [x for x in self.server.folder.iterdir() if x.is_file()]
        files = [{"path": x.name, "size": x.stat().st_size, "oid": "0" * 40} for x in files]
        tree = [{"type": "file", **file} for file in files]
        return json.dumps(tree if "/tree/main" in self.path else {"id": "me/mine"}).encode()

    def answer(self, part, fault=None):
        if fault == "busy":
            return self.send_error(503)
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", len(part))
        self.end_headers()
        if fault == "reset":
            self.wfile.write(part[: len(part) // 2])
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif fault == "slow":
            self.wfile.write(part[:1])
            time.sleep(8)
        else:
            self.wfile.write(part)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with a model, and with texts in 33 row groups."""
    folder = tmp_path_factory.mktemp("texts")
    toy.llama(folder)
    lines = iter(toy.LINES)
    for part in range(3):
        table = pyarrow.table({"number": range(176), "text": [next(lines) for _ in range(176)]})
        pyarrow.parquet.write_table(table, folder / f"{part}.parquet", row_group_size=16)
    return folder


IMPATIENT = [
    ("REQUEST_SECONDS = 60", "REQUEST_SECONDS = 4"),
    ("WAITS = 1, 4, 16", "WAITS = 0.01, 0.01, 0.01"),
]
# HF_ENDPOINT would come too late: the processes are forks.
HUB = """AHEAD = 128
from huggingface_hub import constants
constants.ENDPOINT = "SERVER"
constants.HUGGINGFACE_CO_URL_TEMPLATE = "SERVER/{repo_id}/resolve/{revision}/{filename}"
"""


def flags_of(folder, source, batch=16):
    flags = ["--cpu", "--base", folder / "llama", "--text", source, "--length", 12, "--lanes", 4]
    flags += ["--block", 4, "--epochs", 1, "--batch-size", batch, "--workers", 0, "--lr", 1e-3]
    return [*flags, "--evaluate-every", 99]


def test_on_any_number_of_processes_and_with_faults_of_the_server_a_stream_trains_the_same(
    texts, tmp_path
):
    """The first one, by huggingface_hub."""
    servers = [Server(texts) for _ in range(4)]
    servers[3].faults = "busy", "reset", "slow", "busy"
    replaced = [*IMPATIENT, ("AHEAD = 128", HUB.replace("SERVER", servers[0].url))]
    script = make(tmp_path / "mine.py", "ddp", "fine_tune", "streaming", replaced=replaced)
    sources = ["hf://datasets/me/mine@main", *(server.url for server in servers[1:])]
    runs = [
        (processes, script, flags_of(texts, f"{source}/*.parquet", 16 // processes))
        for processes, source in zip((1, 2, 4, 1), sources, strict=True)
    ]
    one, *others, faulty = train_forked(tmp_path, *runs)
    assert len(one.train) == 32 and one.train[-1]["loss"] < one.train[0]["loss"]
    for run in others:
        assert_same_training(run, one, atol=1e-4, ignored=["learning_rate"])
    assert_same_training(faulty, one, atol=0)
    for server in servers:
        footers = sum(is_footer for *_, is_footer in server.parts)
        read = Counter((path, begin) for path, begin, is_footer in server.parts if not is_footer)
        assert len(read) == 33, "each row group is one request"
        assert server.failed or (footers == 3 and read.total() <= 33 + 4)
    assert [*servers[3].failed.values()] == [2] * 6, "of 3 footers and 33 row groups"
    assert len(servers[3].parts) >= len(servers[0].parts) + 12
    assert servers[0].together > 2, "in threads"


def test_files_that_are_missing_changed_or_wrong_are_one_line_with_their_name(texts, tmp_path):
    server = Server(texts)
    server.missing = "/1.parquet"
    rows = {"text": ["a", None], "number": [1, 2]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "null.parquet", row_group_size=1)
    script = make(tmp_path / "mine.py", "ddp", "fine_tune", "streaming", replaced=IMPATIENT)
    cases = {
        f"{server.url}/1.parquet: FileNotFoundError": f"{server.url}/*.parquet",
        f"cannot read {server.url}/no.parquet: ": f"{server.url}/no.parquet",
        "cannot read http://127.0.0.1:9/0.parquet: ": "http://127.0.0.1:9/0.parquet",
        "config.json is no Parquet file": texts / "llama/config.json",
        "cannot read nosuch://a.parquet: ": "nosuch://a.parquet",
        "null.parquet, row group 1, row 0: ": tmp_path / "null.parquet",
    }
    cases = {text: [script, *flags_of(texts, source, 1)] for text, source in cases.items()}
    for flags in cases.values():
        flags += ["--lanes", 1, "--block", 1]
    named = flags_of(texts, texts / "0.parquet")
    lacking = "0.parquet has the columns number, text, not body: name others by --columns"
    cases[lacking] = [script, *named, "--columns", "body"]
    small = [("available_memory() / 2**30", "0")]
    full = make(tmp_path / "full.py", "ddp", "fine_tune", "streaming", replaced=small)
    cases["0.0 GB of memory, 0.0 GB are free: set fewer --lanes"] = [full, *named]
    assert_one_line(cases, tmp_path, statuses=(1, 2), imports=["transformers.models.llama"])

    files = [texts / f"{part}.parquet" for part in range(3)]
    flags = [*flags_of(texts, tmp_path / "?.parquet"), "--max-steps", 1]
    for file in files:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "first").mkdir()
    (run,) = train_forked(tmp_path / "first", (1, script, flags))
    (tmp_path / "1.parquet").write_bytes(files[2].read_bytes())
    (tmp_path / "again").mkdir()
    (tmp_path / "again/run0").symlink_to(run.directory)
    changed = "1.parquet is new, missing or changed since this run began"
    assert_one_line({changed: [script, *flags]}, tmp_path / "again")
