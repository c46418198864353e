"""What the examples compute, against independent references. That their copies train:
test_adapting.py."""

import argparse
import json
import math
from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace

import numpy
import pytest
import torch
import toy
from composed import make, rates_of, train
from conftest import CNN, NARROW, ROUNDING_FLOAT32, Exit, load
from lazy import (
    auroc,
    by_length,
    fine_tune,
    language_model,
    lib,
    segmentation,
    sklearn,
    transformers,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from torch.utils import flop_counter
from torch.utils.data import DataLoader, RandomSampler
from torchvision.datasets import FakeData

import balanced
import best_weights
import diffusion
import distillation
import ema
import fast_cifar
import gan
import resnet20
import second_optimizer
from lib import fine_tuning, order
from lib.mixed import Mixed

pytestmark = pytest.mark.slow


def test_an_average_of_weights_is_that_of_a_sum_in_float64():
    """Of the trained parameters and the buffers, of which a counter keeps its newest value."""
    model = torch.nn.BatchNorm1d(3)
    model.bias.requires_grad_(False)
    average = ema.Average(model, decay=0.6)
    floating = model.weight.data, model.running_mean
    expected = [x.double() for x in floating]
    for step in range(1, 30):
        average.use(False)
        for x in floating:
            x += torch.randn(3)
        model.num_batches_tracked += 1
        decay = min(0.6, (step + 1) / (step + 10))
        pairs = zip(expected, floating, strict=True)
        expected = [decay * x + (1 - decay) * new.double() for x, new in pairs]
        average.update(step)
        average.use()
    torch.testing.assert_close([x.double() for x in floating], expected, rtol=1e-5, atol=1e-5)
    assert model.num_batches_tracked == 29


def test_resnet20_has_the_size_and_the_shortcuts_of_the_paper():
    """0.27 million parameters, 41 million multiplications per image; no parameters in shortcuts."""
    model = resnet20.build_model(None)
    assert sum(x.numel() for x in model.parameters()) == 269722
    with flop_counter.FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, 32, 32))
    assert counter.get_total_flops() / 2 == pytest.approx(40.55e6, rel=1e-3)
    blocks = [x for x in model if isinstance(x, resnet20.Block)]
    block = blocks[3].eval()
    torch.nn.init.zeros_(block.bn2.weight)
    images = torch.rand(2, 16, 8, 8)
    assert block(images)[:, :16].equal(images[:, :, ::2, ::2])
    assert not block(images)[:, 16:].any()


def test_fast_cifar_cuts_a_square_tests_both_mirror_images_and_decays_only_weights(tmp_path):
    images = torch.ones(2000, 3, 32, 32)
    cut = fast_cifar.cutout(images, 12)
    missing = (cut[:, 0] == 0).sum((1, 2))
    assert cut[:, :1].expand_as(cut).equal(cut) and missing.max() == 12 * 12
    # Of each axis, the mean over the 32 places of the corner.
    inside = sum(min(top + 12, 32) - max(top, 0) for top in range(-6, 26)) / 32
    assert missing.float().mean().item() == pytest.approx(inside**2, rel=0.05)  # 8 deviations

    mine = load(make(tmp_path / "mine.py", "ddp", "fast_cifar"))
    args = SimpleNamespace(model="simple_cnn", lr=0.1, global_batch_size=128)
    model, labels = mine.build_model(args).double(), torch.arange(4)
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    model.eval()
    both = (model(images) + model(images.flip(3))) / 2
    exact = F.cross_entropy(both, labels, reduction="none")
    torch.testing.assert_close(mine.compute_loss(model, (images, labels), args)["loss"], exact)
    optimizer, _ = mine.make_optimizer(model, args, 10)
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    expected = [5e-4 * name.endswith("weight") for name, _ in model.named_parameters()]
    assert [decays[p] for p in model.parameters()] == expected


def test_auroc_is_that_of_scikit_learn():
    """The mean over classes, of their probabilities; the last class has no samples."""
    logits, labels = 3 * torch.randn(90, 4), torch.arange(90) % 3
    outputs = auroc.compute_loss(lambda images: logits, (None, labels), None)["outputs"]
    scores = logits.softmax(1).T[:3]
    exact = [sklearn.metrics.roc_auc_score(labels == c, x) for c, x in enumerate(scores)]
    expected = {"auroc": pytest.approx(sum(exact) / 3)}
    assert auroc.test_metrics(list(outputs), None) == expected
    assert math.isnan(auroc.test_metrics([outputs[0]], None)["auroc"])


