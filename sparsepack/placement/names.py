"""The names of the policies. Nothing is imported here: the command line reads them."""

POLICIES = (
    "static",
    "static-same-share",
    "static-after-prompt",
    "slow",
    "lru",
    "lfu",
    "momentum",
    "momentum-threshold",
    "momentum-letter",
    "oracle-static",
    "belady-within-blocks",
    "belady",
)
"""The names of `placement.policies`, in the order in which they are shown."""
EXTRA = ("momentum-threshold", "momentum-letter", "belady-within-blocks")
"""Those that are played only where they are asked for."""
SINGLE = ("belady-within-blocks", "belady")
"""Those that are the best for single neurons, and nothing special for groups."""
ONLINE = ("static", "static-same-share", "slow", "lru", "lfu", "momentum", "momentum-threshold", "momentum-letter")
"""Those that an engine can follow: they know neither what is to come nor how long the prompt is."""
