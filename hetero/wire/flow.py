"""What a link may carry next: the order of steps and micro-batches, and the exact tensors of each."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from hetero.errors import RemoteProtocolError
from hetero.wire.generation_flow import GenerationFlow
from hetero.wire.headers import DTYPE_BYTES, MAX_PAYLOAD_BYTES, FrameType, Step, TensorEntry, Tensors

# Small tensors that ride with the hidden states: name -> dtype; each has the shape [B, T].
RIDERS = {"labels": "int64", "position_ids": "int64", "attention_mask": "bool"}
# Where the router loss is on, each FORWARD has these three and each BACKWARD the gradient of the second, in float32
# whatever the hidden states are sent in: name -> shape from the number of experts.
ROUTER_SUMS: dict[str, Callable[[int], list[int]]] = {
    "router_tokens": lambda num_experts: [num_experts],
    "router_probs": lambda num_experts: [num_experts],
    "router_rows": lambda num_experts: [1],
}
ROUTER_GRAD = "router_grad"

MAX_MICRO_BATCHES = MAX_PAYLOAD_BYTES[FrameType.STEP] // 8


def pack_shapes(shapes: Sequence[tuple[int, int]]) -> bytes:
    """Rows and length of each micro-batch as little-endian int32 [M, 2]."""
    return struct.pack(f"<{2 * len(shapes)}i", *(number for shape in shapes for number in shape))


def unpack_shapes(payload: bytes | memoryview) -> list[tuple[int, int]]:
    """What `pack_shapes` packed; the length must be a multiple of 8 bytes."""
    numbers = struct.unpack(f"<{len(payload) // 4}i", payload)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


class LinkFlow:
    """Keeps count on one link and refuses what the plan does not imply.

    Args:
        hidden_size: H of hidden [B, T, H] and grad [B, T, H].
        dtype: their dtype on this link.
        max_rows: most rows of a micro-batch.
        max_length: most tokens of a row.
        in_flight_cap: of the sending stage, from the number of micro-batches; None lets a whole step through.
        num_experts: that a router chooses from where the router loss is on, else 0.
        max_eval_rows: most rows of a micro-batch of an evaluation; None: `max_rows`.
        eval_cap: most micro-batches of an evaluation that were sent and not yet taken; None lets all through.
        generation: judges generation, which this run may not do where it is None.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        dtype: str,
        max_rows: int,
        max_length: int,
        in_flight_cap: Callable[[int], int] | None = None,
        num_experts: int = 0,
        max_eval_rows: int | None = None,
        eval_cap: int | None = None,
        generation: GenerationFlow | None = None,
    ) -> None:
        self.generation = generation
        self._hidden_size, self._dtype = hidden_size, dtype
        self._max_eval_rows, self._eval_cap = max_eval_rows or max_rows, eval_cap
        self._evaluation = 0  # the last one's number after this step
        self._evaluating = False
        self._in_flight_cap = in_flight_cap or (lambda num_microbatches: num_microbatches)
        self._max_rows, self._max_length, self._num_experts = max_rows, max_length, num_experts
        self._step: int | None = None
        self._shapes: list[tuple[int, int]] = []
        self._next_forward = self._next_backward = 0

    def begin_step(self, header: Step, shapes_payload: bytes | memoryview) -> list[tuple[int, int]]:
        """A STEP was sent or received; gives rows and length of each micro-batch.

        Raises:
            RemoteProtocolError: the last step is not over, or a micro-batch is larger than the plan allows.
        """
        if self._next_forward < len(self._shapes) or self._next_backward < len(self._shapes):
            raise RemoteProtocolError(f"step {header.step} begins before step {self._step} is over")
        self._check_order(header)
        if len(shapes_payload) == 0 or len(shapes_payload) % 8:
            raise RemoteProtocolError(f"micro-batch shapes are pairs of int32, got {len(shapes_payload)} bytes")
        shapes = unpack_shapes(shapes_payload)
        max_rows = self._max_eval_rows if header.evaluate else self._max_rows
        for rows, length in shapes:
            if not (1 <= rows <= max_rows and 1 <= length <= self._max_length):
                raise RemoteProtocolError(
                    f"a micro-batch has at most {max_rows} rows of {self._max_length} tokens, got {rows} of {length}"
                )
        tokens = sum(rows * length for rows, length in shapes)
        if header.label_tokens > tokens:
            raise RemoteProtocolError(f"step {header.step} has fewer tokens than its {header.label_tokens} labels")
        least, most = (max(1, header.label_tokens), tokens) if self._num_experts and not header.evaluate else (0, 0)
        if not least <= header.real_tokens <= most:
            raise RemoteProtocolError(
                f"step {header.step} must have {least} to {most} real_tokens, got {header.real_tokens}"
            )
        self._step, self._shapes, self._next_forward, self._next_backward = header.step, shapes, 0, 0
        self._evaluation, self._evaluating = header.evaluate, header.evaluate > 0
        return shapes

    def _check_order(self, header: Step) -> None:
        """One step follows the other, and the evaluations after a step have the numbers 1, 2, ..."""
        if header.evaluate:
            if header.step != (header.step if self._step is None else self._step):
                raise RemoteProtocolError(f"an evaluation after step {self._step} may follow, got step {header.step}")
            if header.evaluate != self._evaluation + 1:
                raise RemoteProtocolError(
                    f"evaluation {self._evaluation + 1} after step {header.step} may follow, got {header.evaluate}"
                )
        elif self._step is not None and header.step != self._step + 1:
            raise RemoteProtocolError(f"step {self._step + 1} must follow, got step {header.step}")

    def sent(self, type_: FrameType) -> None:
        """Takes note of a FORWARD or BACKWARD that this side sent."""
        if type_ is FrameType.FORWARD:
            self._next_forward += 1
        else:
            self._next_backward += 1

    def admit(self, type_: FrameType, header: Tensors, payload_bytes: int) -> None:
        """Lets an incoming FORWARD or BACKWARD pass if it is the next one and holds exactly the expected tensors.

        Raises:
            RemoteProtocolError: it does not.
        """
        expected = self._next_forward if type_ is FrameType.FORWARD else self._next_backward
        if header.step != self._step or header.micro_batch != expected or expected >= len(self._shapes):
            raise RemoteProtocolError(
                f"{type_.name} of step {self._step} micro-batch {expected} of {len(self._shapes)} must follow, "
                f"got step {header.step} micro-batch {header.micro_batch}"
            )
        num_micro_batches = len(self._shapes)
        cap = self._eval_cap or num_micro_batches if self._evaluating else self._in_flight_cap(num_micro_batches)
        if type_ is FrameType.FORWARD and self._next_forward - self._next_backward >= cap:
            raise RemoteProtocolError(f"at most {cap} micro-batches may be in flight here, got one more")
        if type_ is FrameType.BACKWARD and expected >= self._next_forward:
            raise RemoteProtocolError(f"BACKWARD of micro-batch {expected} came before its FORWARD was sent")
        rows, length = self._shapes[expected]
        found = {entry.name: entry for entry in header.tensors}
        if len(found) != len(header.tensors):
            raise RemoteProtocolError("a tensor stands twice in a frame")
        allowed = self._allowed(type_, rows, length)
        required = allowed.keys() - (RIDERS.keys() - {"labels"})
        if not required <= found.keys() or any(allowed.get(name) != entry for name, entry in found.items()):
            raise RemoteProtocolError(
                f"{type_.name} must hold {', '.join(map(_show, allowed.values())) or 'no tensors'}; "
                f"got {', '.join(map(_show, header.tensors))}"
            )
        widths = [DTYPE_BYTES[entry.dtype] for entry in header.tensors]
        if widths != sorted(widths, reverse=True):
            raise RemoteProtocolError(f"{type_.name} must hold wide elements first, so that all are aligned")
        if payload_bytes != sum(entry.nbytes() for entry in header.tensors):
            raise RemoteProtocolError(f"{type_.name} carries {payload_bytes} bytes, its tensors have others")
        self.sent(type_)

    def _allowed(self, type_: FrameType, rows: int, length: int) -> dict[str, TensorEntry]:
        if self._evaluating and type_ is FrameType.BACKWARD:
            return {}
        large = "hidden" if type_ is FrameType.FORWARD else "grad"
        allowed = {large: TensorEntry(large, self._dtype, [rows, length, self._hidden_size])}  # type: ignore[arg-type]
        if type_ is FrameType.FORWARD:
            for name, dtype in RIDERS.items():
                allowed[name] = TensorEntry(name, dtype, [rows, length])  # type: ignore[arg-type]
        if self._num_experts and type_ is FrameType.FORWARD and not self._evaluating:
            for name, shape in ROUTER_SUMS.items():
                allowed[name] = TensorEntry(name, "float32", shape(self._num_experts))
        elif self._num_experts and not self._evaluating:
            allowed[ROUTER_GRAD] = TensorEntry(ROUTER_GRAD, "float32", [self._num_experts])
        return allowed


def _show(entry: TensorEntry) -> str:
    return f"{entry.name[:60]!r} {entry.dtype} {entry.shape}"  # the name may be the peer's word
