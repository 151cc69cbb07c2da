"""One pass over text that collects every statistic a packer needs."""
