from __future__ import annotations

from dataclasses import replace

from tests.rules.core.made_up_resumes import resumed
from trainwarden.rules.core.attribution.resume_mix import find
from trainwarden.rules.core.facts import NotPossible
from trainwarden.rules.core.makeup import Moved
from trainwarden.rules.core.resumed import Planned

OTHER = (Moved("image_text_ratio", 0.61, 1.0),)


def test_a_signal_of_the_batch_that_began_otherwise_speaks_for_the_data() -> None:
    data, optimizer = find(replace(resumed(), moved=OTHER))
    assert (data.cause, data.step) == ("data", 301)
    assert "image_text_ratio is 0.61" in data.says
    assert optimizer.weight < 0


def test_it_says_nothing_far_from_the_resume_without_one_or_where_the_mixture_was_changed() -> None:
    assert find(resumed()) == []
    assert find(replace(resumed(onset=500, last=520), moved=OTHER)) == []
    assert isinstance(find(replace(resumed(), moved=OTHER, resumed_from=None)), NotPossible)
    assert isinstance(find(replace(resumed(planned=Planned(changed=("mixture",))), moved=OTHER)), NotPossible)
