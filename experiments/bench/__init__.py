"""Speed, measured against rivals in the same run.

Its `workloads`, `timing` and `peers` need torch alone: they are copied to where a rival's environment runs them.
"""
