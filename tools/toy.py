# SPDX-License-Identifier: Apache-2.0
"""Make toy data for an example, and a tiny model with random weights, in the real formats.

    python tools/toy.py chats

It writes into toy/ in the current directory. The same command always writes the same files. Models
and tokenizers are saved by transformers, in the format of the Hugging Face Hub.
"""

import argparse
import ast
import io
import json
import math
import os
import random
import struct
import sys
import tarfile
import wave
from pathlib import Path
from pydoc_data.topics import topics

import numpy
import torch
from PIL import Image, ImageDraw

os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
LINES = [line for text in topics.values() for line in text.splitlines() if line.strip()]
CHAT_TEMPLATE = (
    "{% for x in messages %}<|{{ x.role }}|>{{ x.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IMAGE_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ x.content }}",
    "{% for part in x.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}",
)
SMALL = {"hidden_size": 64, "intermediate_size": 128}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 4}


def write_json_lines(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def write_parquet(path, rows):
    """Write two files of several row groups, for streaming."""
    import pyarrow.parquet

    for part in range(2):
        table = pyarrow.Table.from_pylist(rows[part::2])
        pyarrow.parquet.write_table(table, f"{path}-{part}.parquet", row_group_size=40)


# ------------------------------------------------------------------------------------------- models
def bpe_tokenizer(special, template=None, **options):
    """Return a byte-level BPE tokenizer with 999 tokens: the special ones, which a string lists,
    are the first. `template` adds some of these to each text."""
    import tokenizers
    import transformers

    special = special.split()
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(LINES, 999, special_tokens=special, show_progress=False)
    if template:
        bpe._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=template,
            pair=template.replace("$A", "$A </s> $B:1"),
            special_tokens=[(name, index) for index, name in enumerate(special)],
        )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **options)


def save(path, tokenizer, model):
    """Save a model and its tokenizer as `from_pretrained` loads them."""
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)


def llama(folder):
    """A Llama in bf16, whose tokenizer has a chat template."""
    import transformers

    names = {"eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    tokenizer = bpe_tokenizer("<|user|> <|assistant|> <|end|>", **names)
    config = transformers.LlamaConfig(vocab_size=999, eos_token_id=2, **SMALL)
    save(folder / "llama", tokenizer, transformers.LlamaForCausalLM(config).bfloat16())


def bert(folder):
    """A BERT without a head."""
    import transformers

    names = {"pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    options = {"model_input_names": inputs, **names}
    tokenizer = bpe_tokenizer("<pad> <s> </s> <mask>", "<s> $A </s>", **options)
    config = transformers.BertConfig(vocab_size=999, **SMALL)
    save(folder / "bert", tokenizer, transformers.BertModel(config))


def clip(folder):
    """A CLIP for images of 32 x 32."""
    import transformers

    names = {"pad_token": "</s>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = bpe_tokenizer("<s> </s>", "<s> $A </s>", **names)
    text = {"vocab_size": 999, "bos_token_id": 0, "eos_token_id": 1, **SMALL}
    vision = {"image_size": 32, "patch_size": 8, **SMALL}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=64)
    save(folder / "clip", tokenizer, transformers.CLIPModel(config))


def t5(folder):
    """A T5."""
    import transformers

    names = {"pad_token": "<pad>", "eos_token": "</s>", "cls_token": "<pad>"}
    tokenizer = bpe_tokenizer("<pad> </s>", "$A </s>", **names)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = transformers.T5Config(vocab_size=999, **sizes, **tokens)
    save(folder / "t5", tokenizer, transformers.T5ForConditionalGeneration(config))


def wav2vec2(folder):
    """A wav2vec2 whose tokens are characters."""
    import transformers

    tokens = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcde"]
    (folder / "wav2vec2").mkdir(exist_ok=True)
    vocabulary = folder / "wav2vec2/vocab.json"
    vocabulary.write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    tokenizer = transformers.Wav2Vec2CTCTokenizer(vocabulary)
    extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    convolutions = {"conv_dim": [32] * 7, "feat_extract_norm": "layer"}
    convolutions |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    masks = {"mask_time_prob": 0.05, "mask_time_length": 2}
    config = transformers.Wav2Vec2Config(vocab_size=len(tokens), **convolutions, **masks, **SMALL)
    config.do_stable_layer_norm = True
    processor = transformers.Wav2Vec2Processor(extractor, tokenizer)
    save(folder / "wav2vec2", processor, transformers.Wav2Vec2ForCTC(config))


def whisper(folder):
    """A Whisper of two languages for utterances of 3 seconds, whose tokens are bytes."""
    import tokenizers
    import transformers

    names = "endoftext startoftranscript en zh translate transcribe notimestamps"
    special = [f"<|{name}|>" for name in names.split()]
    tokens = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), *special]
    numbers = {token: index for index, token in enumerate(tokens)}
    end, start, *_, plain = (numbers[x] for x in special)
    tokenizer = transformers.WhisperTokenizer(numbers, [], extra_special_tokens=special)
    extractor = transformers.WhisperFeatureExtractor(chunk_length=3)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    sizes = {"d_model": 64, "max_source_positions": 150, "max_target_positions": 32}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 128}
    ends |= {"decoder_start_token_id": start}
    config = transformers.WhisperConfig(vocab_size=len(tokens), **sizes, **ends)
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        max_length=32,
        is_multilingual=True,
        lang_to_id={x: numbers[x] for x in ("<|en|>", "<|zh|>")},
        task_to_id={x: numbers[f"<|{x}|>"] for x in ("translate", "transcribe")},
        no_timestamps_token_id=plain,
        **ends,
    )
    save(folder / "whisper", transformers.WhisperProcessor(extractor, tokenizer), model)


