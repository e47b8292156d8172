"""Lockstep: synchronous data-parallel training of image models, from a laptop to a cluster."""

__version__ = "0.1.0"
