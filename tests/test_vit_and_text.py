"""vit, text_classification, and the split of table: what they compute, against independent
references. That their copies train: test_adapting.py."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy
import pytest
import torch
import torchvision
from composed import make, rates_of, write_photos
from conftest import Exit, assert_same_training, exit_by_exception, train_forked
from lazy import lora, pyarrow, sklearn, text_classification, tokenizers, transformers

import pipeline_cifar
import table
import vit
from ddp_cifar import SeededSamples
from lib.mixed import Mixed
from lib.vit_layers import model_blocks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """48 photos for training, 17 for the test."""
    return write_photos(tmp_path_factory.mktemp("photos"), 65)


@pytest.fixture
def small(photos):
    """The flags of a ViT with two layers."""
    sizes = {"size": 16, "patch": 8, "width": 64, "layers": 2}
    return SimpleNamespace(photos=photos, lr=0.5, layer_decay=0.5, **sizes)


DECAYING = "self_attention.in_proj_weight self_attention.out_proj.weight mlp.0.weight mlp.3.weight"
OTHERS = "self_attention.in_proj_bias self_attention.out_proj.bias mlp.0.bias mlp.3.bias "
OTHERS += "ln_1.weight ln_1.bias ln_2.weight ln_2.bias"
OF_LAYER = dict.fromkeys(DECAYING.split(), True) | dict.fromkeys(OTHERS.split(), False)
# Of the whole model: (share of --lr, whether it decays).
LISTED = {
    "class_token": (1 / 8, False),
    "conv_proj.weight": (1 / 8, True),
    "conv_proj.bias": (1 / 8, False),
    "encoder.pos_embedding": (1 / 8, False),
    **{f"encoder.layers.encoder_layer_0.{x}": (1 / 4, decays) for x, decays in OF_LAYER.items()},
    **{f"encoder.layers.encoder_layer_1.{x}": (1 / 2, decays) for x, decays in OF_LAYER.items()},
    "encoder.ln.weight": (1, False),
    "encoder.ln.bias": (1, False),
    "heads.head.weight": (1, True),
    "heads.head.bias": (1, False),
}


def groups_by_name(model, args):
    """{name: (learning rate, weight decay)} of a model's parameters."""
    optimizer, _ = vit.make_optimizer(model, args, 9)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [(group["params"], group) for group in optimizer.param_groups]
    found = [
        (names[x], (group["max_lr"], group["weight_decay"])) for x_s, group in groups for x in x_s
    ]
    assert len(found) == len(dict(found)) == len(names), "each in one group"
    return dict(found)


def test_each_layer_has_its_rate_and_only_matrices_decay(small):
    found = groups_by_name(vit.build_model(small), small)
    expected = {name: (0.5 * share, 0.05 * decays) for name, (share, decays) in LISTED.items()}
    assert found == expected


def test_both_stages_of_a_pipeline_have_the_groups_of_the_whole_model(small):
    """Their names in the pipeline are others, and those in DDP."""
    model = vit.build_model(small)
    whole = groups_by_name(model, small)
    stages = pipeline_cifar.cut(model_blocks(model), "encoder.layers.encoder_layer_1")
    found, rates = {}, []
    for blocks in stages:
        stage = torch.nn.Module()
        stage.stage = torch.nn.Module()
        stage.stage.module = pipeline_cifar.Stage(blocks, nullcontext)
        optimizer, _ = vit.make_optimizer(stage, small, 9)
        rates.append([(group["max_lr"], group["weight_decay"]) for group in optimizer.param_groups])
        for name, group in groups_by_name(stage, small).items():
            name = name.removeprefix("stage.module.").replace("/", ".")
            found[name.replace("encoder.class_token", "class_token")] = group
    assert found == whole
    assert rates[0] == rates[1], "or the checkpoint of one would not be the other's"


def test_the_rates_fall_as_a_cosine_to_the_last_step(small):
    made = vit.make_optimizer(vit.build_model(small), small, 100)
    rates = numpy.array(rates_of(*made, 100))
    begin = 0.3 * 101 - 1  # of the cosine; before it the rates rise
    exact = 0.25 * (1 + numpy.cos(numpy.pi * (numpy.arange(30, 100) - begin) / (100 - begin)))
    assert rates[30:, 0] == pytest.approx(exact, abs=1e-5)  # the last rate is no zero


