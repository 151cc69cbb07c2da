"""Files whose planes or levels are not what a reader knows: each refused in one line that names the tensor."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from forged import forge
from models_for_tests import make_model
from torch import Tensor

from sparsepack.cli.app import main
from sparsepack.errors import ArtifactError
from sparsepack.files.gguf import read_gguf
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.formats.open import read_packed
from sparsepack.formats.plan import Plan, PlannedGroup, PlanRequest
from sparsepack.formats.table import FORMATS
from sparsepack.formats.verify import verify
from sparsepack.formats.zigzag.plan import planned_vector
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.sites import SiteRule
from sparsepack.packing import PackRequest, pack

FORMAT = FORMATS["zigzag-q6_p"]
THRESHOLD, STEPS, MATRIX = "blk.0.mlp_in.threshold", "blk.0.mlp_in.steps", "blk.0.mlp_in.weight"
Change = Callable[[PlannedGroup], PlannedGroup]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_model(tmp_path_factory.mktemp("planes") / "m", "llama", num_hidden_layers=1))


@pytest.fixture
def plan(checkpoint: Checkpoint) -> Plan:
    rule = SiteRule(torch.ones(256), steps=torch.arange(1.0, 6.0))
    return FORMAT.plan(checkpoint, PlanRequest({(0, "mlp_in"): rule}))


def _write(plan: Plan, path: Path, name: str, change: Change) -> None:
    groups = [change(group) if group.tensors[0].name == name else group for group in plan.groups]
    forge(plan, groups=tuple(groups)).write(path)


def _refusal(path: Path) -> str:
    """What reading a file says; `verify` and commands say the same, in one line."""
    with pytest.raises(ArtifactError) as caught:
        read_packed(path)
    said = str(caught.value)
    assert "\n" not in said
    assert verify(path).problems == (said,)
    done = CliRunner().invoke(main, ["generate", str(path), "--prompt", "a"])
    assert done.exit_code == 2
    assert said in done.output
    return said


def _instead(name: str, value: Tensor) -> Change:
    return lambda group: planned_vector(name, "F32", value)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (STEPS, torch.ones(3), "is [3], Q6_P has 5 levels; pack the model again"),
        (STEPS, torch.ones(6), "is [6], Q6_P has 5 levels; pack the model again"),
        (STEPS, torch.ones(5, 256), "is [5, 256], Q6_P has 5 levels; pack the model again"),
        (STEPS, torch.arange(5.0, 0.0, -1.0), "falls from level to level, expected ascending numbers"),
        (STEPS, torch.full((5,), torch.nan), "falls from level to level, expected ascending numbers"),
        (THRESHOLD, torch.ones(128), "is F32 [128], the architecture means F32 [256]; pack the model again"),
        (THRESHOLD, torch.ones(1), "is F32 [1], the architecture means F32 [256]; pack the model again"),
    ],
    ids=["three levels", "six levels", "for each column", "falling", "no numbers", "another width", "one threshold"],
)
def test_levels_that_nobody_knows_are_refused(plan, tmp_path, name, value, says) -> None:
    _write(plan, tmp_path / "m.gguf", name, _instead(name, value))
    said = _refusal(tmp_path / "m.gguf")
    assert name in said
    assert says in said


def test_a_missing_plane_is_refused(plan, tmp_path) -> None:
    """Superblocks that end after the fourth plane."""

    def shortened(group: PlannedGroup) -> PlannedGroup:
        matrix, *others = group.tensors
        kept = BLOCKS["Q6_P"].level_bytes[-2]

        def produce() -> list[Tensor]:
            first, *rest = group.produce()
            return [first.view(matrix.shape)[..., :kept].contiguous(), *rest]

        return PlannedGroup((replace(matrix, shape=(*matrix.shape[:-1], kept)), *others), produce)

    _write(plan, tmp_path / "m.gguf", MATRIX, shortened)
    said = _refusal(tmp_path / "m.gguf")
    assert MATRIX in said
    assert str(BLOCKS["Q6_P"].bytes) in said


@pytest.mark.parametrize("level", range(1, 6))
def test_a_damaged_plane_is_found(plan, tmp_path, level) -> None:
    path = tmp_path / "m.gguf"
    plan.write(path)
    data, info = bytearray(path.read_bytes()), read_gguf(path).tensors[MATRIX]
    data[info.start + BLOCKS["Q6_P"].bytes * 1000 + BLOCKS["Q6_P"].level_bytes[level - 1] - 1] ^= 4
    path.write_bytes(data)
    said = _refusal(path)
    assert f"{MATRIX} does not match the SHA-256; copy or pack it again" in said


def test_narrow_models_are_packed_or_refused_in_one_line(tmp_path) -> None:
    """A column's rows fill superblocks of 256, or pieces of 64, up with zeros, however few they are."""
    sizes = {"hidden_size": 20, "intermediate_size": 9, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = make_model(tmp_path / "m", "llama", **sizes)
    pack(PackRequest(str(model), tmp_path / "m.gguf", format=FORMAT.name, score=False))
    assert verify(tmp_path / "m.gguf", str(model)).passed
