"""Pack what `run.py` needs on a machine that reaches nothing else: code, and CIFAR-10 in pieces.

python benchmarks/cifar_noise/pack.py DATA OUT        DATA has cifar10, cifar100 and frost

Writes OUT/code (the script, the library, digests) and OUT/data0 ... OUT/data5, whose pieces `run.py put` joins again.
"""

import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PIECES = 6
STRANGERS = 20  # sheets of CIFAR-100, a hundred images each


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def add_sheets(
    archive: tarfile.TarFile, folder: str, file: Path, most: int | None = None
) -> None:
    """Add the image sheets of a zip file, which are compressed without loss already."""
    with zipfile.ZipFile(file) as sheets:
        for name in sorted(sheets.namelist())[:most]:
            add(archive, f"{folder}/{name}", sheets.read(name))


def pack_data(data: Path) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        add_sheets(archive, "train", data / "cifar10" / "train-images-0.zip")
        add_sheets(archive, "train", data / "cifar10" / "train-images-1.zip")
        add_sheets(archive, "test", data / "cifar10" / "test-images.zip")
        add_sheets(archive, "ood", data / "cifar100" / "test-images.zip", STRANGERS)
        add(archive, "labels.npz", (data / "cifar10" / "labels.npz").read_bytes())
        for file in sorted((data / "frost").iterdir()):
            add(archive, f"frost/{file.name}", file.read_bytes())
    return stream.getvalue()


def main(data: Path, out: Path) -> None:
    code = out / "code"
    code.mkdir(parents=True, exist_ok=True)
    for name in ("run.py", "specs.txt"):
        shutil.copy(HERE / name, code / name)
    laboratory = ROOT / "lab" / "src" / "slimbayes_lab"
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in (
        ROOT / "src" / "slimbayes",
        laboratory / "data",
        laboratory / "models",
    ):
        target = (
            code
            / "src"
            / folder.relative_to(
                folder.parents[0] if folder.name == "slimbayes" else folder.parents[1]
            )
        )
        shutil.copytree(folder, target, dirs_exist_ok=True, ignore=ignored)
    (code / "src" / "slimbayes_lab" / "__init__.py").touch()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (code / "COMMIT").write_text(commit.stdout)
    packed = pack_data(data)
    size = -(-len(packed) // PIECES)
    digests = json.loads((HERE / "digests.json").read_text())
    digests["tar"] = hashlib.sha256(packed).hexdigest()
    digests["pieces"] = {}
    for number in range(PIECES):
        piece = packed[number * size : (number + 1) * size]
        folder = out / f"data{number}"
        folder.mkdir(exist_ok=True)
        (folder / f"piece{number}").write_bytes(piece)
        digests["pieces"][f"piece{number}"] = hashlib.sha256(piece).hexdigest()
    (code / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
