"""A loop that waits for nothing: where all sleep, its clock jumps to whoever wakes up first.

What a test says of seconds then holds on any machine, and takes none.
"""

import asyncio
import selectors


class JumpingLoop(asyncio.SelectorEventLoop):
    """For what happens within one thread: others do not see its clock."""

    def __init__(self):
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self):
        return self._clock.now

    def stand_still(self, seconds):
        """As if the process had been stopped meanwhile."""
        self._clock.now += seconds


class _Clock(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout=None):
        if timeout is None:
            return super().select(None)
        found = super().select(0)
        if not found:
            self.now += max(0.0, timeout)
        return found
