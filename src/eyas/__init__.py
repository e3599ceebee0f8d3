"""Eyas: lossless speculative decoding with context-aware draft trees (EAGLE-2)."""
