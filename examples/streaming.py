# Parts of a copy, not a program: make new COPY=../mine.py WITH="sft streaming"
# SPDX-License-Identifier: Apache-2.0
"""Rows of Parquet files that stay on the Hugging Face Hub, in a bucket, or on a disk.

For fine_tune (column text), sft (messages), clip and text_to_image (image, caption), whose --text,
--chats, --captions or --images then names Parquet files by a URL or a pattern, such as
"hf://datasets/HuggingFaceTB/smoltalk@main/data/all/train-*.parquet". --columns names other columns,
in that order. Without --test the last row group is the test set. text_to_image keeps no latents
then: it encodes the images of a batch in its step.

An epoch is a function of (seed, epoch): --lanes lanes side by side, of which a batch takes --block
rows in turn. A lane has one row group after the other, each shuffled. So a resumed run reads the
row groups that it needs and skips nothing, on any number of processes. A worker reads each row
group of its lanes once, if --lanes * --block is a multiple of the samples that all workers take at
a time, and --batch-size one of --block; otherwise several workers read it. Files that have changed
since the run began are an error.

Group: additions. Recipes: ddp, amp, sharded.
"""

from lib.row_groups import add_stream_flags
