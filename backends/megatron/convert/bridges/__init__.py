"""Families whose table and configuration come from another package: `model.bridge`.

Our code still builds the model, reads, gathers and writes: a package answers questions and never
sees a weight of the run.
"""
