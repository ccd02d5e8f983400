"""Queries other Python environments for their installed packages."""
