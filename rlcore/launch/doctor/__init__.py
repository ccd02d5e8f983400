"""`rlcore doctor`: looks at a machine and its environments, and says what a run would lack.

It works without torch and without a GPU: everything that needs torch is asked of another process.
"""
