"""One pass over text that collects every statistic a packer needs."""

from sparsepack.verb_module import callable_as

callable_as(__name__, "sparsepack.calibrate.run:calibrate")
