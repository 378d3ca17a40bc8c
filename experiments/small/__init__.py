"""Small studies: one question each."""
