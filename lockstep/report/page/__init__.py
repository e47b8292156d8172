"""Pages that open offline: what happened in a run, drawn from its records."""
