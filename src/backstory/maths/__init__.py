"""The mathematics: tensors in, tensors out. Knows nothing of paths, training loops or printing."""
