"""The packaged recipes: one TOML file each, read by `lockstep.config.load_recipe`."""
