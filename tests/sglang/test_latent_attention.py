"""A real server with DeepSeek-V3's latent attention takes every tensor of a publication.

Its weights are compared, not what it generates: without AMX, SGLang 0.5.23 on the CPU computes
something else for this family than transformers, from the folder's own weights too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import server_kit
from publication_kit import checksums, folder_weights, layout, publish, publishing
from server_kit import Served

from rlcore.launch.commands.init_model import ModelSpec, init_model
from rlcore.weights import Bucket, cut_buckets

# what the folders of the real models say and transformers does not write; the CPU needs YaRN
SAID = {
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("latent")
    init_model(folder / "model", ModelSpec("deepseek_v3", layers=2, kv_heads=4, experts=4))
    place = folder / "model" / "config.json"
    config = json.loads(place.read_text()) | SAID
    del config["rope_parameters"]
    place.write_text(json.dumps(config))
    with server_kit.serving(folder / "model", folder / "server.log") as served:
        yield served


@pytest.mark.full
def test_parts_that_the_server_fuses_arrive_whatever_the_size_of_buckets(
    latent: Served, tmp_path: Path
) -> None:
    first = folder_weights(latent.model)
    second = {name: tensor + 1 for name, tensor in first.items()}
    specs = [spec for bucket in layout(first) for spec in bucket.tensors]
    whole = cut_buckets(specs, 1 << 30)
    with publishing(latent, tmp_path) as (_, engine, sink, participants):
        publish(sink, first, 1, whole)
        of_first = checksums(latent, engine)
        publish(sink, second, 2, whole)
        of_second = checksums(latent, engine)
        small = cut_buckets(specs, 1)
        assert len(small) > len(specs) // 2
        publish(sink, first, 3, small)
        assert checksums(latent, engine) == of_first
        # and that is needed: the server drops a part that comes alone, and says nothing
        publish(sink, second, 4, [Bucket(i, (spec,)) for i, spec in enumerate(specs)])
        apart = checksums(latent, engine)
        fused = {name for name in apart if "fused_qkv_a_proj_with_mqa" in name}
        assert {name for name in apart if apart[name] != of_second[name]} == fused
        assert len(fused) == 2
        assert {name for name in apart if of_first[name] == of_second[name]} == set()
        assert not participants.dropped
