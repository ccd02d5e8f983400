"""Starts runs, and the other commands."""
