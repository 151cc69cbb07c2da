"""What a run would take, as text for people."""

from sparsepack.models.stock.forecast import Forecast
from sparsepack.progress import duration
from sparsepack.workers.forecast import PartsForecast


def forecast_table(found: Forecast | PartsForecast) -> str:
    """A line each: what was measured, and what that comes to."""
    values = _of_parts(found) if isinstance(found, PartsForecast) else _of_blocks(found)
    return "\n".join(f"{name.ljust(8)}  {value}" for name, value in values.items())


def _of_parts(found: PartsForecast) -> dict[str, str]:
    return {
        "measured": f"{found.measured}, on {found.device}",
        "workers": f"{found.workers}, {found.parts}",
        "time": f"about {duration(found.seconds)}, of which {duration(found.alone_seconds)} for any number of workers; "
        f"{found.uncounted} not counted",
        "read": f"{_size(found.bytes_read)}, once on each machine",
        "written": _size(found.bytes_written),
        "memory": f"about {_size(found.memory_bytes)}, a worker",
    }


def _of_blocks(found: Forecast) -> dict[str, str]:
    rest = found.hidden_bytes + found.sums_bytes
    if found.device.startswith("cuda"):
        device, host = found.memory_bytes + found.sums_bytes, found.hidden_bytes
        memory = f"{_size(device)} of the device, {_size(host)} of either for hidden states"
    else:
        memory = _size(found.memory_bytes + rest)
    if found.whole_bytes:
        memory += f"; worker 0 {_size(found.whole_bytes)} more while it saves"
    measured = (
        f"one block: {_size(found.block_bytes)} read in {found.read_seconds:.2f} s, "
        f"a batch of {found.batch} windows in {found.batch_seconds:.2f} s, all else in {found.alone_seconds:.2f} s"
    )
    reading = found.read_seconds > found.computing_seconds
    return {
        "measured": f"{measured}, on {found.device}",
        "workers": f"{found.workers}, {found.windows} windows of {found.context} tokens, {found.rounds} of "
        f"{found.batches} batches at most each",
        "time": f"about {duration(found.seconds)}, bound by {'reading' if reading else 'arithmetic'}; exchanging not "
        "counted",
        "read": f"{_size(found.bytes_read)}, once on each machine",
        "memory": f"about {memory}, a worker",
    }


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.2f} MB"
