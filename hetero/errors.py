"""The exception tree: what can go wrong, by whose fault."""

from __future__ import annotations


class HeteroError(Exception):
    """Every error that hetero raises on purpose; its text is one line for the person who runs it."""


class ConfigError(HeteroError):
    """A value of the user's that cannot work: names the key, the rule, the value and the remedy."""


class NumericError(HeteroError):
    """A loss or a gradient that is not finite."""


class CheckpointError(HeteroError):
    """A checkpoint that cannot be written or must not be used: names the file and what is wrong with it."""


class PeerError(HeteroError):
    """A fault of another machine or of the network between, with where and when it happened.

    Args:
        reason: what happened, in one clause.
        stage: index of the stage that the peer runs, where known.
        host: the peer's host as configured.
        port: the peer's port.
        step: the optimizer step (from 1) during which it happened; None outside of a step.
        lost: the connection is gone or was silent: the machine may come back, and the run go on with it.
    """

    def __init__(
        self,
        reason: str,
        *,
        stage: int | None = None,
        host: str | None = None,
        port: int | None = None,
        step: int | None = None,
        lost: bool = False,
    ) -> None:
        # A reason may hold a peer's own words: no line breaks and no terminal codes in a log.
        self.reason = printable(reason)
        self.stage, self.host, self.port, self.step, self.lost = stage, host, port, step, lost
        super().__init__(self._text())

    def in_step(self, step: int) -> PeerError:
        """The same with the step in which it happened, where that is not known yet."""
        if self.step is not None:
            return self
        return PeerError(self.reason, stage=self.stage, host=self.host, port=self.port, step=step, lost=self.lost)

    def adding(self, remark: str) -> PeerError:
        """The same with one more clause in its reason."""
        reason = f"{self.reason}; {remark}"
        return PeerError(reason, stage=self.stage, host=self.host, port=self.port, step=self.step, lost=self.lost)

    def _text(self) -> str:
        who = "the peer" if self.stage is None else f"stage {self.stage}"
        where = "" if self.host is None else f" at {show_address(self.host, self.port)}"
        when = "" if self.step is None else f" in step {self.step}"
        return f"{who}{where}{when}: {self.reason}"


class ProtocolError(HeteroError):
    """A connection's rules were broken."""


class LocalProtocolError(ProtocolError):
    """This side tried to send what the protocol does not allow; a defect of this program."""


class RemoteProtocolError(ProtocolError):
    """The other side sent what the protocol does not allow; the connection ends."""


def show_address(host: str, port: int | None) -> str:
    """`host:port` with brackets around an IPv6 address; port 0 or None is left out."""
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{port}" if port else shown


def printable(text: str) -> str:
    """Another machine's words as they may stand in a log: line breaks and terminal codes as escapes."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