def test_all_tensors_of_torchvisions_vit_fit_but_the_heads(photos):
    args = SimpleNamespace(photos=photos, size=224, patch=16, width=768, layers=12)
    with torch.device("meta"):
        models = vit.build_model(args), torchvision.models.vit_b_16()
    ours, theirs = ({k: x.shape for k, x in model.state_dict().items()} for model in models)
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} == {
        "heads.head.weight",
        "heads.head.bias",
    }


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
        "        num_classes=len(classes),\n    )",
        "        num_classes=len(classes),\n    ).double()",
    ),
    ("    logits = model(images)", "    logits, targets = model(images), targets.double()"),
]


def test_a_vit_trains_the_same_by_any_recipe_on_any_number_of_processes(photos, tmp_path):
    """In microbatches of 16, 8 and 4: also the photos are mixed in the same way. The pipeline's
    weights have the names of the whole model."""
    scripts = {
        recipe: make(tmp_path / f"{recipe}.py", recipe, "vit", replaced=IN_FLOAT64)
        for recipe in ("ddp", "sharded", "pipeline")
    }
    flags = ["--cpu", "--photos", photos, "--size", 16, "--patch", 8, "--width", 64, "--layers", 2]
    flags += ["--max-steps", 5, "--epochs", 2, "--lr", 1e-3, "--global-batch-size", 16]
    whole, *others = train_forked(
        tmp_path,
        (1, scripts["ddp"], [*flags, "--batch-size", 16]),
        (2, scripts["ddp"], [*flags, "--batch-size", 4]),
        (2, scripts["sharded"], [*flags, "--batch-size", 8]),
        (2, scripts["pipeline"], [*flags, "--batch-size", 16, "--chunks", 4]),
    )
    assert whole.weights.keys() == LISTED.keys()
    assert len(whole.evaluations) == 2
    for run in others:
        assert_same_training(run, whole, 1e-8, {"grad_norm"})
    rates = [1e-3 * 0.75**depth for depth in (0, 0, 1, 1, 2, 2, 3, 3)]
    for run in (whole, *others):
        assert run.summary["peak_learning_rate"] == pytest.approx(rates)


def test_macro_f1_is_the_mean_over_the_classes_that_occur():
    truth, predicted = [0, 0, 1, 3, 3, 3, 0, 1], [0, 1, 1, 4, 3, 3, 0, 4]
    outputs = list(torch.tensor([truth, predicted]).T)
    results = text_classification.test_metrics(outputs, None)
    exact = sklearn.metrics.f1_score(truth, predicted, average="macro", zero_division=0)
    assert results == {"macro_f1": pytest.approx(exact, rel=1e-6)}


WORDS = {"cold": "snow ice frost", "hot": "sun fire lava", "wet": "rain sea river"}


