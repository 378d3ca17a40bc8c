"""Bad data planted in a run, and who finds it."""
