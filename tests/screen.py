"""A terminal's screen, as far as programs here write to it: what a person sees in the end."""

from __future__ import annotations

import re

_PARTS = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Screen:
    """Lines of a terminal that is as long as it has to be; text that reaches the right edge goes on in the next line.

    Args:
        width: columns.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._lines: list[list[str]] = [[]]
        self._row = self._column = 0
        self.cursor = True

    def feed(self, text: str) -> None:
        """Does what the bytes say."""
        for found in _PARTS.finditer(text):
            arguments, command, control, letters = found.groups()
            if command:
                self._command(arguments, command)
            elif control == "\r":
                self._column = 0
            elif control == "\n":
                self._down()
                self._column = 0
            else:
                for letter in letters or "":
                    self._put(letter)

    def shown(self) -> list[str]:
        """The lines, without blanks at their ends."""
        return ["".join(line).rstrip() for line in self._lines]

    def _command(self, arguments: str, command: str) -> None:
        if command == "A":
            self._row -= int(arguments or 1)
            assert self._row >= 0, "above the screen"
        elif command == "K":
            assert arguments == "2"
            self._lines[self._row] = []
        elif command in "hl" and arguments == "?25":
            self.cursor = command == "h"
        else:
            assert command == "m", f"unknown {arguments}{command}"

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append([])

    def _put(self, letter: str) -> None:
        if self._column == self._width:
            self._down()
            self._column = 0
        line = self._lines[self._row]
        line += " " * (self._column + 1 - len(line))
        line[self._column] = letter
        self._column += 1
