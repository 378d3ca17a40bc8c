"""One-line recording in existing trainers. No mathematics here, and no trainer is imported before it is used.

`backstory.integrations.huggingface.BackstoryCallback` is a callback of `transformers.Trainer`,
`backstory.integrations.lightning.BackstoryCallback` one of Lightning's Trainer.
"""
