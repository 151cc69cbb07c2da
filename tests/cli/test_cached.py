"""`generate --cached`: the same text whoever has slots, and what was served is told."""

import json
from pathlib import Path

import pytest
from artifacts_for_tests import tiny_by_neurons
from commands_for_tests import sparsepack


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_by_neurons(tmp_path_factory.mktemp("cached"))


def test_text_is_the_same_and_what_had_slots_is_told(model: Path) -> None:
    def made(*flags: str) -> tuple[dict[str, object], str]:
        result = sparsepack("generate", model, "--prompt", "The for statement", "-n", 40, "--json", "-", *flags)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout), result.stderr

    plain, said = made()
    assert plain["served"] is None
    assert "hit rate" not in said
    for policy in ("slow", "static"):
        found, said = made("--cached", "0.3", "--policy", policy, "--threads", "2")
        assert found["text"] == plain["text"]
        assert f"30 % of the neurons with slots, {policy}, links assumed equal" in said
        assert "of the active neurons" in said
        served = found["served"]
        assert isinstance(served, dict)
        assert served["tokens"] in (39, 40)
        assert 0 < served["hits"] < served["needed"]
