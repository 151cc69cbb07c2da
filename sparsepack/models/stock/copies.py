"""Run parts of what lies in the host's memory on a GPU, while the parts before and after are copied."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def run_between_copies(
    parts: Sequence[Tensor],
    run: Callable[[Tensor], Tensor],
    device: torch.device,
    dtype: torch.dtype,
    advance: Callable[[], object],
) -> None:
    """Put `run` of each part, on the device in the type, in the place of the part; `advance` is called after each run,
    before the GPU may have come to its end.

    parts -- on the CPU, page-locked where copies shall not be waited for

    One part is copied there and one back while one runs. The GPU is waited for at the end, and so that no more than
    that has memory on it.
    """
    using = torch.cuda.current_stream(device)
    there, back = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    there.wait_stream(using)

    def fetched(part: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.stream(there):
            placed = part.to(device, non_blocking=True).to(dtype)
        placed.record_stream(using)
        return placed, there.record_event()

    returned: deque[torch.cuda.Event] = deque()
    ahead = fetched(parts[0]) if parts else None
    for number, part in enumerate(parts):
        assert ahead is not None
        placed, ready = ahead
        ahead = fetched(parts[number + 1]) if number + 1 < len(parts) else None
        using.wait_event(ready)
        made = run(placed)
        del placed
        back.wait_stream(using)
        with torch.cuda.stream(back):
            part.copy_(made, non_blocking=True)
        made.record_stream(back)
        del made
        returned.append(back.record_event())
        advance()
        if len(returned) > 1:
            returned.popleft().synchronize()
    back.synchronize()
