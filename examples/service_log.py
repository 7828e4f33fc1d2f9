"""The long tool result that the examples read: a service log with three facts in it. Not a program."""

from __future__ import annotations

import random

FACTS = {
    12: "09:03:31 node-7 storage: disk /data is full, writes are refused",
    28: "09:11:02 deploy: release 4.2 was rolled back by Mara Lindqvist",
    44: "09:19:47 payments: the certificate of gateway Osprey expires on Friday",
}
"""Log line number -> the lines the later turns ask about."""


def service_log(lines: int = 62) -> str:
    """About 2,000 tokens, the same every time.

    Args:
        lines: how many; the facts stand in lines 12, 28 and 44.
    """
    draw = random.Random(7)
    out: list[str] = []
    for number in range(lines):
        second = 15 * number
        stamp = f"09:{second // 60:02d}:{second % 60:02d}"
        usual = (
            f"{stamp} node-{draw.randint(1, 6)} checkout: request {draw.randint(1000, 9999)} "
            f"took {draw.randint(80, 900)} ms, status {draw.choice((200, 200, 200, 503))}"
        )
        out.append(FACTS.get(number, usual))
    return "\n".join(out)