def qwen(folder):
    """A Qwen2.5-VL, whose processor has a chat template."""
    import transformers

    special = "<|user|> <|assistant|> <|end|> <|vision_start|> <|vision_end|> <|image_pad|>"
    special += " <|video_pad|>"
    tokenizer = bpe_tokenizer(special, eos_token="<|end|>", pad_token="<|end|>")
    numbers = {"vision_start_token_id": 3, "vision_end_token_id": 4}
    numbers |= {"image_token_id": 5, "video_token_id": 6}
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = {"vocab_size": 999, "bos_token_id": None, "eos_token_id": 2, **SMALL}
    text |= {"num_key_value_heads": 4, "rope_parameters": rotary}
    vision = {"depth": 2, "num_heads": 4, "hidden_size": 64, "intermediate_size": 128}
    vision |= {"out_hidden_size": 64, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **numbers)
    size = {"shortest_edge": 28**2, "longest_edge": 84**2}  # areas
    processor = transformers.Qwen2_5_VLProcessor(
        transformers.Qwen2VLImageProcessor(size=size),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(),
        chat_template=IMAGE_CHAT_TEMPLATE,
    )
    save(folder / "qwen", processor, transformers.Qwen2_5_VLForConditionalGeneration(config))


# ------------------------------------------------------------------------------------------- images
def stripes(direction):
    """Return a gray image of 80 x 80 with "rows" or "columns"."""
    line = numpy.random.randint(256, size=80, dtype=numpy.uint8)
    square = numpy.tile(line, (80, 1))
    return Image.fromarray(square.T if direction == "rows" else square)


def photos(folder, name="photos", rows=1):
    """Photos in folders of two classes."""
    for part, count in (("train", 160), ("test", 40)):
        for direction, share in (("rows", rows), ("columns", 1)):
            path = folder / name / part / direction
            path.mkdir(parents=True, exist_ok=True)
            for index in range(round(count * share)):
                stripes(direction).save(path / f"{index}.png")


def rare(folder):
    """Photos in folders of two classes, one of which is rare."""
    photos(folder, "rare", rows=0.2)


