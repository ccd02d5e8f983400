"""A model folder against transformers, layer by layer, in fp32 on the CPU.

Both sides hold one layer at a time. Transformers' own forward pass runs from layer to layer, and
our layer gets the hidden states that transformers' layer got, so that a wrong layer does not blur
the next one.
"""
