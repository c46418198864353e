# SPDX-License-Identifier: Apache-2.0
"""The scripts that others.py knows, and their inputs: data, models with random weights and metrics,
in the places where the scripts look for them without a network."""

import csv
import importlib
import json
import os
import pickle
import random
import re
from pathlib import Path

import numpy
import torch
from PIL import Image

GLUE = """--seed 42 --learning_rate 1e-3 --num_train_epochs 2 --per_device_eval_batch_size 4
    --train_file train.csv --validation_file val.csv --model_name_or_path {model}
    --per_device_train_batch_size {batch} --output_dir {out}"""
EXAMPLE = "--cpu --checkpointing_steps 5 --output_dir {out}"
STEP = "--resume_from_checkpoint {out}/step_{step}"
# A script's command line, and what it needs to resume; steps of an epoch and of the training, and
# the step of the newest checkpoint in mid-epoch, two steps before the script is killed.
SCRIPTS = {
    "run_glue_no_trainer.py": (f"{GLUE} --checkpointing_steps 5", STEP, 12, 24, 15),
    "run_glue.py": (
        f"{GLUE} --do_train --do_eval --use_cpu --report_to none --save_steps 5 --logging_steps 1",
        "--resume_from_checkpoint {out}/checkpoint-{step}",
        *(12, 24, 15),
    ),
    "complete_nlp_example.py": (EXAMPLE, STEP, 9, 27, 15),
    "complete_cv_example.py": (f"{EXAMPLE} --data_dir pets", STEP, 4, 12, 5),
    "train.py": (  # nanoGPT's, which has no epochs
        """--device=cpu --compile=False --dtype=float32 --dataset=tiny --eval_interval=5
        --eval_iters=2 --batch_size=8 --gradient_accumulation_steps=1 --block_size=32 --n_layer=2
        --n_head=2 --n_embd=32 --dropout=0.1 --max_iters=23 --warmup_iters=3 --out_dir={out}""",
        "--init_from=resume",
        *(24, 24, 15),
    ),
    "ours.py": (
        """--base {model} --train train.jsonl --test val.jsonl --global-batch-size 8 --epochs 2
        --batch-size {batch} --cpu --checkpoint-every 5 --lr 1e-3 --log-every 1
        --output-dir {out}""",
        "",
        *(12, 24, 15),
    ),
}
ONE_PROCESS = ["train.py"]  # its device is cuda if it has several
FIXED_BATCH = ["complete_nlp_example.py", "complete_cv_example.py", *ONE_PROCESS]
# Imported before the ranks are forked.
MODULES = "datasets evaluate torchvision accelerate transformers.trainer rich.progress".split()
MODULES += ["transformers.models.bert.modeling_bert", "scipy.io", "torch._dynamo"]
ACCURACY = r"(?:'accuracy': |eval_accuracy *= *|epoch \d: |\"?test_accuracy\"?:? )([\d.]+)"

WORDS = [f"w{index}" for index in range(200)]
# `evaluate.load("accuracy")` reads accuracy/accuracy.py in the current directory.
METRIC = """
import datasets
import evaluate

class Metric(evaluate.Metric):
    def _info(self):
        kinds = {"predictions": datasets.Value("int32"), "references": datasets.Value("int32")}
        features = datasets.Features(kinds)
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        hits = sum(a == b for a, b in zip(predictions, references))
        return {"accuracy": hits / len(references)}
"""
# In place of timm, whose resnet50d needs pretrained weights.
TIMM = """
import torch
from torch import nn

class Model(nn.Module):
    default_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)}

    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 64))
        self.fc = nn.Linear(64, classes)

    def forward(self, images):
        return self.fc(torch.relu(self.features(images)))

    def get_classifier(self):
        return self.fc

def create_model(name, pretrained, num_classes):
    return Model(num_classes)
"""


def text(generator, longest):
    return " ".join(generator.choices(WORDS, k=generator.randrange(3, longest)))


def write_texts(directory, generator):
    """Pairs of sentences with two labels: train.csv and val.csv, the same as JSON lines, and, with
    an index, in a folder that `load_dataset` takes for a data set of the Hub."""
    glue = directory / "nyu-mll/glue"
    glue.mkdir(parents=True)
    files = "\n".join(f"  - split: {x}\n    path: {x}.csv" for x in ("train", "validation"))
    card = f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}\n---\n"
    (glue / "README.md").write_text(card)
    sizes = {"train.csv": 96, "val.csv": 37, "nyu-mll/glue/train.csv": 288}
    for name, size in (sizes | {"nyu-mll/glue/validation.csv": 37}).items():
        rows = [[text(generator, 30), text(generator, 20), index % 2] for index in range(size)]
        path = directory / name
        head = ["sentence1", "sentence2", "label"]
        if path.parent == glue:
            head, rows = [*head, "idx"], [[*row, index] for index, row in enumerate(rows)]
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([head, *rows])
        lines = [json.dumps({"text": f"{x[0]} {x[1]}", "label": x[2]}) for x in rows]
        path.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")


def write_bert(directory, dropout):
    """A BERT of two layers, and a tokenizer whose words are those of the texts."""
    from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast  # reads the environment

    directory.mkdir()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (directory / "vocab.txt").write_text("\n".join([*special, *WORDS]) + "\n")
    tokenizer = BertTokenizerFast(vocab=str(directory / "vocab.txt"), model_max_length=128)
    tokenizer.save_pretrained(directory)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"intermediate_size": 128, "max_position_embeddings": 128, "vocab_size": 205}
    shape |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**shape)).save_pretrained(directory)


def make_inputs(directory):
    """Fill a new folder, in which the scripts run."""
    generator = random.Random(0)
    write_texts(directory, generator)
    for name, dropout in {"bert": 0.1, "bert-base-cased": 0.1, "bert-without-dropout": 0}.items():
        write_bert(directory / name, dropout)
    for name in ("accuracy", "glue"):
        (directory / name).mkdir()
        (directory / name / f"{name}.py").write_text(METRIC)
    (directory / "timm.py").write_text(TIMM)
    (directory / "pets").mkdir()
    for index in range(641):  # of one colour each, which a random crop does not change
        colour = tuple(generator.randrange(256) for _ in range(3))
        Image.new("RGB", (32, 32), colour).save(directory / f"pets/{'abc'[index % 3]}_{index}.jpg")
    tiny = directory / "data/tiny"
    tiny.mkdir(parents=True)
    for name in ("train", "val"):
        tokens = [generator.randrange(1, 1000) for _ in range(20000)]
        numpy.array(tokens, dtype=numpy.uint16).tofile(tiny / f"{name}.bin")
    with (Path(tiny) / "meta.pkl").open("wb") as file:
        pickle.dump({"vocab_size": 1000}, file)


def prepare(inputs, cache):
    """Make the inputs, and import what the scripts import. Libraries read the environment then."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cache), "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for name in MODULES:
        importlib.import_module(name)
    make_inputs(inputs)


def correct(name, run):
    """Return how many test samples a training got right, by its last accuracy, and of how many."""
    summary = Path(run.out, "summary.json")
    text = run.output() + (summary.read_text() if summary.exists() else "")
    samples, unit = (129, 100) if name == "complete_cv_example.py" else (37, 1)
    return float(re.findall(ACCURACY, text)[-1]) / unit * samples, samples
