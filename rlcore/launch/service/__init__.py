"""The rollout service in another process than rank 0's, by one protocol for every launcher.

`host` has the service and answers calls; `client`, `engine_handles` and `handles` are what rank 0
uses in its place. A `Channel` carries the calls: Ray's, or `child_channel` to a process of our own.
"""
