"""The cost of a page for its reader: bytes, first paint, interaction to next paint, memory."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Browser, CDPSession, Page, sync_playwright

from benchmarks.harness import running

from .filling import JOB, STEP_SECONDS, JobReporter, SyntheticRun

LOADS = 7
QUIET_MS = 1500
KEYS = ("w", "w", "w", "a", "d", "d", "s", "ArrowLeft", "[", "]", "h", "h", "t", "t", "0", "e", "l", "l")
INTERACTIONS_PER_OUTLIER = 50
"""Interactions of which INP ignores the longest one, as web.dev/inp defines it."""
HANDS_SECONDS = 5.0
HOUR_SECONDS = 3600
FASTER = 20
"""Speed of the page's clock for the simulated hour."""
WARM_SECONDS = 15.0
ARGUMENTS = ("--no-sandbox", "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking")
DRAWN = '#timeline[data-state="drawn"]'
WINDOWS = (
    "", "x=time", "from=400000&to=600000", "from=500000&to=503000", "from=500000&to=500200", "from=1&to=1000000",
)  # fmt: skip
"""Windows: the whole run on both axes, and smaller parts of it."""

PAINT = """() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? null"""
LISTEN = """() => {
  window.interactionMs = new Map();
  new PerformanceObserver((list) => {
    for (const { interactionId: id, duration } of list.getEntries()) {
      if (id) window.interactionMs.set(id, Math.max(duration, window.interactionMs.get(id) ?? 0));
    }
  }).observe({ type: "event", durationThreshold: 16 });
}"""
HANDS = """async (seconds) => {
  const lanes = document.querySelector(".lanes");
  const box = lanes.getBoundingClientRect();
  const frames = [];
  const turn = (number) => new WheelEvent("wheel", {
    deltaY: Math.floor(number / 60) % 2 ? 12 : -12, ctrlKey: true, bubbles: true, cancelable: true,
    clientX: box.left + box.width * (0.3 + 0.4 * ((number % 97) / 97)), clientY: box.top + 60,
  });
  const began = performance.now();
  let last = began;
  for (let number = 0; last - began < seconds * 1000; number += 1) {
    lanes.dispatchEvent(turn(number));
    const now = await new Promise((resolve) => requestAnimationFrame(resolve));
    frames.push(now - last);
    last = now;
  }
  frames.sort((a, b) => a - b);
  const at = (share) => frames[Math.min(frames.length - 1, Math.floor(frames.length * share))];
  return { perSecond: frames.length / ((last - began) / 1000), p95: at(0.95), longest: frames.at(-1) };
}"""
FAST_CLOCK = """(faster) => {
  const origin = Date.now();
  const [now, date] = [performance.now.bind(performance), Date.now.bind(Date)];
  performance.now = () => now() * faster;
  Date.now = () => origin + (date() - origin) * faster;
  const frame = requestAnimationFrame;
  window.requestAnimationFrame = (call) => frame((at) => call(at * faster));
  const [later, often] = [setTimeout, setInterval];
  window.setTimeout = (call, wait = 0, ...rest) => later(call, wait / faster, ...rest);
  window.setInterval = (call, wait = 0, ...rest) => often(call, wait / faster, ...rest);
}"""


@dataclass(slots=True)
class TransferSizes:
    """Bytes on the wire."""

    scripts: int = 0
    all: int = 0
    requests: int = 0


