"""Cases and helpers of tests/unit/parallel/test_page_in_browser.py, which other tests use too."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
THEMES = {"dark": 0, "light": 1}  # Blink's numbers of the preferred colour schemes


def browse(page: Path, theme: str, *extra: str) -> subprocess.CompletedProcess[str]:
    argv = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    argv += [f"--user-data-dir={page.parent / 'profile'}", "--window-size=1400,1100"]
    argv += [f"--blink-settings=preferredColorScheme={THEMES[theme]}"]
    argv += ["--virtual-time-budget=3000", *extra, page.as_uri()]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)


def width_on_a_phone(page: Path) -> int:
    """Returns the scroll width of a page in a frame 390 pixels wide. Above 390, a phone scrolls
    sideways.
    """
    frame = page.parent / "frame.html"
    frame.write_text(
        f"<iframe id=page width=390 height=844 src='{page.name}'></iframe><title>none</title>"
        "<script>onload = () => { document.title = "
        "page.contentDocument.documentElement.scrollWidth; }</script>"
    )
    shown = browse(frame, "light", "--allow-file-access-from-files", "--dump-dom").stdout
    return int(shown.split("<title>")[1].split("</title>")[0])


def read_png(data: bytes) -> np.ndarray:
    """Returns the pixels (height, width, channels) of a PNG of 8 bits without interlacing (RFC
    2083).
    """
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert data[:4] == b"\x89PNG" and depth == 8 and data[28] == 0
    channels, at, packed = {2: 3, 6: 4}[kind], 8, b""
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        packed += data[at + 8 : at + 8 + size] if data[at + 4 : at + 8] == b"IDAT" else b""
        at += size + 12
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, -1)
    result = np.zeros((height + 1, width + 1, channels), np.uint8)  # with zeros above and left
    pairs = zip(rows[:, 0], rows[:, 1:].reshape(height, -1, channels), strict=True)
    for y, (how, row) in enumerate(pairs, 1):
        if how in (0, 2):
            result[y, 1:] = row + (result[y - 1, 1:] if how else 0)
            continue
        for x in range(1, width + 1):
            left, up, corner = (
                result[place].astype(int) for place in ((y, x - 1), (y - 1, x), (y - 1, x - 1))
            )
            near = np.abs([up - corner, left - corner, left + up - 2 * corner])
            paeth = np.where(
                (near[0] <= near[1]) & (near[0] <= near[2]),
                left,
                np.where(near[1] <= near[2], up, corner),
            )
            result[y, x] = (row[x - 1] + {1: left, 3: (left + up) // 2, 4: paeth}[int(how)]) % 256
    return result[1:, 1:]