def test_both_players_of_the_gan_have_their_own_gradients():
    game, images = gan.Game(), torch.randn(4, 3, 32, 32)
    torch.manual_seed(3)
    gan.compute_loss(game, (images, None), None)["loss"].mean().backward()
    torch.manual_seed(3)
    made = game.generator(torch.randn(4, gan.LATENT))
    losses = {
        game.generator: F.softplus(-game.critic(made)).mean(),
        game.critic: (F.softplus(-game.critic(images)) + F.softplus(game.critic(made))).mean(),
    }
    for player, loss in losses.items():
        weights = [*player.parameters()]
        exact = torch.autograd.grad(loss, weights, retain_graph=True)
        torch.testing.assert_close([x.grad for x in weights], [*exact])


def in_order(name, *arguments):
    """The indices of five epochs."""
    samples = order.Ordered(range(9999), 0, getattr(order, name), *arguments)
    epochs = []
    for epoch in range(5):
        samples.set_epoch(epoch)
        epochs.append(torch.tensor(list(samples)))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 5
    return epochs


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


def test_a_rare_class_counts_as_much_as_another(tmp_path):
    toy.make("rare", tmp_path)
    # Of 192 drawn ones, each is rare or not: 42 are six standard deviations.
    for balance, bound in (("drawing", 42), ("loss", 1e-4)):
        args = SimpleNamespace(photos=tmp_path / "rare", size=8, test=None, balance=balance)
        args.batch_size, args.seed = 10, 0
        train, test = balanced.load_data(args, None)
        for data, most in ((train.dataset, bound), (test.dataset, 1e-4)):
            sums = [0, 0]
            getattr(data, "set_epoch", lambda epoch: None)(1)
            for index in range(len(data)):
                _, label, weight = data[index]
                sums[label] += float(weight)
            assert sums == pytest.approx([len(data) / 2] * 2, abs=most)


def test_persistent_workers_see_the_order_of_each_epoch():
    lanes = order.ByLane(range(20), 0, torch.full((4,), 5), 2, 2)
    for samples in (lanes, order.Ordered(range(20), 0, order.balanced, torch.arange(20) % 2)):
        loader = DataLoader(samples, 4, num_workers=1, persistent_workers=True)
        for epoch in range(3):
            samples.set_epoch(epoch)
            assert torch.cat(list(loader)).tolist() == list(samples)


def test_lines_without_a_target_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("a\n\nab\n" * 20)
    args = SimpleNamespace(text=tmp_path / "a.txt", length=9, seed=0)
    args.batch_size = args.global_batch_size = 6
    for loader, samples in zip(by_length.load_data(args, None), (18, 2), strict=True):
        assert [len(x) for x in loader.dataset] == [2] * samples


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


def test_distillation_is_the_papers_loss(tmp_path):
    ours, theirs, labels = torch.randn(6, 10).double(), torch.randn(6, 10).double(), torch.arange(6)
    batch = None, torch.cat((labels[:, None], theirs), dim=1)
    loss = distillation.compute_loss(lambda images: ours, batch, None)["loss"]
    p, q = (logits.div(4).softmax(1) for logits in (theirs, ours))
    of_labels = -ours.softmax(1)[labels, labels].log()
    exact = 0.1 * of_labels + 0.9 * 16 * (p * (p / q).log()).sum(1)
    torch.testing.assert_close(loss, exact)

    teacher = distillation.build_network(4)
    teacher[3].running_mean += 1
    weights = {name: x.contiguous() for name, x in teacher.state_dict().items()}
    save_file(weights, tmp_path / "teacher.safetensors")
    args = SimpleNamespace(teacher=str(tmp_path / "teacher.safetensors"), teacher_width=4)
    here = SimpleNamespace(device="cpu", autocast=nullcontext)
    images = torch.randn(6, 3, 32, 32)
    for _ in range(2):
        _, targets = distillation.with_teacher(args, here)((images, labels))
        assert targets[:, 0].tolist() == labels.tolist()
        torch.testing.assert_close(targets[:, 1:], teacher.eval()(images), rtol=1e-5, atol=1e-5)


