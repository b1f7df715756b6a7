"""The ranks of a process group meet over its store before a gather that not all of them may have called.

A collective of one rank alone would pair with the next one of training. Keys of a store pair with nothing.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

PATIENCE = 300.0  # seconds
_PAUSE, _LONGEST_PAUSE = 0.001, 0.1  # seconds between two looks


def meet(store: Any, size: int, call: str) -> None:
    """Return once all `size` ranks have come, for a collective to follow; if one does not come, raise on the others.

    They come together in numbered rounds. The first word on how many came to a round is final: all of them go by it. A
    rank that finds it spoken goes on to the next round, so a call that failed leaves nothing behind.

    Args:
        store: a torch.distributed.Store, used for `call` and these ranks only; written.
        size: the number of ranks.
        call: names what all ranks must call.

    Raises: TimeoutError if not all ranks came within `PATIENCE`, or half of the store's timeout if that is shorter: the
        others may wait for this one in a collective, whose timeout is as long. Whatever the store raises.
    """
    seconds = min(PATIENCE, store.timeout.total_seconds() / 2)
    deadline = time.monotonic() + seconds
    last = store.add("last", 0)  # the last round that all ranks came to
    number = last + 1
    while store.check([f"{number}"]):  # others came to that one, and left it
        number += 1
    try:
        is_last = store.add(f"came to {number}", 1) == size
        pause = _PAUSE
        while not is_last and not store.check([f"{number}"]) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        came = store.add(f"came to {number}", 0)
        came = int(store.compare_set(f"{number}", "", f"{came}"))
    except BaseException:  # it must not come to this round twice
        with suppress(Exception):
            store.compare_set(f"{number}", "", "0")
        raise
    if came < size:
        raise TimeoutError(
            f"{call} must be called on all {size} ranks of its process group within {seconds:g} s, got {came} of them; "
            "nothing was gathered, and training can go on"
        )
    if is_last:
        for each in range(last, number):  # all have left these rounds
            for key in (f"{each}", f"came to {each}"):
                with suppress(RuntimeError):  # some stores cannot delete
                    store.delete_key(key)
        store.add("last", number - last)
