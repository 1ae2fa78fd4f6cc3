"""The table of versions says no more than what was tried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.compat import run
from tests.compat.table import TESTS_OF, WHOLE_ENGINE, Report, rewrite, short_table, table

EVERYTHING = {file: 3 for files in (*TESTS_OF.values(), WHOLE_ENGINE) for file in files}


def report(**changed: object) -> Report:
    found = {"version": "0.29.0", "capabilities": {"reset.keep": "", "relieve": ""}, "passed": dict(EVERYTHING)}
    return Report(**{**found, **changed})  # type: ignore[arg-type]


def test_an_operation_works_when_all_it_needs_passed() -> None:
    assert report().cell("reset.keep") == "works"


def test_an_operation_of_which_a_file_was_not_run_is_not_said_to_work() -> None:
    passed = {file: count for file, count in EVERYTHING.items() if file != "test_state_machine"}
    assert report(passed=passed).cell("relieve") == "works*"
    del passed["test_deadlock_relief"]
    assert report(passed=passed).cell("relieve") == "found*"


def test_what_was_not_run_stands_below_the_table() -> None:
    passed = {file: count for file, count in EVERYTHING.items() if file != "test_state_machine"}
    both = [report(passed=passed), report(version="0.33.0")]
    assert table(both).splitlines()[-1] == "\\* Not run here: test_state_machine on 0.29.0."
    assert "Not run" not in table([report()])


def test_a_failed_test_fails_the_operations_that_need_it_and_no_other() -> None:
    found = report(failed={"test_quarantine": ["test_a", "test_b"], "test_offload_guard": ["test_c"]})
    assert found.cell("relieve") == "works"
    assert found.cell("reset.keep") == "FAILS: test_c"
    found.capabilities["reset.quarantine"] = ""
    assert found.cell("reset.quarantine") == "FAILS: test_a and 2 more"
    assert not found.ok


def test_an_operation_that_is_switched_off_says_why() -> None:
    assert report(capabilities={"pause": "cannot be paused"}).cell("pause") == "off: cannot be paused"


def test_a_version_that_could_not_be_tried_fails_everywhere() -> None:
    assert report(trouble="not tried").cell("reset.keep") == "FAILS: not tried"


def test_a_table_has_a_row_an_operation_and_a_column_a_version() -> None:
    both = [report(), report(version="0.33.0", capabilities={"reset.keep": "", "relieve": "it has no queue"})]
    count = sum(EVERYTHING.values())
    assert table(both).splitlines() == [
        "| operation | 0.29.0 | 0.33.0 |",
        "| --- | --- | --- |",
        "| reset.keep | works | works |",
        "| relieve | works | off: it has no queue |",
        f"| tests | {count} passed | {count} passed |",
    ]


def test_a_short_table_has_one_row_for_what_is_alike() -> None:
    found = report(capabilities={"reset.fail": "", "reset.keep": "", "reset.mm": "no", "relieve": ""})
    assert short_table([found]).splitlines()[2:5] == [
        "| reset: fail, keep | works |",
        "| reset: mm | off: no |",
        "| relieve | works |",
    ]


def test_only_what_is_between_the_marks_is_rewritten() -> None:
    page = "before\n<!-- versions -->\nold\n<!-- end -->\nafter <!-- end -->\n"
    assert rewrite(page, "new\n") == "before\n<!-- versions -->\nnew\n<!-- end -->\nafter <!-- end -->\n"
    with pytest.raises(ValueError, match="no <!-- versions -->"):
        rewrite("nothing", "new")


def test_the_pages_have_their_marks() -> None:
    for page, form in run.PAGES.items():
        assert form([report()]).strip() in rewrite((run.ROOT / page).read_text(), form([report()]))


def test_every_file_that_is_named_is_there() -> None:
    there = set(run.test_files("0.29.0"))
    assert there >= set(EVERYTHING)
    assert set(run.test_files("0.33.0")) >= set(EVERYTHING)


def test_a_reading_of_what_earlier_runs_left(tmp_path: Path) -> None:
    results = tmp_path / "results" / "0.29.0"
    results.mkdir(parents=True)
    assert run.report("0.29.0", tmp_path).trouble == "not tried"
    (results / "probe.json").write_text('{"capabilities": {"pause": ""}}')
    cases = (
        '<testcase classname="tests.engine.test_x" name="test_a[1.5]"/>'
        '<testcase classname="tests.engine.test_x.TestContract" name="test_b"><failure/></testcase>'
        '<testcase classname="" name="tests.engine.test_y"><error/></testcase>'
    )
    (junit := tmp_path / "junit.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    for name, result in run.by_file(junit, ["test_x", "test_y", "test_z"]).items():
        (results / f"{name}.json").write_text(json.dumps(result))
    found = run.report("0.29.0", tmp_path)
    assert found.passed == {"test_x": 1, "test_y": 0, "test_z": 0}
    assert found.failed == {
        "test_x": ["test_b"],
        "test_y": ["tests.engine.test_y"],
        "test_z": ["the file could not be run"],
    }
    assert found.cell("pause") == "found*"
