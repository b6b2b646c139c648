"""Pages opened in a headless Chromium, for tests that a browser draws what the project writes."""

import re
import shutil
import subprocess
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
)


def find_chromium() -> str | None:
    """Path of the browser; None where there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


def opened(page: Path, folder: Path) -> tuple[str, list[str]]:
    """The page as the browser holds it once loaded, and what it has written to its console."""
    browser = find_chromium()
    assert browser is not None, "asked for without a browser"
    ended = subprocess.run(
        [browser, *_FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    return ended.stdout, [line for line in ended.stderr.splitlines() if re.search("CONSOLE", line)]
