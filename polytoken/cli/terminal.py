"""Where a chat is shown: a terminal with colours, or plain text for pipes and scripts."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from polytoken.cli.output import say, write
from polytoken.cli.streams import standard_input

if TYPE_CHECKING:
    from rich.console import Console

# A model's text must not move the cursor or talk to the terminal: control characters are shown, not sent.
SHOWN_CONTROLS: Final = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
}


class Screen(Protocol):
    """Asks for lines and shows answers."""

    def read_line(self, *, more: bool) -> str | None:
        """The next line without its line break; None at the end of input. `more` says that it continues another."""
        ...

    def answer(self, text: str, *, reasoning: bool) -> None:
        """A piece of the model's text."""
        ...

    def end_answer(self) -> None:
        """The answer is complete, or was stopped."""
        ...

    def note(self, text: str) -> None:
        """Something about the answer, quietly."""
        ...

    def tell(self, text: str) -> None:
        """What a command has to say."""
        ...

    def complain(self, text: str) -> None:
        """Something that went wrong."""
        ...


class PlainScreen:
    """Answers and what commands say on stdout, errors on stderr, and nothing else; reasoning only if asked for."""

    def __init__(self, *, verbose: bool = False, reasoning: bool = False) -> None:
        self._verbose, self._reasoning = verbose, reasoning
        self._begun = False

    def read_line(self, *, more: bool) -> str | None:
        line = standard_input().readline()
        return line.rstrip("\n") if line else None

    def answer(self, text: str, *, reasoning: bool) -> None:
        if not reasoning or self._reasoning:
            text = text if self._begun else text.lstrip("\n")
            self._begun = self._begun or bool(text)
            write(text)

    def end_answer(self) -> None:
        self._begun = False
        write("\n")

    def note(self, text: str) -> None:
        if self._verbose:
            say("note", text)

    def tell(self, text: str) -> None:
        write(f"{text}\n")

    def complain(self, text: str) -> None:
        say("error", text)


class RichScreen:
    """A terminal: prompts, dimmed reasoning and notes."""

    def __init__(self, *, reasoning: bool = True) -> None:
        from rich.console import Console  # noqa: PLC0415

        self._console: Console = Console(highlight=False)
        self._reasoning = reasoning
        self._last = "\n"
        with suppress(ImportError):
            import readline  # noqa: F401, PLC0415  (line editing and history, where Python has it)

    def read_line(self, *, more: bool) -> str | None:
        try:
            return input("... " if more else ">>> ")
        except EOFError:
            self._console.print()
            return None

    def answer(self, text: str, *, reasoning: bool) -> None:
        shown = text.translate(SHOWN_CONTROLS) if self._reasoning or not reasoning else ""
        if shown:
            self._last = shown[-1]
            style = "dim italic" if reasoning else None
            self._console.print(shown, style=style, end="", markup=False, emoji=False, soft_wrap=True)

    def end_answer(self) -> None:
        if self._last != "\n":
            self._console.print()
        self._last = "\n"

    def note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, soft_wrap=True)

    def tell(self, text: str) -> None:
        self.note(text)

    def complain(self, text: str) -> None:
        self._console.print(text, style="red", markup=False, soft_wrap=True)


def open_screen(*, verbose: bool, reasoning: bool | None = None) -> Screen:
    """A terminal's screen if both ends are one, else a plain one; `reasoning` None is yes there and no here."""
    if standard_input().isatty() and sys.stdout.isatty():
        return RichScreen(reasoning=reasoning is not False)
    return PlainScreen(verbose=verbose, reasoning=reasoning is True)
