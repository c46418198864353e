"""What text_to_image computes, and that diffusers loads it. That its copies train the same in every
way: test_adapting.py."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pyarrow.parquet
import pytest
import torch
import torchvision
import toy
from composed import make
from conftest import load
from lazy import diffusers, lib, lora, text_to_image, transformers
from PIL import Image
from processes import train_forked
from safetensors.torch import save_file

pytestmark = pytest.mark.slow

IMPORTS = ["peft", "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion"]
IMPORTS += ["diffusers.models.unets.unet_2d_condition", "transformers.models.clip.modeling_clip"]


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


def test_images_and_captions_are_encoded_as_their_models_do(base, args):
    """Each alone, by the models themselves."""
    rows = [(base.parent / f"captions/{i}.webp", f"{'a ' * i}red ellipse") for i in range(7)]
    for i in range(7):  # the model reads the middle of a wide image
        wide = Image.new("RGB", (32 + 2 * i, 32))
        wide.paste(Image.open(base.parent / f"captions/{i}.png"), (i, 0))
        wide.save(base.parent / f"captions/{i}.webp", lossless=True)
    means, deviations, texts = lib.latents.encode(rows, args, "cpu")
    vae = diffusers.AutoencoderKL.from_pretrained(base, subfolder="vae")
    model = transformers.CLIPTextModel.from_pretrained(base, subfolder="text_encoder")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base, subfolder="tokenizer")
    for i, (_, caption) in enumerate(rows):
        image = Image.open(base.parent / f"captions/{i}.png")
        pixels = torch.tensor(list(image.tobytes())).view(1, 32, 32, 3).permute(0, 3, 1, 2)
        with torch.no_grad():
            exact = vae.encode(pixels / 127.5 - 1).latent_dist
            tokens = tokenizer(caption, padding="max_length", return_tensors="pt").input_ids
            text = model(tokens)[0]
        scale = vae.config.scaling_factor
        # In float32 the convolutions of a batch round otherwise than those of one image.
        close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3)
        close(means[i], exact.mean[0] * scale)
        close(deviations[i], exact.std[0] * scale)
        close(texts[i], text[0])


def test_a_step_of_a_stream_has_the_inputs_and_targets_of_what_is_encoded_before_it(
    base, args, tmp_path
):
    """Of the test set, the last 40 rows, which workers read as bytes."""
    mine = load(make(tmp_path / "mine.py", "ddp", "text_to_image", "streaming"))
    words = ["--base", base, "--images", base.parent / "captions-?.parquet", "--size", 32]
    words += ["--caption", "caption", "--lanes", 2, "--output-dir", tmp_path]
    with mock.patch("sys.argv", ["mine.py", *map(str, words)]):
        given = mine.parse_args("", mine.add_technique_flags, mine.add_flags)
    mine.set_batch_sizes(given, 1, 1)
    data = mine.load_data(given, None)[1].dataset
    rows = pyarrow.parquet.read_table(base.parent / "captions-1.parquet").to_pylist()[-len(data) :]
    assert len(data) == 40
    files = [tmp_path / f"{i}.png" for i in range(len(rows))]
    for file, row in zip(files, rows, strict=True):
        file.write_bytes(row["image"]["bytes"])
    texts = [row["caption"] for row in rows]
    encoded = lib.latents.encode([*zip(files, texts, strict=True)], args, "cpu")
    before = lib.latents.Noisy(encoded, diffusers.DDPMScheduler.from_pretrained(base / "scheduler"))
    found = []

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
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


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


def test_the_loss_is_the_squared_error_at_each_image_s_time_and_caption(args):
    torch.manual_seed(0)
    model = text_to_image.build_model(args).eval()
    noisy, target = torch.randn(2, 2, 4, 16, 16)
    batch = noisy, torch.tensor([3, 500]), torch.randn(2, 7, 64), target
    losses = text_to_image.compute_loss(model, batch, args)["loss"]
    for i, loss in enumerate(losses):
        predicted = model(noisy[i : i + 1], batch[1][i], batch[2][i : i + 1]).sample[0]
        torch.testing.assert_close(loss, torch.nn.functional.mse_loss(predicted, target[i]))


def test_every_tenth_image_is_in_the_test_set_and_no_other(args, monkeypatch):
    monkeypatch.setattr("text_to_image.encoded_once", lambda rows, *_: [torch.zeros(len(rows))])
    train, test = (x.dataset.indices for x in text_to_image.load_data(args, None))
    assert [*test] == [0, 10, 20, 30] and sorted([*train, *test]) == [*range(32)]


def answer(model):
    torch.manual_seed(0)
    inputs = torch.randn(2, 4, 16, 16), torch.tensor([3, 500]), torch.randn(2, 7, 64)
    with torch.no_grad():
        return model.eval()(*inputs, return_dict=False)[0]


def test_diffusers_loads_what_is_saved_an_adapter_or_the_whole_model(args, tmp_path):
    args.output_dir = str(tmp_path)
    main = SimpleNamespace(is_main_process=True)
    model = text_to_image.build_model(args)
    for parameter in model.parameters():
        parameter.data += 0.01
    whole = {name: x.clone() for name, x in model.state_dict().items()}
    save_file(whole, tmp_path / "model.safetensors")
    text_to_image.save_for_diffusers(main, model, args)
    loaded = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "unet")
    torch.testing.assert_close(loaded.state_dict(), whole, rtol=0, atol=0)

    trained = lora.with_lora(text_to_image.build_model(args))
    before = answer(trained)
    values = trained.state_dict().items()
    adapter = {name: torch.randn_like(x) for name, x in values if "lora_" in name}
    save_file(adapter, tmp_path / "model.safetensors")
    text_to_image.save_for_diffusers(main, trained, args)
    trained.load_state_dict(adapter, strict=False)
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(args.base)
    torch.testing.assert_close(answer(pipeline.unet), before)
    pipeline.load_lora_weights(tmp_path)
    torch.testing.assert_close(answer(pipeline.unet), answer(trained))
    assert not torch.allclose(answer(trained), before, rtol=1e-3)


@pytest.mark.redundant
def test_diffusers_loads_the_adapter_of_a_run(base, args, tmp_path):
    script = make(tmp_path / "mine.py", "ddp", "text_to_image", "lora")
    flags = ["--cpu", "--base", base, "--images", args.images, "--size", 32, "--batch-size", 8]
    flags += ["--prompt", "a red ellipse on blue", "--lr", 1e-2, "--max-steps", 3]
    (run,) = train_forked(tmp_path, (2, script, flags), imports=IMPORTS)
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(base)
    pipeline.load_lora_weights(run.directory)
    options = {"num_inference_steps": 2, "num_images_per_prompt": 4, "output_type": "pt"}
    options |= {"height": 32, "width": 32, "generator": torch.Generator().manual_seed(0)}
    images = pipeline("a red ellipse on blue", **options).images
    torchvision.utils.save_image(images, tmp_path / "expected.png")
    pictures = tmp_path / "expected.png", run.directory / "samples-00000003.png"
    one, other = (torchvision.io.read_image(path).int() for path in pictures)
    assert (one - other).abs().max() <= 1


def test_a_run_reads_what_an_earlier_one_has_encoded(args, tmp_path, monkeypatch):
    """Of the same images and captions. Of others, by another model, or at another size, it encodes
    again."""
    calls = []

    def encode(rows, *_):
        calls.append(rows)
        return torch.ones(len(rows))

    monkeypatch.setattr("lib.latents.encode", encode)
    args.output_dir = args.images = str(tmp_path)
    image = tmp_path / "0.png"
    image.write_text("one")
    caption = "a"
    for number in range(1, 6):
        for _ in range(2):
            rows = [(image, caption)]
            found = lib.latents.encoded_once(rows, args, SimpleNamespace(device="cpu"))
            assert found.equal(torch.ones(1)) and len(calls) == number
        if number == 1:
            caption = "b"
        elif number == 2:
            args.size = 64
        elif number == 3:
            args.base = "another"
        else:
            image.write_text("another")
