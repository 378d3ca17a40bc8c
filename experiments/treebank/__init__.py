"""Influence over three epochs of the Penn Treebank."""
