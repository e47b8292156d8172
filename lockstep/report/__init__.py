"""What happened, for people: the display while a run goes on, and the summary it leaves behind. Torch-free."""
