"""`eagle-jax inspect`: kinds told apart, sizes as loaded, memory as XLA plans it, fit said."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from make_fixtures import FOLDER
from released import cast, config, deep_target, eagle3_tensors, eagle_tensors, write
from safetensors.numpy import load_file
from test_text import write_folder
from test_unpickle import tensor
from test_unpickle import write as write_bin

from eagle_jax.cli import main
from eagle_jax.config import DrafterConfig, ModelConfig, Sampling, TreeShape
from eagle_jax.decode.engine import Engine
from eagle_jax.drafters.eagle import EagleHead
from eagle_jax.drafters.load import bind, load_drafter, save_head
from eagle_jax.nn.modules import parameters
from eagle_jax.overview import HeadFacts, is_head, memory
from eagle_jax.target.load import Target, load_model
from eagle_jax.target.transformer import Transformer
from eagle_jax.tiny import tiny_drafter, tiny_target

FAMILIES = sorted(folder.name for folder in FOLDER.iterdir() if (folder / "config.json").is_file())


def inspect(capsys, *arguments):
    code = main(["inspect", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else None, captured.err


def target_folder(tmp_path, family):
    folder = shutil.copytree(FOLDER / family, tmp_path / family)
    write_folder(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_is_what_loading_makes_of_it(capsys, tmp_path, family):
    folder = target_folder(tmp_path, family)
    code, report, _ = inspect(capsys, folder, "--length", 32, "--nodes", 4, "--depth", 2)
    assert code == 0 and not is_head(folder)
    found, loaded = report["target"], load_model(folder)
    assert found["config"] == json.loads(json.dumps(loaded.config.__dict__, default=vars))
    arrays = parameters(loaded).values()
    assert found["parameters"] == sum(array.size for array in arrays)
    assert report["memory"]["bytes"]["target weights"] == sum(array.nbytes for array in arrays)
    tensors = load_file(folder / "model.safetensors")
    assert sum(found["stored"].values()) == sum(array.nbytes for array in tensors.values())


def released(folder, kind):
    if kind == "eagle":
        return write(folder, config(bias=True), eagle_tensors())
    if kind == "bin":
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config(bias=True)))
        content, storages = {}, {}
        for number, (name, array) in enumerate(cast(eagle_tensors(), "f16").items()):
            stride = (array.shape[1], 1) if array.ndim == 2 else (1,)
            content[name] = tensor("HalfStorage", str(number), array.size, 0, array.shape, stride)
            storages[str(number)] = array.tobytes()
        write_bin(folder / "pytorch_model.bin", content, storages)
        return str(folder)
    return write(folder, config(draft_vocab_size=30), eagle3_tensors())


@pytest.mark.parametrize("kind", ["eagle", "bin", "eagle3", "own"])
def test_a_head_is_what_loading_makes_of_it(capsys, tmp_path, kind):
    target = deep_target()
    if kind == "own":
        path = tmp_path / "head"
        made = tiny_drafter(target, draft_vocab_size=40, method="eagle3")
        facts = {"target": "tiny", "tau": [{"nodes": 4, "depth": 2, "top_k": 2, "tau": 1.5}]}
        ids = np.asarray(made.module.draft_ids[...])
        save_head(path, made.module.head, ids, facts)
    else:
        path = released(tmp_path / "head", kind)
    code, report, _ = inspect(capsys, path)
    loaded = load_drafter(str(path), target)
    head = report["head"]
    assert code == 0 and "target" not in report and "fits" not in report
    assert head["method"] == loaded.method and head["format"] == loaded.format
    assert head["parameters"] == sum(a.size for a in parameters(loaded.module.head).values())
    draft_vocab = loaded.module.head.config.draft_vocab_size
    assert head["config"]["draft_vocab_size"] == draft_vocab
    assert head["target"] == ("tiny" if kind == "own" else None)
    assert len(head["tau"]) == (1 if kind == "own" else 0)


def test_fit_is_said_with_the_exit_code(capsys, tmp_path):
    folder = target_folder(tmp_path, "llama-separate")
    model = load_model(folder)
    good, bad = tmp_path / "good", tmp_path / "bad"
    smaller = dataclasses.replace(model.config, vocab_size=model.config.vocab_size - 1)
    for path, other in ((good, model.config), (bad, smaller)):
        made = tiny_drafter(tiny_target(config=other))
        save_head(path, made.module.head, None, {})
    for arguments in ((folder, "--drafter", good), (good, "--target", folder)):
        code, report, _ = inspect(capsys, *arguments)
        assert code == 0 and report["fits"] and "drafter weights" in report["memory"]["bytes"]
    code, report, _ = inspect(capsys, folder, "--drafter", bad)
    assert code == 1 and not report["fits"] and "vocab_size" in report["misfit"]
    assert main(["inspect", str(folder), "--drafter", str(bad)]) == 1
    assert "made for a target with vocab_size" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no such target"),
        (["{target}", "--target", "x"], "--drafter"),
        (["{head}", "--drafter", "x"], "--target"),
        (["{target}", "--batch", "0"], "at least 1"),
        (["{head}", "--drafter-layers", "1,2,3"], "EAGLE-1/2"),
    ],
)
def test_bad_input_ends_with_exit_code_2(capsys, tmp_path, arguments, message):
    folders = {
        "{target}": target_folder(tmp_path, "llama-tied"),
        "{head}": released(tmp_path / "head", "eagle"),
    }
    code, report, err = inspect(capsys, *(folders.get(word, word) for word in arguments))
    assert code == 2 and report is None and message in err


@pytest.mark.parametrize(("batch", "nodes"), [(1, 8), (2, 32)])
def test_memory_is_what_xla_plans(batch, nodes):
    """Weights and caches to the byte; the pass is an estimate of what XLA holds besides."""
    sizes = ModelConfig(
        vocab_size=8192, hidden_size=64, intermediate_size=128, num_layers=3, num_heads=4,
        num_kv_heads=2, head_dim=16, context=1024,
    )  # fmt: skip
    model = Transformer(sizes, rngs=nnx.Rngs(0))
    target = Target("mid", model, None, ())
    drafts = DrafterConfig.like(sizes, sizes.vocab_size)
    head = EagleHead(drafts, rngs=nnx.Rngs(1))
    shape = TreeShape(nodes, 3, 4)
    engine = Engine(model, bind(head, None, target), shape)
    prompts, length = [[1, 2, 3]] * batch, 1000
    state = engine.start(prompts, length - 3, Sampling(), [0] * batch, [])
    count = sum(array.size for array in parameters(head).values())
    facts = HeadFacts(FOLDER, "own", "eagle", drafts, None, count, (), None, ())
    parts = memory(sizes, facts, length=length, batch=batch, shape=shape, dtype=jnp.float32)
    assert parts["target weights"] == sum(a.nbytes for a in parameters(model).values())
    assert parts["target cache"] == sum(a.nbytes for a in jax.tree.leaves(state.caches))
    assert parts["drafter cache"] == sum(a.nbytes for a in jax.tree.leaves(state.drafter.cache))
    planned = engine.compile_ahead(state, steps=True).memory_analysis().temp_size_in_bytes
    assert 0.5 * planned < parts["tree pass"] < 3 * planned
