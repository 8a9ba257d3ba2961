"""`headwise serve`: the page with a model behind it, on this computer only; see docs/serve.md.

A request enters through `security`, is read by `requests` and answered by `app`; `runs` runs models in the background.
"""