@contextmanager
def chromium() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("no chromium on this machine: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()


@contextmanager
def fresh(browser: Browser, url: str = "", drawn: str = DRAWN) -> Iterator[Page]:
    """Open a page in a new context with an empty cache, and wait until it is drawn if there is a URL."""
    with browser.new_context(viewport={"width": 1440, "height": 900}) as context:
        page = context.new_page()
        if url:
            page.goto(url)
            page.wait_for_selector(drawn)
        yield page


def bytes_of_first_load(browser: Browser, url: str, *, drawn: str = DRAWN) -> TransferSizes:
    """Measure all that a new browser fetches until the page is drawn."""
    with fresh(browser) as page:
        sizes = weighed(page)
        page.goto(url)
        page.wait_for_selector(drawn)
        page.wait_for_timeout(QUIET_MS)  # parts of the page send requests of their own
    return sizes


def weighed(page: Page) -> TransferSizes:
    sizes, kinds = TransferSizes(), dict[str, str]()
    session: CDPSession = page.context.new_cdp_session(page)
    session.send("Network.enable")

    def ended(event: dict[str, Any]) -> None:
        size = int(event["encodedDataLength"])
        sizes.all += size
        sizes.requests += 1
        sizes.scripts += size if kinds.get(event["requestId"]) == "Script" else 0

    session.on("Network.responseReceived", lambda event: kinds.update({event["requestId"]: event["type"]}))
    session.on("Network.loadingFinished", ended)
    return sizes


def first_paint_ms(browser: Browser, url: str, *, drawn: str = DRAWN) -> list[float]:
    """Open each page in a new browser context with an empty cache."""
    found = []
    for _ in range(LOADS):
        with fresh(browser, url, drawn) as page:
            page.wait_for_function(f"({PAINT})() !== null")
            found.append(float(page.evaluate(PAINT)))
    return found


def interactions_ms(browser: Browser, url: str) -> list[float]:
    """Return the duration from each interaction to the next frame, as the browser measures it."""
    with fresh(browser, url) as page:
        page.evaluate(LISTEN)
        box = page.locator('[data-lane="metric"] .lane-body').bounding_box()
        assert box is not None
        for part in range(20):
            page.mouse.move(box["x"] + 80 + part * 40, box["y"] + 40 + part * 20)
        for key in 3 * KEYS:
            page.keyboard.press(key)
            page.wait_for_timeout(120)
        for start in (0.2, 0.4, 0.6):
            page.mouse.move(box["x"] + box["width"] * start, box["y"] + 60)
            page.mouse.down()
            page.mouse.move(box["x"] + box["width"] * (start + 0.15), box["y"] + 60, steps=5)
            page.mouse.up()
            page.wait_for_timeout(300)
            page.mouse.dblclick(box["x"] + 200, box["y"] + 60)
            page.wait_for_timeout(300)
        page.locator('[data-part="metric"]').select_option("grad_norm")
        page.wait_for_timeout(500)
        # durations are multiples of 8 ms; the browser does not report those below 16 ms
        return [float(value) for value in page.evaluate("[...window.interactionMs.values()]")]


def next_paint_ms(durations: Sequence[float]) -> float:
    """Return INP (interaction to next paint): the longest interaction, ignoring one in fifty."""
    longest_first = sorted(durations, reverse=True)
    return longest_first[len(durations) // INTERACTIONS_PER_OUTLIER] if durations else 0.0


def frames(browser: Browser, url: str) -> dict[str, float]:
    """Measure frames while zooming in and out of a million iterations, one wheel step per frame."""
    with fresh(browser, url) as page:
        page.evaluate(HANDS, 1.0)
        return {name: float(value) for name, value in page.evaluate(HANDS, HANDS_SECONDS).items()}


def heap_growth_mb(browser: Browser, url: str, port: int, run: SyntheticRun) -> tuple[float, int]:
    """Measure memory over an hour of the page's clock, which takes minutes, while the job trains.

    Return the growth after garbage collection, and how often the timeline was redrawn.
    """
    answers = []
    with running(_train, port, run), fresh(browser) as page:
        page.add_init_script(f"({FAST_CLOCK})({FASTER})")
        page.on("response", lambda response: answers.append(1) if "/timeline?" in response.url else None)
        page.goto(url + f"?from={run.iteration - 3000}&to={run.iteration + 10}&live=1")
        page.wait_for_selector(DRAWN)
        session = page.context.new_cdp_session(page)
        page.wait_for_timeout(WARM_SECONDS * 1000)
        before, begun = _heap_bytes(session), len(answers)
        page.wait_for_timeout(HOUR_SECONDS / FASTER * 1000)
        return (_heap_bytes(session) - before) / 1e6, len(answers) - begun


def _heap_bytes(session: CDPSession) -> float:
    session.send("Performance.enable")
    for _ in range(3):
        session.send("HeapProfiler.collectGarbage")
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(metric["value"] for metric in metrics if metric["name"] == "JSHeapUsedSize"))


def _train(port: int, run: SyntheticRun, ended: threading.Event) -> None:
    """Report once per second of the page's clock, as an agent does."""
    reporter = JobReporter(port, JOB)
    reporter.attempt, reporter.sequence = run.attempt, 1_000_000
    while not ended.wait(1 / FASTER):
        reporter.report(run, round(1 / STEP_SECONDS))


def timeline_bytes(browser: Browser, url: str) -> dict[str, tuple[int, int, float]]:
    """Return bytes on the wire, unpacked bytes and seconds to answer, by window."""
    found: dict[str, tuple[int, int, float]] = {}
    for window in WINDOWS:
        with fresh(browser) as page:
            with page.expect_response(lambda response: "/timeline?" in response.url) as caught:
                page.goto(f"{url}?{window}")
            response = caught.value
            wire, plain = response.request.sizes()["responseBodySize"], len(response.body())
            timing = response.request.timing
            found[window] = (wire, plain, (timing["responseEnd"] - timing["requestStart"]) / 1000)
    return found
