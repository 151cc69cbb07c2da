"""Several processes that do one piece of work together, on one machine or several.

shard.py     what one of them does of the work: its share of the windows, and the loop over the blocks
exchange.py  how they exchange what they found
state.py     the state of a run that has not finished, from which it goes on, by one process or several
joined.py    a process finds the others, as torchrun or `launch` started them
alive.py     signs of life, by which a process that is lost ends all
launch.py    a command starts the workers itself (`--devices`)
forked.py    many items by forks of this process, for encoders on a CPU

Nowhere else is torch.distributed called, or a process forked. Whatever the number of workers, the result has the same
bits: windows are dealt in parts that do not depend on it, and what is found in each part is added in the order of the
parts.
"""

PARTS = 16
"""Parts of work whose sums are large, at most: so many sums of each kind come to the worker that needs them, and so
many workers can share it."""
