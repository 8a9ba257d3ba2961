"""One head's map: what is shown is the map, keys move and zoom it, and a real terminal is given back as it was."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
import torch

from headwise import AttentionMap, OptionError, Scoring, causal, view
from headwise.view.color import Palette
from headwise.view.pictures import Cell
from headwise.view.screen import FOOTER, HEADER, MapScreen, described, number, precise, printed
from headwise.view.tokens import wide

T = 37


def make(tokens=T, heads=3, layers=2):
    maps = [
        AttentionMap(torch.randn(1, heads, tokens, 5), torch.randn(1, heads, tokens, 5), Scoring(causal()))
        for _ in range(layers)
    ]
    return view(maps, words=[f"w{i}" for i in range(tokens)])


@pytest.fixture(scope="module")
def result():
    torch.manual_seed(0)
    return make()


def bare(lines):
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]


@pytest.mark.parametrize("size", [(40, 12), (80, 24), (200, 60)])
@pytest.mark.parametrize("depth", [0, 4, 8, 24])
@pytest.mark.parametrize("keys", ["", "+", "++", "+++", "++++", "t", "-"])
def test_every_screen_fits(result, size, depth, keys):
    screen = MapScreen(result, 1, 2, Palette(depth), *size)
    for key in keys:
        screen.press(key)
    lines = bare(screen.lines())
    assert len(lines) <= size[1]
    assert max(map(wide, lines)) <= size[0]


@pytest.mark.parametrize("tokens", [1, 2, T, 301])
def test_at_first_the_whole_map_is_shown_and_its_rows_sum_to_one(tokens):
    result = make(tokens)
    screen = MapScreen(result, 0, 1, Palette(24), 80, 24)
    picture = screen.picture(screen.window())
    assert picture.sum(-1) == pytest.approx(torch.ones(len(picture)).numpy(), abs=1e-5)
    assert len(picture) * screen.span >= tokens


def test_pixels_are_sums_over_keys_and_means_over_queries(result):
    screen = MapScreen(result, 1, 2, Palette(24), 40, 12)
    assert screen.span == 4
    dense = result.maps[1][0, 2].double()
    expected = torch.stack([block.mean(0) for block in dense.split(4)])
    expected = torch.stack([block.sum(1) for block in expected.split(4, 1)], 1)
    torch.testing.assert_close(screen.picture(screen.window()).double(), expected, atol=1e-6, rtol=1e-5)


def test_a_cell_is_told_by_the_queries_and_keys_that_it_covers_also_at_the_end():
    torch.manual_seed(0)
    result = make(301)
    screen = MapScreen(result, 0, 1, Palette(24), 80, 24)
    assert (screen.span, screen.query) == (16, 300)
    dense = result.maps[0][0, 1].double()
    assert f"queries 288–300 put {dense[288:, :16].sum(1).mean():.4f} on keys 0–15" in bare(screen.lines())
    screen.press("end")
    assert f"queries 288–300 put {dense[288:, 288:].sum(1).mean():.4f} on keys 288–300" in bare(screen.lines())
    screen.press("up")
    assert "queries 272–287 put 0 on keys 288–300" in bare(screen.lines())


def test_a_cell_of_one_query_or_key_is_told_in_the_singular():
    screen = MapScreen(make(289), 0, 1, Palette(24), 80, 24)
    assert any(re.match(r"query 288 puts 0\.\d{4} on keys 0–15$", line) for line in bare(screen.lines()))


def test_the_heading_says_which_number_leaves_out_the_first_token_since_the_map_does_not():
    query = torch.nn.functional.one_hot(torch.arange(T), T).float()
    previous = AttentionMap(20 * query.roll(-1, 1)[None, None], T**0.5 * query[None, None], Scoring(causal()))
    title, *_ = bare(MapScreen(view(previous), 0, 0, Palette(24), 80, 24).lines())
    assert re.fullmatch(r"0\.0  previous-token [01]\.\d\d without the first token", title)
    sink = AttentionMap(torch.ones(1, 1, T, 5), 20 * query[None, None, :, :1].expand(1, 1, T, 5), Scoring(causal()))
    assert printed(view(sink), 0, 0, 80)[0] == "0.0  first-token sink 1.00; rest: broad 1.00"


def test_a_weight_that_would_round_to_zero_is_not_called_zero():
    assert [precise(weight) for weight in (0.0, 1.9e-7, 6e-5, 0.25)] == ["0", "< 0.0001", "0.0001", "0.2500"]
    scores = torch.tensor([[9.0], [-9.0]])[None, None]
    screen = MapScreen(view(AttentionMap(torch.ones(1, 1, 2, 1), scores)), 0, 0, Palette(24), 80, 24)
    screen.press("right")
    assert "weight < 0.0001" in bare(screen.lines())
    screen.press("enter")
    assert "weight < 0.0001 · logit -9.000" in " ".join(bare(screen.lines()))


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_how_to_quit_and_to_list_the_keys_is_shown_at_every_width(result, width):
    last = bare(MapScreen(result, 0, 0, Palette(24), width, 24).lines())[-1]
    assert last.endswith("? keys · q quits")
    assert len(last) <= width
    assert "…" not in last


def test_a_question_mark_lists_every_key_until_the_next_one(result):
    screen = MapScreen(result, 0, 0, Palette(24), 40, 12)
    before = screen.lines()
    screen.press("?")
    listed = bare(screen.lines())
    assert len(listed) == 12
    assert max(map(wide, listed)) <= 40
    for key in ("arrows", "PgUp PgDn", "Home End", "+ -", "Enter", "n p", "t", "?", "q"):
        assert any(line.startswith(f"{key} ") for line in listed), key
    screen.press("down")
    assert screen.lines() == before
    for key in "?q":
        screen.press(key)
    assert screen.ended


def test_a_printed_map_says_all_of_its_scale_on_few_columns():
    found = printed(make(301), 1, 0, 60)
    assert max(map(wide, found)) <= 60
    said = " ".join(" ".join(found).replace("\u00a0", " ").split())
    assert "a letter is 8 × 8 weights; from 0 to 1 on a square-root scale: ' .:-=+*#%@'" in said


def test_zooming_in_ends_at_single_weights_in_numbers(result):
    screen = MapScreen(result, 0, 0, Palette(0), 80, 24)
    for _ in range(20):
        screen.press("+")
    window = screen.window()
    assert window.span == 1
    torch.testing.assert_close(
        screen.picture(screen.window()),
        result.maps[0][0, 0, window.query : window.query + window.rows, window.key : window.key + window.cols],
    )
    row = next(line for line in screen.lines() if f"w{screen.query} " in line)
    assert number(result.maps[0][0, 0, screen.query, 0].item()) in row
    for _ in range(20):
        screen.press("-")
    assert screen.window().rows * screen.span >= T


def test_arrows_move_by_a_cell_and_stop_at_the_edges(result):
    screen = MapScreen(result, 0, 0, Palette(24), 80, 48)
    assert (screen.query, screen.key) == (T - 1, 0)
    for key in ("up", "up", "right", "right", "right", "down", "left"):
        screen.press(key)
    assert (screen.query, screen.key) == (T - 2, 2)
    for _ in range(2 * T):
        screen.press("right")
        screen.press("down")
    assert (screen.query, screen.key) == (T - 1, T - 1)
    screen.press("home")
    assert screen.key == 0
    screen.press("end")
    assert screen.key == T - 1


def test_the_window_follows_the_cursor(result):
    screen = MapScreen(result, 0, 0, Palette(24), 40, 12)
    for key in ("+", "+", "+", *["up"] * 30, *["right"] * 11):
        screen.press(key)
        window = screen.window()
        row, col = window.at(screen.query, screen.key)
        assert 0 <= row < window.rows
        assert 0 <= col < window.cols


def test_enter_tells_the_largest_weight_of_the_pixel(result):
    screen = MapScreen(result, 1, 2, Palette(24), 40, 12)
    span = screen.span
    screen.press("right")
    screen.press("enter")
    dense = result.maps[1][0, 2]
    first = (T - 1) // span * span
    block = dense[first:T, span : 2 * span]
    assert dense[screen.query, screen.key] == block.max()
    cell = result.cell(1, 2, screen.query, screen.key)
    assert described(cell) in " · ".join(bare(screen.lines())), "in two lines on a narrow screen"
    assert f"rank {cell.rank} of {cell.visible}" in described(cell)
    screen.press("left")
    assert "logit" not in " ".join(bare(screen.lines()))


def test_a_hidden_key_is_told_to_be_hidden(result):
    screen = MapScreen(result, 0, 0, Palette(24), 80, 48)
    for key in (*["up"] * 5, "end", "right", "right", "enter"):
        screen.press(key)
    assert "may not see this key" in " ".join(bare(screen.lines()))


def test_next_and_previous_go_through_all_heads_of_all_layers(result):
    screen = MapScreen(result, 0, 0, Palette(24), 80, 24)
    seen = []
    for _ in range(6):
        seen.append((screen.layer, screen.head))
        screen.press("n")
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert (screen.layer, screen.head) == (0, 0)
    screen.press("p")
    assert (screen.layer, screen.head) == (1, 2)
    assert "1.2" in screen.lines()[0]


def test_words_can_be_shown_and_hidden(result):
    screen = MapScreen(result, 0, 0, Palette(24), 80, 48)
    with_words = bare(screen.lines())
    assert any("w36" in line for line in with_words[HEADER:-FOOTER])
    screen.press("t")
    assert not any("w36" in line for line in bare(screen.lines())[HEADER:-FOOTER])


def test_other_keys_do_nothing(result):
    screen = MapScreen(result, 0, 0, Palette(24), 80, 24)
    before = screen.lines()
    for key in ("x", "", "\x01", "é"):
        screen.press(key)
    assert screen.lines() == before
    assert not screen.ended


@pytest.mark.parametrize("place", [(2, 0), (0, 3), (-1, 0)])
def test_a_head_that_is_not_there_is_refused(result, place):
    with pytest.raises(OptionError, match="0 to"):
        MapScreen(result, *place, Palette(0), 80, 24)


@pytest.mark.parametrize(("tokens", "lines"), [(1, 1), (T, T), (301, 38)])
def test_printed_once_it_is_letters_with_a_word_a_line(tokens, lines):
    result = make(tokens)
    found = printed(result, 1, 0, 80)
    assert len(found) == HEADER + lines + 1
    assert max(map(wide, found)) <= 80
    assert all("\x1b" not in line for line in found)
    assert "w0" in found[HEADER]


def test_numbers_take_three_columns():
    assert [number(share) for share in (0.0, 0.004, 0.43, 0.999, 1.0)] == ["", "", ".43", "1.0", "1.0"]


# In a real terminal.

PROGRAM = """
import sys, torch
from headwise import AttentionMap, Scoring, causal, view
from headwise.view.color import palette
from headwise.view.screen import show
from headwise.view.screen import MapScreen

