"""A job of test_slurm.py: each rank says what it sees, and fails."""

import os
import sys

names = "RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"
# One write, or the lines of two ranks may come interleaved.
os.write(1, f"sees {' '.join(os.environ.get(name, 'none') for name in names)};\n".encode())
sys.exit("it is broken")
