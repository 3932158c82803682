"""Frames, the connection's protocol, and the message extension point."""

from hetero.wire.messages import CommandTable, Message, MessageType

__all__ = ["CommandTable", "Message", "MessageType"]
