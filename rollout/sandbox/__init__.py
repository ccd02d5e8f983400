"""Sandboxes: model-written code runs apart, with limits, and is ended as a tree.

`base.py` has the one interface, `build.py` chooses an implementation from the configuration.
"""
