"""The rollout service in a child process of rank 0, under every launcher.

`child` runs in the child, `client` in rank 0; `frames` has their messages.
"""
