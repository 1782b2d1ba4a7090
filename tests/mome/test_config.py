"""Configurations: JSON round trip, refusals, and the frozen surface of the command line."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mome.command import parse
from mome.config import RunConfig, TableConfig, differences, from_dict, to_dict
from mome.errors import UserError
from mome.presets import PRESETS
from optim.rows import RowRule

MOMENTUM_GATED = [
    "local", "--table.ngram.rule", "momentum", "--table.ngram.decay", "gated", "--table.ngram.weight-decay", "0.1",
]  # fmt: skip


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
        (["local", "--cycle", "0"], "--cycle 0: give a whole number of 1 or more"),
        (["local", "--cycle-late", "-1"], "--cycle-late -1: give a whole number of 0 or more"),
        (["local", "--cycle-late", "4", "--cycle-late-from", "0"], "--cycle alone is for all steps"),
        (["local", "--cycle-late", "4", "--cycle-late-from", "1"], "above 0 and below 1"),
        (["local", "--cycle-late-from", "0.5"], "--cycle-late-from changes nothing: --cycle-late is 0"),
        (["local", "--prefetch", "-1"], "--prefetch -1: give a whole number of 0 or more"),
        (["local", "--row-clip", "-1"], "--row-clip -1.0: a norm"),
        (["local", "--row-clip", "nan"], "--row-clip nan: a norm"),
        (["local-dense", "--row-clip", "1"], "--row-clip changes nothing: no memory is on"),
        (["local-dense", "--cycle", "2"], "--cycle changes nothing: no memory is on"),
        (["local-dense", "--prefetch", "2"], "--prefetch changes nothing: no memory is on"),
        (["local", "--table.ngram.rule", "adamw"], "--table.ngram.rule"),
        (["local", "--table.ngram.format", "fp16"], "--table.ngram.format"),
        (["local", "--table.ngram.place", "disk"], "--table.ngram.place"),
        (["local", "--table.ngram.decay", "lazy"], "--table.ngram.decay"),
        (["local", "--table.ngram.beta2-by", "token"], "--table.ngram.beta2-by"),
        (["local", "--table.ngram.rule", "momentum", "--table.ngram.momentum", "1"], "below 1"),
        (["local", "--table.ngram.momentum", "0.5"], "the rule is adam"),
        (["local", "--table.ngram.rule", "momentum", "--table.ngram.eps", "1e-5"], "the rule momentum has none"),
        (["local", "--table.ngram.rule", "momentum", "--table.ngram.beta2", "0.5"], "the rule momentum has none"),
        (["local", "--table.ngram.rule", "sgd", "--table.ngram.beta2-by", "step", "--cycle", "2"], "sgd has none"),
        (["local", "--table.ngram.beta2-by", "step"], "every event has one step"),
        (["local", "--table.ngram.decay", "touched"], "the weight decay is 0"),
        (["local", "--table.ngram.decay", "none"], "the weight decay is 0"),
        (["local", "--table.ngram.decay", "none", "--table.ngram.weight-decay", "0.1"], "the decay is none"),
        (MOMENTUM_GATED, "momentum moves untouched rows"),
        (["local", "--table.ngram.resident-gib", "2"], "the place is device"),
        (["local", "--table.ngram.place", "host", "--table.ngram.no-cached"], "the place is host"),
        (["local", "--table.ngram.place", "file", "--table.ngram.resident-gib", "-1"], "give 0 GiB or more"),
        (["local", "--table.value.format", "bf16"], "the memory value is off"),
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


def test_flags_of_a_table_that_change_something_are_taken():
    words = {
        "factored": ["--beta2", "0.9", "--eps", "1e-8", "--weight-decay", "0.1", "--decay", "gated-retroactive"],
        "momentum": ["--momentum", "0.5", "--weight-decay", "0.1", "--decay", "touched", "--format", "fp8"],
        "adagrad": ["--eps", "1e-8", "--place", "file", "--resident-gib", "0.5", "--no-cached"],
        "adam": ["--beta2-by", "step", "--format", "bf16+16", "--place", "host"],
        "sgd": ["--weight-decay", "0.1", "--decay", "gated"],
    }
    for rule, flags in words.items():
        named = [flag.replace("--", "--table.ngram.") if flag.startswith("--") else flag for flag in flags]
        config = parse(["local", "--cycle-late", "4", "--table.ngram.rule", rule, *named]).config
        assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config
        assert config.table.ngram.row_rule().kind == rule


def test_what_a_rule_gets_of_its_table():
    words = ["--rule", "momentum", "--momentum", "0.5", "--weight-decay", "0.25", "--decay", "touched"]
    named = [word.replace("--", "--table.ngram.") for word in words]
    assert parse(["local", *named]).config.table.ngram.row_rule() == RowRule(
        "momentum", beta2=0.98, eps=1e-10, weight_decay=0.25, decay="touched", momentum=0.5
    )
    # As a preset with decay would be switched to none: the rule then decays nothing.
    assert TableConfig(weight_decay=0.5, decay="none").row_rule() == RowRule("adam", beta2=0.98, decay="none")


def test_the_beta2_of_an_event():
    assert TableConfig(beta2=0.95).event_beta2(4) == 0.95
    by_step = TableConfig(beta2=0.95, beta2_by="step")
    assert by_step.event_beta2(1) == 0.95 and by_step.event_beta2(2) == 0.95**2


def test_the_cadence_of_a_run():
    config = parse(["local", "--steps", "400", "--cycle", "2", "--cycle-late", "4", "--cycle-late-from", "0.84"]).config
    cadence = config.make_cadence()
    assert (cadence.early, cadence.late, cadence.switch) == (2, 4, 336)
    assert cadence.schedule == config.make_schedule()
