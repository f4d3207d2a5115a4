"""Takes the documentation's screenshots of the dashboard, in a real Chromium.

``TIDEGATE_CHROMIUM=PATH python -m tests.observability.dashboard.screenshots docs/pictures`` runs
two short trainings and a run that is killed and resumed, and writes a picture of each state of
the page. It needs playwright and takes four minutes; `make screenshots` calls it.
"""

import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import tidegate
from tests.models import make_model_directory
from tests.observability.dashboard.chromium import CHROMIUM_FLAGS
from tests.observability.dashboard.synthetic_run import SyntheticRun
from tidegate.observability.dashboard.comparisons import ComparableRuns
from tidegate.observability.dashboard.dashboard import Dashboard, url_in
from tidegate.observability.dashboard.recorded import RecordedSource

WIDE, NARROW = (1280, 1000), (420, 900)
RUN_TIMEOUT_S = 400.0
VERSIONS = 40
KILLED_AFTER_BATCHES = 8
BATCHES = 20
SHOWN_AT_BATCHES = 20
"""Batches after which the running example is taken."""

REPOSITORY = Path(__file__).parents[3]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    ),
}
"""Finds the examples from the temporary directory, whose relative paths the pictures show."""

EXAMPLE = ("-m", "examples.async_grpo", "--runs", "runs", "--versions", str(VERSIONS))


