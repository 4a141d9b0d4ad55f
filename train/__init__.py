"""Trains a drafter: the target's answers -> features -> fit -> evaluate -> export."""
