"""Every page in a real browser without scripts: phone and desktop, dark and light."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Browser, browser, why_no_browser
from web_daemon import World, furnished, walk

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser()),
]

_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# the names of what can be worked but says nothing to somebody who does not see it
_UNNAMED = """[...document.querySelectorAll('a, button, input, select, svg[role=img]')].filter(
  e => !(e.textContent.trim() || e.labels?.length || e.getAttribute('aria-label'))
).map(e => e.outerHTML)"""
# text whose contrast with what is behind it is under 4.5, WCAG's level AA
_FAINT = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = c => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = c;
    canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = c => c.slice(0, 3).map(v => (v /= 255) <= .03928 ? v / 12.92
    : ((v + .055) / 1.055) ** 2.4).reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = e => { for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor); if (c[3]) return c; }
    return rgb('Canvas'); };
  return [...document.querySelectorAll('body :not(desc)')].filter(e =>
    [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())).filter(e => {
      const style = getComputedStyle(e), is_svg = e instanceof SVGElement;
      const [a, b] = [light(rgb(is_svg ? style.fill : style.color)), light(behind(e))];
      return (Math.max(a, b) + .05) / (Math.min(a, b) + .05) < 4.5;
    }).map(e => e.outerHTML.slice(0, 200));
})()"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with furnished(tmp_path_factory.mktemp("web")) as made:
        yield made


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def test_every_page_fits_and_says_nothing_on_the_console(world: World, window: Browser) -> None:
    origin = f"http://127.0.0.1:{world.port}"
    paths = [path for path in walk(world.port) if path not in {"/style.css", "/icon.svg"}]
    paths = [path for path in paths if "page=" not in path]  # they look as the first one does
    assert len(paths) > 20
    for path in [*paths, "/absent"]:
        window.open(origin + path)
        for width, dark in ((320, True), (1280, False)):
            window.resize(width, dark=dark)
            assert window.run(_OVERFLOW) == 0, (path, width)
            assert window.run(_FAINT) == [], (path, dark)
        assert window.run(_UNNAMED) == [], path
        assert "taken" not in window.run("document.title")
        said = [line for line in window.said() if path != "/absent" or " 404 " not in line]
        assert said == [], path
        asked = window.asked()
        assert asked and all(url.startswith(f"{origin}/") for url in asked), asked


def test_the_keyboard_reaches_the_content_and_every_page(world: World, window: Browser) -> None:
    """Tab stops in the order of the page; the first one skips the navigation."""
    window.resize(1280)
    window.open(f"http://127.0.0.1:{world.port}/mirrors")
    seen = []
    for _ in range(14):
        key = {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}
        window.command("Input.dispatchKeyEvent", type="rawKeyDown", **key)
        window.command("Input.dispatchKeyEvent", type="keyUp", **key)
        focused = "document.activeElement"
        name = f"({focused}.textContent.trim() || {focused}.name).split('\\n')[0]"
        seen.append(window.run(name))
    assert seen[:10] == [
        *("Skip to content", "Overview", "Mirrors", "Datasets", "Checkouts", "Environments"),
        *("Audits", "Reports", "Receipts", "Activity"),
    ]
    assert {"find", "Filter"} <= set(seen)
