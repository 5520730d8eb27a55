"""`make screenshots`: the dashboard after a demo load, at desktop and phone width, light and dark, in docs/images."""

from __future__ import annotations

import argparse
import asyncio
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

from scripts.demo import load, running

FOLDER = Path(__file__).parents[1] / "docs" / "images"
SIZES = {"desktop": (1440, 1180), "phone": (390, 844)}


def take(url: str, folder: Path) -> list[Path]:
    """One picture for each size and colour scheme; of the whole page at phone width."""
    taken = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                context = browser.new_context(
                    viewport={"width": width, "height": height}, color_scheme=scheme, locale="en-US"
                )
                page = context.new_page()
                page.goto(f"{url}/dashboard?range=1h")
                page.locator("#tokens .js-plotly-plot .main-svg").first.wait_for(timeout=30_000)
                page.wait_for_timeout(1000)
                path = folder / f"dashboard-{name}-{scheme}.png"
                page.screenshot(path=path, full_page=name == "phone")
                taken.append(path)
                context.close()
        browser.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--port", type=int, default=8090)
    asked = parser.parse_args()
    if shutil.which("chromium") is None:
        raise SystemExit("this needs chromium: apt-get install chromium")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with running(asked.port) as demo:
        asyncio.run(load(demo, asked.seconds, 15))
        for path in take(demo.url, FOLDER):
            print(path)


if __name__ == "__main__":
    main()
