"""The laws of the house, each a function from a source tree to the list of its violations.

A violation is one sentence that begins with ``file:line:`` and says what to do. ``tests/test_house.py`` holds the project
to them, and each law to a planted violation.
"""

from __future__ import annotations

from tests.laws.core import core_has_no_state_of_its_own, core_is_pure, feed_has_two_drivers
from tests.laws.device import one_place_copies_off_the_device
from tests.laws.leaves import leaves_are_tested_and_documented, leaves_know_no_sibling
from tests.laws.rooms import (
    SHARED,
    no_import_cycle,
    outside_is_reached_in_few_places,
    rooms_keep_apart,
    shared_files_stand_alone,
    torch_stays_in_the_training_process,
)
from tests.laws.texts import files_are_short, rooms_are_links, texts_speak_of_the_product

LAWS = (
    shared_files_stand_alone,
    rooms_keep_apart,
    torch_stays_in_the_training_process,
    core_is_pure,
    core_has_no_state_of_its_own,
    feed_has_two_drivers,
    outside_is_reached_in_few_places,
    leaves_know_no_sibling,
    leaves_are_tested_and_documented,
    one_place_copies_off_the_device,
    no_import_cycle,
    files_are_short,
    texts_speak_of_the_product,
    rooms_are_links,
)

__all__ = [
    "LAWS",
    "SHARED",
    "core_has_no_state_of_its_own",
    "core_is_pure",
    "feed_has_two_drivers",
    "files_are_short",
    "leaves_are_tested_and_documented",
    "leaves_know_no_sibling",
    "no_import_cycle",
    "one_place_copies_off_the_device",
    "outside_is_reached_in_few_places",
    "rooms_are_links",
    "rooms_keep_apart",
    "shared_files_stand_alone",
    "texts_speak_of_the_product",
    "torch_stays_in_the_training_process",
]