def test_diffusion_makes_the_image_whose_noise_the_model_knows(tmp_path):
    of_image, of_noise = diffusion.shares(torch.linspace(0, 1, 9))
    torch.testing.assert_close(of_image**2 + of_noise**2, torch.ones(9, 1, 1, 1))
    assert of_image[0] == 1 and of_noise[0] == 0

    def exact_noise(x, time):
        of_image, of_noise = diffusion.shares(time)
        return (x - of_image * 0.5) / of_noise

    here = SimpleNamespace(device="cpu", is_main_process=True)
    args = SimpleNamespace(seed=0, output_dir=tmp_path)
    diffusion.save_samples(here, exact_noise, args, steps=2)
    colors = {color for _, color in Image.open(tmp_path / "samples.png").getcolors()}
    gray = round((0.5 + 2) / 4 * 255)
    assert colors == {(0, 0, 0), (gray, gray, gray)}, "between the images, and each of them"


def test_the_mean_iou_is_that_of_all_pixels_that_count():
    logits, labels = torch.randn(9, 4, 5, 5), torch.randint(3, (9, 5, 5))
    labels[torch.rand(9, 5, 5) < 0.4] = 255
    labels[0] = 255
    values = segmentation.compute_loss(lambda images: logits, (None, labels), None)
    truth, found = labels[labels != 255], logits.argmax(1)[labels != 255]
    iou = sklearn.metrics.jaccard_score(truth, found, average="macro")
    results = segmentation.test_metrics(list(values["outputs"]), None)
    assert results == {"miou": pytest.approx(iou, rel=ROUNDING_FLOAT32)}
    loss = (values["loss"] * values["weight"]).sum() / values["weight"].sum()
    exact = F.cross_entropy(logits.double(), labels, ignore_index=255).item()
    assert loss.item() == pytest.approx(exact, rel=ROUNDING_FLOAT32)


def test_weights_in_bf16_are_fine_tuned_in_fp32(tmp_path):
    """Also their shapes on the meta device."""
    toy.llama(tmp_path)
    args = SimpleNamespace(base=tmp_path / "llama")
    saved = transformers.AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.bfloat16)
    weights = fine_tune.build_model(args).state_dict()
    expected = {name: x.float() for name, x in saved.state_dict().items()}
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    with torch.device("meta"):
        shapes = fine_tune.build_model(args).state_dict()
    torch.testing.assert_close(shapes, expected, check_device=False)  # and types, but no values


FINE_TUNED = ["sft", "preferences", "fine_tune", "text_classification", "embeddings", "clip"]
FINE_TUNED += ["detection", "vision_chat"]
FROM_SCRATCH = ["by_length", "diffusion", "gan", "mixture", "segmentation", "tokens", "vit"]


@pytest.mark.parametrize("name", [*FINE_TUNED, *FROM_SCRATCH])
def test_a_task_has_defaults_that_suit_its_optimizer(name, tmp_path):
    """The recipes' rate is for SGD: Adam would diverge."""
    mine = load(make(tmp_path / "mine.py", "ddp", name))
    parser = argparse.ArgumentParser(conflict_handler="resolve")  # as in the recipes
    parser.set_defaults(lr=0.1)
    mine.add_flags(parser)
    assert parser.get_default("lr") <= 3e-3
    if name in FINE_TUNED:
        assert parser.get_default("clip_norm") == 1
        assert mine.make_optimizer.__doc__ == fine_tuning.make_optimizer.__doc__


def test_transformers_decays_the_same_parameters_and_the_rate_has_a_short_before_first_step():
    for kind in ("Llama", "Bert"):
        config = getattr(transformers, f"{kind}Config")(vocab_size=9, **toy.SMALL)
        model = getattr(transformers, f"{kind}Model")(config)
        expected = transformers.Trainer.get_decay_parameter_names(None, model)
        optimizer, _ = fine_tuning.make_optimizer(model, SimpleNamespace(lr=1), 9)
        names = {x: name for name, x in model.named_parameters()}
        decay, none = ([names[x] for x in group["params"]] for group in optimizer.param_groups)
        assert sorted(decay) == sorted(expected) and len(decay) + len(none) == len(names)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0]
    for steps in (1, 2, 9, 16, 99, 1000):
        made = fine_tuning.make_optimizer(model, SimpleNamespace(lr=1), steps)
        rates = [rate for rate, *_ in rates_of(*made, steps)]
        assert rates.index(max(rates)) <= 0.1 * steps
    assert rates.index(max(rates)) >= 0.03 * steps and max(rates) > 0.99 and rates[-1] < 0.01


