"""A recorded run over HTTP: a page for people, JSON for programs, both at the same path."""
