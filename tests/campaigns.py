"""Campaigns that end by what they have drawn, not by the clock."""

import contextlib
from collections.abc import Callable, Mapping, Set

from fa2_cute.fuzz.campaign import Campaign


class Stop(BaseException):
    """Ends a campaign from within, as Ctrl-C does."""


def drive(campaign: Campaign, cases_drawn: int, enough: Callable[[], bool] = lambda: True):
    """Run ``campaign`` until it has drawn as many cases, and there are ``enough``."""

    def on_case(campaign):
        if campaign.drawn >= cases_drawn and enough():
            raise Stop

    with contextlib.suppress(Stop):
        campaign.run(600.0, on_case)  # minutes: on a busy machine too it is the number of cases that ends it


def drive_until_met(campaign: Campaign, wanted: Mapping[str, Set[str]]):
    """Run ``campaign`` until it has met all ``wanted`` kinds of each aspect; AssertionError if 24,000 cases do not.

    What a seed draws depends a little on what else the process has imported (hypothesis takes constants from there), so
    the rarest kind may come late.
    """

    def missing() -> dict[str, Set[str]]:
        left = {aspect: kinds - set(campaign.classes.get(aspect, ())) for aspect, kinds in wanted.items()}
        return {aspect: kinds for aspect, kinds in left.items() if kinds}

    drive(campaign, 4000, lambda: campaign.drawn >= 24_000 or (campaign.drawn % 200 == 0 and not missing()))
    assert missing() == {}
