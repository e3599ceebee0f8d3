"""Eyas beside other engines on the same prompts: see README.md."""
