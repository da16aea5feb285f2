"""Which settings a continued run may change."""

import pytest

from cascade_train.engine.run.config_difference import (
    ABSENT,
    Difference,
    describe,
    find_differences,
    is_limit_raised,
    limits_of,
    refused,
)

FREE = [
    "run.name", "run.resume", "log.every_steps", "sample.prompts", "checkpoint.keep_last", "tracker.name",
    "profile.steps", "validate.samples", "train.max_steps", "train.max_epochs", "train.micro_batch_size",
    "memory.budget_gb", "optimizer.lr", "optimizer.algorithm._target_", "lr_scheduler.warmup_steps", "parallel.mode",
    "compile", "compile_fallback", "activation_checkpointing", "attention", "ema.device",
    "train.max_grad_norm", "ema.decay", "ema.start_step", "ema.every_steps",
]  # fmt: skip
BOUND = [
    "run.seed", "train.global_batch_size", "train.precision", "data.urls", "model._target_",
    "model.network.depth", "task.rank", "objective.target", "ema.weights", "compiler", "runs.name",
]  # fmt: skip


def test_free_keys_may_change_and_bound_keys_may_not():
    assert [key for key in FREE if not Difference(key, 1, 2).is_free] == []
    assert [key for key in BOUND if Difference(key, 1, 2).is_free] == []


def test_what_components_declare_free_may_change_and_the_rest_may_not():
    differences = [Difference("data.num_workers", 0, 4), Difference("data.crop", "center", "random")]
    assert refused(differences, free_keys={"data.num_workers"}) == differences[1:]


def test_a_free_option_that_is_null_may_become_a_component_and_back():
    there = [Difference("data.source", None, "(absent)"), Difference("data.source.path", "(absent)", "pictures")]
    assert refused(there, free_keys={"data.source.path"}) == []
    assert refused([Difference("data.sources", 1, 2)], free_keys={"data.source"}) != []


def test_an_average_may_change_its_decay_but_neither_begin_nor_end():
    assert not any(Difference("ema.decay", *values).is_free for values in ((0.9, None), (None, 0.9), (ABSENT, 0.9)))


def test_the_data_and_the_batch_size_may_change_where_the_user_says_so():
    data = [Difference("data.urls", "a", "b"), Difference("data.buckets.distance", "log", "linear")]
    data += [Difference("train.global_batch_size", 8, 4)]
    model = [Difference("model.network.depth", 1, 2)]
    assert refused(data + model) == data + model
    assert refused(data + model, data_may_change=True) == model


def test_differences_are_found_below_any_depth_and_on_either_side():
    old = {"a": {"b": {"c": 1, "gone": None}}, "urls": ["x", "y"], "same": {"z": 0}, "node": {}}
    new = {"a": {"b": {"c": 2}}, "urls": ["y", "x"], "same": {"z": 0}, "added": False, "node": {"k": 1}}
    assert find_differences(old, new) == [
        Difference("a.b.c", 1, 2),
        Difference("a.b.gone", None, ABSENT),
        Difference("added", ABSENT, False),
        Difference("node", {}, ABSENT),
        Difference("node.k", ABSENT, 1),
        Difference("urls", ["x", "y"], ["y", "x"]),
    ]
    assert find_differences(old, old) == []


def test_a_difference_reads_old_arrow_new():
    found = [Difference("a.b", 1, None), Difference("c", ["w", "x"], ["w", "y"]), Difference("d", [1], [1, 2])]
    assert describe(found) == f"  a.b: 1 -> None\n  c[1]: x -> y\n  d[1]: {ABSENT} -> 2"


@pytest.mark.parametrize(
    ("old", "new", "raised"),
    [
        ((10, None), (20, None), True),
        ((10, None), (None, None), True),
        ((10, None), (10, None), False),
        ((10, None), (5, None), False),
        ((None, 2), (None, 3), True),
        ((None, 2), (100, 2), False),
    ],
)
def test_a_raised_limit_is_one_that_trains_longer(old, new, raised):
    limits = [limits_of({"train": {"max_steps": n}, "data": {"num_examples_to_see": seen}}) for n, seen in (old, new)]
    assert is_limit_raised(*limits) is raised
    assert is_limit_raised({"train.max_epochs": 2}, {"train.max_epochs": 3})
