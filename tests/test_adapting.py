"""What docs/adapting.md, data.md and training.md say to write in a copy, taken from these pages: on
two processes, stopped in mid-training and rerun, it is the uninterrupted run."""

import functools
import io
import random
import re
import shutil
import tarfile
import textwrap
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, copy, forked, load, outputs, train_forked
from safetensors.torch import load_file
from test_resume import untimed
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.slow

PAGE = "".join((ROOT / f"docs/{x}.md").read_text() for x in ("adapting", "data", "training"))


def said(text):
    """A snippet that is on the pages."""
    assert text in PAGE, text
    return text


def block(title, language="python", number=0):
    """A block of code below a heading of the pages."""
    [section] = re.findall(rf"^##+ {title}\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[number]


def hunks(title, number=0):
    """The (old, new) lines of a diff of the pages."""
    pairs = []
    for hunk in filter(
        None, re.split(r"^@@.*\n", block(title, "diff", number), flags=re.MULTILINE)
    ):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(x[1:] for x in lines if x[0] in f" {sign}") for sign in "-+")
        pairs.append((old, new) if old else (END, f"\n\n{new}{END}"))
    return pairs


END = '\n\nif __name__ == "__main__":'
ORDER = block("Data in an order of its own")


NOISY_LINE = '''
class Noisy(torch.utils.data.TensorDataset):
    def set_epoch(self, epoch):
        generator = torch.Generator().manual_seed(epoch)
        self.noise = 0.1 * torch.randn(len(self), generator=generator)

    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs + self.noise[index], targets

def load_data(args, accelerator):
    """Few samples and much noise: soon the training learns only the noise."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(69, 12, generator=generator)
    targets = inputs[:, 0] + 0.5 * torch.randn(69, generator=generator)
    whole = Noisy(inputs, targets)
    train_set, test_set = (torch.utils.data.Subset(whole, x) for x in (range(24), range(24, 69)))
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    return train_loader, DataLoader(test_set, args.batch_size)

class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        # Training reads it, and each rank changes it in its own way.
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.3)
        return x - self.mean

def build_model(args):
    frozen = nn.Dropout(0.1).eval()  # not to be woken up by an evaluation
    fixed = nn.Linear(64, 64).requires_grad_(False)
    layers = nn.Linear(12, 64), fixed, nn.Dropout(0.1), nn.ReLU(), frozen
    return nn.Sequential(Centred(), *layers, nn.Linear(64, 1))

def compute_loss(model, batch):
    inputs, targets = batch
    error = (model(inputs).squeeze(1) - targets) ** 2
    return {"loss": error * (1 + 0.1 * torch.rand_like(error)), "mse": error}
'''
IMBALANCED = """
class Augmented(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return inputs + torch.rand(()) * numpy.random.rand(), label

def load_data(args, accelerator):
    labels = (torch.arange(96) % 8 == 0).long()
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(3)) + labels[:, None]
    test_set = torch.utils.data.TensorDataset(inputs, labels)
    train_set = Ordered(Augmented(inputs, labels), args.seed, balanced, labels)
    workers = {"num_workers": 2, "persistent_workers": True}
    train_loader = DataLoader(train_set, args.batch_size, drop_last=True, **workers)
    return train_loader, DataLoader(test_set, args.batch_size)

def build_model(args):
    return nn.Linear(6, 2)

def compute_loss(model, batch):
    inputs, labels = batch
    logits = model(inputs)
    class_weights = torch.tensor([1.0, 3.0])
    loss = LOSS
    return {"loss": loss, "label": labels == 1, "score": logits[:, 1]}

def roc_auc_score(labels, scores):
    return (scores[labels == 1, None] > scores[labels == 0]).double().mean().item()
"""
WEIGHTED = 'F.cross_entropy(logits, labels, class_weights.to(labels.device), reduction="none")'
IMBALANCED = ORDER + IMBALANCED.replace("LOSS", said(WEIGHTED))
SCHEDULE = "torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps + 1, **shape)"
LATE = said("torch.optim.lr_scheduler.LambdaLR(optimizer, [f, g])")
LATE = LATE.replace("f,", "lambda step: 1.0,").replace("g]", "lambda step: float(step >= 6)]")
GROUPS = '[{"params": model[1].parameters()}, {"params": model[6].parameters()}], lr=peak'
ROWS = [
    (
        "gradient_as_bucket_view=True",
        f"gradient_as_bucket_view=True, {said('find_unused_parameters=True')}",
    ),
    (", " + said('"fused": True') + "}", "}"),
    ("SGD(model.parameters(), lr=peak", f"SGD({GROUPS}"),
    (SCHEDULE, LATE),
]
IMPORTS = ["transformers.models.llama.modeling_llama", "peft", "datasets"]
ADDED = "metrics.add(step, values)"
STOP = """
def stop_at(step, stop):
    if str(step) == os.environ.get("STOP_AT"):
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.received:
            time.sleep(0.01)
"""
WRITE = '        metrics.write("evaluation", test)\n'
RMSE = said('test["test_rmse"] = test["test_mse"] ** 0.5')
BEST = hunks("Best weights, early stopping")
EARLY = [(WRITE, f"        {RMSE}\n{WRITE}"), *BEST]
MODEL = block("A language model")
TEXT = ["--text", "text.txt", "--length", 128, "--lr", 3e-3]
# Pairs of noisy views, of which each is to find its partner in the batch.
PAIRS = """
import datasets

def load_data(args, accelerator):
    rows = torch.randn(45, 6, generator=torch.Generator().manual_seed(3)).tolist()
    train_set, test_set = (
        datasets.Dataset.from_dict({"values": part})WITH_FORMAT for part in (rows[:24], rows[24:])
    )
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    return train_loader, DataLoader(test_set, args.batch_size)

def build_model(args):
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))

def compute_loss(model, batch):
    inputs = batch["values"]
    noisy = inputs + 0.1 * NOISE if model.training else inputs.flip(1)
    first, second = model(torch.cat((inputs, noisy))).chunk(2)
    partners = torch.arange(len(inputs))
    losses = F.cross_entropy(first @ second.T, partners, reduction="none")
    return {"loss": losses, "alone": F.mse_loss(first, second, reduction="none").sum(1)}
"""
PAIRS = PAIRS.replace("WITH_FORMAT", said('load_dataset(...).with_format("torch")')[17:])
PAIRS = PAIRS.replace("NOISE", said("torch.randn_like(inputs)"))
EMA, SHARDED_EMA = (
    [(old, new.replace("0.999", "0.9")) for old, new in hunks("An average of the weights", number)]
    for number in (0, 1)
)
SAVE = "save_weights(accelerator, plain.state_dict(), args.output_dir)"
WHOLE = "save_whole_model(accelerator, ema, args.output_dir)"
SHARDED_EMA += [(old, new.replace(SAVE, WHOLE)) for old, new in BEST]
GAN = """
def load_data(args, accelerator):
    whole = 3 + torch.randn(45, 2, generator=torch.Generator().manual_seed(3))
    train_loader = DataLoader(whole[:24], args.batch_size, shuffle=True, drop_last=True)
    return train_loader, DataLoader(whole[24:], args.batch_size)

class Game(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, inputs, part):
        made = self.generator(torch.randn(len(inputs), 4))
        if part == "generator":
            return F.softplus(-self.critic(made)).squeeze(1)
        judged = F.softplus(-self.critic(inputs)) + F.softplus(self.critic(made.detach()))
        return judged.squeeze(1)

def build_model(args):
    return Game()
"""
ORDERED = """
def load_data(args, accelerator):
    folder = Path(__file__).parent
    index = torch.load(folder / "index.pt", mmap=True)
    data = TarSamples(sorted(folder.glob("*.tar")), index)
    train = Ordered(data, args.seed, by_shard, data.index[:, 0], 10)
    options = {"batch_size": args.batch_size, "collate_fn": read}
    workers = {"num_workers": 1, "persistent_workers": True}
    return DataLoader(train, drop_last=True, **options, **workers), DataLoader(data, **options)

def read(samples):
    lines = [torch.tensor(list(sample["txt"])) for sample in samples]
    numbers = torch.tensor([int(sample["cls"]) for sample in samples])
    return nn.utils.rnn.pad_sequence(lines, batch_first=True), numbers, torch.rand(len(lines))

def build_model(args):
    return nn.Sequential(nn.Embedding(256, 8), nn.Dropout(0.1), nn.Linear(8, 1))

def compute_loss(model, batch):
    lines, numbers, noise = batch
    return {"loss": (model(lines).mean((1, 2)) - noise) ** 2, "number": numbers}
"""
SHARDS = ORDER + block("Tar shards") + ORDERED
LINES = ORDER + block("Data in an order of its own", number=1)
GAME = [(old, new.replace("head", "generator")) for old, new in hunks("A second optimizer")]
GAME += hunks("A GAN")
COSINE = (said('"anneal_strategy": "linear"'), said('"anneal_strategy": "cos"'))
BALANCED = [COSINE, *hunks("AUROC, F1")]
LORA = f"""{MODEL}
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig

def build_model(args):
    path = str(Path(__file__).parent / "base")
    config = AutoConfig.from_pretrained(path)
    {said("if torch.empty(0).is_meta")}:
        model = AutoModelForCausalLM.{said("from_config(config, dtype=torch.float32)")}
    else:
        model = AutoModelForCausalLM.{said("from_pretrained(path, dtype=torch.float32).train()")}
    {said("return get_peft_model(model, LoraConfig())")}
"""
LORA_DIFF = hunks("LoRA checkpoints")
EVERY_STEP = ["--epochs", 3, "--checkpoint-every", 1]
COPIES = {  # of which recipe, how it is changed, what is added, flags, in which step SIGTERM comes
    "early": ("ddp", EARLY, NOISY_LINE, ["--epochs", 20, "--lr", 0.5], 10),
    "balanced": ("ddp", BALANCED, IMBALANCED, [], 15),
    "rows": ("ddp", ROWS, NOISY_LINE, ["--epochs", 4], 4),
    "language model": ("ddp", [], MODEL, TEXT, 4),
    "language model, sharded": ("sharded", [], MODEL, TEXT, 4),
    "pairs": ("ddp", EMA, PAIRS, EVERY_STEP, 4),
    "EMA, sharded": ("sharded", SHARDED_EMA, PAIRS, EVERY_STEP, 4),
    "GAN": ("ddp", GAME, GAN, [], 4),
    "LoRA": ("ddp", LORA_DIFF, LORA, TEXT, 4),
    "LoRA, sharded": ("sharded", hunks("LoRA checkpoints", 1), LORA, TEXT, 4),
    "shards": ("ddp", [], SHARDS, ["--batch-size", 2], 8),
    "lengths": ("ddp", [], f"{MODEL}\n\n{LINES}", TEXT, 4),
}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A function that returns a copy's directory and the answers of its runs, made when first asked
    for: an uninterrupted run, one that is stopped and the same command again, and the same command
    on the first one."""
    return functools.cache(lambda what: run_copy(what, tmp_path_factory.mktemp("copy")))


def run_copy(what, directory):
    recipe, lines, project, flags, stop_at = COPIES[what]
    lines = [*lines, (ADDED, f"{ADDED}, stop_at(step, stop)")]
    project = f"\n\n{project}{STOP}"
    script = copy(f"{recipe}_cifar", directory / "mine.py", *lines, project=project)
    (directory / "text.txt").write_text(PAGE[:8000])
    if "LoRA" in what:
        torch.manual_seed(7)
        functions(MODEL)["build_model"](None).bfloat16().save_pretrained(directory / "base")
    write_shards(directory)
    common = ["--cpu", "--epochs", 2, "--keep", 9, "--log-every", 1, "--global-batch-size", 8]
    run = {"processes": 2, "script": script, "directory": directory, "grace": 30}
    whole, stopped = (
        {**run, "flags": [*common, *flags, "--output-dir", name]} for name in ("whole", "stopped")
    )
    runs = [whole, {**stopped, "env": {"STOP_AT": str(stop_at)}}, stopped, whole]
    answers = forked(runs[: 4 if what == "early" else 3], directory, imports=IMPORTS)
    codes = [codes for codes, _ in answers]
    assert codes[:3] == [[0, 0], [143, 143], [0, 0]], answers
    return directory, answers


@pytest.mark.parametrize("what", COPIES)
def test_stopped_in_mid_training_and_rerun_a_copy_is_the_uninterrupted_run(adapted, what):
    directory, _ = adapted(what)
    whole, stopped = (outputs(directory / name) for name in ("whole", "stopped"))
    begin = stopped["summary"]["resumed_from"]
    assert begin == COPIES[what][4] + 1 and begin % whole["summary"]["steps_per_epoch"]
    texts = [(directory / name / "metrics.jsonl").read_text() for name in ("whole", "stopped")]
    assert untimed(texts[0]) == untimed(texts[1])
    assert whole["weights"].read_bytes() == stopped["weights"].read_bytes()


@pytest.mark.parametrize(
    ("recipe", "lines"),
    [("amp", [*EMA, *BEST]), ("amp", LORA_DIFF), ("pipeline", BEST), ("sharded", BEST)],
)
def test_diffs_fit_the_other_recipes(recipe, lines, tmp_path):
    compile(copy(f"{recipe}_cifar", tmp_path / "mine.py", *lines).read_text(), "mine.py", "exec")


def test_early_stopping_keeps_the_best_weights_and_a_rerun_trains_no_more(adapted):
    directory, answers = adapted("early")
    run = outputs(directory / "whole")
    losses = [line["test_loss"] for line in run["evaluations"]]
    best = losses.index(min(losses))
    assert 1 < best and len(losses) == best + 1 + 5 < 20, "after five that were not better"
    codes, output = answers[3]
    assert codes == [0, 0] and f'"resumed_from": {3 * len(losses)}' in output, output
    assert not re.search(r"^step \d+/.* lr ", output, re.MULTILINE)
    assert run["summary"]["test_loss"] == losses[-1]
    assert run["summary"]["test_rmse"] ** 2 == pytest.approx(run["summary"]["test_mse"])
    checkpoint = directory / f"whole/step-{3 * (best + 1):08}.pt"
    states = torch.load(checkpoint, weights_only=True)["states"]
    for name in ("whole", "stopped"):
        saved = load_file(directory / name / "best.safetensors")
        assert saved.keys() == states["model"].keys() != load_file(run["weights"])
        assert all(torch.equal(saved[name], states["model"][name]) for name in saved)


def test_each_class_is_drawn_as_often_as_any_other_and_the_auroc_is_of_all_samples(adapted):
    run = outputs(adapted("balanced")[0] / "whole")
    rare = [line["label"] for line in run["train"]]
    assert len(rare) == 24 and sum(rare) / 24 == pytest.approx(0.5, abs=0.1)
    assert run["summary"]["test_label"] == 12 / 96, "the test set stays, class weights or not"
    space = functions(IMBALANCED)
    model = space["build_model"](None)
    model.load_state_dict(load_file(run["weights"]))
    inputs, labels = space["load_data"](SimpleNamespace(batch_size=96, seed=0), None)[1].dataset[:]
    exact = space["roc_auc_score"](labels, model(inputs)[:, 1])
    assert 0.6 < exact < 1 and run["summary"]["test_auroc"] == pytest.approx(exact, abs=1e-3)


def test_a_group_of_parameters_begins_late(adapted):
    directory, _ = adapted("rows")
    initial = first_weights(NOISY_LINE)
    early = torch.load(directory / "stopped/step-00000005.pt", weights_only=True)["states"]["model"]
    final = load_file(directory / "whole/model.safetensors")
    changed = {name for name, value in early.items() if not torch.equal(value, initial[name])}
    assert changed == {"0.mean", "1.weight", "1.bias"}
    same = {name for name, value in final.items() if torch.equal(value, initial[name])}
    assert same == {"2.weight", "2.bias"}, "those that are frozen"


BASE = ["--cpu", "--global-batch-size", 8, "--epochs", 1, "--log-every", 1]
FROM_TEXT = [*BASE, "--text", "../text.txt", "--length", 128, "--lr", 3e-3]
TWO = ["--epochs", 2]
OTHERS = {  # as above, but of how many processes, and all flags
    "model": (1, "ddp", [], MODEL, [*FROM_TEXT, *TWO, "--batch-size", 4]),
    "pairs": (1, "ddp", *COPIES["pairs"][1:3], [*BASE, *EVERY_STEP, "--batch-size", 4]),
    "shards": (1, *COPIES["shards"][:3], [*BASE, *TWO, "--batch-size", 2]),
}


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """{name: output, directory and files} of the runs of OTHERS."""
    directory = tmp_path_factory.mktemp("others")
    (directory / "text.txt").write_text(PAGE[:8000])
    write_shards(directory)
    runs = []
    for name, (processes, recipe, lines, project, flags) in OTHERS.items():
        path = directory / f"{name}.py"
        script = copy(f"{recipe}_cifar", path, *lines, project="\n\n" + project)
        runs.append((processes, script, flags))
    return dict(zip(OTHERS, train_forked(directory, *runs, imports=IMPORTS), strict=True))


def functions(project):
    """The functions of a project, and what a recipe has, as a namespace."""
    space = dict(vars(load("recipes/ddp_cifar.py")))
    exec(project, space)
    return space


def first_weights(project):
    space = functions(project)
    space["seed_rng"](0)
    return space["build_model"](None).state_dict()


def test_the_loss_of_the_language_model_is_the_mean_over_all_tokens(adapted, others):
    """However many processes there are, sharded or not: bounds for fourteen steps of AdamW."""
    directories = [adapted(name)[0] for name in ("language model", "language model, sharded")]
    whole, sharded = (outputs(directory / "whole") for directory in directories)
    space = functions(MODEL)
    args = SimpleNamespace(text=directories[0] / "text.txt", length=128, batch_size=1)
    model = space["build_model"](args)
    model.load_state_dict(load_file(whole["weights"]), strict=False)  # one of the tied names
    losses = []
    for tokens in space["load_data"](args, None)[1]:
        assert (tokens >= 0).all(), "a batch of one sequence is not padded"
        logits = model.double()(tokens[:, :-1]).logits[0]
        losses.append(F.cross_entropy(logits, tokens[0, 1:], reduction="none").detach())
    assert len({len(loss) for loss in losses}) == 2, "the last one is shorter"
    exact = torch.cat(losses).mean().item()
    for run in (whole, sharded, vars(others["model"])):
        assert run["summary"]["test_loss"] == pytest.approx(exact, rel=1e-4)
    assert whole["train"][-1]["loss"] < 0.8 * whole["train"][0]["loss"]
    assert whole["summary"]["peak_learning_rate"] == 3e-3, "whatever the global batch is"
    (_, printed), *_ = adapted("language model")[1]
    assert "Removed shared tensor" in printed and said("Removed shared tensor")


def test_pairs_and_noise_are_those_of_a_microbatch(adapted, others):
    """On one process and on two; but not the pairs of the test set, whose last batch is padded."""
    two, one = outputs(adapted("pairs")[0] / "whole"), vars(others["pairs"])
    for name in ("loss", "alone"):
        values = [[line[name] for line in run["train"]] for run in (one, two)]
        assert values[0] == pytest.approx(values[1], rel=1e-5)
    (first, second) = (run["summary"] for run in (one, two))
    assert first["test_alone"] == pytest.approx(second["test_alone"], rel=1e-5)
    assert first["test_loss"] != pytest.approx(second["test_loss"], rel=1e-3)


def test_the_average_of_the_weights_is_evaluated_and_saved(adapted):
    run = adapted("pairs")[0] / "whole"
    paths = sorted(run.glob("step-*.pt"))
    states = [torch.load(path, weights_only=True)["states"]["model"] for path in paths]
    average = states[0]
    for state in states[1:]:
        average = {name: 0.9 * average[name] + 0.1 * state[name] for name in state}
    saved = load_file(run / "model.safetensors")
    assert len(paths) == 9 and saved.keys() == average.keys()
    for name, weights in saved.items():
        torch.testing.assert_close(weights, average[name])
        assert not torch.allclose(weights, states[-1][name])


def test_both_players_of_the_gan_are_trained(adapted):
    initial = first_weights(GAN)
    final = load_file(adapted("GAN")[0] / "whole/model.safetensors")
    assert not any(torch.equal(value, initial[name]) for name, value in final.items())


def test_a_sharded_average_is_that_of_ddp_for_any_world_size(adapted):
    """Evaluated, saved, and resumed on one process from the fifth of nine steps on two."""
    directory, _ = adapted("EMA, sharded")
    names = ("whole/best", "stopped/best", "whole/model")
    best, again, last = ((directory / f"{name}.safetensors").read_bytes() for name in names)
    assert best == again != last
    ddp = outputs(adapted("pairs")[0] / "whole")
    for path in sorted((directory / "whole").glob("step-*"))[5:]:
        shutil.rmtree(path)
    flags = ["--cpu", *EVERY_STEP, "--log-every", 1, "--global-batch-size", 8, "--batch-size", 4]
    run = {"processes": 1, "script": directory / "mine.py", "directory": directory}
    [(codes, output)] = forked([{**run, "flags": [*flags, "--output-dir", "whole"]}], directory)
    assert codes == [0] and '"resumed_from": 5' in output, output
    for run in (outputs(directory / name) for name in ("stopped", "whole")):
        torch.testing.assert_close(load_file(run["weights"]), load_file(ddp["weights"]))
        assert run["summary"]["test_alone"] == pytest.approx(ddp["summary"]["test_alone"], rel=1e-5)


@pytest.mark.parametrize("what", ["LoRA", "LoRA, sharded"])
def test_lora_saves_what_it_trains_and_peft_loads_it(adapted, what):
    directory, _ = adapted(what)
    trained = load_file(directory / "whole/model.safetensors")
    assert len(trained) == 2 * 2 * 4 and all("lora_" in name for name in trained)
    [checkpoint] = (directory / "whole").glob("step-00000007*")
    size = sum(x.stat().st_size for x in (checkpoint, *checkpoint.glob("*")) if x.is_file())
    assert size < (directory / "base/model.safetensors").stat().st_size / 2
    space = functions(MODEL + "from peft import PeftModel")
    base = space["AutoModelForCausalLM"].from_pretrained(directory / "base", dtype=torch.float32)
    loaded = space["PeftModel"].from_pretrained(base, directory / "whole").state_dict()
    assert all(torch.equal(loaded[name], x) and x.any() for name, x in trained.items())
    if what == "LoRA, sharded":
        ddp = load_file(adapted("LoRA")[0] / "whole/model.safetensors")
        # After 14 steps of AdamW, which divides a gradient's rounding error by its size.
        torch.testing.assert_close(trained, ddp, rtol=0, atol=1e-3)


def test_ratios_of_sums_are_those_of_the_whole_test_set():
    """In batches. The last class is never found, and in no label."""
    space = functions(block("mIoU"))
    logits, labels = torch.randn(21, 4, 4, 4), torch.randint(3, (21, 4, 4))
    logits[:, 3] = -100.0
    labels[torch.rand(labels.shape) < torch.rand(21, 1, 1)] = 255
    labels[::9] = 255  # images without a valid pixel
    batches = zip(logits.split(8), labels.split(8), strict=True)
    metrics = [space["compute_loss"](nn.Identity(), batch) for batch in batches]
    sums = torch.cat([space["sample_rows"](values) for values in metrics]).sum(0)
    means = space["means"](metrics[0], sums, 21)
    test = {f"test_{name}": mean for name, mean in means.items()}
    [(old, new)] = hunks("mIoU")
    exec(textwrap.dedent(new.removesuffix(old)), {"test": test})
    found, valid = logits.argmax(1), labels != 255
    ratios = []
    for c in range(3):
        inter = (found == c) & (labels == c) & valid
        union = ((found == c) | (labels == c)) & valid
        ratios.append(inter.sum().item() / union.sum().item())
    assert test["test_miou"] == pytest.approx(sum(ratios) / 3)


def write_shards(directory):
    """Write 61 samples, each some bytes and its number, in five shards, and their index."""
    draw = random.Random(3)
    for number in range(61):
        files = {"txt": draw.randbytes(draw.randrange(1, 3000)), "cls": str(number).encode()}
        with tarfile.open(directory / f"{number // 13}.tar", "a") as tar:
            for ending, content in files.items():
                file = tarfile.TarInfo(f"./all/{number}.{ending}")
                file.size = len(content)
                tar.addfile(file, io.BytesIO(content))
    index = functions(SHARDS)["tar_index"](sorted(directory.glob("*.tar")))
    torch.save(index, directory / "index.pt")


def test_any_world_size_trains_on_the_global_batches_of_an_order(adapted, others):
    directory, _ = adapted("shards")
    one, two = vars(others["shards"]), outputs(directory / "whole")
    losses = [[line["loss"] for line in run["train"]] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    space = functions(SHARDS)
    space["__file__"] = directory / "mine.py"
    samples = space["load_data"](SimpleNamespace(batch_size=2, seed=0), None)[0].dataset
    batches = []
    for epoch in (0, 1):
        samples.set_epoch(epoch)
        numbers = torch.tensor([int(samples[i]["cls"]) for i in range(len(samples))])
        batches += numbers[: len(samples) // 8 * 8].view(-1, 8).double().mean(1).tolist()
    assert len(batches) == 14
    for run in (one, two):
        assert [line["number"] for line in run["train"]] == batches


def in_order(name, *arguments):
    """The indices of five epochs."""
    space = functions(ORDER)
    samples = space["Ordered"](range(9999), 0, space[name], *arguments)
    epochs = []
    for epoch in range(5):
        samples.set_epoch(epoch)
        epochs.append(torch.tensor(list(samples)))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 5
    return epochs


def test_shards_are_read_one_after_the_other_and_shuffled_within_a_buffer():
    shard = torch.arange(5).repeat_interleave(torch.tensor([7, 40, 1, 22, 30]))
    buffers = (in_order("by_shard", shard, size) for size in (16, 1))
    for shuffled, epoch in zip(*buffers, strict=True):
        assert epoch.sort().values.tolist() == list(range(100))
        assert len(shard[epoch].unique_consecutive()) == 5, "one after the other"
        assert (shard[epoch].diff().ne(0) | epoch.diff().eq(1)).all(), "each from its begin"
        for part, plain in zip(shuffled.split(16), epoch.split(16), strict=True):
            assert {*part.tolist()} == {*plain.tolist()} and not torch.equal(part, plain)


def test_a_global_batch_has_similar_lengths_and_each_sample_comes_once():
    lengths = 1 + torch.arange(2005) * 7 % 2005 // 10
    seen = set()
    for epoch in in_order("by_length", lengths, 8):
        assert len(epoch) == len(epoch.unique()) == 2000
        widths = lengths[epoch].view(-1, 8)
        assert lengths[epoch].sum() > 0.95 * 8 * widths.amax(1).sum(), "hardly any padding"
        assert lengths[epoch[:80]].float().mean() == pytest.approx(101, rel=0.5), "in any order"
        seen |= {*epoch.tolist()}
    assert len(seen) == 2005, "each epoch leaves out others"


def test_any_window_of_a_mixture_has_the_shares_of_its_weights():
    first, sizes, shares = (0, 50, 450), (50, 400, 1000), (0.5, 0.3, 0.2)
    for epoch in in_order("mixture", sizes, shares, 1000):
        for begin, size, share in zip(first, sizes, shares, strict=True):
            chosen = (begin <= epoch) & (epoch < begin + size)
            passes = epoch[chosen].split(size)
            assert all(len(part.unique()) == len(part) for part in passes), "all before one again"
            counts = chosen.cumsum(0)
            assert counts[-1] == 1000 * share
            for window in (7, 32, 250):
                error = counts[window:] - counts[:-window] - share * window
                assert error.abs().max() <= 1 + share * (len(sizes) - 2) + 1e-9
