"""vit and table: what they compute, against independent references. That their copies train:
test_adapting.py."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy
import pytest
import torch
import torchvision
from composed import make, write_photos
from conftest import Exit
from lazy import lora, pyarrow
from processes import train_forked

import table
import vit
from ddp_cifar import SeededSamples
from lib.mixed import Mixed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """48 photos for training, 17 for the test."""
    return write_photos(tmp_path_factory.mktemp("photos"), 65)


@pytest.fixture
def small(photos):
    """The flags of a ViT with two layers."""
    sizes = {"size": 16, "patch": 8, "width": 64, "layers": 2}
    return SimpleNamespace(photos=photos, test=None, lr=0.5, layer_decay=0.5, **sizes)


DECAYING = "self_attention.in_proj_weight self_attention.out_proj.weight mlp.0.weight mlp.3.weight"
DECAYING = [f"encoder.layers.encoder_layer_{i}.{x}" for i in (0, 1) for x in DECAYING.split()]
DECAYING += ["conv_proj.weight", "heads.head.weight"]
SHARES = {"class_token": 1 / 8, "conv_proj": 1 / 8, "encoder.pos_embedding": 1 / 8}
SHARES |= {"encoder.layers.encoder_layer_0": 1 / 4, "encoder.layers.encoder_layer_1": 1 / 2}
SHARES |= {"encoder.ln": 1, "heads": 1}


def test_each_layer_has_its_rate_and_only_matrices_decay(small):
    model = vit.build_model(small)
    optimizer, _ = vit.make_optimizer(model, small, 9)
    groups = {x: group for group in optimizer.param_groups for x in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(groups)
    for name, parameter in model.named_parameters():
        (share,) = (share for prefix, share in SHARES.items() if name.startswith(prefix))
        group = groups[parameter]
        assert group["max_lr"] == 0.5 * share, name
        assert group["weight_decay"] == 0.05 * (name in DECAYING), name


def test_all_tensors_of_torchvisions_vit_fit_but_the_heads(photos):
    args = SimpleNamespace(photos=photos, test=None, size=224, patch=16, width=768, layers=12)
    with torch.device("meta"):
        models = vit.build_model(args), torchvision.models.vit_b_16()
    ours, theirs = ({k: x.shape for k, x in model.state_dict().items()} for model in models)
    assert ours.keys() == theirs.keys()
    others = {name for name in ours if ours[name] != theirs[name]}
    assert others == {"heads.head.weight", "heads.head.bias"}


@pytest.mark.parametrize("sizes", [{"size": 20}, {"width": 80}])
def test_sizes_that_do_not_fit_are_an_error(small, sizes):
    with pytest.raises(Exit, match="whole patches"):
        vit.build_model(SimpleNamespace(**{**vars(small), **sizes}))


def test_lora_adapts_only_layers_that_the_vit_calls(small):
    """DDP would wait for the gradients of the others."""
    model = lora.with_lora(vit.build_model(small))
    model(torch.rand(2, 3, 16, 16)).sum().backward()
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    assert len(trained) == 2 * (1 + 2 * 2 + 1), "convolution, two layers of each MLP, head"
    assert all(x.grad is not None for x in trained.values())


class Colours:
    """40 photos of one colour each, in four classes: the value of all pixels is the class."""

    classes = tuple("abcd")

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((3, 16, 16), float(index % 4)), index % 4


def test_a_share_of_the_photos_is_mixed_and_each_has_the_classes_of_its_pixels():
    """Whatever the order. In another epoch it is another mixture."""
    samples, counts = SeededSamples(Mixed(Colours(), 0.5), seed=0), Counter()
    targets = []
    for epoch in range(5):
        samples.set_epoch(epoch)
        forward = [samples[i] for i in range(40)]
        backward = [samples[i] for i in reversed(range(40))][::-1]
        torch.testing.assert_close(forward, backward, rtol=0, atol=0)
        targets.append([target.tolist() for _, target in forward])
        for image, target in forward:
            assert target.sum().item() == pytest.approx(1)
            mean = (target * torch.arange(4)).sum().item()
            assert image.mean().item() == pytest.approx(mean, abs=1e-5)
            colours = image.unique()
            counts["mixed"] += target.max().item() < 1
            counts["CutMix"] += len(colours) == 2
            counts["MixUp"] += len(colours) == 1 and 1e-3 < colours.item() % 1 < 1 - 1e-3
    # Of 200, half. Of their partners a quarter has the same class: then nothing is seen.
    assert counts["mixed"] == pytest.approx(0.75 * 100, abs=30)
    assert counts["CutMix"] > 10 < counts["MixUp"] and targets[0] != targets[1]


def test_labels_are_smoothed_in_training_only():
    logits, targets = torch.randn(5, 4).double(), torch.rand(5, 4).double().softmax(1)
    smooth = 0.9 * targets + 0.1 / 4
    batch = None, targets
    for grad, exact in ((True, smooth), (False, targets)):
        with torch.set_grad_enabled(grad):
            values = vit.compute_loss(lambda images: logits, batch, None)
        torch.testing.assert_close(values["loss"], -(exact * logits.log_softmax(1)).sum(1))
    assert values["accuracy"].tolist() == (logits.argmax(1) == targets.argmax(1)).tolist()


def test_a_pipeline_computes_what_the_whole_model_does_and_has_its_names(small, tmp_path):
    """And all rates on both stages, though each has a part of the layers."""
    model, images = vit.build_model(small), torch.rand(2, 3, 16, 16)
    torch.nn.init.normal_(model.heads.head.weight)  # or all logits would be 0
    blocks = torch.nn.Sequential(*vit.model_blocks(model).values())
    torch.testing.assert_close(blocks(images), model(images), rtol=0, atol=0)
    script = make(tmp_path / "mine.py", "pipeline", "vit")
    flags = ["--cpu", "--photos", small.photos, "--size", 16, "--patch", 8, "--width", 64]
    flags += ["--layers", 2, "--max-steps", 1, "--lr", 1e-3, "--batch-size", 8]
    (run,) = train_forked(tmp_path, (2, script, flags))
    assert run.weights.keys() == model.state_dict().keys()
    rates = [1e-3 * 0.75**depth for depth in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert run.summary["peak_learning_rate"] == pytest.approx(rates)


@pytest.mark.parametrize("by_order", [True, False])
def test_a_tenth_of_a_table_is_the_test_set_and_the_columns_file_gives_its_rows_back(
    by_order, tmp_path
):
    """The last tenth, or rows drawn in the same way for any seed. The statistics are of the others
    alone."""
    columns = {name: numpy.random.default_rng(ord(name)).normal(5, 3, 47) for name in "yab"}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    args = SimpleNamespace(table=str(tmp_path / "t.parquet"), target="y", by_order=by_order)
    args.batch_size, args.output_dir = 9, tmp_path
    splits = []
    for args.seed in (0, 1):
        loaders = table.load_data(args, SimpleNamespace(device="cpu"))
        splits.append([loader.dataset.values.double().numpy() for loader in loaders])
    (train, test), (_, same) = splits
    assert (len(train), len(test)) == (43, 4) and (test == same).all()
    assert abs(train.mean(0)).max() < 1e-6
    saved = json.loads((tmp_path / "columns.json").read_text())
    assert saved["names"] == ["a", "b", "y"], "the target at the end"
    rows = numpy.concatenate((train, test)) * saved["std"] + saved["mean"]
    expected = numpy.stack([columns[name] for name in "aby"], axis=1)
    assert (rows == pytest.approx(expected, abs=1e-5)) == by_order
    by_target = [x[x[:, 2].argsort()] for x in (rows, expected)]
    assert by_target[0] == pytest.approx(by_target[1], abs=1e-5)


def test_the_errors_of_a_table_are_those_of_each_row():
    model, inputs, targets = torch.nn.Linear(3, 1), torch.randn(5, 3), torch.randn(5)
    values = table.compute_loss(model, (inputs, targets), None)
    errors = torch.cat([model(x) - y for x, y in zip(inputs, targets, strict=True)])
    torch.testing.assert_close(values, {"loss": errors**2, "absolute_error": errors.abs()})
