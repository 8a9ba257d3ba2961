"""Exercises 13 and 14: a tiny GPT, and reading its heads."""

import importlib.resources
import math

import torch
from torch import Tensor, nn

from headwise.check import MISTAKES
from headwise.learn.course.exercise import (
    WAITS,
    Exercise,
    Part,
    Space,
    WrongPartError,
    close,
    ignores,
    made,
    needs,
    unused,
)
from headwise.learn.course.pieces import source

TEXT = "fables.txt"
PAIRS = 2.34  # nats per letter of a model that knows only how often each letter follows another, on the fables
STEPS = 400  # that an answer is trained for; the model answer is then near 2.0


def fables() -> str:
    """The text that exercise 13 trains on: 100 KB of Aesop's fables, translated by V. S. Vernon Jones in 1912."""
    return (importlib.resources.files("headwise.learn.course") / TEXT).read_text(encoding="utf-8")


def letters(text: str) -> Tensor:
    """The letters of a text as whole numbers, in the order of the alphabet that it uses."""
    known = {letter: number for number, letter in enumerate(sorted(set(text)))}
    return torch.tensor([known[letter] for letter in text])


def _table(tokens: Tensor) -> Tensor:
    """Logits that depend on the letter alone."""
    return torch.randn(17, 17, generator=torch.Generator().manual_seed(2))[tokens]


def _logits(space: Space) -> None:
    model = made(space, "TinyGPT", 17, 12, 3, 2, 11)
    with torch.no_grad():
        found = model(torch.randint(17, (2, 7)))
    if tuple(found.shape) != (2, 7, 17):
        raise WrongPartError(
            f"tokens (2, 7) give shape {tuple(found.shape)}; expected (2, 7, 17): a logit for every letter"
        )
    if found.min() >= 0 and torch.allclose(found.sum(-1), torch.ones(2, 7), atol=1e-4):
        raise WrongPartError("the model returns probabilities; cross_entropy takes logits, before the softmax")


def _positions(space: Space) -> None:
    model = made(space, "TinyGPT", 17, 12, 3, 2, 11)
    with torch.no_grad():
        found = model(torch.full((1, 7), 5))
    if torch.allclose(found[0, 0], found[0, 6], atol=1e-4):
        raise WrongPartError("seven equal letters give equal logits: the model does not know positions")
    for context in (11, 60):
        try:
            made(space, "TinyGPT", 17, 12, 3, 2, context)(torch.randint(17, (1, context)))
        except (IndexError, RuntimeError) as error:
            raise WrongPartError(f"a model with a context of {context} fails on {context} letters: {error}") from error


def _decoder(space: Space) -> None:
    model, tokens = made(space, "TinyGPT", 17, 12, 3, 2, 11), torch.randint(17, (1, 7))
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 17
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    if not torch.allclose(before[:, :4], after[:, :4], atol=1e-5):
        raise WrongPartError("logits 0 to 3 changed when letter 4 did: the model sees the future")
    if torch.allclose(before[:, 6], after[:, 6], atol=1e-6):
        raise WrongPartError("logits at 6 did not change when letter 4 did: the model does not read the past")


