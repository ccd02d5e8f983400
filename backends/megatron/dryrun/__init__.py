"""One rank of a run whose other ranks are not there, and whose tensors have no memory.

`rank.rehearse` builds the real backend and runs the phases of a step. docs/dryrun.md says how far
that goes.
"""
