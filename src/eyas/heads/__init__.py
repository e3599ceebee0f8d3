"""Draft heads: the small networks that guess what the target says next.

``config`` and ``rope`` are numpy only, so that an engine without PyTorch can read a head; ``eagle`` and ``eagle3`` are
the PyTorch modules that both training and drafting use, ``layers`` what they are made of.
"""
