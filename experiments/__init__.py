"""The paper's experiments and ours, and the benchmarks: `python -m experiments NAME … --json`. Not shipped."""
