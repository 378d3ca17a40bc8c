"""Small models of many families, recorded as they are."""
