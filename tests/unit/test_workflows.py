"""The files for a code host: workflows, forms, and what they must not do."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"uses: [\w-]+/[\w.-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+$")
WRITES = {
    ("release", "build"): {"id-token", "attestations"},
    ("release", "publish"): {"id-token"},
    ("image", "server"): {"packages", "id-token", "attestations"},
}
"""Jobs with a permission to write. There are no others."""

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def _read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


def _triggers(workflow: dict[Any, Any]) -> Any:
    return workflow[True]  # to YAML 1.1, `on` is a Boolean


def test_there_are_workflows_for_tests_nights_releases_and_the_image() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "image", "nightly", "release"]


@each_workflow
def test_every_action_is_pinned_by_commit_and_names_its_version(path: Path) -> None:
    uses = [line.strip().removeprefix("- ") for line in path.read_text().splitlines() if "uses:" in line]
    assert uses
    assert [line for line in uses if not PINNED.fullmatch(line)] == []


def test_an_action_has_one_version_in_all_workflows() -> None:
    versions: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for action, version in re.findall(r"uses: (\S+)@(\S+)", path.read_text()):
            versions.setdefault(action, set()).add(version)
    assert {action: each for action, each in versions.items() if len(each) > 1} == {}


@each_workflow
def test_jobs_may_read_and_those_that_publish_may_write_what_they_must(path: Path) -> None:
    workflow = _read(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        permissions = job.get("permissions", {})
        writes = {scope for scope, level in permissions.items() if level == "write"}
        assert writes == WRITES.get((path.stem, name), set()), name
        assert all(level in {"read", "write"} for level in permissions.values())


@each_workflow
def test_a_checkout_keeps_no_credentials_and_every_job_has_a_time_limit(path: Path) -> None:
    for name, job in _read(path)["jobs"].items():
        assert job["timeout-minutes"] <= 300, name
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name


@each_workflow
def test_no_script_contains_text_of_others_and_no_secret_is_stored(path: Path) -> None:
    workflow = _read(path)
    assert not {"pull_request_target", "workflow_run"} & set(_triggers(workflow))
    scripts = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert [script for script in scripts if "${{" in script] == []
    assert set(re.findall(r"secrets\.(\w+)", path.read_text())) <= {"GITHUB_TOKEN"}


@each_workflow
def test_every_target_of_make_exists(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"run: make ([\w-]+)", path.read_text()))
    assert {target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)} == set()


def test_the_matrix_tests_every_python_that_is_declared_with_the_pinned_torch_and_an_old_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    matrix = _read(ROOT / ".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    prefix = "Programming Language :: Python :: 3."
    declared = {line.removeprefix(prefix) for line in project["classifiers"] if line.startswith(prefix)}
    assert {f"3.{minor}" for minor in declared} <= set(matrix["python"])
    assert matrix["torch"] == ["pinned"]
    old = [row for row in matrix["include"] if row["torch"] != "pinned"]
    assert {row["python"] for row in old} == set(matrix["python"])
    oldest = re.search(r"torch>=([\d.]+)", str(project["optional-dependencies"]["torch"]))
    assert oldest is not None
    assert any(row["torch"].startswith(f"{oldest[1]}.") for row in old)
    assert any(row["runner"].endswith("-arm") for row in matrix["include"])


def test_a_release_is_built_once_verified_and_then_published_without_a_stored_token() -> None:
    jobs = _read(ROOT / ".github/workflows/release.yml")["jobs"]
    assert list(jobs) == ["build", "verify", "publish"]
    assert (jobs["verify"]["needs"], jobs["publish"]["needs"]) == ("build", "verify")
    scripts = {name: "\n".join(step.get("run", "") for step in job["steps"]) for name, job in jobs.items()}
    assert 'test "$GITHUB_REF_NAME" = "v$version"' in scripts["build"]
    assert "sha256sum --check" in scripts["verify"]
    assert scripts["publish"].strip() == ""
    assert jobs["publish"]["environment"] == "pypi"
    upload = jobs["publish"]["steps"][-1]
    assert upload["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "password" not in upload.get("with", {})


def test_the_image_is_built_for_two_architectures_with_sbom_and_provenance_and_pushed_for_a_tag_only() -> None:
    steps = _read(ROOT / ".github/workflows/image.yml")["jobs"]["server"]["steps"]
    build = next(step["with"] for step in steps if step.get("id") == "build")
    assert set(build["platforms"].split(",")) == {"linux/amd64", "linux/arm64"}
    assert (build["sbom"], build["provenance"]) == (True, "mode=max")
    assert build["push"] == "${{ github.event_name == 'push' }}"


def test_before_a_commit_runs_what_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"] for repository in hooks for hook in repository["hooks"]] == ["make lint"]


def test_the_hosted_documentation_fails_on_warnings_and_has_the_requirements_of_make_docs() -> None:
    hosting = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())
    assert hosting["sphinx"] == {"configuration": "docs/conf.py", "fail_on_warning": True}
    assert any("docs/requirements.txt" in line for line in hosting["build"]["jobs"]["install"])


@pytest.mark.parametrize("form", ["bug", "feature"])
def test_a_form_asks_with_labels(form: str) -> None:
    fields = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{form}.yml").read_text())["body"]
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
