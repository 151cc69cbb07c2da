"""Sites by name and pattern."""

import pytest

from sparsepack.errors import SiteError
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.family import SITES
from sparsepack.models.sites import SiteKey, chosen_sites, site_name


@pytest.fixture(scope="module")
def tiny() -> Checkpoint:
    return open_checkpoint("shipped:tiny")


@pytest.mark.parametrize(
    ("include", "ignore", "expected"),
    [
        ((), (), [(layer, site) for layer in range(3) for site in SITES]),
        (("blk.1.mlp_mid",), (), [(1, "mlp_mid")]),
        (("blk.*.mlp_mid", "blk.0.*"), (), [*[(0, site) for site in SITES], (1, "mlp_mid"), (2, "mlp_mid")]),
        (("re:blk\\.[12]\\.attn_.*",), ("*.attn_out",), [(1, "attn_in"), (2, "attn_in")]),
        ((), ("blk.0.*", "blk.2.*", "re:.*mlp.*"), [(1, "attn_in"), (1, "attn_out")]),
    ],
)
def test_patterns_choose_sites_in_order_of_execution(
    tiny: Checkpoint, include: tuple[str, ...], ignore: tuple[str, ...], expected: list[SiteKey]
) -> None:
    assert chosen_sites(tiny.sites, include, ignore) == expected


@pytest.mark.parametrize("which", ["include", "ignore"])
def test_a_pattern_that_matches_nothing_gives_the_nearest_names(tiny: Checkpoint, which: str) -> None:
    lists: dict[str, tuple[str, ...]] = {"include": (), "ignore": (), which: ("blk.1.mlp_middle",)}
    with pytest.raises(SiteError, match=rf"{which} 'blk\.1\.mlp_middle' matches no site; nearest: blk\.1\.mlp_mid"):
        chosen_sites(tiny.sites, **lists)
    with pytest.raises(SiteError, match="nearest: blk"):
        chosen_sites(tiny.sites, **{**lists, which: ("re:blk.9.*",)})
    with pytest.raises(SiteError, match=r"'re:\(' *: not a regular expression"):
        chosen_sites(tiny.sites, **{**lists, which: ("re:(",)})


def test_nothing_left_is_an_error(tiny: Checkpoint) -> None:
    with pytest.raises(SiteError, match="no site is left"):
        chosen_sites(tiny.sites, ("blk.0.*",), ("blk.*",))


def test_a_site_has_one_name() -> None:
    assert site_name(3, "mlp_mid") == "blk.3.mlp_mid"
