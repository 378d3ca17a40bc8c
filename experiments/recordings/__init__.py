"""Recordings of classifiers beside exact derivatives, and what they cost."""
