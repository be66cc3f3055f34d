"""Pictures of the commands in a terminal, as SVG, from what they really print.

    python -m bench.terminal_pictures FOLDER [chat | stop | help]

chat: a conversation with a message of two lines and with commands.
stop: `twostroke serve`, ended with Ctrl-C while requests run.
help: `twostroke serve --help`.

Each command runs on the default model in a pseudo-terminal of 96 columns, and its input is typed.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import select
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from rich.console import Console
from rich.text import Text

from bench.witness import get_json, post_json
from twostroke.model.find.hub import cache_dir

COLUMNS, ROWS = 96, 50
PATIENCE_S = 600.0
CTRL_C = "\x03"
URL = "http://127.0.0.1:8000"
# Escape sequences that are no colours, such as those that switch a mode of the terminal.
OTHER_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b[=>]|\x07")
REMOTE_FONT = re.compile(r"@font-face \{[^}]*\}\s*")


class Terminal:
    """A command in a pseudo-terminal. `text`: what the terminal has shown."""

    def __init__(self, *words: str, cache: str | None = None) -> None:
        """`cache`: the command's cache directory, where it also runs."""
        self.text = ""
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
            if cache is not None:
                os.chdir(cache)
                os.environ["TWOSTROKE_CACHE"] = cache
            os.execv(sys.executable, [sys.executable, "-m", "twostroke", *words])

    def wait_for(self, text: str, start: int = 0) -> int:
        """Read until the text has been shown at or after `start`. Return the place after it."""
        until = time.monotonic() + PATIENCE_S
        while (at := self.text.find(text, start)) < 0:
            assert time.monotonic() < until, f"no {text!r} in {self.text!r}"
            assert self._read(), f"the command ended without {text!r}: {self.text!r}"
        return at + len(text)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def end(self) -> str:
        """Wait for the end of the command. Return all that the terminal has shown."""
        while self._read():
            pass
        os.waitpid(self._pid, 0)
        return self.text

    def _read(self) -> bool:
        """Read what there is, for up to a second. Return False at the end."""
        if not select.select([self._fd], [], [], 1.0)[0]:
            return True
        try:
            found = os.read(self._fd, 65536)
        except OSError:  # the command has ended
            return False
        text = OTHER_ESCAPES.sub("", found.decode(errors="replace"))
        self.text += text.replace("\r\n", "\n").replace("\r", "")
        return bool(found)


def svg(title: str, text: str) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text.rstrip()))
    return REMOTE_FONT.sub("", console.export_svg(title=title))


def chat() -> str:
    with tempfile.TemporaryDirectory() as folder:
        for one in cache_dir().iterdir():  # the model, without the history of other chats
            if one.name != "chat_history":
                (Path(folder) / one.name).symlink_to(one)
        terminal = Terminal("chat", "--temperature", "0", cache=folder)
        at = terminal.wait_for("> ")
        for typed, shown in (
            ("/set max_tokens 60", "> "),
            ("Name three things to take\\", "… "),
            ("to a picnic at the sea.", "tok/s"),
            ("/system Answer in one short sentence.", "> "),
            ("And if it rains?", "tok/s"),
            ("/save picnic.json", "> "),
        ):
            terminal.type(f"{typed}\n")
            at = terminal.wait_for(shown, terminal.wait_for(typed, at))
            if shown == "tok/s":
                at = terminal.wait_for("> ", at)
        terminal.type("/exit\n")
        return "$ twostroke chat --temperature 0\n" + terminal.end()


def stop() -> str:
    """Takes the default port, which must be free."""
    terminal = Terminal("serve")
    terminal.wait_for(URL)
    threads = [Thread(target=complete) for _ in range(3)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + PATIENCE_S
    while get_json(f"{URL}/load")["server_load"] < len(threads):
        assert time.monotonic() < until, "the requests did not start"
        time.sleep(0.05)
    terminal.type(CTRL_C)
    text = terminal.end()
    for thread in threads:
        thread.join()
    return f"$ twostroke serve\n{text}"


def complete() -> None:
    body = {"prompt": "The sea is", "max_tokens": 80, "ignore_eos": True}
    post_json(f"{URL}/v1/completions", body)


def usual_help() -> str:
    return "$ twostroke serve --help\n" + Terminal("serve", "--help").end()


COMMANDS: dict[str, tuple[str, Callable[[], str]]] = {
    "chat": ("twostroke chat", chat),
    "stop": ("twostroke serve", stop),
    "help": ("twostroke serve --help", usual_help),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", nargs="*", choices=tuple(COMMANDS), default=tuple(COMMANDS))
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in args.what:
        title, record = COMMANDS[name]
        (folder / f"terminal-{name}.svg").write_text(svg(title, record()), encoding="utf-8")


if __name__ == "__main__":
    main()