class _Fixed(nn.Module):
    """Predicts that letter n + 1 follows letter n, for sure."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 100.0 * nn.functional.one_hot((tokens + 1) % 17, 17).float()


def _loss(space: Space) -> None:
    loss = needs(space, "loss")
    rising = torch.arange(8)[None]
    found = float(loss(_Fixed(), rising))
    if not found < 0.01:
        cure = "logits at i predict letter i + 1"
        if math.isclose(found, math.log(math.e + 16) - 1, abs_tol=1e-3):
            cure = "cross_entropy takes logits, and here it gets their softmax"
        raise WrongPartError(f"a model that is always right has a loss of {found:.3g}; {cure}")
    uniform = float(loss(lambda tokens: torch.zeros(*tokens.shape, 17), torch.randint(17, (2, 8))))
    if not math.isclose(uniform, math.log(17), abs_tol=1e-3):
        times = uniform / math.log(17)
        is_sum = math.isclose(times, 14, rel_tol=1e-3)
        raise WrongPartError(
            f"a model that does not know has a loss of {uniform:.3g}; expected log(17) = {math.log(17):.3g}"
            + (": yours is the sum over 14 letters, 14 times their mean" if is_sum else "")
        )
    tokens = torch.randint(17, (3, 8))
    wanted = nn.functional.cross_entropy(_table(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    close(loss(_table, tokens), wanted, "the mean over 3 texts of 8 letters, 21 predictions,")


def _unregistered(model: nn.Module) -> list[str]:
    """The plain lists and dictionaries that hide layers of a model from the optimizer."""
    known = {*model.modules()}
    kept = [(name, value) for module in known for name, value in vars(module).items() if name[0] != "_"]
    groups = [(name, value.values() if isinstance(value, dict) else value) for name, value in kept
              if isinstance(value, dict | list | tuple)]  # fmt: skip
    return [name for name, group in groups if any(isinstance(x, nn.Module) and x not in known for x in group)]


def _whole(space: Space) -> None:
    """Fail if the optimizer cannot reach a layer, or the logits do not depend on one."""
    model = made(space, "TinyGPT", 17, 12, 3, 2, 11)
    if hidden := _unregistered(model):
        mistake = MISTAKES["layers-in-list"]
        raise WrongPartError(f"{mistake.title}: self.{hidden[0]}. {mistake.why} {mistake.hint}")
    for layers in (2, 4):
        model = made(space, "TinyGPT", 17, 12, 3, layers, 11)
        if spare := unused(model, model(torch.randint(17, (2, 7)))):
            raise WrongPartError(f"{spare[0]} is made and never used")
    _as_many_blocks(space)
    if ignores(space, "TinyGPT", (17, 12, 3, 2, 11), (17, 12, 2, 2, 11), torch.randint(17, (2, 7))):
        raise WrongPartError("num_heads is not used: with 2 and with 3 heads and the same weights, it gives the same")
    if _grows(made(space, "TinyGPT", 17, 12, 3, 2, 11)):
        raise WrongPartError("the stream reaches the last projection as large as it is: a norm comes before it")


def _as_many_blocks(space: Space) -> None:
    """Fail unless every layer has parameters of its own."""
    one, two, four = (
        sum(p.numel() for p in made(space, "TinyGPT", 17, 12, 3, layers, 11).parameters()) for layers in (1, 2, 4)
    )
    if not four - two == 2 * (two - one) > 0:
        raise WrongPartError(
            f"num_layers blocks are asked for, each with its own weights: with 1, 2 and 4 layers, the model has "
            f"{one:,}, {two:,} and {four:,} parameters"
        )


def _grows(model: nn.Module) -> bool:
    """Whether logits grow with the embeddings, as without a last norm. What is used twice stays as it is."""
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    others = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    tables -= {parameter for module in others for parameter in module.parameters(recurse=False)}
    tokens = torch.randint(17, (1, 7))
    with torch.no_grad():
        before = model(tokens).abs().max()
        for table in tables:
            table.mul_(1e4)
        return bool(model(tokens).abs().max() > 100 * before)


def _learns(space: Space) -> None:
    try:
        _loss(space)
    except WrongPartError:
        raise WrongPartError(WAITS) from None
    _whole(space)
    found = trained(space, STEPS)[1]
    if not found < PAIRS - 0.1:
        raise WrongPartError(
            f"after {STEPS} steps the loss is {found:.2f} per letter; expected less than {PAIRS - 0.1:.2f}. Counting "
            f"pairs of letters alone gives {PAIRS}, and your model has more to go by"
        )


def trained(space: Space, steps: int, width: int = 48, context: int = 48) -> tuple[nn.Module, float]:
    """The learner's model trained on the fables for `steps` steps, and the mean loss of the last twenty."""
    torch.manual_seed(0)
    tokens = letters(fables())
    model: nn.Module = needs(space, "TinyGPT")(int(tokens.max()) + 1, width, 4, 2, context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(tokens) - context, (12,))
        value = needs(space, "loss")(model, torch.stack([tokens[i : i + context] for i in starts.tolist()]))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return model, sum(losses[-20:]) / 20


