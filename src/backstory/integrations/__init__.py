"""Recording in one line inside people's own trainers. Thin: no mathematics, and no trainer is imported before it is used.

`backstory.integrations.huggingface.BackstoryCallback` is a callback of `transformers.Trainer`,
`backstory.integrations.lightning.BackstoryCallback` one of Lightning's Trainer.
"""
