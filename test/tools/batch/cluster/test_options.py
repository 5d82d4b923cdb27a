"""The options of a batch on a cluster, without a cluster."""

from __future__ import annotations

import argparse

import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.batch import command
from sglang_qspec.tools.batch.cluster.options import settle

RAY = "--ray local"
MODELS = "--model t --draft-model d"


def parsed(text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    return parser.parse_args(["in", "--output", "out", *text.split()])


def test_options_that_are_not_given_have_defaults() -> None:
    options = parsed(RAY)
    settle(options)
    assert (options.min_servers, options.draft_gpus, options.sidecars) == (1, 0, 0)
    assert options.max_servers is options.target_gpus is options.server_cpus is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--min-servers 2", "--min-servers needs --ray"),
        ("--sidecars 1", "--sidecars needs --ray"),
        ("--ray ray://head:10001", "--ray is 'ray://head:10001', but must be 'local', 'auto', or"),
        (f"{RAY} --url http://a", "--ray starts servers, and excludes --url"),
        (f"{RAY} --min-servers 3 --max-servers 2", "--max-servers is 2, but must be at least"),
        (f"{RAY} --draft-gpus 2", "--draft-gpus is 2, but must be 0 or 1"),
        (f"{RAY} --draft-gpus 1 --target-gpus 0", "--draft-gpus is for targets on GPUs, but"),
        (f"{RAY} --sidecars 1", "--sidecars needs --model and --draft-model"),
        (f"{RAY} --sidecar-resource cheap", "--sidecar-resource needs --sidecars"),
    ],
)
def test_options_that_exclude_each_other_are_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settle(parsed(text))


def test_sidecars_take_both_models() -> None:
    settle(parsed(f"{RAY} {MODELS} --sidecars 1 --sidecar-resource cheap"))
