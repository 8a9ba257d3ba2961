"""What heads do, to look at. The package can be called: `headwise.view(model, text)` gives a `Sight`."""

from headwise.verbs import make_callable
from headwise.view.looking import view
from headwise.view.sight import Head, Pair, Sight

__all__ = ["Head", "Pair", "Sight", "view"]

make_callable(__name__, view)
