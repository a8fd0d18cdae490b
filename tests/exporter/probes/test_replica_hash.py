"""The hash of the parameters' bits: every bit counts, how they lie in memory does not, and it is taken when all ranks take it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwarden.exporter.cadence import Cadence
from trainwarden.exporter.probes.probe import Closing
from trainwarden.exporter.probes.replica_hash import SMALL, ReplicaHash, halves, hash_of
from trainwarden.exporter.sheet import Reading, Sheet
from trainwarden.exporter.watched import Watched

KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def by_hand(tensors: list[torch.Tensor]) -> int:
    """The same in Python's whole numbers, for tensors that are large or of a size that fills words of 64 bits."""
    total = 0
    for place, tensor in enumerate(tensors):
        words = np.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(), dtype=np.uint64)
        total += sum(int(word) for word in words) * (2 * place + 1) * 11400714819323198485
    return total % 2**64


def test_it_is_the_sum_of_the_words_times_an_odd_number_of_the_place() -> None:
    torch.manual_seed(0)
    large = [torch.randn(130, 160), torch.randn(200, 220, dtype=torch.float64)]
    assert all(tensor.numel() * tensor.element_size() > SMALL for tensor in large)
    high, low = halves(hash_of(large)).tolist()
    assert high * 2**32 + low == by_hand(large)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    shape=st.sampled_from([(1,), (3,), (7, 5), (16, 16), (129, 131), (300, 200)]),
    seed=st.integers(0, 2**16),
)
def test_any_one_bit_that_flips_changes_it(kind: torch.dtype, shape: tuple[int, ...], seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(4, generator=chance), torch.randn(*shape, generator=chance).to(kind), torch.randn(3, 3)]
    before = int(hash_of(tensors))
    assert int(hash_of([tensor.clone() for tensor in tensors])) == before
    bits = tensors[1].view(WHOLE[tensors[1].element_size()]).view(-1)
    place = int(torch.randint(bits.numel(), (1,), generator=chance))
    bits[place] ^= 1 << int(torch.randint(8 * tensors[1].element_size() - 1, (1,), generator=chance))
    assert int(hash_of(tensors)) != before


@pytest.mark.parametrize("kind", KINDS)
def test_how_a_replica_lies_in_memory_makes_no_difference(kind: torch.dtype) -> None:
    base = torch.randn(64, 48).to(kind)
    odd = torch.empty(base.numel() + 1, dtype=kind)[1:].view(64, 48).copy_(base)
    turned = base.t().contiguous().t()
    assert not turned.is_contiguous()
    assert len({int(hash_of([one])) for one in (base, odd, turned)}) == 1


def test_ten_thousand_small_parameters_and_one_without_elements_are_hashed() -> None:
    many = [torch.full((3,), float(number)) for number in range(10_000)]
    before = int(hash_of(many))
    many[7_777][1] += 1
    assert int(hash_of(many)) != before


def test_nothing_of_it_needs_a_value() -> None:
    many = [torch.empty(300, 300, device="meta"), torch.empty(7, device="meta", dtype=torch.bfloat16)]
    assert halves(hash_of([*many, torch.empty(5, 4, device="meta").t()])).shape == (2,)


def reading(probe: ReplicaHash, watched: Watched, regular: bool) -> Reading:
    sheet = Sheet()
    probe.close(Closing(sheet=sheet, watched=watched, loss=None, regular=regular))
    values: dict[str, list[tuple[object, np.ndarray]]] = {}
    for name, meta, tensor in sheet.tensors:
        values.setdefault(name, []).append((meta, tensor.double().numpy()))
    return Reading(step=1, due=True, host={}, values=values)


def test_the_signal_is_a_whole_number_below_two_to_the_32_at_regular_steps_of_several_ranks() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(0, 3))
    watched = Watched(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    probe = ReplicaHash(world_size=4)
    value = probe.signals(reading(probe, watched, True))["param_hash"]
    assert isinstance(value, float)
    assert value.is_integer()
    assert 0 <= value < 2**32
    assert probe.signals(reading(probe, watched, False)) == {}
    alone = ReplicaHash(world_size=1)
    assert alone.signals(reading(alone, watched, True)) == {}


def test_regular_steps_do_not_depend_on_what_a_rank_has_seen() -> None:
    calm, alarmed = Cadence(every=10), Cadence(every=10)
    alarmed.arm(11)
    assert [step for step in range(1, 40) if alarmed.due(step)] != [step for step in range(1, 40) if calm.due(step)]
    assert [alarmed.regular(step) for step in range(1, 40)] == [calm.regular(step) for step in range(1, 40)]
