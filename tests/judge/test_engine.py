"""The engine: when a condition becomes an alert, when it ends, what it is called together with, and what a resume remembers."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collapse_monitor.judge import DEFAULT_RULES, History, Judge, confirmed_after
from collapse_monitor.judge.engine import MOST_ALERTS
from collapse_monitor.judge.thresholds import CLEAR_CHECKS, FOR_CHECKS, NO_DATA_CHECKS, REMIND_CHECKS
from collapse_monitor.records import Alert, Condition, Severity, Snapshot
from tests.synthetic import make_snapshot

STATES = {
    "f": ("fire", Severity.WARNING),
    "F": ("fire", Severity.CRITICAL),
    "h": ("hold", Severity.WARNING),
    "n": ("no_data", Severity.WARNING),
}


class Script:
    """A rule that says what it is told: one text per layer, one letter per check; `.` is healthy."""

    def __init__(self, *layers: str, name: str = "script", for_checks: int = FOR_CHECKS) -> None:
        self.name, self.layers, self.for_checks = name, layers, for_checks

    def __call__(self, snapshot: Snapshot, history: History) -> list[Condition]:
        said = ((layer, text[snapshot.step]) for layer, text in enumerate(self.layers))
        return [
            Condition(layer, "token_similarity", 0.9 + layer / 100, 0.8, 0.1, STATES[letter][0], STATES[letter][1])  # type: ignore[arg-type]
            for layer, letter in said
            if letter != "."
        ]


def play(*rules: Script, judge: Judge | None = None, start: int = 0, end: int | None = None) -> list[Alert]:
    judge = judge or Judge(rules)
    events = []
    for step in range(start, len(rules[0].layers[0]) if end is None else end):
        events.extend(judge.check(make_snapshot(step)))
    return events


def told(events: Sequence[Alert]) -> list[tuple[int, str, str, tuple[int, ...]]]:
    return [(event.step, event.rule, event.state, event.layers) for event in events]


@pytest.mark.parametrize(
    ("course", "expected"),
    [
        ("...ff...", [(4, "firing"), (7, "resolved")]),  # confirmed by the second check, resolved by the third clear one
        ("f.f.f.f.", []),  # one check is no confirmation, however often
        ("ff.f..f...", [(1, "firing"), (9, "resolved")]),  # flickering is one episode
        ("hhhhhh", []),  # the band between the thresholds starts nothing
        ("ffhhhhhh...", [(1, "firing"), (10, "resolved")]),  # but keeps what fires
        ("fhf", []),  # and confirms nothing
        ("ff..h..h...", [(1, "firing"), (10, "resolved")]),
        ("fnf...", [(2, "firing"), (5, "resolved")]),  # no data neither confirms nor clears
        ("fnnnf.", []),  # what is pending does not wait for ever
    ],
)
def test_an_episode(course: str, expected: list[tuple[int, str]]) -> None:
    events = [event for event in play(Script(course)) if event.state != "no_data"]
    assert [(event.step, event.state) for event in events] == expected


def test_an_alert_says_when_it_was_first_seen_and_when_confirmed() -> None:
    event = play(Script("..fff"))[0]
    assert (event.since, event.step, event.state, event.severity) == (2, 3, "firing", Severity.WARNING)
    assert (event.metric, event.value, event.bound, event.baseline) == ("token_similarity", 0.9, 0.8, 0.1)


def test_layers_are_one_alert_that_names_the_first_as_origin() -> None:
    events = play(Script("......", "..ffff", "..ffff", "......"))
    assert told(events) == [(3, "script", "firing", (1, 2))]
    assert events[0].value == pytest.approx(0.91)


def test_other_layers_while_firing_are_no_new_alert_and_the_finding_has_them() -> None:
    rule = Script("ffffff.....", "..ffff.....")
    judge = Judge([rule])
    assert told(play(rule, judge=judge, end=6)) == [(1, "script", "firing", (0,))]
    assert [finding.layers for finding in judge.findings] == [(0, 1)]
    assert told(play(rule, judge=judge, start=6)) == [(8, "script", "resolved", (0, 1))]
    assert judge.findings == []


def test_a_higher_severity_is_news_a_lower_one_is_not() -> None:
    events = play(Script("ffFFffFF...."))
    assert [(event.step, event.state, event.severity) for event in events] == [
        (1, "firing", Severity.WARNING),
        (3, "firing", Severity.CRITICAL),
        (10, "resolved", Severity.INFO),
    ]
    assert [event.since for event in events] == [0, 0, 0]
    assert "got worse" in events[1].message


def test_severity_needs_its_own_confirmation() -> None:
    assert [event.severity for event in play(Script("fFfFfFfF"))] == [Severity.WARNING]


def test_a_rule_may_ask_for_another_number_of_checks() -> None:
    assert [event.step for event in play(Script("f....", for_checks=1)) if event.state == "firing"] == [0]
    assert [event.step for event in play(Script("fffff", for_checks=4))] == [3]


def test_losing_data_is_an_event_and_never_health() -> None:
    rule = Script("ff" + "n" * 8)
    judge = Judge([rule])
    events = play(rule, judge=judge)
    assert [(event.step, event.state, event.severity) for event in events] == [
        (1, "firing", Severity.WARNING),
        (1 + NO_DATA_CHECKS, "no_data", Severity.WARNING),
    ]
    assert judge.status == {"script": "firing"}
    assert [finding.phenomenon for finding in judge.findings] == ["script"]


def test_data_that_never_was_is_not_lost() -> None:
    rule = Script("n" * 9)
    judge = Judge([rule])
    assert play(rule, judge=judge) == []
    assert judge.status == {"script": "no_data"}


def test_data_lost_while_healthy_is_a_note_told_once_until_it_comes_back() -> None:
    events = play(Script("..nnnnn.nnnn"))
    assert [(event.step, event.state, event.severity) for event in events] == [
        (4, "no_data", Severity.INFO),
        (10, "no_data", Severity.INFO),
    ]


def test_one_short_batch_is_no_loss() -> None:
    assert play(Script("..nn..nn..")) == []


class TestEchoes:
    def test_rank_collapse_silences_oversmoothing_here_and_further_down(self) -> None:
        events = play(Script("....", "ffff", "....", name="rank_collapse"), Script("ffff", "ffff", "ffff", name="oversmoothing"))
        assert told(events) == [(1, "rank_collapse", "firing", (1,)), (1, "oversmoothing", "firing", (0,))]

    def test_an_echo_is_told_when_its_source_is_gone_and_it_is_not(self) -> None:
        events = play(Script("ff.......", name="rank_collapse"), Script("fffffffff", name="oversmoothing"))
        assert told(events) == [
            (1, "rank_collapse", "firing", (0,)),
            (4, "rank_collapse", "resolved", (0,)),
            (4, "oversmoothing", "firing", (0,)),
        ]

    def test_an_alert_that_becomes_an_echo_is_not_resolved_by_it(self) -> None:
        rules = [Script("....ffff", name="rank_collapse"), Script("ffffffff", name="oversmoothing")]
        judge = Judge(rules)
        events = play(*rules, judge=judge)
        assert told(events) == [(1, "oversmoothing", "firing", (0,)), (5, "rank_collapse", "firing", (0,))]
        assert [finding.phenomenon for finding in judge.findings] == ["rank_collapse"]

    def test_critical_silences_warnings_on_the_same_layers_only(self) -> None:
        events = play(Script("FFF", "...", name="one"), Script("fff", "fff", name="other"))
        assert told(events) == [(1, "one", "firing", (0,)), (1, "other", "firing", (1,))]

    def test_two_critical_ones_are_both_told(self) -> None:
        assert len(play(Script("FFF", name="one"), Script("FFF", name="other"))) == 2

    def test_non_finite_explains_why_nothing_can_be_read(self) -> None:
        events = play(Script("." + "F" * 8, name="non_finite"), Script("." + "n" * 8, name="oversmoothing"))
        assert [event.rule for event in events] == ["non_finite"]


class TestMute:
    def test_a_rule(self) -> None:
        assert Judge([Script("ff", name="mine")], mute=["mine"]).check(make_snapshot()) == []
        assert play(judge=Judge([Script("ffff", "ffff")], mute=["script"]), end=4) == []

    @pytest.mark.parametrize("mute", ["script:0,2-3", ("script", [0, 2, 3])])
    def test_layers_of_a_rule(self, mute: str | tuple[str, list[int]]) -> None:
        events = play(judge=Judge([Script("ff", "ff", "ff", "ff", "ff")], mute=[mute]), end=2)
        assert told(events) == [(1, "script", "firing", (1, 4))]

    @pytest.mark.parametrize(
        ("mute", "message"),
        [
            (["nonsense"], r"mute: unknown rule 'nonsense', allowed are non_finite, rank_collapse, oversmoothing, .*"),
            (["oversmoothing:x"], r"mute: cannot read the layers of 'oversmoothing:x': write 'name:0,3-5'"),
            (["oversmoothing:5-3"], r"cannot read the layers"),
            ([3], r"mute: 3 is neither a rule name, 'name:0,3-5', nor \(name, layers\)"),
            ("oversmoothing", r"mute='oversmoothing': give a list, as in mute=\['oversmoothing'\]"),
        ],
    )
    def test_what_cannot_be_read_is_refused(self, mute: list[str], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Judge(DEFAULT_RULES, mute=mute)


def test_rules_by_name_and_by_import_path() -> None:
    judge = Judge(["oversmoothing", "collapse_monitor.judge.token_rules.rank_collapse"])
    assert list(judge.status) == ["oversmoothing", "rank_collapse"]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("nonsense", r"Unknown rule 'nonsense': allowed are non_finite, rank_collapse, .*, the import path of a function, or a callable"),
        ("collapse_monitor.nothing.here", r"cannot be imported .*my_package\.rules\.my_rule"),
        ("collapse_monitor.judge.thresholds.FOR_CHECKS", r"is a int: a rule is a callable"),
        (3, r"Unknown rule 3"),
    ],
)
def test_unknown_rules_are_refused(rule: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Judge([rule])


def test_a_name_alone_is_no_list_of_rules() -> None:
    with pytest.raises(ValueError, match=r"rules='oversmoothing': give a list, as in rules=\['oversmoothing'\]"):
        Judge("oversmoothing")


def test_two_rules_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="Two rules are named 'script'"):
        Judge([Script("f"), Script("f")])


def test_a_number_of_checks_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="'script': for_checks is 0, it must be at least 1"):
        Judge([Script("f", for_checks=0)])
    with pytest.raises(ValueError, match="at least 1 check"):
        confirmed_after(0)


def test_a_plain_function_is_a_rule() -> None:
    def too_wide(snapshot: Snapshot, history: History) -> list[Condition]:
        return [Condition(0, "effective_rank", snapshot.series("effective_rank")[0], 1.0, message="much too wide")]

    judge = Judge([*DEFAULT_RULES, too_wide])
    events = [event for step in range(3) for event in judge.check(make_snapshot(step))]
    assert [event.rule for event in events] == ["too_wide"]
    assert "much too wide." in events[0].message


def test_a_rule_that_raises_is_switched_off_once_and_the_others_go_on() -> None:
    calls = []

    def broken(snapshot: Snapshot, history: History) -> list[Condition]:
        calls.append(snapshot.step)
        raise KeyError("oops")

    judge = Judge([broken, Script("fff")])
    assert told(play(judge=judge, end=3)) == [(1, "script", "firing", (0,))]
    assert calls == [0]
    assert [(name, type(error)) for name, error in judge.faults] == [("broken", KeyError)]
    assert judge.status == {"broken": "off", "script": "firing"}


def test_a_rule_that_returns_something_else_is_at_fault() -> None:
    def wrong(snapshot: Snapshot, history: History) -> list[Condition]:
        return ["collapsed"]  # type: ignore[list-item]

    judge = Judge([wrong])
    judge.check(make_snapshot())
    assert "a rule returns a list of Condition, this one returned a str in it" in str(judge.faults[0][1])


def test_reminders_go_to_the_log_as_information(caplog: pytest.LogCaptureFixture) -> None:
    rule = Script("f" * (2 * REMIND_CHECKS + 5))
    judge = Judge([rule])
    with caplog.at_level(logging.INFO, "collapse_monitor"):
        events = play(rule, judge=judge)
    assert len(events) == len(judge.alerts) == 1
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 2
    assert f"script (warning) still fires at step {REMIND_CHECKS + 1} in layer 0 ('blocks.0'), since step 0" in caplog.text


def test_the_list_of_alerts_is_bounded() -> None:
    rule = Script("ff..." * (MOST_ALERTS // 2 + 20))
    judge = Judge([rule])
    events = play(rule, judge=judge)
    assert len(events) > MOST_ALERTS == len(judge.alerts)
    assert judge.alerts[-1] == events[-1]


COURSES = st.lists(st.lists(st.sampled_from("....ffFhn"), min_size=24, max_size=24).map("".join), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(COURSES, st.integers(1, 23))
def test_a_resume_anywhere_changes_nothing(courses: list[str], at: int) -> None:
    rules = [Script(*courses, name="oversmoothing"), Script(*courses[::-1], name="rank_collapse")]
    whole = Judge(rules)
    expected = play(*rules, judge=whole)
    first, second = Judge(rules), Judge(rules)
    events = play(*rules, judge=first, end=at)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert [finding.layers for finding in second.findings] == [finding.layers for finding in first.findings]
    events += play(*rules, judge=second, start=at)
    assert [repr(event) for event in events] == [repr(event) for event in expected]
    assert second.status == whole.status
    assert [alert.message for alert in second.alerts] == [alert.message for alert in whole.alerts]


def slowly(course: str) -> list[tuple[int, str]]:
    """What should be told about one layer, looked up in the text: "ff" begins, "..." ends."""
    events, firing, start = [], False, 0
    for step in range(len(course)):
        seen = course[start : step + 1]
        if not firing and seen.endswith("f" * FOR_CHECKS):
            events.append((step, "firing"))
            firing = True
        elif firing and seen.endswith("." * CLEAR_CHECKS):
            events.append((step, "resolved"))
            firing, start = False, step + 1
    return events


@settings(max_examples=200, deadline=None)
@given(st.text("..ffh", min_size=1, max_size=40))
def test_the_engine_agrees_with_reading_the_course_as_text(course: str) -> None:
    assert [(event.step, event.state) for event in play(Script(course))] == slowly(course)


@settings(max_examples=100, deadline=None)
@given(COURSES)
def test_every_firing_has_its_sightings_and_every_resolution_its_firing(courses: list[str]) -> None:
    out: Severity | None = None
    for event in play(Script(*courses)):
        if event.state == "firing":
            assert out is None or event.severity.rank > out.rank
            letters = "F" if event.severity is Severity.CRITICAL else "fF"
            sightings = [courses[layer][: event.step + 1].replace("n", "")[-FOR_CHECKS:] for layer in event.layers]
            assert any(len(seen) == FOR_CHECKS and set(seen) <= set(letters) for seen in sightings)
            out = event.severity
        elif event.state == "resolved":
            assert out is not None
            assert any(course[: event.step + 1].replace("n", "").endswith("." * CLEAR_CHECKS) for course in courses)
            out = None
