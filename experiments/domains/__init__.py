"""What each source of text is worth, against retraining without it."""
