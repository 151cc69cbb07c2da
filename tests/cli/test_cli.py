"""The command line as its users meet it: the whole chain on every family, and one clear line for every mistake."""

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands_for_tests import fails, sparsepack, succeeds
from models_for_tests import make_model

from sparsepack import progress
from sparsepack.cli import main
from sparsepack.cli.command import emit
from sparsepack.errors import OutputError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a calibration of the tiny model and a zigzag file at half sparsity."""
    folder = tmp_path_factory.mktemp("tiny")
    common = ("--context", 128, "--samples", 6)
    succeeds("calibrate", "shipped:tiny", "--text", "shipped:train", "-o", folder / "cal", *common)
    succeeds(
        *("pack", "shipped:tiny", "--calibration", folder / "cal", "--sparsity", 0.5),
        *("-o", folder / "m.gguf", "--windows", 6),
    )
    return folder


def test_help_names_every_verb_and_imports_no_torch() -> None:
    code = "import sys; from sparsepack.cli import main\n"
    code += "try: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"\n  {verb} " in done.stdout for verb in main.commands)


def test_recipes_are_checked_without_torch() -> None:
    code = "import sys; from pathlib import Path; from sparsepack.recipe.load import load_recipe\n"
    code += "load_recipe(Path('quickstart'))\n"
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(family, marks=pytest.mark.long) for family in ("mistral", "qwen2", "qwen3"))],
)
def test_the_whole_chain_runs_on_a_model_of_each_family(family: str, tmp_path: Path) -> None:
    make_model(tmp_path / "model", family)
    text = tmp_path / "text.txt"
    text.write_text("The sun rose over the hills, and the river ran on to the sea. " * 120)
    model, cal, packed = tmp_path / "model", tmp_path / "cal", tmp_path / "m.gguf"
    succeeds("calibrate", model, "--text", text, "-o", cal, "--context", 64)
    succeeds("thresholds", model, "--calibration", cal, "--sparsity", 0.4, "-o", tmp_path / "t.json")
    succeeds("pack", model, "--thresholds", tmp_path / "t.json", "-o", packed)
    assert "passed" in succeeds("verify", packed, "--against", model)
    assert "sparsepack" in succeeds("inspect", packed)
    measured = succeeds(
        *("eval", packed, "--perplexity", text, "--context", 64, "--windows", 4),
        *("--against", model, "--json", "-"),
    )
    row = json.loads(measured)["perplexity"][0]
    assert row["protocol"] == "decode"
    # The random qwen3 is so sure of each word that float64 does not tell its divergence from zero.
    assert row["kl_divergence"]["value"] > 0 or family == "qwen3"
    assert row["source_perplexity"] != row["perplexity"]["value"]
    assert row["realised_sparsity"]["overall"] == pytest.approx(0.4, abs=0.05)
    assert succeeds("generate", packed, "--prompt", "The sun", "-n", 4).startswith("The sun")
    assert "runtime: " in succeeds("bench", packed, "-p", 8, "-n", 4, "-r", 1)
    assert "runtime: reference" in succeeds("bench", packed, "-p", 8, "-n", 4, "-r", 1, "--backend", "reference")


def test_a_model_of_odd_widths_is_padded_or_stored_in_other_types(shared: Path, tmp_path: Path) -> None:
    model = shared / "models" / "stories-260k"
    succeeds("pack", model, "-o", tmp_path / "s.gguf")
    assert "passed" in succeeds("verify", tmp_path / "s.gguf", "--against", model)
    story = succeeds("generate", tmp_path / "s.gguf", "--prompt", "Once upon a time", "-n", 24)
    assert "there was a little" in story
    result = sparsepack("pack", model, "--format", "q4_k", "-o", tmp_path / "p.gguf")
    assert result.exit_code == 0, result.output
    assert "note: blk.*.attn_q.weight is Q5_0: 64 columns, Q4_K needs a multiple of 256" in result.stderr
    assert "passed" in succeeds("verify", tmp_path / "p.gguf", "--against", model)


def test_merged_calibrations_count_both(tiny: Path, tmp_path: Path) -> None:
    common = ("--context", 128, "--samples", 6, "--seed", 1)
    succeeds("calibrate", "shipped:tiny", "--text", "shipped:train", "-o", tmp_path / "b", *common)
    assert "12 of 128" in succeeds("calibrate", "merge", tiny / "cal", tmp_path / "b", "-o", tmp_path / "c")


def test_an_edited_table_is_what_is_packed(tiny: Path, tmp_path: Path) -> None:
    arguments = ("--calibration", tiny / "cal", "--sparsity", 0.5, "--windows", 4, "--allocation", "uniform")
    succeeds("thresholds", "shipped:tiny", *arguments, "-o", tmp_path / "t.json")
    table = json.loads((tmp_path / "t.json").read_text())
    table["rows"][2]["threshold"] = 7.5
    (tmp_path / "t.json").write_text(json.dumps(table))
    succeeds("pack", "shipped:tiny", "--thresholds", tmp_path / "t.json", "-o", tmp_path / "m.gguf")
    described = json.loads(succeeds("inspect", tmp_path / "m.gguf", "--json", "-"))
    assert described["thresholds"]["rows"][2]["threshold"] == 7.5
    for edited in (tmp_path / "t.json", tmp_path / "m.gguf"):
        told = succeeds("inspect", edited)
        assert "99.0 % @ 7.5" in told
        assert "blk.0.mlp_in: `threshold` counts, not `sparsity`: 7.5 skips 99.0 %, not 50.0 %" in told


def test_a_table_edited_by_hand_says_what_will_happen(tiny: Path, tmp_path: Path) -> None:
    """A smaller threshold skips less, a `sparsity` changes nothing, and what `inspect` expects is what `eval` finds."""
    table = json.loads(succeeds("inspect", tiny / "m.gguf", "--json", "-"))["thresholds"]
    assert "note" not in succeeds("inspect", tiny / "m.gguf").split("| program")[0]
    path = tmp_path / "t.json"
    rows = [row | {"channel_weights": None, "offset": None} for row in table["rows"]]
    path.write_text(json.dumps({**table, "rows": rows}))
    value = json.loads(path.read_text())
    for row in value["rows"]:
        row["threshold"] *= 0.4
        row["sparsity"] = 0.9
    path.write_text(json.dumps(value))
    expected = json.loads(succeeds("inspect", path, "--json", "-"))["expected"]
    assert expected["overall"] == expected["of_sparse_sites"] < 0.35
    told = succeeds("inspect", path)
    assert f"text: {100 * expected['overall']:.1f} % of all block weights" in told
    assert "the thresholds count, not the table's `sparsity` of" in told
    evaluated = ("--perplexity", "shipped:train", "--context", 128, "--windows", 8, "--json", "-")
    row = json.loads(succeeds("eval", "shipped:tiny", "--thresholds", path, *evaluated))["perplexity"][0]
    assert row["realised_sparsity"]["overall"] == pytest.approx(expected["overall"], abs=0.04)


def test_dense_generation_differs_from_sparse(tiny: Path) -> None:
    arguments = ("generate", tiny / "m.gguf", "--prompt", "The assignment statement", "-n", 40)
    assert succeeds(*arguments) == succeeds(*arguments)
    assert succeeds(*arguments) != succeeds(*arguments, "--dense")


def test_mistakes_are_one_line_and_leave_nothing(tiny: Path, tmp_path: Path) -> None:
    cal, packed, new = tiny / "cal", tiny / "m.gguf", tmp_path / "new.gguf"
    short = tmp_path / "short.txt"
    short.write_text("A few words.")
    (tmp_path / "empty.txt").write_text(" \n")
    pack = ("pack", "shipped:tiny", "--calibration", cal, "-o", new, "--sparsity")
    assert "expected at least 0 and below 1" in fails(*pack, "1.0")
    assert "matches no site; nearest" in fails(*pack, "0.5", "--ignore", "blk.9.attn_in")
    assert "exists already" in fails("pack", "shipped:tiny", "-o", packed)
    assert "needs --calibration" in fails("pack", "shipped:tiny", "--sparsity", 0.5, "-o", new)
    assert "no place for thresholds" in fails(*pack, "0.5", "--format", "q4_k")
    assert "fewer than one window" in fails("calibrate", "shipped:tiny", "--text", short, "-o", tmp_path / "c")
    assert "no text in it" in fails("calibrate", "shipped:tiny", "--text", tmp_path / "empty.txt", "-o", tmp_path / "c")
    assert "no such" in fails("eval", packed, "--perplexity", tmp_path / "none.txt")
    assert "nothing to evaluate" in fails("eval", packed)
    assert "not a thresholds table" in fails("inspect", cal / "calibration.json")
    assert "no such file" in fails("generate", tmp_path / "none.gguf", "--prompt", "x")
    assert "no such recipe" in fails("run", tmp_path / "none.yaml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt", "short.txt"]


def test_damaged_files_are_refused(tiny: Path, tmp_path: Path) -> None:
    whole = (tiny / "m.gguf").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 16
    (tmp_path / "flipped.gguf").write_bytes(flipped)
    (tmp_path / "cut.gguf").write_bytes(whole[:-1000])
    for name in ("flipped.gguf", "cut.gguf"):
        fails("generate", tmp_path / name, "--prompt", "x")
        fails("eval", tmp_path / name, "--perplexity", "shipped:heldout")
        assert sparsepack("verify", tmp_path / name).exit_code == 1


def test_a_calibration_of_another_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "other", "llama")
    line = fails(
        "pack", tmp_path / "other", "--calibration", tiny / "cal", "--sparsity", 0.5, "-o", tmp_path / "x.gguf"
    )
    assert "the calibration is of shipped:tiny" in line


def test_a_failed_gate_exits_3(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("{schema: 1, name: r, model: shipped:tiny, pack: {format: q4_k}, gates: {file_bytes: {max: 1}}}")
    result = sparsepack("run", recipe, "-w", tmp_path / "w")
    assert result.exit_code == 3, result.output
    assert "FAIL" in result.stdout.upper()


def test_where_the_result_cannot_go_is_said_before_any_work(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsepack.eval.run.evaluate", lambda *_, **__: pytest.fail("evaluated"))
    nowhere = tiny / "none" / "x.json"
    line = fails("eval", tiny / "m.gguf", "--perplexity", "shipped:heldout", "--json", nowhere)
    assert f"the folder {nowhere.parent} does not exist" in line


def test_mistakes_say_what_is_wrong_and_no_more(tiny: Path) -> None:
    packed = tiny / "m.gguf"
    assert fails("pack", "shipped:tiny", "--thresholds", tiny / "none.json", "-o", tiny / "x.gguf").endswith(
        "none.json: cannot be read (No such file or directory)"
    )
    for device in ("foo", "cuda:x", "mps2"):
        assert fails("generate", packed, "--prompt", "a", "--device", device).endswith(
            f"--device {device}: expected cpu, cuda, cuda:N or mps"
        )
    if not torch.backends.mps.is_available():
        line = fails("generate", packed, "--prompt", "a", "--device", "mps")
        assert "--device mps: not usable here (torch finds no Apple GPU); this machine has cpu" in line
    assert "a text without a name" in fails("calibrate", "shipped:tiny", "--text", "", "-o", tiny / "c")
    long = fails("generate", packed, "--prompt", "once " * 3000, "-n", 1)
    assert long.endswith("shorten it")
    small = fails("generate", packed, "--prompt", "once " * 300, "-n", 1, "--context", 64)
    assert small.endswith("shorten it or give a larger context")


def test_numbers_out_of_range_name_their_flag(tiny: Path) -> None:
    for flag, value in (("--seed", 2**64), ("--threads", 9999), ("-n", -1)):
        result = sparsepack("generate", tiny / "m.gguf", "--prompt", "a", flag, value)
        assert result.exit_code == 2
        assert f"Invalid value for '{flag}'" in result.output
    result = sparsepack("eval", tiny / "m.gguf", "--perplexity", "shipped:heldout", "--batch", 0)
    assert result.exit_code == 2
    assert "Invalid value for '--batch'" in result.output


def _no_such_tensor() -> None:
    torch.empty(1 << 50, dtype=torch.int8)


def _raising(error: BaseException) -> Callable[[], None]:
    def raises() -> None:
        raise error

    return raises


ENDS = {
    "Ctrl-C": (_raising(KeyboardInterrupt()), 130, "interrupted"),
    "a full disk that is not standard output": (
        _raising(OSError(errno.ENOSPC, "No space left on device")),
        1,
        "No space left on device",
    ),
    "no memory": (_raising(MemoryError()), 1, "out of memory; use a smaller --batch or --context"),
    "no memory on a GPU, as torch 2.11 says it": (
        _raising(
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which "
                "1.06 GiB is free. Including non-PyTorch memory, this process has 78.04 GiB memory in use."
            )
        ),
        1,
        "out of memory on GPU 0: 2.00 GiB more are needed, 1.06 GiB of 79.11 GiB are free; use a smaller --batch or "
        "--context, another --device, or end what else uses it",
    ),
    "no memory on Metal": (
        _raising(torch.OutOfMemoryError("MPS backend out of memory")),
        1,
        "out of memory on the device; use a smaller --batch or --context, or another --device",
    ),
    "no memory on a GPU for its driver": (
        _raising(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported at some other call")),
        1,
        "out of memory on the GPU; end what else uses it, or use another --device",
    ),
    "a GPU that another process has to itself": (
        _raising(RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nSearch for it")),
        1,
        "the GPU is busy or unavailable: another process has it to itself; end that, or use another --device",
    ),
    "no memory for a tensor": (
        _no_such_tensor,
        1,
        "out of memory, 1048576.0 GiB more are needed; use a smaller --batch or --context",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_ends_a_command_is_one_line(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    end, code, said = ENDS[case]
    monkeypatch.setattr("sparsepack.eval.run.evaluate", lambda *_, **__: end())
    assert fails("eval", "shipped:tiny", "--perplexity", "shipped:heldout", code=code) == f"sparsepack: {said}"


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("a mistake of ours")
    monkeypatch.setattr("sparsepack.eval.run.evaluate", lambda *_, **__: _raising(error)())
    assert sparsepack("eval", "shipped:tiny", "--perplexity", "shipped:heldout").exception is error


def test_a_table_is_printed_even_where_its_json_cannot_be_written(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(OutputError, match="does not exist"):
        emit({}, str(tmp_path / "none" / "x.json"), lambda _: "the table")
    assert capsys.readouterr().out == "the table\n"


@pytest.mark.parametrize("place", ["before the verb", "after it", None])
def test_quiet_leaves_results_and_errors(tiny: Path, place: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST", 0.001)
    before, after = (["--quiet"] if place == where else [] for where in ("before the verb", "after it"))
    run = ("bench", tiny / "m.gguf", "-p", 8, "-n", 8, "-r", 1)
    done = sparsepack(*before, *run, *after)
    assert done.exit_code == 0
    assert "t/s" in done.stdout
    assert bool(done.stderr) == (place is None)
    if place is None:
        assert "runtime: " in done.stderr
        assert any(line.startswith("bench: ") for line in done.stderr.splitlines())
    assert "no such file" in fails(*before, "eval", "shipped:tiny", "--perplexity", "none.txt", *after)
