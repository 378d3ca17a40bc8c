"""Data and training runs that several studies share."""
