"""What a build of paceline adds to its files: the manual pages, which are made from the help of the verbs."""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManualPages(BuildHookInterface):
    """Puts them into the wheel, for `share/man` of the environment that it is installed into."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the pages into a folder that `finalize` removes."""
        sys.path.insert(0, str(Path(self.root) / "src"))
        from paceline.cli.man import pages

        self.folder = Path(tempfile.mkdtemp())
        for name, page in pages().items():
            (self.folder / name).write_text(page, encoding="ascii")
            build_data["shared_data"][str(self.folder / name)] = f"share/man/man1/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel has them now."""
        shutil.rmtree(self.folder)
