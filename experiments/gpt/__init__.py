"""Every method against retraining, on a small GPT."""
