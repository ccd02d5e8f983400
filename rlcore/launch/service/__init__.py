"""The rollout service in a child process of rank 0, under every launcher.

`child` and `host` run in the child; `process` and `client` in rank 0.
"""
