"""One rank of a run, without the other ranks and without memory for tensors.

`rank.rehearse` builds the real backend and runs the phases of a step. docs/dryrun.md describes its
limits.
"""
