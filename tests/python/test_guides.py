"""Runs the guides about the package."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from conftest import Server, run_filter

PROJECT = Path(__file__).parents[2]


@pytest.mark.parametrize("guide", ["python", "spark"])
def test_guide_prints_what_it_says(server: Server, tmp_path: Path, guide: str) -> None:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as archive:
        table = b"".join(b"%d\n" % number for number in range(1, 1001))
        for name, data in [("greeting", b"hello\n"), ("table.csv", table)]:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    packed = run_filter(["zstd", "-q", "-c"], output.getvalue())
    (server.directory / "data.tar.zst").write_bytes(packed)
    configuration = "spark.ui.enabled false\nspark.sql.shuffle.partitions 2\n"
    (tmp_path / "spark-defaults.conf").write_text(configuration)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SPARK_CONF_DIR": str(tmp_path),
    }
    place = tmp_path / "guide"
    place.mkdir()
    runner, page = PROJECT / "scripts/lib/run-guide", PROJECT / f"docs/guides/{guide}.md"
    command = [runner, page, "https://example.com", server.url("").rstrip("/")]
    subprocess.run(command, cwd=place, env=environment, check=True)
