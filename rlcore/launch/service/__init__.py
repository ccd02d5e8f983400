"""The rollout service in a child process of rank 0, under every launcher.

`child` and `host` run in the child; `process`, `client` and `handles` in rank 0.
"""
