"""The build step that pyproject.toml cannot state: train.py, infer.py and the configs go into the package `zoo.cli`."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class Build(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        here = Path(__file__).parent
        for file in (here / "train.py", here / "infer.py", *sorted(here.glob("configs/**/*.yaml"))):
            target = Path(self.build_lib) / "zoo/cli" / file.relative_to(here)
            self.mkpath(str(target.parent))
            self.copy_file(str(file), str(target))


setup(cmdclass={"build_py": Build})
