"""What a run would need and how long a step would take, from numbers alone: no weights, no torch,
no GPU.

docs/planning.md has the model behind the estimates.
"""
