"""Gradients → weights: storage, update rules, schedules and the loss."""
