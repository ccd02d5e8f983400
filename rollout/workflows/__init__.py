"""Workflows: they make samples from a prompt, each in a file of its own."""
