"""rlcore: reinforcement learning for language models that outgrow one GPU.

Importing this package imports nothing else; see `rlcore.algorithms`, `rlcore.config`,
`rlcore.trainer.loop`.
"""

__version__ = "0.2.0"
