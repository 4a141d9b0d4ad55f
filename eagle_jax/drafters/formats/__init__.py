"""Heads of other projects: read as they were released, and written as others load them."""
