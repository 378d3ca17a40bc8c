"""Recording in one line inside people's own trainers. Thin: no mathematics, and no trainer is imported before it is asked for.

`backstory.integrations.huggingface.Record` is a callback of `transformers.Trainer`, `backstory.integrations.lightning.Record`
one of Lightning's Trainer.
"""
