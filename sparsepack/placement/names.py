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
"""These policies are played only where they are asked for."""
SINGLE = ("belady-within-blocks", "belady")
"""These policies are the best for single neurons, and nothing special for groups."""
DRAWN = ("static", "slow", "momentum", "belady", "oracle-static")
"""A picture of all policies shows the first four of these that were played: how to start, two ways to move, a bound."""
ONLINE = ("static", "static-same-share", "slow", "lru", "lfu", "momentum", "momentum-threshold", "momentum-letter")
"""An engine can follow these policies: they know neither what is to come nor how long the prompt is."""
