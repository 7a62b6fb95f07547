"""One home for options."""
