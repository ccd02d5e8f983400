"""`rlcore doctor`: checks a machine and its environments for the needs of a run.

It works without torch and without a GPU; another process answers questions that need torch.
"""
