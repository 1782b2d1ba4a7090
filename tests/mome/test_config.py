"""Configurations: JSON round trip, refusals, and the frozen surface of the command line."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mome.command import parse
from mome.config import RunConfig, differences, from_dict, to_dict
from mome.errors import UserError
from mome.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip(name):
    config = PRESETS[name]
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_round_trip_of_values_away_from_the_defaults():
    config = parse(
        ["local", "--memory.ngram.layers", "0", "2", "--memories", "ngram", "value", "--memory.value.init", "0.25"]
    ).config
    assert config.memory.ngram.layers == (0, 2)
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_unknown_key_names_the_nearest():
    saved = to_dict(PRESETS["local"])
    saved["model"]["widht"] = 3
    with pytest.raises(UserError, match=r"model\.widht \(did you mean width\?\)"):
        from_dict(RunConfig, saved)


def test_differences_name_the_field():
    one = to_dict(PRESETS["local"])
    other = to_dict(dataclasses.replace(PRESETS["local"], seed=4))
    assert differences(one, other) == ["seed: 0 -> 4"]
    assert differences(one, one) == []


def test_local_dense_is_local_in_every_field_but_memory():
    changed = differences(to_dict(PRESETS["local"]), to_dict(PRESETS["local-dense"]))
    assert [line.split(":")[0] for line in changed] == ["memories", "preset"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["locla"], "locla: no such preset (did you mean local?)"),
        (["local", "--stepz", "3"], "--steps"),
        (["local", "--steps", "0"], "--steps 0: give a whole number of 1 or more"),
        (["local", "--steps", "many"], "--steps"),
        (["local", "--memories", "rooted"], "did you mean routed?"),
        (["local", "--memories", "ngram", "ngram"], "name each memory once"),
        (["local", "--table.ngram.beta2", "1.5"], "beta2 lies between 0 and 1"),
        (["local", "--memory.ngram.rows", "1"], "--memory.ngram.rows 1"),
        (["local", "--row-tokens", "100000"], "--model.max-tokens"),
        (["local", "--train-glob", "x*.bin"], "--val-glob"),
        (["docs-plain", "--memories", "ngram"], "plug points"),
        (["local", "--table.ngram.lr", "inf"], "and finite"),
        (["local", "--table.ngram.eps", "0"], "eps is above 0"),
        (["local", "--table.ngram.weight-decay", "60"], "wipes out every row"),
        (["local", "--memory.value.init", "0.5"], "the memory value is off"),
        (["local-dense", "--table.ngram.lr", "0.5"], "the memory ngram is off"),
        (["local", "--table.ngram.rule", "adagrad", "--table.ngram.beta2", "0.5"], "the rule adagrad has none"),
        (["local", "--optim.plain-lr", "0.5"], "--optim.kind is muon"),
        (["docs-plain", "--optim.down-lr-mul", "3"], "--optim.kind is adamw"),
        (["docs-plain", "--schedule.momentum", "0.5", "0.6"], "--optim.kind is adamw"),
        (["docs-plain", "--model.long-every", "3"], "the plain model has none"),
        (["docs-plain", "--optim.kind", "muon"], "the plain model takes adamw"),
        (["local", "--seed", str(2**63)], "below 2**63"),
        (["local", "--train-glob", "a_0.bin", "a_1.bin", "--val-glob", "b.bin"], "quote the pattern"),
    ],
)
def test_bad_words_get_one_line(words, said):
    with pytest.raises(UserError) as refused:
        parse(words)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_preset_may_be_left_out():
    assert parse(["--steps", "7"]).config == dataclasses.replace(PRESETS["local"], steps=7)
    assert parse([]).config == PRESETS["local"]
