"""vit and table: what they compute, against independent references. That their copies train:
test_adapting.py."""

import json
from types import SimpleNamespace

import numpy
import pytest
import torch
import torchvision
from composed import make, write_photos
from conftest import Exit, assert_same_training, exit_by_exception
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
def test_sizes_that_do_not_fit_are_an_error(small, sizes, monkeypatch):
    monkeypatch.setattr(vit, "exit_with_error", exit_by_exception)
    with pytest.raises(Exit, match="whole patches"):
        vit.build_model(SimpleNamespace(**{**vars(small), **sizes}))


def test_lora_adapts_only_layers_that_the_vit_calls(small):
    """DDP would wait for the gradients of the others."""
    model = vit.build_model(small)
    torch.nn.init.normal_(model.heads.head.weight)
    model = lora.with_lora(model)
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


def test_a_mixed_photo_has_the_classes_of_its_pixels_whatever_the_order():
    """Also in another epoch it is another mixture."""
    samples = SeededSamples(Mixed(Colours(), 1.0), seed=0)
    forward = [samples[i] for i in range(40)]
    backward = [samples[i] for i in reversed(range(40))][::-1]
    cut, blended = 0, 0
    for (image, target), again in zip(forward, backward, strict=True):
        torch.testing.assert_close([image, target], [*again], rtol=0, atol=0)
        assert target.sum().item() == pytest.approx(1)
        mean = (target * torch.arange(4)).sum().item()
        assert image.mean().item() == pytest.approx(mean, abs=1e-5)
        whole = image.unique()
        cut += len(whole) == 2
        blended += len(whole) == 1 and 1e-3 < whole.item() % 1 < 1 - 1e-3
    assert cut > 5 and blended > 5, "CutMix and MixUp"
    samples.set_epoch(1)
    assert not torch.equal(samples[0][0], forward[0][0])


def test_a_share_of_the_photos_is_mixed_and_none_of_the_test_set():
    for share, expected in ((0.0, 0), (0.5, 100)):
        samples = SeededSamples(Mixed(Colours(), share), seed=0)
        mixed = 0
        for epoch in range(10):
            samples.set_epoch(epoch)
            for index in range(0, 40, 2):
                image, target = samples[index]
                mixed += target.max().item() < 1
                assert target.max().item() < 1 or image.unique().tolist() == [target.argmax()]
        # A partner has the same class in a quarter of the mixtures: then nothing is seen.
        assert mixed == pytest.approx(0.75 * expected, abs=30 * (share > 0))


def test_labels_are_smoothed_in_training_only():
    logits, targets = torch.randn(5, 4).double(), torch.rand(5, 4).double().softmax(1)
    smooth = 0.9 * targets + 0.1 / 4
    batch = None, targets
    for grad, exact in ((True, smooth), (False, targets)):
        with torch.set_grad_enabled(grad):
            values = vit.compute_loss(lambda images: logits, batch, None)
        torch.testing.assert_close(values["loss"], -(exact * logits.log_softmax(1)).sum(1))
    assert values["accuracy"].tolist() == (logits.argmax(1) == targets.argmax(1)).tolist()


IN_FLOAT64 = [
    ("v2.ToDtype(torch.float32, ", "v2.ToDtype(torch.float64, "),
    (
        "        num_classes=len(photo_classes(args)),\n    )",
        "        num_classes=len(photo_classes(args)),\n    ).double()",
    ),
    ("    logits = model(images)", "    logits, targets = model(images), targets.double()"),
]


def test_a_vit_trains_the_same_by_any_recipe_on_any_number_of_processes(small, tmp_path):
    """In microbatches of 16, 8 and 4: also the photos are mixed in the same way. The pipeline's
    weights have the names of the whole model."""
    flags = ["--cpu", "--photos", small.photos, "--size", 16, "--patch", 8, "--width", 64]
    flags += ["--layers", 2, "--max-steps", 5, "--epochs", 2, "--lr", 1e-3]
    flags += ["--global-batch-size", 16]
    runs = []
    for recipe, *more in (("ddp", 16), ("sharded", 8), ("pipeline", 16, "--chunks", 4)):
        script = make(tmp_path / f"{recipe}.py", recipe, "vit", replaced=IN_FLOAT64)
        runs.append((1 + (recipe != "ddp"), script, [*flags, "--batch-size", *more]))
    whole, *others = train_forked(tmp_path, *runs)
    assert whole.weights.keys() == vit.build_model(small).state_dict().keys()
    assert len(whole.evaluations) == 2
    for run in others:
        assert_same_training(run, whole, 1e-8, {"grad_norm"})
    rates = [1e-3 * 0.75**depth for depth in (0, 0, 1, 1, 2, 2, 3, 3)]
    for run in (whole, *others):
        assert run.summary["peak_learning_rate"] == pytest.approx(rates)


def write_parquet(path, columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


@pytest.fixture
def of_table(tmp_path):
    """The flags of table."""
    common = {"target": "y", "batch_size": 9, "output_dir": tmp_path, "by_order": True}
    return SimpleNamespace(table=str(tmp_path / "t.parquet"), **common)


@pytest.mark.parametrize("by_order", [True, False])
def test_a_tenth_of_a_table_is_the_test_set_and_the_columns_file_gives_its_rows_back(
    by_order, tmp_path, of_table
):
    """The last tenth, or rows drawn in the same way for any seed. The statistics are of the others
    alone."""
    columns = {name: numpy.random.default_rng(ord(name)).normal(5, 3, 47) for name in "yab"}
    write_parquet(of_table.table, columns)
    of_table.by_order = by_order
    splits = []
    for of_table.seed in (0, 1):
        loaders = table.load_data(of_table, SimpleNamespace(device="cpu"))
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