def texts(count, seed):
    """(text, label), of words of which half are of the label."""
    rng = numpy.random.default_rng(seed)
    everything = " ".join(WORDS.values()).split()
    samples = []
    for _ in range(count):
        label = sorted(WORDS)[rng.choice(3, p=[0.5, 0.3, 0.2])]
        words = [*rng.choice(WORDS[label].split(), 3), *rng.choice(everything, rng.integers(1, 6))]
        samples.append((" ".join(rng.permutation(words)), label))
    return samples


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A directory with a tokenizer and a BERT of one layer with random weights."""
    directory = tmp_path_factory.mktemp("base")
    words = ["<pad>", "<unk>", *" ".join(WORDS.values()).split()]
    model = tokenizers.models.WordLevel({x: i for i, x in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    tokenizer.save_pretrained(directory)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 20}
    torch.manual_seed(0)
    config = transformers.BertConfig(num_attention_heads=2, initializer_range=0.3, **size)
    transformers.BertModel(config).save_pretrained(directory)
    return directory


def write_parquet(path, columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_the_f1_of_a_run_is_that_of_its_saved_model_text_by_text(base, tmp_path):
    """On one process and two, whose last batch is filled up. Labels are strings or integers, in
    Parquet or JSON lines; what the run has written loads in transformers."""
    train, test = texts(128, seed=1), texts(43, seed=2)
    numbers = {"cold": 20, "hot": 3, "wet": 100}
    kinds = {"strings": {x: x for x in WORDS}, "numbers": numbers}
    runs = []
    for kind, names in kinds.items():
        labels = [names[label] for _, label in train]
        columns = {"words": [text for text, _ in train], "label": labels}
        write_parquet(tmp_path / f"{kind}.parquet", columns)
        lines = [json.dumps({"words": x, "label": names[label]}) + "\n" for x, label in test]
        (tmp_path / f"{kind}.jsonl").write_text("".join(lines))
        flags = ["--cpu", "--base", base, "--train", tmp_path / f"{kind}.parquet", "--text"]
        flags += ["words", "--test", tmp_path / f"{kind}.jsonl", "--lr", 3e-3, "--epochs", 3]
        runs += [flags]
    script = make(tmp_path / "mine.py", "ddp", "text_classification")
    flags = ["--batch-size", 8, "--global-batch-size", 16]
    described = [(1, script, [*runs[0], *flags]), (2, script, [*runs[1], *flags])]
    for run, names in zip(train_forked(tmp_path, *described), kinds.values(), strict=True):
        classify = transformers.pipeline("text-classification", str(run.directory), device="cpu")
        known = classify.model.config.id2label
        assert [*known.values()] == [str(x) for x in sorted(names.values())]
        predicted = [x["label"] for x in classify([text for text, _ in test])]
        truth = [str(names[label]) for _, label in test]
        assert len({*predicted}) == 3 and predicted != truth, "or it would be no test"
        expected = sklearn.metrics.f1_score(truth, predicted, average="macro", zero_division=0)
        assert run.summary["test_macro_f1"] == pytest.approx(expected, abs=1e-6)
        right = sum(a == b for a, b in zip(truth, predicted, strict=True))
        assert run.summary["test_accuracy"] == pytest.approx(right / 43, abs=1e-6)


def test_an_adapter_has_the_new_head_of_a_classifier(base, tmp_path):
    """Loaded twice, onto a head that is random each time, it gives the accuracy of the run."""
    for name, samples in {"train": texts(128, seed=1), "test": texts(43, seed=2)}.items():
        lines = [json.dumps({"text": text, "label": label}) + "\n" for text, label in samples]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    script = make(tmp_path / "mine.py", "ddp", "text_classification", "lora")
    flags = ["--cpu", "--base", base, "--batch-size", 16, "--lr", 1e-2, "--epochs", 2]
    flags += ["--train", tmp_path / "train.jsonl", "--test", tmp_path / "test.jsonl"]
    (run,) = train_forked(tmp_path, (1, script, flags))
    auto = transformers.AutoModelForSequenceClassification
    options = {"tokenizer": str(run.directory), "device": "cpu"}
    truth = [f"LABEL_{sorted(WORDS).index(label)}" for _, label in samples]
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = auto.from_pretrained(run.directory / "adapter", num_labels=3)
        classify = transformers.pipeline("text-classification", model, **options)
        predicted = [x["label"] for x in classify([text for text, _ in samples])]
        right = sum(a == b for a, b in zip(truth, predicted, strict=True))
        assert right / 43 == pytest.approx(run.summary["test_accuracy"], abs=1e-6)
    with pytest.raises(ValueError, match="Unrecognized model"):  # not with other weights at random
        auto.from_pretrained(run.directory)


def test_a_label_that_training_does_not_have_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("text_classification.exit_with_error", exit_by_exception)
    write_parquet(tmp_path / "a.parquet", {"text": ["a"], "label": [3]})
    args = SimpleNamespace(text="text", label="label", train="train.parquet")
    config = SimpleNamespace(label2id={"1": 0, "2": 1})
    with pytest.raises(Exit, match="the label 3"):
        text_classification.labelled_texts(str(tmp_path / "a.parquet"), config, args)


@pytest.fixture
def of_table(tmp_path):
    """The flags of table."""
    common = {"target": "y", "batch_size": 9, "output_dir": tmp_path, "by_order": True}
    return SimpleNamespace(table=str(tmp_path / "t.parquet"), **common)


def test_a_table_in_csv_has_the_same_rows_and_other_columns_are_named(
    of_table, tmp_path, monkeypatch
):
    monkeypatch.setattr("table.exit_with_error", exit_by_exception)
    write_parquet(of_table.table, {"a": [*range(20)], "y": [x / 7 for x in range(20)]})
    text = "".join(f"{x},{x / 7!r}\n" for x in range(20))
    (tmp_path / "t.csv").write_text(f"a,y\n{text}")
    (tmp_path / "wrong.csv").write_text("a,day,name,y\n1,2024-01-01,b,2\n")
    values = []
    for of_table.table in (str(tmp_path / x) for x in ("t.parquet", "t.csv")):
        train, _ = table.load_data(of_table, SimpleNamespace(device="cpu"))
        values.append(train.dataset.values)
    assert torch.equal(*values)
    of_table.table = str(tmp_path / "wrong.csv")
    with pytest.raises(Exit, match=r"no numbers: day \(date32\[day\]\), name \(string\)"):
        table.column_names(of_table)
    of_table.table = str(tmp_path / "none.csv")
    with pytest.raises(Exit, match=r"--table .*none.csv: "):
        table.column_names(of_table)


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
