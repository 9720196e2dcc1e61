"""The workflows and issue forms of .github: what they name exists, and jobs have no more rights than they use."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml"))
READS = {"contents": "read"}
# What a release needs beyond reading: the attestation of its files, the index's trusted publishing, the release's page.
RELEASE_RIGHTS = {
    "build": {"contents": "read", "id-token": "write", "attestations": "write"},
    "pypi": {"id-token": "write"},
    "github": {"contents": "write"},
}


def workflow(name: str) -> dict[Any, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


def commands(path: Path) -> str:
    return "\n".join(step["run"] for step in steps(path) if "run" in step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_make_targets_and_scripts_that_exist(path: Path) -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    lines = re.findall(r"^make (.*)$", commands(path), re.MULTILINE)
    targets = {word for line in lines for word in line.split() if "=" not in word}
    scripts = set(re.findall(r"\bdeploy/\S+\.sh\b", commands(path)))

    assert targets
    assert targets <= set(phony.group(1).split())
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_job_has_a_time_limit_and_runs_on_a_named_version_of_a_system(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]

    for job in jobs.values():
        matrix = job.get("strategy", {}).get("matrix", {}).get("include", [])
        systems = [row["os"] for row in matrix] or [job["runs-on"]]
        assert all(re.fullmatch(r"(ubuntu|macos)-\d+(\.\d+)?", system) for system in systems)
        assert job["timeout-minutes"] <= 360


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_major_version_and_leave_no_token_in_the_checkout(path: Path) -> None:
    used = [step for step in steps(path) if "uses" in step]

    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", step["uses"]) for step in used)
    for step in used:
        if step["uses"].startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_only_the_jobs_of_a_release_may_do_more_than_read(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    rights = {name: job["permissions"] for name, job in document["jobs"].items() if "permissions" in job}

    assert document["permissions"] == READS
    assert rights == (RELEASE_RIGHTS if path.stem == "release" else {})


def test_each_change_is_linted_and_tested_on_linux_and_apple_silicon_and_in_a_browser() -> None:
    ci = workflow("ci")

    # YAML 1.1 reads the key `on` as true.
    assert ci[True] == {"push": {"branches": ["main"]}, "pull_request": None}
    assert {row["os"] for row in ci["jobs"]["test"]["strategy"]["matrix"]["include"]} == {"ubuntu-24.04", "macos-15"}
    for job, target in (("lint", "lint"), ("test", "test"), ("test-web", "test-web")):
        assert ci["jobs"][job]["steps"][2]["run"].split()[:2] == ["make", target]


def test_each_night_soaks_and_runs_the_selftest_on_a_mac() -> None:
    nightly = workflow("nightly")

    assert set(nightly[True]) == {"schedule", "workflow_dispatch"}
    assert "make soak PYTHON=python" in [step.get("run") for step in nightly["jobs"]["soak"]["steps"]]
    selftest = nightly["jobs"]["selftest"]
    assert selftest["runs-on"].startswith("macos-")
    assert ".venv/bin/mlxctl selftest --report selftest.md" in [step.get("run") for step in selftest["steps"]]
    assert selftest["steps"][-1]["if"] == "always()"


def test_a_release_publishes_only_the_attested_files_of_one_build() -> None:
    release = workflow("release")
    build = [step.get("run") or step["uses"] for step in release["jobs"]["build"]["steps"]]

    assert release[True] == {"push": {"tags": ["v*"]}}
    made, attested, handed_on = (
        next(at for at, step in enumerate(build) if step.startswith(start))
        for start in ("make dist test-dist", "actions/attest-build-provenance@", "actions/upload-artifact@")
    )
    assert made < attested < handed_on
    for name in ("pypi", "github"):
        job = release["jobs"][name]
        assert job["needs"] == "build"
        assert "make" not in " ".join(step.get("run", "") for step in job["steps"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_fields_of_forms_with_labels(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    fields = [each for each in form["body"] if each["type"] != "markdown"]

    assert form["name"]
    assert form["description"]
    assert {each["type"] for each in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert len({each["id"] for each in fields}) == len(fields)
    assert all(each["attributes"]["label"] for each in fields)


def test_a_bug_report_asks_for_doctor_and_the_selftests_report() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug_report.yml").read_text())
    fields = {each["id"]: each for each in form["body"] if "id" in each}

    assert "mlxctl doctor --json" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"]["validations"] == {"required": True}
    assert "mlxctl selftest --report" in fields["selftest"]["attributes"]["label"]