GPT = Exercise(
    "tiny-gpt",
    "A tiny GPT",
    difficulty=4,
    minutes=40,
    idea="A decoder is an embedding, some blocks, and a projection to the vocabulary. Logits at position i predict "
    "token i + 1, so a text of T tokens gives T − 1 training examples at once. That is all a language "
    "model is trained on.",
    solution=source('''
        """Exercise 13: a tiny GPT. Run this file to train it on Aesop's fables, in a minute on one core."""

        import torch
        from torch import Tensor, nn

        from headwise import MultiHeadAttention  # or your own


        class Block(nn.Module):
            """The block of exercise 12, ready; your own may stand here instead."""

            def __init__(self, d_model: int, num_heads: int) -> None:
                super().__init__()
                $block_layers

            def forward(self, x: Tensor) -> Tensor:
                $block


        class TinyGPT(nn.Module):
            """Predicts the next letter."""

            def __init__(self, vocabulary: int, d_model: int, num_heads: int, num_layers: int, context: int) -> None:
                """Embeddings of letters and of positions, num_layers blocks, a norm, and a projection to letters."""
                super().__init__()
                self.letters = nn.Embedding(vocabulary, d_model)
                self.positions = nn.Embedding(context, d_model)
                self.blocks = nn.Sequential(*(Block(d_model, num_heads) for _ in range(num_layers)))
                self.norm = nn.LayerNorm(d_model)
                self.logits = nn.Linear(d_model, vocabulary)

            def forward(self, tokens: Tensor) -> Tensor:
                """tokens (B, T), whole numbers → logits (B, T, vocabulary) for the letter after each"""
                positions = torch.arange(tokens.shape[1], device=tokens.device)
                x = self.letters(tokens) + self.positions(positions)
                return self.logits(self.norm(self.blocks(x)))


        def loss(model: nn.Module, tokens: Tensor) -> Tensor:
            """The mean cross-entropy of predicting every letter from those before it; the first is not predicted.

            tokens (B, T) → one number
            """
            logits = model(tokens[:, :-1])
            return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


        if __name__ == "__main__":
            from headwise.learn.course import train_and_write

            train_and_write(globals(), seconds=60)
    '''),
    parts=(
        Part(
            "the logits",
            "How many numbers does the model give for every letter of the text?",
            "One for every letter of the alphabet: the last layer projects d_model to the vocabulary.",
            "return self.logits(self.norm(self.blocks(x)))",
            _logits,
        ),
        Part(
            "the positions",
            "How could attention, which averages, know the order of the letters?",
            "Add an embedding of the position 0, 1, 2, … to the embedding of the letter.",
            "x = self.letters(tokens) + self.positions(positions)",
            _positions,
        ),
        Part(
            "the future stays hidden",
            "Are all blocks causal?",
            "If a logit could see the letter it predicts, training would learn to copy.",
            "MultiHeadAttention(d_model, num_heads, causal=True)",
            _decoder,
        ),
        Part(
            "the loss",
            "Which letter do the logits at position i predict?",
            "Letter i + 1: leave out the last input and the first target, then cross_entropy over all of them.",
            "return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())",
            _loss,
        ),
        Part(
            "it learns",
            "Does the loss fall below what pairs of letters alone could give?",
            "Check that every part is registered (nn.Sequential or nn.ModuleList), so that the optimizer sees it.",
            "self.blocks = nn.Sequential(*(Block(d_model, num_heads) for _ in range(num_layers)))",
            _learns,
        ),
    ),
    seconds=120.0,
    more="Run your file with python: the block at its end trains the model for a minute and lets it write a fable. If "
    "yours has no such block, --solution shows it.",
)


def _weights() -> Tensor:
    torch.manual_seed(1)
    hidden = torch.ones(7, 7).triu(1).bool()
    return torch.randn(3, 7, 7).masked_fill(hidden, -math.inf).softmax(-1)


def _previous(space: Space) -> None:
    weights = _weights()
    wanted = weights.diagonal(-1, 1, 2).mean(-1)
    close(needs(space, "previous_token")(weights), wanted, "previous_token(weights)")


