"""Rivals, one script each, run by the python of an environment of their own. They know nothing of Backstory."""
