"""The packaged recipes, one TOML file each, and how a recipe is read (`read.py`) or refused (`complaints.py`)."""
