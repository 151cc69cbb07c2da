"""Products of slid folders: which shapes are measured, what the table says, and on a GPU that contenders are right."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsepack.bench import linears
from sparsepack.bench.linears import Linear, bench_linears, contenders, linears_of
from sparsepack.bench.run import linears_table
from sparsepack.errors import UserError
from sparsepack.models.pattern import Pattern


def test_linears_of_one_shape_are_measured_once() -> None:
    shapes = {"l.0.q_proj": (64, 32), "l.0.k_proj": (16, 32), "l.0.v_proj": (16, 32), "l.1.q_proj": (64, 32)}
    assert linears_of(shapes) == [Linear("q_proj", 64, 32, 2), Linear("k_proj/v_proj", 16, 32, 2)]


def test_a_folder_without_slid_linears_has_nothing_to_measure() -> None:
    with pytest.raises(UserError, match="nothing to measure"):
        linears_of({})


def test_there_are_so_many_copies_of_the_weights_that_no_cache_holds_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "ROTATION", 1000)
    made: list[torch.Tensor] = []

    def of(copy: torch.Tensor) -> linears.Run:
        made.append(copy)
        return lambda x: x

    for columns, count in ((1, 16), (64, 1), (7, 3)):  # of 64, 4096 and 448 bytes
        made.clear()
        runs, nbytes = linears.copies(torch.ones(16, columns), of)
        assert len(runs) == len({copy.data_ptr() for copy in made}) == count
        assert nbytes == 64 * columns


def test_the_table_has_sums_and_ratios() -> None:
    ways = contenders([Pattern(6, 8)])
    names, baselines = [way.name for way in ways], [way.name for way in ways if way.how is None]
    linears = [{"name": "a", "rows": 8, "columns": 16, "count": 2}, {"name": "b", "rows": 8, "columns": 8, "count": 1}]
    rows: list[dict[str, Any]] = [
        {**linear, "tokens": 64, "contender": name, "seconds": (n + 1) * 1e-6, "share": share}
        for linear, share in zip(linears, (0.5, None), strict=True)
        for n, name in enumerate(names)
    ]
    result = {"device": "a GPU", "read_bandwidth": 1e9, "contenders": names, "linears": linears, "tokens": [64]}
    table = " ".join(linears_table({**result, "baselines": baselines, "products": rows}).split())
    assert "| a 8 x 16, 2 of them | 1.0 (50%) | 2.0 (50%) |" in table
    assert "| all of them | 3 | 6 | 9 |" in table
    assert "| as dense INT8 | 64 | 3.00 | 1.50 | 1.00 |" in table
    assert table.count("| as dense ") == len(baselines)
    assert "as dense 6/8" not in table


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_contender_is_measured() -> None:
    other = replace(contenders()[0], name="one more")
    result = bench_linears([Linear("a", 256, 512), Linear("b", 512, 256, 3)], [64], rounds=2, others=[other])
    assert len(result["products"]) == 2 * len(result["contenders"])
    for row in result["products"]:
        assert row["seconds"] > 0
        assert len(row["samples"]) == 2
    assert "b 512 x 256, 3 of them" in linears_table(result)
    assert "as dense one more" in linears_table(result)
