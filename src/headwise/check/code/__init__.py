"""A learner's code as people have it: reading a file, loading it and its project, what it says about itself.

`source` needs no torch and answers what never has to run. Imports `report`, `mistakes` and the names of arguments.
"""
