"""Families whose table and configuration come from another package: `model.bridge`.

    protocol.py         what is asked of a package
    mbridge.py          mbridge, for one family of a folder
    megatron_bridge.py  megatron-bridge, the same
    fields.py           which of its TransformerConfig fields our layers carry
    table.py            its names and conversions as rows of a table of ours, with the proof that they are the same
    read.py             all of that for a folder

Our code still builds the model, reads, gathers and writes: a package answers questions and never
    sees a weight of the run.
"""
