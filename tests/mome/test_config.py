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
        ["local", "--memory.ngram.layers", "0", "2", "--memories", "ngram", "value", "--memory.routed.init", "0.25"]
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
