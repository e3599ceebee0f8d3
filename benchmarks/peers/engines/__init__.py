"""One module per engine, each importable only in that engine's own environment.

A module has ``load(settings) -> Engine``; ``settings`` are the keys of a ``peers.lineup.Contestant`` and what every
engine is told: ``model`` (its own file or directory), ``threads``, ``positions`` (prompt and answer together).
"""
