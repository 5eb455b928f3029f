from __future__ import annotations

import hashlib
import tomllib

from holdfast_web.shared.assets import STATIC

VENDOR = STATIC / "vendor"
PACKAGES = tomllib.loads((VENDOR / "vendor.toml").read_text())["package"]


def test_every_vendored_file_is_the_one_that_was_published() -> None:
    for package in PACKAGES:
        for name, digest in package["sha256"].items():
            found = hashlib.sha256((VENDOR / package["folder"] / name).read_bytes()).hexdigest()
            assert found == digest, f"{package['folder']}/{name}"


def test_nothing_is_vendored_that_is_not_listed() -> None:
    listed = {f"{package['folder']}/{name}" for package in PACKAGES for name in package["sha256"]}
    there = {str(path.relative_to(VENDOR)) for path in VENDOR.rglob("*") if path.is_file()}
    assert there - {"vendor.toml"} == listed


def test_every_package_comes_with_its_version_and_licence() -> None:
    for package in PACKAGES:
        assert package["folder"].endswith(f"-{package['version']}")
        assert "LICENSE" in package["sha256"]
        assert package["licence"]
        assert package["integrity"].startswith("sha512-")
