"""What text_to_image computes, and that diffusers loads it. That its copies train the same in every
way: test_adapting.py."""

import io
from functools import partial
from types import SimpleNamespace

import numpy
import pyarrow.parquet
import pytest
import torch
import torchvision
import toy
from composed import make, train
from conftest import load
from lazy import diffusers, lib, text_to_image
from PIL import Image
from safetensors.torch import save_file

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory of a tiny Stable Diffusion, with images beside it: 32 of them."""
    path = tmp_path_factory.mktemp("toy")
    toy.make("painter", path)
    rows = path / "captions/metadata.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:32]))
    return path / "painter"


@pytest.fixture
def args(base):
    sizes = {"size": 32, "batch_size": 5, "caption": "text"}
    return SimpleNamespace(base=str(base), images=str(base.parent / "captions"), **sizes)


def test_a_step_sees_images_and_captions_as_their_models_encode_them(base, args, tmp_path):
    """Of a stream, in its step, and before the first step. Of a stream these are the last 40 rows,
    which workers read as bytes. The other images are wide: the model sees the middle."""
    mine = load("examples/streaming.text_to_image.py")
    given = {**vars(args), "images": f"{args.images}-?.parquet", "caption": "caption"}
    given |= {"lanes": 2, "block": 8, "workers": 0, "columns": None, "test": None, "seed": 0}
    given |= {"global_batch_size": 5, "output_dir": tmp_path}
    data = mine.load_data(SimpleNamespace(**given), None)[1].dataset
    assert len(data) == 40
    rows = pyarrow.parquet.read_table(base.parent / "captions-1.parquet").to_pylist()[-40:]
    images = [Image.open(io.BytesIO(row["image"]["bytes"])) for row in rows]
    pairs = [(tmp_path / f"{number}.png", row["caption"]) for number, row in enumerate(rows)]
    for number, (image, (path, _)) in enumerate(zip(images, pairs, strict=True)):
        wide = Image.new("RGB", (32 + 2 * (number % 7), 32))
        wide.paste(image, (number % 7, 0))
        wide.save(path)
    encoded = lib.latents.encode(pairs, args, "cpu")
    scheduler = diffusers.DDPMScheduler.from_pretrained(base / "scheduler")
    before, found = lib.latents.Noisy(encoded, scheduler), []

    def model(*inputs, return_dict):
        found.append([*inputs])
        return [inputs[0]]

    for samples, compute_loss in ((data, mine.compute_loss), (before, text_to_image.compute_loss)):
        batch = []
        for index in range(0, 40, 9):
            torch.manual_seed(index)
            batch.append(samples[index])
        losses = compute_loss(model, torch.utils.data.default_collate(batch), args)["loss"]
        found[-1].append(losses)
    # In float32 the convolutions of a batch round otherwise than those of one image.
    close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3)
    close(*found)
    noisy, times, texts, target = torch.utils.data.default_collate(batch)
    close(found[1], [noisy, times, texts, (noisy - target).square().mean((1, 2, 3))])

    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(base)
    options = {"padding": "max_length", "return_tensors": "pt"}
    for index in range(0, 40, 9):
        pixels = torch.tensor(numpy.array(images[index])).permute(2, 0, 1)[None]
        tokens = pipeline.tokenizer(pairs[index][1], **options).input_ids
        with torch.no_grad():
            latents = pipeline.vae.encode(pixels / 127.5 - 1).latent_dist
            text = pipeline.text_encoder(tokens)[0]
        scale = pipeline.vae.config.scaling_factor
        exact = latents.mean * scale, latents.std * scale, text
        close([x[index] for x in encoded], [x[0] for x in exact])


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_noise_and_target_are_those_of_the_formula(kind):
    """Of arXiv:2006.11239, equation 4, and arXiv:2202.00512, section 4: a sample's random numbers
    are the same whenever it is read after the same seed."""
    scheduler = diffusers.DDPMScheduler(prediction_type=kind)
    mean, deviation, texts = torch.randn(3, 4, 8, 8), torch.rand(3, 4, 8, 8), torch.randn(3, 5, 2)
    samples = lib.latents.Noisy([mean, deviation, texts], scheduler)
    assert len(samples) == 3
    betas = torch.linspace(0.0001, 0.02, 1000, dtype=torch.float64)
    for seed in range(9):
        torch.manual_seed(seed)
        noisy, time, text, target = samples[1]
        torch.manual_seed(seed)
        clean = (mean[1] + deviation[1] * torch.randn(4, 8, 8)).double()
        noise = torch.randn(4, 8, 8).double()
        share = (1 - betas[: time + 1]).prod()
        expected = share.sqrt() * clean + (1 - share).sqrt() * noise
        velocity = share.sqrt() * noise - (1 - share).sqrt() * clean
        torch.testing.assert_close(noisy.double(), expected, rtol=1e-4, atol=1e-4)
        exact = noise if kind == "epsilon" else velocity
        torch.testing.assert_close(target.double(), exact, rtol=1e-4, atol=1e-4)
        assert text.equal(texts[1])


def test_every_tenth_image_is_in_the_test_set_and_no_other(args, monkeypatch):
    monkeypatch.setattr("text_to_image.encoded_once", lambda rows, *_: [torch.zeros(len(rows))])
    train, test = (x.dataset.indices for x in text_to_image.load_data(args, None))
    assert [*test] == [0, 10, 20, 30] and sorted([*train, *test]) == [*range(32)]


def test_diffusers_loads_the_whole_model_that_is_saved(args, tmp_path):
    args.output_dir = str(tmp_path)
    model = text_to_image.build_model(args)
    whole = {name: x + 0.01 for name, x in model.state_dict().items()}
    save_file(whole, tmp_path / "model.safetensors")
    text_to_image.save_for_diffusers(SimpleNamespace(is_main_process=True), model, args)
    loaded = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "unet")
    torch.testing.assert_close(loaded.state_dict(), whole, rtol=0, atol=0)


def test_diffusers_loads_the_adapter_of_a_run_and_makes_its_images(base, args, tmp_path):
    script = make(tmp_path / "mine.py", "ddp", "text_to_image", "lora")
    flags = ["--cpu", "--base", base, "--images", args.images, "--size", 32, "--batch-size", 8]
    flags += ["--prompt", "a red ellipse on blue", "--lr", 1e-2, "--max-steps", 3]
    (run,) = train(tmp_path, (1, script, flags))
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(base)
    options = {"num_inference_steps": 2, "num_images_per_prompt": 4, "output_type": "pt"}
    options |= {"height": 32, "width": 32}
    made = numpy.array(Image.open(run.directory / "samples-00000003.png"), dtype=int)
    for is_adapted in (False, True):
        if is_adapted:
            pipeline.load_lora_weights(run.directory)
        options["generator"] = torch.Generator().manual_seed(0)
        images = pipeline("a red ellipse on blue", **options).images
        torchvision.utils.save_image(images, tmp_path / "expected.png")
        expected = numpy.array(Image.open(tmp_path / "expected.png"), dtype=int)
        assert (abs(made - expected).max() <= 1) == is_adapted


def test_a_run_reads_what_an_earlier_one_has_encoded(args, tmp_path, monkeypatch):
    """Of the same images and captions. Of others, by another model, or at another size, it encodes
    again."""
    calls = []
    monkeypatch.setattr("lib.latents.encode", lambda *_: calls.append(1) or torch.ones(1))
    args.output_dir = args.images = str(tmp_path)
    image = tmp_path / "0.png"
    image.write_text("one")
    changes = ("caption", "a"), ("caption", "b"), ("size", 64), ("base", "other"), ("image", "two")
    for number, (name, value) in enumerate(changes, 1):
        setattr(args, name, value)
        if name == "image":
            image.write_text(value)
        for _ in range(2):
            rows = [(image, args.caption)]
            found = lib.latents.encoded_once(rows, args, SimpleNamespace(device="cpu"))
            assert found.equal(torch.ones(1)) and len(calls) == number
