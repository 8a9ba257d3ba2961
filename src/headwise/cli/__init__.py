"""The `headwise` command, one module per verb. Results go to standard output, messages to standard error.

May import every room; nothing imports it.
"""

import errno
import importlib
import os
import re
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

from headwise.cli.console import print_anywhere, say
from headwise.cli.parser import HelpFormatter, Parser
from headwise.errors import HeadwiseError, nearest

# Every verb and what it does. Its module is imported when it is asked for: most of them need torch.
VERBS = {
    "view": "show what every attention head of a model does with a text, in the terminal and as a page",
    "serve": "explore attention in the browser: type a text, switch models and heads",
    "survey": "measure every attention head of a model over a whole corpus; run it with torchrun for several processes",
    "heads": "find the heads of known kinds by experiment: induction, retrieval, previous-token, sinks and more",
    "trace": "trace an answer back to the passages of its prompt, by four methods, and test each by deletion",
    "check": "check the multi-head attention in a file: right, or which mistake is on which line",
    "steps": "walk through attention in ten steps, on your words or on small tensors: shapes, code, reasons, memory",
    "cost": "compute what attention costs: parameters, operations, memory, cache; MHA, GQA and MQA compared",
    "course": "learn attention by writing it: fourteen exercises with hints, from dot products to a decoder; interview",
    "quiz": "find and fix the mistake in a class; the checker judges your answer",
    "bench": "compare the layer with other implementations: correctness, time, memory, growth with length",
    "generate": "generate text with the built-in model, a small GPT trained on old books",
    "inspect": "list the attention layers in a checkpoint: heads, widths, options, parameters, cache",
    "tour": "see the ten steps, the fused layer against the reference, and its speed on this machine",
}
EXAMPLES = """examples:
  headwise view "To be, or not to be, that is the question."
  headwise check examples/attention.py
  headwise steps "The quick brown fox"
  headwise course
  headwise cost --model gpt2
"""
NO_MEMORY = re.compile("allocate memory|out of memory")  # how torch says it, on a CPU and on a GPU
CLOSE = 0.7  # how like a command a word must be to mean it rather than an option


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Exit status: 0 success, 1 the checked code is wrong, 2 wrong usage or failure."""
    print_anywhere()
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's; no verb needs NumPy
    arguments = _asked_for_help(sys.argv[1:] if arguments is None else list(arguments))
    typed = next((word for word in arguments if not word.startswith("-")), "")
    try:
        status = _run(typed, arguments)
        sys.stdout.flush()  # now, while an error can still be reported
    except BrokenPipeError:  # `headwise ... | head` closed the pipe
        _discard_output()
        return 0
    except KeyboardInterrupt:
        return 130  # the shells' status for Ctrl-C
    except HeadwiseError as error:
        say(f"headwise {typed}: {error}")
        return 2
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not NO_MEMORY.search(str(error)):
            raise
        say(f"headwise {typed}: there is not enough memory. Try a shorter text, fewer samples or a smaller model.")
        return 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT):
            raise
        say(f"headwise {typed}: the output cannot be written: {error.strerror}.")
        _discard_output()
        return 2
    return status


def _run(verb: str, arguments: list[str]) -> int:
    """Run the verb that was typed, or say what else can be typed."""
    if verb and verb not in VERBS:
        say(f"headwise: no command is called {verb!r}.{_instead(verb)} All of them: headwise --help.")
        return 2
    start = arguments.index(verb) if verb else len(arguments)
    parser = _program()
    if parser.read(arguments[:start]).version:
        print(_version())
        return 0
    if not verb:
        parser.print_help()
        return 2
    return int(module_of(verb).run(parser_of(verb).read(arguments[start + 1 :])))


def _asked_for_help(arguments: list[str]) -> list[str]:
    """`help` and `help view` as `--help` and `view --help`."""
    return [*arguments[1:2], "--help"] if arguments[:1] == ["help"] else arguments


def _instead(typed: str) -> str:
    """What was meant by a command that does not exist: a command, or an option of one, such as `interview`."""
    found = nearest(typed, VERBS, CLOSE)
    if found is None:
        flags = [f"{verb} --{flag}" for verb in VERBS for flag in parser_of(verb).flags() if flag == typed]
        found = " or ".join(f"headwise {flag}" for flag in flags[:3]) or nearest(typed, VERBS)
    return "" if found is None else f" Did you mean {found}?"


def module_of(verb: str) -> ModuleType:
    """The module of a verb: its options, its examples, and `run`."""
    return importlib.import_module(f"headwise.cli.{verb}")


def parser_of(verb: str) -> Parser:
    """The parser of a verb."""
    module, summary = module_of(verb), VERBS[verb]
    described = f"{summary[0].upper()}{summary[1:]}."
    parser = Parser(f"headwise {verb}", description=described, epilog=module.EXAMPLES, formatter_class=HelpFormatter)
    module.add_arguments(parser)
    return parser


def _program() -> Parser:
    """The parser of what comes before a verb."""
    parser = Parser(
        prog="headwise",
        usage="headwise [-h] [--version] COMMAND ...",
        description="Multi-head attention you can read, run and see.\n`headwise COMMAND --help` explains a command.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="show the versions of headwise and torch, then exit")
    commands = parser.add_argument_group("commands")
    for name, summary in VERBS.items():  # for the help: arguments from a verb on are read by its own parser
        commands.add_argument(name, nargs="?", help=summary)
    return parser


def _discard_output() -> None:
    """Discard the remaining output, which Python would flush again at exit."""
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115


def _version() -> str:
    import torch

    from headwise import __version__

    return f"headwise {__version__}, torch {torch.__version__}"
