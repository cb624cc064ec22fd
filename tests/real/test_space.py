"""The example of a Space: its files, copied as its page says, serve the studio, and a browser gets answers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SPACE = ROOT / "examples" / "space"


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.xdist_group("browser")
def test_a_space_answers_in_a_browser(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    (script,) = re.findall(r"```bash\n(mkdir .*?)```", (SPACE / "README.md").read_text(), flags=re.DOTALL)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, check=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPACE_ID": "you/studio"}
    command = [sys.executable, "-W", "ignore", "app.py", "--host", "127.0.0.1", "--port", str(port)]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=tmp_path / "my-space", env=environment, stdout=output, stderr=output)
    try:
        while "The studio runs at" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        page = browser.new_page()
        response = page.goto(f"http://127.0.0.1:{port}/")
        policy = response.headers["content-security-policy"]
        assert policy.endswith("frame-ancestors 'self' https://huggingface.co")
        page.locator("#written .answers[aria-busy=false] .answer").first.wait_for(timeout=300_000)
        assert page.locator("#written .answer").count() == 4
        assert page.locator("#strip [data-cell$='.mlp']").count() == 30
        page.close()
    finally:
        process.terminate()
        process.wait(60)


def test_the_settings_of_the_space_name_its_file() -> None:
    """The lines that Hugging Face reads; without them the page of a Space is an error."""
    import yaml

    head = (SPACE / "README.md").read_text(encoding="utf-8").split("---\n")[1]
    settings = yaml.safe_load(head)
    assert settings["sdk"] == "gradio"
    assert (SPACE / settings["app_file"]).is_file()
    assert len(settings["short_description"]) <= 60
