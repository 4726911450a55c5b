"""Every part of a model lies somewhere, and what is divided lies in one place only."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError
from engine.checkpoint.model_config import ExpertsConfig, ModelConfig
from engine.parallel.shard import config_of, shard_of
from tests.support.models import plain_config


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 16), st.integers(1, 40), st.data())
def test_all_of_a_model_is_divided(
    kv_heads: int, group: int, ranks: int, eights: int, data: st.DataObject
) -> None:
    heads = kv_heads * group
    ranks = min(ranks, heads)
    inner = data.draw(st.sampled_from([16, 32, 96, 128])) * eights
    vocabulary = data.draw(st.integers(ranks, 1000))
    experts = ExpertsConfig(ranks + 3, 2, 16, True, frozenset({0}))
    config = plain_config(
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        experts=experts,
    )
    shards = [shard_of(config, rank, ranks) for rank in range(ranks)]
    for parts, whole in (
        ([shard.query_heads for shard in shards], heads),
        ([shard.inner for shard in shards], inner),
        ([shard.vocabulary for shard in shards], vocabulary),
        ([shard.experts for shard in shards], experts.count),
    ):
        assert [one for part in parts for one in part] == list(range(whole))
        assert all(len(part) > 0 for part in parts)
    for shard in shards:
        own = config_of(config, shard)
        assert own.heads % own.kv_heads == 0
        assert {head // group for head in shard.query_heads} == set(shard.kv_heads)


def test_groups_of_scales_stay_together_where_they_can() -> None:
    # SmolLM2-135M.
    config = plain_config(heads=9, kv_heads=3, intermediate_size=1536)
    assert [shard_of(config, rank, 2).inner for rank in range(2)] == [
        range(768),
        range(768, 1536),
    ]
    assert all(shard_of(config, rank, 5).inner.stop % 128 == 0 for rank in range(5))
    assert [len(shard_of(config, rank, 2).kv_heads) for rank in range(2)] == [1, 2]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (plain_config(heads=4, kv_heads=2), "more ranks than the model has query heads, 4"),
        (
            plain_config(
                heads=16, experts=ExpertsConfig(6, 2, 16, True, frozenset({0})), kv_heads=8
            ),
            "more ranks than the model has experts, 6",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(config: ModelConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        shard_of(config, 0, 8)


@pytest.mark.parametrize(("kv_heads", "ranks"), [(8, 2), (3, 2), (1, 4), (2, 3), (3, 8), (2, 2)])
def test_each_kv_head_is_counted_on_one_rank(kv_heads: int, ranks: int) -> None:
    config = plain_config(heads=8 * kv_heads, kv_heads=kv_heads, intermediate_size=64)
    shards = [shard_of(config, rank, ranks) for rank in range(ranks)]
    counted = [head for shard in shards for head in shard.counted_kv_heads]
    assert sorted(counted) == list(range(kv_heads))
    assert all(set(shard.counted_kv_heads) <= set(shard.kv_heads) for shard in shards)