class Camera:
    """A browser that opens pages and saves screenshots of them."""

    def __init__(self, browser: Any, directory: Path) -> None:
        self._browser = browser
        self._directory = directory

    @contextmanager
    def page(
        self, url: str, size: tuple[int, int] = WIDE, *, scheme: str = "light"
    ) -> Iterator[Any]:
        """Open a page, and wait until it has the run's state."""
        width, height = size
        page = self._browser.new_page(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        page.goto(url)
        page.wait_for_selector("body[data-frames]")
        page.wait_for_load_state("load")
        page.wait_for_timeout(500)
        yield page
        page.close()

    def save(self, page: Any, name: str, *, whole: bool = False) -> None:
        """Save a picture with 128 colours, a third of the bytes."""
        from PIL import Image

        shown = Image.open(io.BytesIO(page.screenshot(full_page=whole)))
        path = self._directory / f"dashboard{name and '-' + name}.png"
        shown.convert("RGB").quantize(128).save(path, optimize=True)
        sys.stdout.write(f"{path}\n")

    def take(
        self, url: str, name: str, size: tuple[int, int] = WIDE, *, scheme: str = "light"
    ) -> None:
        """Open a page and save it."""
        with self.page(url, size, scheme=scheme) as page:
            self.save(page, name)


def take_training_run(camera: Camera, directory: Path) -> None:
    """Take a run of the example while it trains, and the same page after the run's end."""
    command = [sys.executable, *EXAMPLE, "--mode", "async", "--name", "async"]
    run = subprocess.Popen(
        [*command, "--dashboard", "127.0.0.1:0"],
        cwd=directory,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
    )
    try:
        with camera.page(_url_of(directory / "runs" / "async")) as page:
            _wait_for_batches(page, SHOWN_AT_BATCHES)
            camera.save(page, "", whole=True)
            page.wait_for_selector("#state:text-is('ended')", timeout=1e3 * RUN_TIMEOUT_S)
            page.wait_for_timeout(500)
            camera.save(page, "ended")
        run.wait(RUN_TIMEOUT_S)
    finally:
        run.kill()


def take_recorded_run(camera: Camera, directory: Path) -> None:
    """Take a mixed rollout and its story, and the comparison with a synchronous run."""
    command = [sys.executable, *EXAMPLE, "--mode", "sync", "--name", "sync"]
    subprocess.run(
        command,
        cwd=directory,
        env=ENVIRONMENT,
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=RUN_TIMEOUT_S,
    )
    shown = directory / "runs" / "async"
    with Dashboard("127.0.0.1:0") as dashboard:
        dashboard.start(RecordedSource(shown), ComparableRuns(shown))
        list_url = f"{dashboard.url}#rollouts?mixed=1&sort=turns&descending=1"
        with camera.page(list_url) as page:
            page.click("#rollouts tbody tr:first-child a")
            page.wait_for_selector("#story li")
            camera.save(page, "why")
            page.locator("#colour-by").scroll_into_view_if_needed()
            page.evaluate("document.getElementById('rollout-text').scrollIntoView()")
            camera.save(page, "rollout")
        camera.take(f"{dashboard.url}#compare?run=async&run=sync", "compare")
        camera.take(dashboard.url, "narrow", NARROW, scheme="dark")


def take_resumed_run(camera: Camera, directory: Path) -> None:
    """Take a run that was killed and resumed."""
    command = [sys.executable, "-m", "tests.observability.dashboard.screenshots", "--train"]
    subprocess.run([*command, str(directory)], check=False, timeout=RUN_TIMEOUT_S)
    train(directory, BATCHES)
    with Dashboard("127.0.0.1:0") as dashboard:
        dashboard.start(RecordedSource(directory / "resumed"))
        camera.take(dashboard.url, "resumed", (WIDE[0], 760))


def take_synthetic_runs(camera: Camera) -> None:
    """Take a thousand engines, and a run whose bound was passed and that lost tokens."""
    for name, run in (
        ("engines", SyntheticRun(engines=1000)),
        ("broken", SyntheticRun(engines=2, staleness_max=3, unaccounted=7)),
    ):
        with Dashboard("127.0.0.1:0") as dashboard:
            dashboard.start(run)
            camera.take(dashboard.url, name, (WIDE[0], 820))


def train(directory: Path, batches: int, *, is_killed: bool = False) -> None:
    """Train on a tiny model with a journal, resuming if there is one; optionally die at the end."""
    model = directory / "model"
    if not model.exists():
        make_model_directory(model)
    with tidegate.serve_sync(
        model=model,
        engines=1,
        group_size=4,
        groups_per_batch=4,
        run_directory=directory / "resumed",
        journal=True,
        resume=True,
    ) as rollouts:
        weights = load_file(model / "model.safetensors")
        if rollouts.is_resumed:
            rollouts.publish(weights)
        tasks = range(4 * BATCHES)
        for number, _ in enumerate(rollouts.batches(tasks, episode=_answer), start=1):
            rollouts.publish(weights)
            rollouts.ack(rollouts.state_dict())
            if is_killed and number == batches:
                os._exit(1)


async def _answer(episode: tidegate.Episode, task: int) -> float:
    episode.append([10 + task % 40, 11, 12])
    turn = await episode.generate(max_tokens=24)
    return sum(token % 2 for token in turn.token_ids) / 24


def _wait_for_batches(page: Any, batches: int) -> None:
    """Wait until the page shows that this many batches were trained."""
    end_s = time.monotonic() + RUN_TIMEOUT_S
    while int(page.locator("#figures dd").first.text_content()) < batches:
        if time.monotonic() > end_s:
            raise TimeoutError(
                f"the run has not trained {batches} batches in {RUN_TIMEOUT_S:.0f} s"
            )
        page.wait_for_timeout(200)


def _url_of(run: Path) -> str:
    """Wait until a run's dashboard is up, and return its URL."""
    end_s = time.monotonic() + RUN_TIMEOUT_S
    while time.monotonic() < end_s:
        if url := url_in(run):
            return url
        time.sleep(0.5)
    raise TimeoutError(f"{run} has shown no dashboard for {RUN_TIMEOUT_S:.0f} s")


def main(directory: Path) -> None:
    """Take all pictures into a directory."""
    from playwright.sync_api import sync_playwright

    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ["TIDEGATE_CHROMIUM"], args=CHROMIUM_FLAGS
        )
        camera = Camera(browser, directory.resolve())
        take_synthetic_runs(camera)
        take_resumed_run(camera, Path(place))
        take_training_run(camera, Path(place))
        take_recorded_run(camera, Path(place))
        browser.close()


if __name__ == "__main__":
    if sys.argv[1] == "--train":
        train(Path(sys.argv[2]), KILLED_AFTER_BATCHES, is_killed=True)
    else:
        main(Path(sys.argv[1]))
