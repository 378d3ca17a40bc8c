"""One-line recording in existing trainers. No mathematics here, and no trainer is imported before it is used.

The module of a trainer, such as `backstory.integrations.lightning`, has a `BackstoryCallback` for it.
"""
