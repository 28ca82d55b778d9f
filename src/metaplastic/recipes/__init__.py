"""Choices, not code: runs that are named for what they show, as typed configurations."""
