"""The demo and the paper's experiments, as commands. Knows nothing of the command line."""
