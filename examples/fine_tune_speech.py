# Parts of a copy, not a program: make new COPY=../mine.py WITH=fine_tune_speech
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained model to transcribe speech: wav2vec2 and its kind by CTC, or Whisper.

    python tools/toy.py recognizers
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py --base toy/wav2vec2 \\
        --train toy/speech/train.tsv --test toy/speech/test.tsv --epochs 20 --batch-size 8 --lr 1e-3

With --base toy/whisper --language english it is a Whisper. With a model of the Hub and your own
train.tsv and test.tsv:

    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --base facebook/wav2vec2-large-960h-lv60-self
    accelerate launch --config_file accelerate_configs/2gpu.yaml mine.py \\
        --base openai/whisper-small --language english --lr 1e-5

The toy models have random weights: --lr is higher for them. Wav files have 16 bits and 16 kHz. A
line of a list has the path of a file, relative to the list's folder, a tab, and the text. --train
and --test can be datasets, also of FLAC or MP3 at any rate, which torchcodec decodes. The tokenizer
of --base needs the characters of all texts: many have capitals alone. Every token counts once.
too_short is the share of tokens whose utterance is too short for CTC: they teach nothing. The
convolutions of wav2vec2 are not trained.

test_wer and test_cer are the shares of wrong words and characters of the whole test set, by greedy
decoding. `transformers.pipeline("automatic-speech-recognition", "runs/mine")` transcribes, Whisper
by a beam search. Models with feat_extract_norm "group", such as wav2vec2-base, normalize over the
padding of a batch; in all others an utterance has the same loss in any batch. On GPUs, the gradient
of torch's CTC is not deterministic: a resumed run differs by rounding.

Group: speech. Recipes: ddp, amp, sharded.
"""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCTC, AutoModelForSpeechSeq2Seq

from ddp_cifar import exit_with_error
from lib.fine_tuning import make_optimizer
from lib.generation import generate
from lib.order import Ordered, by_length
from lib.pretrained import load_pretrained, save_beside_weights
from lib.recognition import Transcribed, ctc, processor_of, task_of
from lib.utterances import count_errors
from speech import test_metrics


def add_flags(parser):
    """Add the example's flags, which a resumed run must repeat."""
    add = parser.add_argument
    add("--base", required=True, help="a directory, or a model's name on the Hub")
    add("--train", default="train.tsv", help="lines of path, tab, text, or a dataset (train.tsv)")
    add("--test", default="test.tsv", help="a list or dataset for evaluation (test.tsv)")
    add("--audio", default="audio", help="the column of sounds in a dataset (audio)")
    add("--text", default="text", help="the column of texts in a dataset (text)")
    add("--language", help="of the texts, such as english: for a Whisper of many languages")
    parser.set_defaults(lr=1e-4, batch_size=8, epochs=3, clip_norm=1.0)


def model_config(args):
    """Return the class of the model, and its configuration: no layer is skipped at random, or DDP
    would wait for its gradient."""
    config = AutoConfig.from_pretrained(args.base)
    for name in vars(config):
        if name.endswith("layerdrop"):
            setattr(config, name, 0.0)
    return AutoModelForSpeechSeq2Seq if config.is_encoder_decoder else AutoModelForCTC, config


def load_data(args, accelerator):
    """Return the DataLoaders for training and test, of batches of similar lengths."""
    auto, config = model_config(args)
    processor = processor_of(args.base, args.language)
    save_beside_weights(accelerator, args, auto, config, processor, **task_of(args.language))
    sources, names = (args.train, args.test), (args.audio, args.text)
    train_set, test_set = (Transcribed(x, processor, config, names) for x in sources)
    options = {"batch_size": args.batch_size, "num_workers": 2, "collate_fn": test_set.collate}
    train_set = Ordered(train_set, args.seed, by_length, train_set.lengths, args.global_batch_size)
    return DataLoader(train_set, drop_last=True, **options), DataLoader(test_set, **options)


def build_model(args):
    """Return the model, on the CPU."""
    auto, config = model_config(args)
    model = load_pretrained(auto, args, config)
    how = getattr(model, "generation_config", None)
    if getattr(how, "is_multilingual", False) != bool(args.language):
        exit_with_error("argument --language: a Whisper of many languages needs it, and no other")
    if hasattr(model, "freeze_feature_encoder"):
        model.freeze_feature_encoder()
    return model


def compute_loss(model, batch, args):
    """Return the mean loss of each text's tokens, and their number as its weight. In evaluations,
    "outputs" are those of `count_errors`."""
    inputs, lengths, labels, texts = batch
    plain = getattr(model, "module", model)
    weight = (labels != -100).sum(1).clamp(min=1)
    if plain.config.is_encoder_decoder:
        logits = model(**inputs, labels=labels, use_cache=False).logits.float()
        loss = F.cross_entropy(logits.mT, labels, reduction="none").sum(1)
        values = {"loss": loss / weight, "weight": weight}
    else:
        logits, blank = model(**inputs).logits, plain.config.pad_token_id
        lengths = plain._get_feat_extract_output_lengths(lengths)
        loss, too_short, best = ctc(logits, lengths, labels, blank)
        values = {"loss": loss / weight, "too_short": too_short, "weight": weight}
    if not torch.is_grad_enabled():
        if plain.config.is_encoder_decoder:
            best = generate(model, **inputs, num_beams=1, do_sample=False, **task_of(args.language))
        tokenizer = processor_of(args.base, args.language).tokenizer
        found = tokenizer.batch_decode(best, skip_special_tokens=plain.config.is_encoder_decoder)
        values["outputs"] = count_errors(texts, found)
    return values
