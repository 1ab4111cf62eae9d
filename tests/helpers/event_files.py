"""What TensorBoard would show of a run folder."""

import importlib.util
from pathlib import Path

import pytest

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboardX") is None, reason="needs tensorboardX"
)


def shown_in_tensorboard(workdir: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value, as TensorBoard understands the event files."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, dict[int, float]] = {}
    for path in sorted(workdir.glob("tensorboard/events*")):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            if event.session_log.status == event.session_log.START:
                for tag in found.values():
                    for step in [step for step in tag if step >= event.step]:
                        del tag[step]
            for value in event.summary.value:
                tag = found.setdefault(value.tag, {})
                assert event.step not in tag, "a step is shown twice"
                tag[event.step] = value.simple_value
    return found
