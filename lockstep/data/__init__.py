"""A batch, from disk to the device."""
