"""Engines on top of the store. The only part that imports torch or an engine."""
