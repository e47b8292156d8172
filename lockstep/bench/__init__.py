"""This system beside its peers, in one run."""