def _entropy(space: Space) -> None:
    weights = _weights()
    wanted = torch.special.entr(weights).sum(-1).mean(-1)
    found = needs(space, "entropy")(weights)
    if isinstance(found, Tensor) and found.isnan().any():
        raise WrongPartError("entropy(weights) is NaN: 0 · log 0 counts as 0, and hidden keys have a weight of 0")
    close(found, wanted, "entropy(weights)")


def _found_head(space: Space) -> None:
    from headwise.models import load_builtin

    found = needs(space, "find_head")(load_builtin(), "It was a dark evening in November, and the rain fell upon it.")
    values = [*found] if isinstance(found, tuple | list | Tensor) else [found]
    if len(values) != 2 or any(float(value) != int(value) for value in values):
        told = ", ".join(f"{float(value):.4g}" for value in values)
        raise WrongPartError(f"find_head returns {told}; expected two whole numbers, the layer and the head")
    if tuple(int(n) for n in values) != (4, 2):
        raise WrongPartError(
            f"find_head gives {found}; another head of the built-in model attends more to the previous token"
        )
    shorter = load_builtin()
    shorter.gpt.blocks = shorter.gpt.blocks[:4]
    for text, wanted in (("1 2 3 4 5 6 7 8 9", (1, 6)), ("one one one one one one", (2, 4))):
        other = tuple(int(n) for n in needs(space, "find_head")(shorter, text))
        if other != wanted:
            raise WrongPartError(
                f"for the first 4 layers of the model and the text {text!r}, find_head gives {other}; expected {wanted}"
            )


READING = Exercise(
    "reading-heads",
    "Reading its heads",
    difficulty=4,
    minutes=25,
    idea="Attention weights can be measured. The mean weight on the previous token finds heads that look one token "
    "back; the entropy tells sharp heads from diffuse ones. What a head attends to does not yet say what it is for.",
    solution=source('''
        """Exercise 14: reading heads."""

        import torch
        from torch import Tensor

        from headwise import watch


        def previous_token(weights: Tensor) -> Tensor:
            """The mean weight of every head on the previous token, over all queries but the first.

            weights (H, T, T) → (H,)
            """
            return weights.diagonal(-1, dim1=1, dim2=2).mean(-1)


        def entropy(weights: Tensor) -> Tensor:
            """The mean entropy of every head, in nats: −Σ w · log w over keys, then the mean over queries.

            weights (H, T, T), some of them 0 → (H,)
            """
            return torch.special.entr(weights).sum(-1).mean(-1)


        def find_head(model, text: str) -> tuple[int, int]:
            """The layer and head of the built-in model (headwise.load_builtin()) that looks most at the previous token.

            model.tokens(text) gives token ids (1, T); `with watch(model.gpt) as seen:` collects the attention of every
            layer, and list(seen.values())[layer][0] is its weights (H, T, T).
            """
            with torch.no_grad(), watch(model.gpt) as seen:
                model.gpt(model.tokens(text))
            shares = torch.stack([previous_token(weights[0]) for weights in seen.values()])  # (layers, H)
            layer, head = divmod(int(shares.argmax()), shares.shape[1])
            return layer, head
    '''),
    parts=(
        Part(
            "the previous token",
            "Where in the matrix of a head are the weights of token i on token i − 1?",
            "On the diagonal below the main one: diagonal(-1) over the last two axes.",
            "return weights.diagonal(-1, dim1=1, dim2=2).mean(-1)",
            _previous,
        ),
        Part(
            "the entropy",
            "What is 0 · log 0 on a computer, and what should it be?",
            "NaN, and it should be 0. torch.special.entr and torch.xlogy return 0.",
            "return torch.special.entr(weights).sum(-1).mean(-1)",
            _entropy,
        ),
        Part(
            "the head",
            "Over which axes do you look for the largest share?",
            "Stack the shares of all layers to (layers, heads) and take the argmax of the whole.",
            "layer, head = divmod(int(shares.argmax()), shares.shape[1])",
            _found_head,
        ),
    ),
    more="headwise view shows every head of any model; docs/heads.md says what they do.",
)

EXERCISES = (GPT, READING)
