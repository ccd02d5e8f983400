"""Workflows, which make samples from a prompt; each has its own file."""
