"""What the step will do, as data: measured into a profile, chosen as a plan. Torch-free."""