def test_groups_of_parameters_keep_their_own_peak_rates(tmp_path):
    """Those of two optimizers, too, in a copy whose owner gave AdamW a tenth of Muon's rate."""

    def two_groups():
        one, other = ([torch.nn.Parameter(torch.zeros(2))] for _ in range(2))
        return [{"params": one, "lr": 1e-6}, {"params": other}]

    args, model = SimpleNamespace(lr=0.1), SimpleNamespace(parameters=two_groups)
    for example in (language_model, diffusion, gan):
        rates = rates_of(*example.make_optimizer(model, args, 9), 9)
        assert [max(x) for x in zip(*rates, strict=True)] == pytest.approx([1e-6, 0.1])
    edited = '[{"params": others}]', '[{"params": others, "lr": args.lr / 10}]'
    mine = load(make(tmp_path / "mine.py", "ddp", "second_optimizer", replaced=[edited]))
    rates = rates_of(*mine.make_two_optimizers(torch.nn.Linear(3, 3), args, 9), 9)
    assert [max(x) for x in zip(*rates, strict=True)] == pytest.approx([0.1, 0.01])


def test_two_optimizers_as_one_step_as_each_alone():
    """Also after their state was saved and loaded."""
    torch.manual_seed(0)
    start = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3))
    args = SimpleNamespace(lr=1e-2)
    weights = []
    for joint in (True, False):
        model = deepcopy(start)
        one, _ = second_optimizer.make_two_optimizers(model, args, 9)
        for step in range(6):
            model(torch.arange(5)).square().sum().backward()
            for optimizer in [one] if joint else one.both:
                optimizer.step()
            model.zero_grad()
            if joint and step == 2:
                state = deepcopy(one.state_dict())
                one, _ = second_optimizer.make_two_optimizers(model, args, 9)
                one.load_state_dict(state)
        weights.append(model.state_dict())
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    tied = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5))
    tied[1].weight = tied[0].weight
    muon, _ = second_optimizer.make_two_optimizers(tied, args, 9)[0].both
    assert muon.param_groups[0]["params"] == []


