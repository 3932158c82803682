"""What a process that computes on its CPU holds beyond what it needs: nothing while it loads, little while it trains.

GNU's C library by itself keeps what is freed; it lies scattered, and such a heap grew to 1.4 times of what a stage
needs at once. If large blocks go back to the system instead, the kernel has to clear their pages at each use: over a
million faults in a step of SmolLM2's middle stage. So they are kept, and whenever the process holds more than it ever
had to, what is free goes back. Elsewhere (another C library, another system) nothing is done.
"""

from __future__ import annotations

import ctypes
import os

_HELD = "/proc/self/statm"  # Linux
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
# Sizes from which on a block, and what is free at the heap's end, go back at once. Blocks of more than 4 MiB take much
# longer to compute than to clear.
_RETURNED, _KEPT = (128 << 10, 128 << 10), (4 << 20, 8 << 20)


class Heap:
    """The C library's heap, which all threads of the process share."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None) if os.access(_HELD, os.R_OK) else None
        self._library = library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
        self._needed = 0  # bytes, the most that was ever held between layers with nothing free
        self._is_first_step = True

    def begin_loading(self) -> None:
        """Freed blocks go back at once, until `end_loading`."""
        self._return_from(_RETURNED)
        self.give_back()

    def end_loading(self) -> None:
        """Freed blocks are kept, without a bound until the first step."""
        self._needed, self._is_first_step = 0, True
        self.give_back()
        self._return_from(_KEPT)

    def bound(self) -> None:
        """Gives back what is free if the process holds more than it ever needed; for layers of training steps.

        The first step shows what is needed, so freed blocks go back at once until its end. To be called often: it
        takes microseconds where nothing is to be given back.
        """
        if self._library is None:
            return
        if not self._needed and self._is_first_step:
            self._return_from(_RETURNED)
        held = _held_bytes()
        if held > self._needed:
            self.give_back()
            self._needed = max(self._needed, _held_bytes())

    def end_step(self) -> None:
        """From the second step on freed blocks are kept."""
        if self._is_first_step and self._needed:
            self._is_first_step = False
            self._return_from(_KEPT)

    def give_back(self) -> None:
        """What is free goes back to the system."""
        if self._library is not None:
            self._library.malloc_trim(0)

    def _return_from(self, sizes: tuple[int, int]) -> None:
        if self._library is not None:
            for setting, size in zip((_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD), sizes, strict=True):
                self._library.mallopt(setting, size)  # stays as it is where the library does not allow the value


def _held_bytes() -> int:
    """Anonymous memory of this process; what is mapped from files is not held (proc(5), statm)."""
    with open(_HELD, "rb") as file:
        fields = file.read().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
