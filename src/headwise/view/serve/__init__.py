"""`headwise serve`: the page, live. Text in, heads out, on this computer alone; see docs/serve.md."""
