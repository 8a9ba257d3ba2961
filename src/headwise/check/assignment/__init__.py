"""Assignments: the forms that five documents ask for, comparison with anybody's reference, and solutions.

Imports everything of `check` but `verdict` and `unfinished`.
"""