def test_the_best_weights_and_the_traced_steps_are_in_their_files(tmp_path):
    """The training stops after two evaluations without a lower loss of the validation samples. The
    losses are given: those of a training that gets worse would be other ones on another CPU. The
    test set is evaluated once, with the last weights."""
    evaluated = 'run.metrics.write("evaluation", evaluate(run, model, test_loader))'
    given = evaluated[:-1] + ' | {"validation_loss": abs(run.step / run.steps_per_epoch - 3.1)})'
    replaced = [("PATIENCE = 5", "PATIENCE = 2"), (evaluated, given), *NARROW]
    added = "best_weights", "trace", "validation"
    script = make(tmp_path / "mine.py", "ddp", *added, replaced=replaced)
    flags = [*CNN, "--batch-size", 64, "--epochs", 9, "--keep", 9]
    (run,) = train(tmp_path, (1, script, flags))
    *evaluations, last = run.evaluations
    losses = [line["validation_loss"] for line in evaluations]
    best = losses.index(min(losses))
    assert 0 < best and len(losses) == best + 3 < 9
    step = evaluations[best]["step"]
    content = torch.load(run.directory / f"step-{step:08}.pt", weights_only=True)
    weights, expected = load_file(run.directory / "best.safetensors"), content["states"]["model"]
    torch.testing.assert_close(weights, dict(expected), rtol=0, atol=0)
    lines = [json.dumps({"event": "evaluation", "test_loss": loss}) for loss in (2, 1, None, 3)]
    assert best_weights.evaluations_since_best("\n".join(lines)) == 2
    events = json.loads((run.directory / "trace-0.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event["name"].startswith("ProfilerStep")}
    assert names == {"ProfilerStep#7", "ProfilerStep#8", "ProfilerStep#9"}
    mine = load(script)
    model = mine.build_model(SimpleNamespace(model="simple_cnn")).eval()
    model.load_state_dict(run.weights)
    images, labels = plain(mine, 64, seed=2).__getitems__(range(64))
    loss = F.cross_entropy(model(images), labels).item()
    assert last["test_loss"] == pytest.approx(loss, rel=ROUNDING_FLOAT32)
    assert "validation_loss" not in last and not any("test_loss" in line for line in evaluations)


def plain(mine, samples, seed):
    """Synthetic images without augmentation."""
    return mine.ImageTensors(*mine.synthetic_images(samples, seed), torch.device("cpu"))


def test_validation_samples_are_of_the_training_set_and_read_as_the_test_set_is(tmp_path):
    """They are a function of --seed, on whichever process."""
    mine = load(make(tmp_path / "mine.py", "ddp", "validation"), exits=True)
    here = SimpleNamespace(device=torch.device("cpu"))
    splits = []
    for seed in (0, 0, 1):
        args = SimpleNamespace(data="synthetic", batch_size=8, seed=seed)
        run = SimpleNamespace(args=args, samples=[], prepare_data=lambda loaders: loaders)
        loaders = mine.load_data(args, here)
        train, validation, test = mine.with_validation(run, loaders)
        assert test is loaders[1] and run.samples == [64]
        assert isinstance(train.sampler, RandomSampler) and train.drop_last
        splits.append((train.dataset.indices, validation.dataset.indices))
    assert splits[0] == splits[1] != splits[2]
    trained, chosen = splits[2]
    assert len(chosen) == 26 and sorted(trained + chosen) == [*range(256)]
    loaders[0].dataset.set_epoch(1)
    expected = plain(mine, 256, seed=1).__getitems__(chosen[:8])
    assert all(map(torch.equal, next(iter(validation)), expected))

    folders = [FakeData(9, transform=name) for name in ("random", "of the test")]
    folders[0].classes = folders[1].classes = "ab"
    found = mine.read_as_test(*map(Mixed, folders, (0.8, 0.0)))
    assert (found.share, found.folder.transform) == (0, "of the test")
    assert folders[0].transform == "random"
    with pytest.raises(Exit, match="training and test set are FakeData and list: edit read_as_t"):
        mine.read_as_test(folders[0], [])
    with pytest.raises(Exit, match="the training set has an order of its own"):
        mine.with_validation(run, loaders[::-1])


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
SIZES |= {"intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8}
OF_OPT = {"ffn_dim": 16, "word_embed_proj_dim": 16, "max_position_embeddings": 30, "dropout": 0}
HEADS = [
    ("Llama", {"tie_word_embeddings": True}),
    ("Gemma2", {"final_logit_softcapping": 0.5, "tie_word_embeddings": False}),
    ("OPT", OF_OPT),  # its decoder is in its model
]


@pytest.mark.parametrize(("kind", "options"), HEADS)
def test_chunks_of_logits_have_the_losses_and_gradients_of_all(kind, options, monkeypatch):
    """Logits of the counted targets alone, of three at a time; the last ones once."""
    monkeypatch.setattr(lib.token_losses, "LOGITS", 3 * 50 + 7)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    inputs, targets = torch.randint(50, (2, 3, 9)).unbind(1)[:2]
    targets[0, ::2] = targets[1, 1:7] = -100
    logits = model(inputs, use_cache=False).logits.double()
    exact = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 9)
    weights = torch.rand(2, 9)
    expected = torch.autograd.grad((exact * weights).sum(), [*model.parameters()])

    model = lib.token_losses.with_token_losses(model)
    if kind == "Llama":
        model.compile(backend="eager")
    rows = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda _, given, out: rows.append(out.numel() // 50))
    losses = model(inputs, targets=targets, use_cache=False)
    assert losses.dtype == torch.float32 and rows == [3, 3, 1]
    torch.testing.assert_close(losses.double(), exact, rtol=ROUNDING_FLOAT32, atol=1e-6)
    found = torch.autograd.grad((losses * weights).sum(), [*model.parameters()])
    assert rows == [3, 3, 1, 3, 3]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=ROUNDING_FLOAT32)
    assert model(inputs, use_cache=False).logits.shape == (2, 9, 50), "without targets"
    assert model.bfloat16()(inputs, targets=targets, use_cache=False).dtype == torch.float32


def test_chunks_train_as_one_in_sharded(tmp_path):
    content = numpy.random.default_rng(0).integers(50, size=2000).astype("<u2")
    content.tofile(tmp_path / "a.bin")
    flags = ["--cpu", "--train", tmp_path / "a.bin", "--vocabulary", 50, "--length", 16]
    flags += ["--global-batch-size", 8, "--max-steps", 3, "--epochs", 1]
    whole = make(tmp_path / "whole.py", "ddp", "tokens")
    chunked = [("LOGITS = 2**27", "LOGITS = 50 * 7")]
    chunked = make(tmp_path / "chunked.py", "sharded", "tokens", replaced=chunked)
    exact, run = train(tmp_path, (1, whole, flags), (2, chunked, flags))
    for name in ("loss", "grad_norm"):
        expected = [line[name] for line in exact.train]
        assert [line[name] for line in run.train] == pytest.approx(expected, rel=1e-4)
