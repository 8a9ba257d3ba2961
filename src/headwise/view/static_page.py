"""Self-contained HTML pages without scripts, light or dark as the reader prefers."""

from html import escape
from string import Template

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>$title</title>
<style>
:root { --ink: #1c2430; --soft: #5b6675; --paper: #fbfaf7; --card: #ffffff; --line: #e2ded4; --mark: #0b6e99;
  --out: #23743f; --warn: #9a5b00; --heat: 11, 110, 153; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e6e1; --soft: #a3abb6; --paper: #14171c; --card: #1d2128; --line: #333a45; --mark: #6cc3e8;
    --out: #7fd39b; --warn: #f0b35a; --heat: 108, 195, 232; }
}
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
.soft { color: var(--soft); }
.scroll { overflow-x: auto; }
.frame { border: 1.5px solid var(--ink); border-radius: 2px; padding: 0 .12em; margin: 0 .06em; font-weight: inherit; }
@media (max-width: 40rem) {
  .wide::before { content: "scroll sideways for more columns →"; position: sticky; left: 0; font-size: .8rem;
    color: var(--soft); }
}
table { border-collapse: collapse; }
@media print {
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .wide::before { display: none; }
  .scroll { overflow: visible; }
}
$style
</style>
</head>
<body>
$body
</body>
</html>
""")


def static_page(title: str, style: str, body: str) -> str:
    """A page from its title (text), its additional style (CSS) and its body (HTML)."""
    return PAGE.substitute(title=escape(title), style=style.strip(), body=body.strip())
