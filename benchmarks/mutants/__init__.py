"""Mistakes made on purpose: right attention in many styles, mutated everywhere, judged by execution and by the checker.

`styles/` holds right classes, `drivers` how to build and call them, `mutate` and `operators` the mistakes, `truth` what
they change, `expected` what a report should say about them, and `run` the comparison with the checker.
"""