torch.manual_seed(0)
result = view(AttentionMap(torch.randn(1, 3, 31, 5), torch.randn(1, 3, 31, 5), Scoring(causal())))

class Screen(MapScreen):
    def press(self, key):
        if key == "!":
            raise RuntimeError("broken on purpose")
        super().press(key)

show(Screen(result, 0, 1, palette(sys.stdout), 80, 24))
print("gave it back")
"""


class Terminal:
    """A pseudo-terminal with a program in it."""

    def __init__(self, arguments, columns=80, lines=24, **environment):
        self.master, self.slave = pty.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(self.slave)
        environment = {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **environment}
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env={
                **{k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLORTERM", "COLUMNS", "LINES")},
                **environment,
            },
            preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
        )
        self.text = ""

    def resize(self, columns, lines):
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def send(self, keys):
        os.write(self.master, keys.encode())

    def until(self, wanted, seconds=40):
        """Read until what was written since the last look matches, and give it."""
        start, end = len(self.text), time.monotonic() + seconds
        while not re.search(wanted, self.text[start:], re.DOTALL):
            assert time.monotonic() < end, f"no {wanted!r} in {self.text[start:][-900:]!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.text += os.read(self.master, 65536).decode("utf-8", "replace")
        return self.text[start:]

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal():
    made = []

    def make_one(*arguments, **options):
        made.append(Terminal(arguments or ["-c", PROGRAM], **options))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


DRAWN = r"q quits\x1b\[0m\x1b\[K\x1b\[J"


def test_keys_work_in_a_real_terminal_and_it_is_given_back(terminal):
    one = terminal()
    assert "\x1b[?1049h\x1b[?25l" in one.until(DRAWN)
    assert "head 1" not in one.text
    one.send("\x1b[A\x1bOC")
    assert "29 “29” attends to 1 “1”" in one.until(r"attends to 1 .*" + DRAWN)
    one.send("\r")
    assert re.search(r"weight 0\.\d{4} · logit -?\d+\.\d{3} · rank \d+ of 30 · \d+\.\d\d × uniform", one.until(DRAWN))
    one.send("n")
    assert "\x1b[1m0.2  " in one.until(DRAWN)
    one.send("p+")
    one.until(r"0\.1  .*" + DRAWN + ".*" + DRAWN)
    one.resize(40, 12)
    one.process.send_signal(signal.SIGWINCH)
    one.until(
        r"\x1b\[H((?!\x1b\[H|\r\n).)*(\r\n((?!\x1b\[H|\r\n).)*){11}\x1b\[J"
    )  # twelve lines, after what was under way
    assert termios.tcgetattr(one.slave) != one.before
    one.send("q")
    assert "\x1b[?25h\x1b[?1049l" in one.until("gave it back")
    assert one.process.wait(20) == 0
    assert termios.tcgetattr(one.slave) == one.before


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (lambda one: one.send("\x03"), 0),  # Ctrl-C
        (lambda one: one.send("\x1b"), 0),  # Escape
        (lambda one: one.send("!"), 1),  # an error of our own
        (lambda one: one.process.terminate(), 143),
    ],
    ids=["interrupt", "escape", "error", "terminate"],
)
def test_the_terminal_is_given_back_however_it_ends(terminal, end, status):
    one = terminal()
    one.until(DRAWN)
    end(one)
    assert "\x1b[0m" in one.until(r"\x1b\[\?25h\x1b\[\?1049l")
    assert one.process.wait(20) == status
    assert termios.tcgetattr(one.slave) == one.before


def test_the_verb_opens_a_head_in_a_terminal(terminal):
    one = terminal("-m", "headwise", "view", "The sea, the sea.", "--head", "3.0", COLORTERM="truecolor")
    shown = one.until(DRAWN)
    assert "\x1b[1m3.0  " in shown
    assert "38;2;" in shown
    one.send("q")
    one.until(r"1049l")
    assert one.process.wait(20) == 0


def test_without_colours_the_screen_is_letters(terminal):
    one = terminal(NO_COLOR="1")
    shown = one.until(r"q quits\x1b\[K\x1b\[J")
    assert not re.search(r"\x1b\[[0-9;]*m", shown)
    one.send("q")
    assert one.process.wait(20) == 0


def test_a_weight_that_rounds_to_nought_is_said_to_be_small():
    cell = Cell(weight=2e-5, logit=-9.0, rank=30, visible=30)
    assert described(cell).startswith("weight < 0.0001 · logit -9.000")
