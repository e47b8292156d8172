"""Lockstep: synchronous data-parallel training of image models, from a laptop to a cluster."""

import os

__version__ = "0.1.0"

# CUDA reads this when it starts. By default it feeds a GPU through 8 queues that streams share, so that nvJPEG's work
# may stand in line behind whole recorded steps; CUDA_DEVICE_MAX_CONNECTIONS=8 lockstep bench input --train shows it.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
