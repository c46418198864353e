"""What docs/adapting.md says to write in a copy, taken from that page: on two processes, stopped in
mid-training and continued by the same command, it is the uninterrupted run."""

import functools
import json
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, copy, forked, load, outputs, train_forked
from safetensors.torch import load_file
from test_resume import untimed
from torch.nn import functional as F

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/adapting.md").read_text()


def said(text):
    """A snippet that is on the page."""
    assert text in PAGE, text
    return text


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
    return {"loss": error * (1 + 0.1 * torch.rand_like(error))}
'''
IMBALANCED = """
class Augmented(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        DRAW
        inputs, label = super().__getitem__(index)
        return inputs + torch.rand(()) * numpy.random.rand(), label


def load_data(args, accelerator):
    labels = (torch.arange(96) % 8 == 0).long()
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(3)) + labels[:, None]
    test_set = torch.utils.data.TensorDataset(inputs, labels)
    train_set = Augmented(inputs, labels)
    WEIGHTS
    workers = {"num_workers": 2, "persistent_workers": True}
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, **workers)
    return train_loader, DataLoader(test_set, args.batch_size)


def build_model(args):
    return nn.Linear(6, 2)


def compute_loss(model, batch):
    inputs, labels = batch
    logits = model(inputs)
    class_weights = torch.tensor([1.0, 3.0])
    loss = LOSS
    return {"loss": loss, "rare": labels == 1, "sum": inputs.sum(1)}
"""
DRAW = "[index] = random.choices(range(len(self)), cum_weights=self.weights)"
CUMULATED = "self.weights = (1 / labels.bincount()[labels]).cumsum(0).tolist()"
WEIGHTED = 'F.cross_entropy(logits, labels, class_weights.to(labels.device), reduction="none")'
IMBALANCED = IMBALANCED.replace("DRAW", said(DRAW)).replace("LOSS", said(WEIGHTED))
IMBALANCED = IMBALANCED.replace("WEIGHTS", said(CUMULATED).replace("self", "train_set"))
SCHEDULE = "schedule(optimizer, lambda step: lr_lambda(step, max(1, total_steps)))"
COSINE = (
    SCHEDULE,
    said("torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, total_steps))"),
)
LATE = said("LambdaLR(optimizer, [f, g])").replace("LambdaLR", "schedule")
LATE = LATE.replace("f,", "lambda step: 1.0,").replace("g]", "lambda step: float(step >= 6)]")
GROUPS = '[{"params": [model[1].weight]}, {"params": model[6].parameters()}], lr=peak'
STATES = '    states = {"model": plain, "optimizer": optimizer, "scheduler": scheduler}\n'
SECOND = """    second = torch.optim.AdamW([plain[1].bias], lr=1e-2)
    second = accelerator.prepare(second)
    states["second"] = second
"""
ROWS = [
    (
        "gradient_as_bucket_view=True",
        f"gradient_as_bucket_view=True, {said('find_unused_parameters=True')}",
    ),
    (", " + said('"fused": True') + "}", "}"),
    ("SGD(model.parameters(), lr=peak", f"SGD({GROUPS}"),
    (SCHEDULE, LATE),
    (STATES, STATES + SECOND),
    ("args, step, measure_norm):", "args, step, measure_norm, second):"),
    ("args, step, line_due\n", "args, step, line_due, second\n"),
    ("    optimizer.step()\n", "    optimizer.step()\n    second.step()\n"),
    ("    optimizer.zero_grad()\n", "    optimizer.zero_grad()\n    second.zero_grad()\n"),
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
LOSSES = "losses = [x[LOSS] for x in map(json.loads, metrics.text.splitlines()) if LOSS in x]"
LOSSES = LOSSES.replace("LOSS", '"test_loss"')
STOPS = "if losses.index(min(losses)) < len(losses) - 5: break"
EARLY = WRITE, f"{WRITE}        {said(LOSSES)}\n        {said(STOPS)}\n"
(MODEL,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
TEXT = ["--text", "text.txt", "--length", 128, "--lr", 3e-3]
# Pairs of noisy views, of which each is to find its partner in the batch.
PAIRS = """
import datasets
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def load_dataset(first, last):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(last, 6, generator=generator)[first:].tolist()
    path = f"{first}-{os.getpid()}.jsonl"
    Path(path).write_text("".join(json.dumps({"values": row}) + chr(10) for row in rows))
    return datasets.load_dataset("json", data_files=path, split="train", cache_dir="c")


def load_data(args, accelerator):
    train_set = load_dataset(0, 24)WITH_FORMAT
    test_set = load_dataset(24, 45)WITH_FORMAT
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
EMA = said("ema = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)")
EMA = EMA.replace("0.999", "0.9")
STEP = """            values, grad_norm = train_step(
                accelerator, model, optimizer, scheduler, microbatches, args, step, line_due
            )
"""
TRACED = f"""            {said('trace = utils.ProfileKwargs(output_trace_dir=f"trace/{step}")')}
            {said("with accelerator.profile(trace) if step in (20, 21) else suppress():")}
{STEP.replace("    ", "        ", 3)}            {said("ema.update_parameters(plain)")}
"""
ANNOTATED = [
    (STATES, f'    {EMA}\n{STATES}    states["ema"] = ema\n'),
    (STEP, TRACED.replace("(20, 21)", "(3, 4)")),
    ("evaluate(accelerator, model, test", said("evaluate(accelerator, ema, ") + "test"),
    ("accelerator, plain.state_dict()", "accelerator, " + said("ema.module.state_dict()")),
]
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


def compute_loss(model, batch, part="critic"):
    return {"loss": model(batch, part)}


def make_optimizer(model, args, total_steps):
    optimizer = torch.optim.Adam(model.critic.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def check(model):
    for name, parameter in model.named_parameters():
        rounded = parameter.grad.bfloat16().float()
        assert torch.equal(parameter.grad, rounded), f"{name}: not from an all-reduce in bf16"
"""
PASS = """    optimizer.step()
    for index, batch in enumerate(microbatches):
        number = index * accelerator.num_processes + accelerator.process_index
        seed_rng(args.seed, step, number, "generator")
        with accelerator.accumulate(model):
            accelerator.backward(compute_loss(model, batch, "generator")["loss"].mean())
    check(model)
    second.step()
    second.zero_grad()
"""
HOOK = said("comm_hook=utils.DDPCommunicationHookType.BF16")
GAME = [
    ("gradient_as_bucket_view=True", f"find_unused_parameters=True, {HOOK}"),
    (STATES, STATES + SECOND.replace("[plain[1].bias]", "plain.generator.parameters()")),
    *ROWS[5:7],
    ("    optimizer.step()\n", PASS),
]
EVERY_STEP = ["--epochs", 3, "--checkpoint-every", 1]
COPIES = {  # of which recipe, how it is changed, what is added, flags, in which step SIGTERM comes
    "early": ("ddp", [EARLY], NOISY_LINE, ["--epochs", 20, "--lr", 0.5], 10),
    "balanced": ("ddp", [COSINE], IMBALANCED, [], 15),
    "rows": ("ddp", ROWS, NOISY_LINE, ["--epochs", 4], 4),
    "language model": ("ddp", [], MODEL, TEXT, 4),
    "language model, sharded": ("sharded", [], MODEL, TEXT, 4),
    "pairs": ("ddp", ANNOTATED, PAIRS, EVERY_STEP, 4),
    "GAN": ("ddp", GAME, GAN, [], 4),
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
def test_stopped_in_mid_training_and_continued_a_copy_is_the_uninterrupted_run(adapted, what):
    directory, _ = adapted(what)
    whole, stopped = (outputs(directory / name) for name in ("whole", "stopped"))
    begin = stopped["summary"]["resumed_from"]
    assert begin == COPIES[what][4] + 1 and begin % whole["summary"]["steps_per_epoch"]
    texts = [(directory / name / "metrics.jsonl").read_text() for name in ("whole", "stopped")]
    assert untimed(texts[0]) == untimed(texts[1])
    assert whole["weights"].read_bytes() == stopped["weights"].read_bytes()


def test_early_stopping_ends_the_run_and_the_same_command_trains_no_more(adapted):
    directory, answers = adapted("early")
    run = outputs(directory / "whole")
    losses = [line["test_loss"] for line in run["evaluations"]]
    best = losses.index(min(losses))
    assert 1 < best and len(losses) == best + 1 + 5 < 20, "after five that were not better"
    codes, output = answers[3]
    steps = 3 * len(losses)
    assert codes == [0, 0] and run["summary"]["resumed_from"] == steps, output
    assert not re.search(r"^step \d+/.* lr ", output, re.MULTILINE)
    assert run["summary"]["test_loss"] == losses[-1]


def test_each_class_is_drawn_as_often_as_any_other(adapted):
    run = outputs(adapted("balanced")[0] / "whole")
    rare = [line["rare"] for line in run["train"]]
    assert run["summary"]["test_rare"] == 12 / 96, "the test set stays, class weights or not"
    epochs = [sum(part) / 12 for part in (rare[:12], rare[12:])]
    assert epochs == pytest.approx([0.5, 0.5], abs=0.15)
    sums = [line["sum"] for line in run["train"]]
    assert len(rare) == 24
    assert sum(sums[:12]) != pytest.approx(sum(sums[12:]), abs=1e-3), "each epoch draws anew"


def test_a_group_of_parameters_begins_late_and_a_second_optimizer_early(adapted):
    directory, _ = adapted("rows")
    recipe = load("recipes/ddp_cifar.py")
    space = {**vars(recipe)}
    exec(NOISY_LINE, space)
    recipe.seed_rng(0)
    initial = space["build_model"](None).state_dict()
    early = torch.load(directory / "stopped/step-00000005.pt", weights_only=True)["states"]["model"]
    final = load_file(directory / "whole/model.safetensors")
    changed = {name for name, value in early.items() if not torch.equal(value, initial[name])}
    assert changed == {"0.mean", "1.weight", "1.bias"}
    same = {name for name, value in final.items() if torch.equal(value, initial[name])}
    assert same == {"2.weight", "2.bias"}, "those that are frozen"


PRETRAINED = """
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig

path = "../base"


def pretrained():
    config = AutoConfig.from_pretrained(path)
    if WHOLE_IS_ELSEWHERE:
        return AutoModelForCausalLM.CONFIGURED
    return AutoModelForCausalLM.LOADED


def build_model(args):
    model = pretrained()
    ADAPTED
"""
PRETRAINED = PRETRAINED.replace("CONFIGURED", said("from_config(config, dtype=torch.float32)"))
PRETRAINED = PRETRAINED.replace(
    "LOADED", said("from_pretrained(path, dtype=torch.float32).train()")
)
META = said("if torch.empty(0).is_meta")[3:]
LORA = said("return get_peft_model(model, LoraConfig())")
LORA = MODEL + PRETRAINED.replace("WHOLE_IS_ELSEWHERE", META).replace("ADAPTED", LORA)
CONFIGURED = PRETRAINED.replace("WHOLE_IS_ELSEWHERE", "True").replace("ADAPTED", "return model")
SEGMENTS = """
classes = range(3)


def load_data(args, accelerator):
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(3, (37, 4, 4), generator=generator)
    images = labels[:, None] + torch.randn(37, 1, 4, 4, generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < torch.rand(37, 1, 1)] = 255
    whole = torch.utils.data.TensorDataset(images, labels)
    train_set, test_set = (torch.utils.data.Subset(whole, x) for x in (range(16), range(16, 37)))
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    return train_loader, DataLoader(test_set, args.batch_size)


def build_model(args):
    return nn.Conv2d(1, 3, 1)


def compute_loss(model, batch):
    images, labels = batch
    logits = model(images)
    losses = F.cross_entropy(logits, labels, ignore_index=255, reduction="none")
    valid = (labels != 255).sum((1, 2))
    values = {"loss": losses.sum((1, 2)) / valid.clamp(min=1), "weight": valid}
    found = torch.where(labels == 255, -1, logits.argmax(1))
    for c in classes:
        inter, union = (found == c) & (labels == c), (found == c) | (labels == c)
        values[f"inter{c}"] = inter.sum((1, 2)) / valid.clamp(min=1)
        values[f"union{c}"] = union.sum((1, 2)) / valid.clamp(min=1)
    return values
"""
SEGMENTS = SEGMENTS.replace("torch.rand(37, 1, 1)", "torch.rand(37, 1, 1, generator=generator)")
RATIO = said('sum(test[f"test_inter{c}"] / test[f"test_union{c}"] for c in classes) / len(classes)')
RATIO = WRITE, f'        test["test_miou"] = {RATIO}\n{WRITE}'
BASE = ["--cpu", "--global-batch-size", 8, "--epochs", 1, "--log-every", 1]
WEIGHTS = ["--weights", "../base/model.safetensors"]
FROM_BASE = [*BASE, "--text", "../text.txt", "--length", 128, "--lr", 3e-3]
OTHERS = {  # as above, but of how many processes, and all flags
    "model": (1, "ddp", [], MODEL, [*FROM_BASE, "--epochs", 2, "--batch-size", 4]),
    "pairs": (1, "ddp", *COPIES["pairs"][1:3], [*BASE, *EVERY_STEP, "--batch-size", 4]),
    "LoRA": (2, "ddp", [], LORA, FROM_BASE),
    "LoRA, sharded": (2, "sharded", [], LORA, FROM_BASE),
    "weights": (2, "sharded", [], MODEL + CONFIGURED, [*FROM_BASE, "--epochs", 0, *WEIGHTS]),
    "segments": (2, "ddp", [RATIO], SEGMENTS, BASE),
}


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """{name: output, directory and files} of the runs of OTHERS."""
    directory = tmp_path_factory.mktemp("others")
    (directory / "text.txt").write_text(PAGE[:8000])
    pretrained_model().save_pretrained(directory / "base")
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


def pretrained_model():
    torch.manual_seed(7)
    return functions(MODEL)["build_model"](None).bfloat16()


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


def test_the_traces_of_two_steps(adapted):
    directory = adapted("pairs")[0] / "trace"
    assert {path.name for path in directory.iterdir()} == {"3", "4"}
    for path in (directory / "3/profile_0.json", directory / "4/profile_1.json"):
        names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
        assert {"aten::addmm", "gloo:all_reduce"} <= names


def test_both_players_of_the_gan_are_trained(adapted):
    recipe = load("recipes/ddp_cifar.py")
    recipe.seed_rng(0)
    initial = functions(GAN)["build_model"](None).state_dict()
    final = load_file(adapted("GAN")[0] / "whole/model.safetensors")
    assert not any(torch.equal(value, initial[name]) for name, value in final.items())


def test_lora_trains_its_own_parameters_of_a_pretrained_model_and_saves_all(others):
    plain, sharded = (load_file(others[name].weights) for name in ("LoRA", "LoRA, sharded"))
    base = pretrained_model().state_dict()
    trained = 0
    for name, weights in plain.items():
        torch.testing.assert_close(sharded[name], weights)
        original = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if "lora_B" in name:
            trained += weights.count_nonzero() > 0
        elif "lora_A" not in name:
            assert torch.equal(weights, base.pop(original).float()), name
    assert trained == 2 * 4 and len(base) == 1, "all but one name of the tied weights"
    path = others["LoRA"].directory / "step-00000007.pt"
    assert len(torch.load(path, weights_only=True)["states"]["model"]) > len(plain)


def test_weights_for_a_model_from_its_config(others):
    run = others["weights"]
    assert "not: lm_head.weight" in run.output
    assert run.summary["test_loss"] == pytest.approx(others["LoRA"].summary["test_loss"], rel=0.1)
    saved, base = load_file(run.weights), pretrained_model().state_dict()
    assert all(torch.equal(weights, base[name].float()) for name, weights in saved.items())


def test_ratios_of_sums_are_those_of_the_whole_test_set(others):
    space = functions(SEGMENTS)
    model = space["build_model"](None)
    model.load_state_dict(load_file(others["segments"].weights))
    images, labels = next(iter(space["load_data"](SimpleNamespace(batch_size=21), None)[1]))
    found, valid = model(images).argmax(1), labels != 255
    assert len(images) == 21 and 0 < valid.sum() < valid.numel()
    ratios = []
    for c in range(3):
        inter = (found == c) & (labels == c) & valid
        union = ((found == c) | (labels == c)) & valid
        ratios.append(inter.sum().item() / union.sum().item())
    assert others["segments"].evaluations[-1]["test_miou"] == pytest.approx(sum(ratios) / 3)
