"""Into how many parts the ranks split a tensor, told from its placements on meshes that need no other process."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainwarden.exporter.copies import is_full, mesh_size, opaque, parts, signature
from trainwarden.exporter.watched import Watched


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of 2 x 4 ranks of which this process is the first; nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("copies", "shards"))
    dist.destroy_process_group()


def placed(mesh: DeviceMesh, *placements: object) -> DTensor:
    return DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False)  # type: ignore[arg-type]


def test_only_sharded_dimensions_of_a_mesh_split_a_tensor(mesh: DeviceMesh) -> None:
    assert parts(placed(mesh, Replicate(), Shard(0))) == 4
    assert parts(placed(mesh, Shard(0), Shard(1))) == 8
    assert parts(placed(mesh, Shard(1), Replicate())) == 2
    assert parts(placed(mesh, Replicate(), Replicate())) == 1
    assert math.isnan(parts(placed(mesh, Partial(), Shard(0))))
    assert parts(torch.ones(3)) == parts(nn.Parameter(torch.ones(3))) == 1
    assert parts(placed(mesh["shards"], Shard(0))) == 4


def test_only_a_tensor_that_is_replicated_throughout_is_full(mesh: DeviceMesh) -> None:
    assert is_full(torch.ones(1))
    assert is_full(placed(mesh, Replicate(), Replicate()))
    assert not is_full(placed(mesh, Replicate(), Shard(0)))
    assert not is_full(placed(mesh, Partial(), Replicate()))
    assert mesh_size(placed(mesh, Replicate(), Shard(0))) == 8
    assert mesh_size(placed(mesh["shards"], Shard(0))) == 4
    assert mesh_size(torch.ones(1)) is None


def model_on(mesh: DeviceMesh) -> nn.Module:
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(placed(mesh, *([Shard(0)] * mesh.ndim)))
    return model


def test_a_mesh_of_fewer_ranks_than_hold_parameters_of_these_names_tells_nothing(mesh: DeviceMesh) -> None:
    covered = Watched(model_on(mesh), [])
    assert covered.split
    covered.meet(8, all_alike=True)
    assert covered.summable
    stage = Watched(model_on(mesh["shards"]), [])
    stage.meet(4, all_alike=False)
    assert stage.summable
    doubtful = Watched(model_on(mesh["shards"]), [])
    doubtful.meet(8, all_alike=True)
    assert not doubtful.summable
    assert doubtful.untold is not None
    assert "[4] ranks" in doubtful.untold


def test_a_gradient_that_is_still_a_partial_sum_tells_nothing(mesh: DeviceMesh) -> None:
    watched = Watched(model_on(mesh), [])
    assert watched.told([0], [placed(mesh, Shard(0), Shard(0))])
    assert not watched.told([0], [placed(mesh, Partial(), Shard(0))])
    assert not watched.told([0], [torch.ones(2, 2)])


def test_models_of_the_same_parameters_have_one_signature() -> None:
    one, other = nn.Linear(2, 3), nn.Linear(2, 3)
    renamed, larger = nn.Sequential(nn.Linear(2, 3)), nn.Linear(2, 4)
    names = [Watched(model, []).signature() for model in (one, other, renamed, larger)]
    assert names[0] == names[1]
    assert len(set(names)) == 3
    assert signature([], []) == signature([], [])
    assert opaque(one) is None
