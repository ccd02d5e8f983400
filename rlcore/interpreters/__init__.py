"""Asks other Python environments what they have installed."""