def shards(folder):
    """Images of two classes and their numbers in tar files, as webdataset writes them."""
    for part, count in (("train", 8), ("test", 2)):
        (folder / "shards" / part).mkdir(parents=True, exist_ok=True)
        for shard in range(count):
            with tarfile.open(folder / f"shards/{part}/{shard}.tar", "w") as tar:
                for index in range(40):
                    label = random.randrange(2)
                    image = io.BytesIO()
                    stripes(("rows", "columns")[label]).save(image, "png")
                    for kind, content in ("png", image.getvalue()), ("cls", str(label).encode()):
                        info = tarfile.TarInfo(f"{index:03}.{kind}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))


def boxes(folder):
    """Images with filled boxes of two gray values, and the boxes in COCO's format."""
    for part, count in (("train", 160), ("test", 40)):
        (folder / "boxes" / part).mkdir(parents=True, exist_ok=True)
        images, annotations = [], []
        for number in range(1, count + 1):
            image = Image.new("L", (random.randint(60, 96), random.randint(60, 96)))
            for _ in range(random.randrange(5)):
                x, y = random.randint(0, 30), random.randint(0, 30)
                width, height = random.randint(9, 30), random.randint(9, 30)
                category = random.randint(1, 2)
                image.paste(80 * category, (x, y, x + width, y + height))
                found = {"image_id": number, "category_id": category}
                annotations.append(found | {"bbox": [x, y, width, height]})
            image.save(folder / f"boxes/{part}/{number}.png")
            images.append({"id": number, "file_name": f"{number}.png"})
        content = {"images": images, "annotations": annotations}
        content["categories"] = [{"id": 1, "name": "dark"}, {"id": 2, "name": "light"}]
        (folder / f"boxes/{part}.json").write_text(json.dumps(content))


def masks(folder):
    """Images of rings, and masks with the number of each pixel's class."""
    (folder / "masks").mkdir(exist_ok=True)
    for index in range(160):
        corner = index, index // 2
        image = Image.radial_gradient("L").crop((*corner, corner[0] + 64, corner[1] + 64))
        image.save(folder / f"masks/{index}.jpg")
        image.point(lambda value: value // 64).save(folder / f"masks/{index}.png")


def draw_shape(path, width=32, height=32):
    """Save an image of a shape on a background. Return its caption."""
    colours = "red green blue yellow cyan black white orange".split()
    shape = random.choice(["ellipse", "rectangle"])
    front, back = random.sample(colours, 2)
    x, y = random.sample(range(18), 2)
    image = Image.new("RGB", (width, height), back)
    getattr(ImageDraw.Draw(image), shape)((x, y, x + 14, y + 14), fill=front)
    image.save(path)
    return f"a {front} {shape} on {back}"


def captions(folder):
    """Images of a shape on a background, their captions in JSON lines, and a CLIP."""
    (folder / "captions").mkdir(exist_ok=True)
    rows = []
    for index in range(640):
        caption = draw_shape(folder / f"captions/{index}.png")
        rows.append({"image": f"{index}.png", "caption": caption})
    write_json_lines(folder / "captions/captions.jsonl", rows)
    files = [{"bytes": (folder / "captions" / row["image"]).read_bytes()} for row in rows]
    rows = [row | {"image": file} for file, row in zip(files, rows, strict=True)]
    write_parquet(folder / "captions", rows)
    clip(folder)


def image_chats(folder):
    """Conversations with two images, one or none in JSON lines, and a Qwen2.5-VL."""
    path = folder / "image_chats"
    path.mkdir(exist_ok=True)
    rows = []
    for number in range(400):
        names = [f"{number}-{index}.png" for index in range(number % 3)]
        seen = [draw_shape(path / x, *random.choices(range(32, 85), k=2)) for x in names]
        text = {"type": "text", "text": "What is here?"}
        asked = [*({"type": "image", "path": name} for name in names), text]
        said = " and ".join(seen) or "Nothing"
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        rows.append({"messages": messages})
    write_json_lines(path / "chats.jsonl", rows)
    qwen(folder)


def painter(folder):
    """Images with captions as an image folder of datasets, and a tiny Stable Diffusion."""
    import diffusers
    import transformers

    captions(folder)
    rows = [json.loads(x) for x in (folder / "captions/captions.jsonl").read_text().splitlines()]
    rows = [{"file_name": row["image"], "text": row["caption"]} for row in rows]
    write_json_lines(folder / "captions/metadata.jsonl", rows)
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    size = {"block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 16}
    attention = {"cross_attention_dim": 64, "attention_head_dim": 8}
    unet = {"down_block_types": down, "up_block_types": up, **size, **attention}
    coder = {"down_block_types": ["DownEncoderBlock2D"] * 2}
    coder["up_block_types"] = ["UpDecoderBlock2D"] * 2
    text = transformers.CLIPTextConfig.from_pretrained(folder / "clip")
    cut = {"model_max_length": text.max_position_embeddings}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "clip", **cut)
    diffusers.StableDiffusionPipeline(
        vae=diffusers.AutoencoderKL(**coder, **size),
        text_encoder=transformers.CLIPTextModel(text),
        tokenizer=tokenizer,
        unet=diffusers.UNet2DConditionModel(**unet),
        scheduler=diffusers.DDPMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder / "painter")


# -------------------------------------------------------------------------------------------- texts
def text(folder):
    """A text in English, a text in Python, and a Llama."""
    code = [path.read_text("utf-8") for path in sorted(Path(ast.__file__).parent.glob("[ab]*.py"))]
    (folder / "text.txt").write_text("\n".join(LINES), "utf-8")
    (folder / "code.txt").write_text("\n".join(code), "utf-8")
    write_parquet(folder / "text", [{"text": line} for line in LINES])
    llama(folder)


def tokens(folder):
    """Tokens in a file without a header, in one with llm.c's, and in Megatron's two."""
    (folder / "tokens").mkdir(exist_ok=True)
    tokenizer = bpe_tokenizer("<s>")
    lines = [numpy.array(tokenizer.encode(f"{line}\n"), "<u2") for line in LINES[:6000]]
    plain, header, megatron = (lines[begin::3] for begin in range(3))
    numpy.concatenate(plain).tofile(folder / "tokens/plain.bin")
    numbers = numpy.array([20240520, 1, sum(map(len, header))] + [0] * 253, "<i4")
    content = b"".join(x.tobytes() for x in (numbers, *header))
    (folder / "tokens/header.bin").write_bytes(content)
    numpy.concatenate(megatron).tofile(folder / "tokens/megatron.bin")
    lengths = numpy.array([len(line) for line in megatron], "<i4")
    begins = 2 * (lengths.cumsum(dtype="<i8") - lengths)
    documents = numpy.arange(len(lengths) + 1, dtype="<i8")
    content = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, len(lengths), len(documents))
    content += b"".join(x.tobytes() for x in (lengths, begins, documents))
    (folder / "tokens/megatron.idx").write_bytes(content)


def chats(folder):
    """Conversations in JSON lines, and a Llama with a chat template."""
    rows = []
    for number in range(400):
        i, j = divmod(number, 20)
        said = [f"{i} + {j}", f"It is {i + j}.", "Thanks", "Any" + " time" * (i % 5)]
        roles = ["user", "assistant"] * 2
        messages = [{"role": x, "content": y} for x, y in zip(roles, said, strict=True)]
        rows.append({"messages": messages})
    write_json_lines(folder / "chats.jsonl", rows)
    write_parquet(folder / "chats", rows)
    llama(folder)


def preferences(folder):
    """Prompts with a chosen and a rejected answer in JSON lines, and a Llama."""
    rows = []
    for number in range(400):
        i, j = divmod(number, 20)
        answers = {"chosen": f"It is {i + j}.", "rejected": "No" + " idea" * (i % 5)}
        rows.append({"prompt": f"{i} + {j}", **answers})
    write_json_lines(folder / "preferences.jsonl", rows)
    llama(folder)


def prompts(folder):
    """Prompts, with a pattern of the completions that are rewarded, in JSON lines, and a Llama."""
    sums = [f"{i} + {j}" for i in range(20) for j in range(16)]
    write_json_lines(folder / "prompts.jsonl", [{"prompt": x, "pattern": "[a-z ]*"} for x in sums])
    llama(folder)


def documented_functions():
    """Return [(name, docstring)] of functions in Python's library."""
    found = []
    for path in sorted(Path(ast.__file__).parent.glob("[a-d]*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                found.append((node.name.replace("_", " "), doc))
    return found


def pairs(folder):
    """Names of Python functions and their docstrings in JSON lines, and a BERT."""
    rows = [{"anchor": name, "positive": doc} for name, doc in documented_functions()]
    write_json_lines(folder / "pairs.jsonl", rows)
    bert(folder)


def queries(folder):
    """The same as queries and documents, for training and test, and a BERT."""
    rows = [{"query": name, "document": doc} for name, doc in documented_functions()]
    test = rows[::10]
    write_json_lines(folder / "queries/test.jsonl", test)
    write_json_lines(folder / "queries/train.jsonl", [row for row in rows if row not in test])
    bert(folder)


def labels(folder):
    """Lines of text, labelled as "code" or "text", in JSON lines, and a BERT."""
    rows = [{"text": line, "label": "code" if "(" in line else "text"} for line in LINES[:3000]]
    test = rows[::10]
    write_json_lines(folder / "labels/test.jsonl", test)
    write_json_lines(folder / "labels/train.jsonl", [row for i, row in enumerate(rows) if i % 10])
    bert(folder)


def lines(folder):
    """Lines of text in two files, and a BERT."""
    (folder / "lines").mkdir(exist_ok=True)
    test = len(LINES) // 10
    (folder / "lines/test.txt").write_text("\n".join(LINES[:test]), "utf-8")
    (folder / "lines/train.txt").write_text("\n".join(LINES[test:]), "utf-8")
    bert(folder)


def entities(folder):
    """Sentences with tags of persons and places, in the format of CoNLL 2003, and a BERT."""
    people = ["Ada Lovelace", "Alan Turing", "Grace Hopper", "Emmy Noether", "Euler", "Gauss"]
    places = ["New York", "London", "Berlin", "Tokyo", "San Francisco", "Rome", "Lima"]
    verbs = ["flew to", "wrote a letter from", "was never in", "has lived near"]
    for part, count in (("train", 640), ("test", 80)):
        lines = []
        for _ in range(count):
            chunks = [(random.choice(people), "PER"), (random.choice(verbs), "")]
            chunks += [(random.choice(places), "LOC"), ("for a week .", "")]
            for chunk, kind in chunks:
                for index, word in enumerate(chunk.split()):
                    tag = f"{'I' if index else 'B'}-{kind}" if kind else "O"
                    lines.append(f"{word} {tag}\n")
            lines.append("\n")
        path = folder / f"entities/{part}.conll"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(lines))
    bert(folder)


def translations(folder):
    """Numbers in digits and in words, in JSON lines, and a T5."""
    words = "zero one two three four five six seven eight nine".split()
    numbers = random.sample(range(100, 100_000), 1100)
    rows = [
        {"source": " ".join(str(x)), "target": " ".join(words[int(digit)] for digit in str(x))}
        for x in numbers
    ]
    write_json_lines(folder / "translations/train.jsonl", rows[100:])
    write_json_lines(folder / "translations/test.jsonl", rows[:100])
    t5(folder)


# ---------------------------------------------------------------------------------- speech, a table
def speech(folder):
    """Wav files with a tone for each letter, and lists of their texts."""
    for part, count in (("train", 480), ("test", 48)):
        (folder / "speech" / part).mkdir(parents=True, exist_ok=True)
        lines = []
        for index in range(count):
            words = [random.sample("abcde", random.randint(1, 4)) for _ in range(3)]
            said = " ".join("".join(word) for word in words[: random.randint(1, 3)])
            pitches = [" abcde".index(letter) / 9 for letter in said]
            tones = 9999 * numpy.sin(numpy.outer(pitches, range(1600)))
            with wave.open(str(folder / f"speech/{part}/{index}.wav"), "wb") as file:
                file.setparams((1, 2, 16000, 0, "NONE", ""))
                file.writeframes(tones.astype("<i2"))
            lines.append(f"{part}/{index}.wav\t{said}\n")
        (folder / f"speech/{part}.tsv").write_text("".join(lines))


def recognizers(folder):
    """Speech as above, a wav2vec2 of characters, and a Whisper of bytes."""
    speech(folder)
    wav2vec2(folder)
    whisper(folder)


def table(folder, rows=20000):
    """Columns of numbers in Parquet: y = a sin(b) + c / 3."""
    import pyarrow.parquet

    a, b, c = 2 * math.pi * numpy.random.rand(3, rows)
    columns = {"a": a, "b": b, "c": c, "y": a * numpy.sin(b) + c / 3}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "table.parquet")


ALL = photos, rare, shards, boxes, masks, captions, image_chats, painter
ALL += text, chats, preferences, prompts, pairs, queries, labels, lines, entities, translations
ALL += speech, recognizers, table, tokens
KINDS = {kind.__name__: kind for kind in ALL}


def make(kind, folder):
    """Write the data of a kind into a folder."""
    folder.mkdir(exist_ok=True)
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)
    KINDS[kind](folder)


def main():
    listed = "\n".join(f"    {name:16}{kind.__doc__}" for name, kind in KINDS.items())
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=f"{__doc__}\n{listed}", formatter_class=layout)
    parser.add_argument("kind", choices=KINDS, metavar="KIND")
    kind = parser.parse_args().kind
    try:
        make(kind, Path("toy"))
    except ImportError as error:
        sys.exit(f"{error}: pip install {error.name}")
    print(f"toy/ has new files: {KINDS[kind].__doc__}")


if __name__ == "__main__":
    main()
