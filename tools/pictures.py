"""Creates the pictures of README and docs from real pages, with jobs of the tests' agent.

python -m tools.pictures [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import msgspec
from playwright.sync_api import Browser, Page

from benchmarks.dashboard.pages import DRAWN, chromium
from holdfast.client import Client
from tests.support.fake_agent import ITERATION_SECONDS, FakeAgent, over_http
from tests.support.job_processes import served
from tools.small_png import small

JOB = "char-gpt"
RESTORED = 560
MAX_BYTES = 150_000
SETTLED_MS = 1500
"""Wait until the page's own requests are answered."""


def main(folder: Path) -> None:
    """Write the pictures into a folder."""
    with tempfile.TemporaryDirectory(prefix="holdfast-pictures-") as scratch, served(Path(scratch)) as server:
        fill(server.server)
        with chromium() as browser:
            for name, png in pictures(browser, server.server).items():
                if len(png) > MAX_BYTES:
                    sys.exit(f"{name} has {len(png):,} bytes, more than {MAX_BYTES:,}")
                (folder / name).write_bytes(png)
                print(f"{folder / name}  {len(png) / 1000:.0f} kB")


def fill(url: str) -> None:
    """Create one detailed job and some others."""
    for number, (job, iterations) in enumerate((("resnet-50", 2600), ("vit-b16", 1400), ("whisper-small", 700))):
        trained(url, job, iterations, seed=number).send()
    ended = trained(url, "ablation-no-warmup", 520, seed=4)
    ended.fail("OutOfMemoryError: CUDA out of memory")
    ended.supervise("gave_up", "CUDA out of memory", start=5)
    full = trained(url, "llama-sft", 900, seed=5)
    for _ in range(3):
        full.train(12)
        made = full._checkpoint("scheduled")
        full.open.clear()
        full.events.append(msgspec.structs.replace(made, state="failed", reason="No space left on device"))
    full.send()
    tell_story(url)


def trained(url: str, job: str, iterations: int, *, seed: int, ahead: int = 0, **options: bool) -> FakeAgent:
    """Return an agent that has done so many iterations by about now, or by when it will have done some more."""
    began = time.time() - (iterations + ahead) * ITERATION_SECONDS * 1.04
    agent = FakeAgent(over_http(url), job=job, started_at=began, seed=seed, **options)
    agent.start()
    agent.train(15)
    agent.pace()
    agent.train(iterations - 15)
    return agent


def tell_story(url: str) -> None:
    """Simulate a crash, another budget, a restore, and another crash."""
    agent = trained(url, JOB, 600, seed=7, ahead=1450, measures_machine=True)
    agent.crash(12)
    agent.train(400)
    agent.send()
    with Client(url) as client:
        client.edit(JOB, budget=0.02)
        agent.obey(agent.desired())
        agent.train(150)
        agent.send()
        client.restore(JOB, RESTORED)
    agent.obey(agent.desired())
    agent.train(300)
    agent.crash(20, "killed by SIGSEGV")
    agent.train(620)
    agent.send()


def pictures(browser: Browser, url: str) -> dict[str, bytes]:
    wide = browser.new_page(viewport={"width": 1440, "height": 1660}, color_scheme="light")
    phone = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark", device_scale_factor=2)
    blank = browser.new_page()
    found = {
        "job-page.png": taken(wide, f"{url}/jobs/{JOB}?machine=0", DRAWN),
        "fleet-page.png": taken(wide, f"{url}/", ".jobs", tall=640),
        "restore-phone.png": taken(phone, f"{url}/jobs/{JOB}/restore?iteration={RESTORED}", ".restore-facts"),
    }
    return {name: small(blank, png) for name, png in found.items()}


def taken(page: Page, url: str, shown: str, *, tall: int | None = None) -> bytes:
    page.goto(url)
    page.wait_for_selector(shown)
    page.wait_for_timeout(SETTLED_MS)
    size = page.viewport_size
    assert size is not None
    return page.screenshot(clip={"x": 0, "y": 0, "width": size["width"], "height": tall or size["height"]})


if __name__ == "__main__":
    main(Path(*(sys.argv[1:] or ["docs"])))
