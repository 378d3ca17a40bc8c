"""The picture of the README: one prediction, and the training images behind it, on the time axis."""
