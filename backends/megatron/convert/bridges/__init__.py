"""Families whose table and configuration come from another package: `model.bridge`.

    protocol.py         the interface of a package
    mbridge.py          mbridge behind it
    megatron_bridge.py  megatron-bridge behind it
    table.py            a package's names and conversions as rows of a table of ours, with a proof
    read.py             the architecture of a folder, with a package's fields and table

Our code still builds the model, reads, gathers and writes: a package answers questions and never
sees a weight of the run.
"""
