"""What vision_chat computes and saves, against transformers, with models that join images by their
patches and that pad them. That its copies train the same in every way: test_adapting.py."""

import json
from types import SimpleNamespace

import pytest
import torch
import toy
from composed import close, loss_of_step, make, train
from conftest import Exit
from lazy import lib, transformers, vision_chat
from PIL import Image

# How transformers opens an image is deprecated.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The image decoding")]


def idefics3(folder):
    """An Idefics3, which cuts an image into tiles. Its tokenizer begins each text with a token."""
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    special = f"<s> <|user|> <|assistant|> <|end|> <image> <global-img> {' '.join(tiles)} </s>"
    names = {"bos_token": "<s>", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    tokenizer = toy.bpe_tokenizer(special, "<s> $A", **names)
    sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    images = transformers.Idefics3ImageProcessor(**sizes)
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    template = toy.IMAGE_CHAT_TEMPLATE.replace(place, "<image>")
    options = {"image_seq_len": 4, "chat_template": template}
    processor = transformers.Idefics3Processor(images, tokenizer, **options)
    text = {"model_type": "llama", "vocab_size": len(tokenizer), "eos_token_id": 3, **toy.SMALL}
    vision = {"image_size": 32, "patch_size": 8, **toy.SMALL}
    config = transformers.Idefics3Config(text_config=text, vision_config=vision, image_token_id=4)
    toy.save(folder / "idefics3", processor, transformers.Idefics3ForConditionalGeneration(config))


def message(role, *parts):
    """Integers are images."""
    forms = [
        {"type": "text", "text": x} if isinstance(x, str) else {"type": "image", "path": f"{x}.png"}
        for x in parts
    ]
    return {"role": role, "content": forms}


CHATS = [
    [message("user", "no image"), message("assistant", "none")],
    [message("user", 0, "What is it?"), message("assistant", "a thing")],
    [
        message("user", "See", 1, " and ", 2),
        message("assistant", "two longer things"),
        message("user", "more", 3),
        message("assistant", "Yes, it is", " one"),
    ],
    [message("user", 2, 2, "the same?"), message("assistant", "yes")],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats")
    for index, size in enumerate([(30, 70), (64, 64), (90, 35), (40, 33)]):
        Image.effect_noise(size, 99).convert("RGB").save(path / f"{index}.png")
    torch.manual_seed(0)
    toy.qwen(path)
    idefics3(path)
    return path


def arguments(folder, kind):
    args = {"base": folder / kind, "base_dtype": "float32", "chats": folder / "chats.jsonl"}
    args |= {"train_vision": True, "chat_template": None, "length": 1000, "output_dir": folder}
    return SimpleNamespace(**args)


@pytest.fixture(params=["qwen", "idefics3"])
def args(request, folder):
    return arguments(folder, request.param)


@pytest.fixture
def processor(args):
    return lib.image_chat.chat_processor(args, SimpleNamespace(is_main_process=False))


def dataset(processor, args, chats=CHATS):
    lines = [{"messages": messages} for messages in chats]
    rows = [lib.image_chat.samples_with_images(processor, x, args.chats, 1, args) for x in lines]
    samples = [lib.image_chat.packed(sample) for row in rows for sample in row]
    sizes = torch.tensor([*map(len, samples)])
    ends = sizes.cumsum(0)
    return lib.image_chat.ImageChats(torch.cat(samples), ends - sizes, ends)


def marked(template):
    """A template that marks the contents of answers, and their ends, as transformers finds them."""
    behind = template.partition("<|{{ x.role }}|>")[2]
    content = behind.partition("{% endfor %}{% if add_generation_prompt")[0]
    generation = f"{{% generation %}}{content}{{% endgeneration %}}"
    both = f"{{% if x.role == 'assistant' %}}{generation}{{% else %}}{content}{{% endif %}}"
    return template.replace(content, both)


def test_tokens_and_targets_are_those_of_transformers(args, processor, folder, monkeypatch):
    """Of each conversation alone; ours are in one batch. The same if the template marks answers.
    One begins with the tokenizer's first token, and an answer ends with a token of one letter."""
    monkeypatch.chdir(folder)  # transformers opens an image from here
    usual = processor.chat_template
    other = "<s>" + usual.replace("<|end|>", "<|end|>{{ '\n' }}")
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    for template in (usual, marked(usual), other, marked(other)):
        processor.tokenizer.chat_template = template
        options["chat_template"] = template if "generation %" in template else marked(template)
        data = dataset(processor, args)
        batch = lib.image_chat.pad_image_chats(processor, [*data])
        counts = batch["attention_mask"][: len(CHATS)].sum(1).tolist()
        for index, (messages, count) in enumerate(zip(CHATS, counts, strict=True)):
            found = processor.apply_chat_template(messages, **options)
            [tokens], [mask] = found["input_ids"], found["assistant_masks"]
            assert batch["input_ids"][index, :count].tolist() == tokens
            expected = [x if own else -100 for x, own in zip(tokens, mask, strict=True)][1:]
            assert batch["targets"][index, : count - 1].tolist() == expected
            assert (batch["targets"][index, count - 1 :] == -100).all()
        assert not template.startswith("<s>") or data.lengths.tolist() == counts


def test_no_token_of_an_image_is_a_target(args, processor):
    """Even in an answer."""
    chat = [message("user", 0, "draw"), message("assistant", "Here", 1, "it is")]
    batch = lib.image_chat.pad_image_chats(processor, [*dataset(processor, args, [chat])])
    targets = batch["targets"][batch["targets"] != -100]
    text = processor.decode(targets).replace("<|vision_start|>", "").replace("<|vision_end|>", "")
    assert text == "Hereit is<|end|>"


def test_the_loss_is_that_of_transformers_however_a_batch_is_divided(args, processor):
    """Its gradient, too, in microbatches that are weighted as in a recipe's `train_step`. That of
    the vision encoder exists without images: DDP and FSDP wait for it on the other ranks."""
    model = vision_chat.build_model(args).double()
    parameters = [*model.parameters()]
    samples = [*dataset(processor, args)]
    losses, counts = [], []
    for sample in samples:
        inputs = lib.image_chat.pad_image_chats(processor, [sample])
        targets = inputs.pop("targets")
        labels = torch.cat([torch.full((1, 1), -100), targets[:, :-1]], dim=1)
        if not sample[2]:  # then there is a second text with a blank image
            inputs = {name: inputs[name][:1] for name in ("input_ids", "attention_mask")}
        losses.append(model(**inputs, labels=labels).loss)
        counts.append((targets != -100).sum())
    exact = (torch.stack(losses) * torch.stack(counts)).sum() / sum(counts)
    expected = torch.autograd.grad(exact, parameters)
    for size in (1, 2, 4):
        parts = [samples[i : i + size] for i in range(0, 4, size)]
        batches = [lib.image_chat.pad_image_chats(processor, part) for part in parts]
        loss = loss_of_step([vision_chat.compute_loss(model, x, args) for x in batches])
        assert loss.item() == close(exact.item())
        actual = torch.autograd.grad(loss, parameters)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


ASKED = {"type": "text", "text": "What?"}
BOTH = [{"type": "image"}, {"type": "image"}, ASKED]
NAMES = ["a.png", "b.png"]


@pytest.mark.parametrize(
    ("content", "beside"),
    [
        ([*({"type": "image", "path": name} for name in NAMES), ASKED], None),
        ([*({"type": "image", "image": f"file://{x}", "text": None} for x in NAMES), ASKED], []),
        ([*({"type": "image_url", "image_url": {"url": name}} for name in NAMES), ASKED], None),
        (BOTH, [{"path": name, "bytes": None} for name in NAMES]),
        ("<image><image>What?", NAMES),
        ("What?", NAMES),
    ],
)
def test_images_in_the_forms_of_data_sets(content, beside):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    found, names = lib.image_chat.with_images({"messages": messages, "images": beside})
    assert found == [message("system", "Be brief."), {"role": "user", "content": BOTH}]
    assert names == NAMES


def asking(*parts):
    return {"messages": [message("user", *parts), message("assistant", "a thing")]}


WRONG = {
    "0 images have a name, 1 a place": asking("<image>"),
    "'image' would be ignored": {**asking(0), "image": "0.png"},
    "'system' would be ignored": {**asking(0), "system": "Be brief."},
    "name all in one": {**asking(0), "images": ["1.png"]},
    r"9\.png: No such file or directory": asking(9),
    r"16\.png has more than 8 bits": asking(16),
    "of type video": {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
    "writes 1 images, not 0": asking("<|image_pad|>"),
    "more than --length": asking("What?" * 1000),
    "writes 0 images, not 1": asking(0, "a"),
}


@pytest.mark.parametrize("error", WRONG)
def test_a_row_that_means_something_else_is_an_error(error, folder, tmp_path):
    Image.new("I;16", (40, 40)).save(folder / "16.png")
    args = arguments(folder, "qwen")
    if error.startswith("writes 0"):
        args.chat_template = tmp_path / "texts.jinja"
        args.chat_template.write_text(toy.CHAT_TEMPLATE.replace("x.content", "x.content[-1].text"))
    processor = lib.image_chat.chat_processor(args, SimpleNamespace(is_main_process=False))
    with pytest.raises(ValueError, match=error):
        lib.image_chat.samples_with_images(processor, WRONG[error], args.chats, 1, args)


def test_a_base_without_images_is_an_error(tmp_path):
    toy.llama(tmp_path)
    with pytest.raises(Exit, match="its processor has no token for an image"):
        args = arguments(tmp_path, "llama")
        lib.image_chat.chat_processor(args, SimpleNamespace(is_main_process=False))


def test_an_image_that_cannot_be_read_has_its_file_and_row_in_the_error(folder, tmp_path):
    image = (folder / "0.png").read_bytes()
    (tmp_path / "0.png").write_bytes(image[: len(image) // 2])
    args = arguments(folder, "qwen")
    args.chats, args.test, args.global_batch_size = tmp_path / "cut.jsonl", None, 1
    text, with_image = (json.dumps(asking(x)) for x in ("a", 0))
    args.chats.write_text(f"{text}\n\n{with_image}\n{text}")
    processor = lib.image_chat.chat_processor(args, SimpleNamespace(is_main_process=False))
    train, _ = lib.image_chat.read_image_chats(processor, args)
    with pytest.raises(OSError, match=rf"cut\.jsonl, row 2: {tmp_path}/0\.png: "):
        train[1]


def test_the_pipeline_of_transformers_answers_as_the_run(folder, tmp_path, monkeypatch):
    """With what a run saves, and with an adapter and its frozen vision encoder: the same loss."""
    toy.write_json_lines(folder / "chats.jsonl", [{"messages": x} for x in CHATS * 10])
    flags = ["--cpu", "--base", folder / "qwen", "--chats", folder / "chats.jsonl"]
    flags += ["--batch-size", 4, "--max-steps", 4, "--lr", 1e-2]
    whole = make(tmp_path / "whole.py", "ddp", "vision_chat")
    adapted = make(tmp_path / "adapted.py", "sharded", "vision_chat", "lora")
    runs = train(tmp_path, (2, whole, [*flags, "--train-vision"]), (2, adapted, flags))
    args = arguments(folder, "qwen")
    monkeypatch.chdir(folder)
    for run, part in zip(runs, ("", "adapter"), strict=True):
        source = {"model": str(run.directory / part), "processor": str(run.directory)}
        pipe = transformers.pipeline("image-text-to-text", **source, device="cpu")
        chats = dataset(pipe.processor, args)
        test = lib.image_chat.pad_image_chats(pipe.processor, [*chats])
        model = lib.token_losses.with_token_losses(pipe.model)
        values = vision_chat.compute_loss(model, test, args)
        loss = (values["loss"] * values["weight"]).sum() / values["weight"].sum()
        assert loss.item() == pytest.approx(run.summary["test_loss"], rel=1e-5)
        assert loss < 6.8, "it has not trained"
        [answer] = pipe(text=CHATS[1][:1], max_new_tokens=3, return_full_text=False)
        assert isinstance(answer["generated_text"], str)
    names = [name for name in run.weights if ".lora_" in name]
    assert names and not any("visual" in name for name in names)
    args.train_vision = False
    frozen = vision_chat.build_model(args)
    assert not any(x.requires_grad for x in frozen.model.visual.parameters())
    assert all(x.requires_grad for x in frozen.model.language_model.parameters())
