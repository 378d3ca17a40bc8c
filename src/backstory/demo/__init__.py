"""The demos and their data."""
