"""The choice of the tree from costs and tau, and its cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from eagle_jax import PLAIN, TreeShape, generate
from eagle_jax.decode import tune
from eagle_jax.decode.acceptance import FEW, tau_by_tree
from eagle_jax.decode.tune import best_gate, best_tree, fastest
from eagle_jax.tiny import tiny_drafter, tiny_target

TABLE = [
    {"nodes": 4, "depth": 3, "top_k": 1, "tau": 2.0},
    {"nodes": 8, "depth": 4, "top_k": 2, "tau": 2.6},
]


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Fixed costs instead of measured ones; counts how often they are asked for."""
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path))
    costs = {"pass": {1: 10.0, 4: 12.0, 8: 14.0}, "draft": 1.0, "cycle": {}, "asked": 0}

    def target_pass_ms(target, nodes, batch):
        costs["asked"] += 1
        return costs["pass"][nodes]

    monkeypatch.setattr(tune, "target_pass_ms", target_pass_ms)

    def cycle_ms(engines, prompts):
        return [cycle(engine.shape.nodes) for engine in engines]

    def cycle(nodes):
        drafts = costs["draft"] if nodes > 1 else 0.0
        return costs["cycle"].get(nodes, costs["pass"][nodes] + drafts)

    monkeypatch.setattr(tune, "draft_ms", lambda target, drafter, shape, batch: costs["draft"])
    monkeypatch.setattr(tune, "cycle_ms", cycle_ms)
    return costs


def drafter_for(target, table=TABLE):
    return dataclasses.replace(tiny_drafter(target), tau=table)


def test_takes_the_fastest_tree(measured):
    target = tiny_target()
    # 2.0 * 10 / 13 = 1.54 against 2.6 * 10 / 15 = 1.73
    assert best_tree(target, drafter_for(target)) == TreeShape(8, 4, 2)


def test_a_steep_cost_curve_takes_a_smaller_tree(measured):
    target = tiny_target()
    measured["pass"][8] = 22.0
    assert best_tree(target, drafter_for(target)) == TreeShape(4, 3, 1)


def test_whole_cycles_have_the_last_word(measured):
    target = tiny_target()
    measured["cycle"] = {8: 21.0}
    assert best_tree(target, drafter_for(target)) == TreeShape(4, 3, 1)


def test_decodes_plainly_where_nothing_pays(measured):
    target = tiny_target()
    measured["pass"] = {1: 10.0, 4: 20.0, 8: 27.0}
    assert best_tree(target, drafter_for(target)) == PLAIN


def test_measures_once_a_machine_and_head(measured):
    target = tiny_target()
    best_tree(target, drafter_for(target))
    asked = measured["asked"]
    best_tree(tiny_target(), drafter_for(target))
    assert measured["asked"] == asked
    best_tree(target, drafter_for(target), batch=3)
    assert measured["asked"] > asked
    asked = measured["asked"]
    best_tree(target, drafter_for(target), batch=4)
    assert measured["asked"] == asked
    other = [{**TABLE[0], "tau": 1.2}, TABLE[1]]
    best_tree(target, drafter_for(target, other))
    assert measured["asked"] > asked


def test_a_damaged_cache_is_measured_anew(measured, tmp_path):
    target = tiny_target()
    (tmp_path / "tuning.json").write_text("{")
    assert best_tree(target, drafter_for(target)) == TreeShape(8, 4, 2)


def test_fastest_needs_a_real_gain():
    row = {"nodes": 4, "depth": 3, "top_k": 1, "tau": 1.5}
    assert fastest([{**row, "gate": 0.3, "speedup": 1.01}]) == PLAIN
    assert fastest([{**row, "gate": 0.3, "speedup": 1.2}]) == TreeShape(4, 3, 1, gate=0.3)


def test_the_gate_shuts_out_what_does_not_pay():
    """Half of the passes gain nothing from drafts, the other half triples."""
    row = {"tau": 2.0, "by_promise": [(0.5, 1.0), (0.0, 0.0), (0.5, 3.0), (0.0, 0.0)]}
    found = best_gate(row, 1, plain=10.0, cycle=20.0, closed=11.0)
    # Always drafting: 2 tokens in 20 ms. With the gate: 4 tokens in 20 + 11 ms.
    assert found == {"gate": 0.25, "speedup": pytest.approx(4 / 3.1)}
    assert best_gate(row, 8, 10.0, 20.0, 11.0) == {"gate": 0.0, "speedup": 1.0}
    assert best_gate({"tau": 2.0}, 1, 10.0, 20.0, 11.0) == {"gate": 0.0, "speedup": 1.0}
    # Where drafting is nearly free, nothing is shut out.
    both = {"tau": 2.25, "by_promise": [(0.5, 1.5), (0.5, 3.0)]}
    assert best_gate(both, 1, 10.0, 10.5, 10.4)["gate"] == 0.0


def test_a_gate_reaches_the_tree(measured):
    table = [{**TABLE[0], "by_promise": [(0.5, 1.0), (0.5, 3.0)]}]
    measured["pass"][4] = 19.0
    tree = best_tree(tiny_target(), drafter_for(tiny_target(), table))
    assert tree == TreeShape(4, 3, 1, gate=0.5)


def test_a_head_without_a_table_is_measured_once(measured, monkeypatch):
    target, asked = tiny_target(), []

    def tau_by_tree(target, drafter, prompts, trees):
        asked.append(len(prompts))
        return TABLE

    monkeypatch.setattr(tune, "tau_by_tree", tau_by_tree)
    assert best_tree(target, drafter_for(target, ())) == TreeShape(8, 4, 2)
    assert best_tree(target, drafter_for(target, ())) == TreeShape(8, 4, 2)
    other = dataclasses.replace(tiny_drafter(target, seed=9), tau=())
    best_tree(target, other)
    assert len(asked) == 2


def test_tau_by_tree_counts_as_generate_does(target, drafter):
    prompts = [[1, 2, 3], [4, 5], [6] * 9]
    for row in tau_by_tree(target, drafter, prompts, FEW[:2], max_new_tokens=20, batch=2):
        tree = TreeShape(row["nodes"], row["depth"], row["top_k"])
        run = generate(target, drafter, prompts, max_new_tokens=20, tree=tree)
        assert row["tau"] == pytest.approx(run.stats.tau, abs=1e-3)
        shares, taus = np.array(row["by_promise"]).T
        assert shares.sum() == pytest.approx(1, abs=2e-3)
        assert shares @ taus == pytest.approx(row["tau"], abs=5e-3)
