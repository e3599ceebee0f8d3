"""Draft heads: the small networks that guess the target's next features.

``config`` and ``rope`` are numpy only, so that an engine without PyTorch can read a head; ``eagle`` is the
PyTorch module that both training and drafting use.
"""
