"""Unfinished work: gaps in the source, a call completed as the reference would, fragments, and the next step.

Imports everything of `check` but `verdict`.
"""
