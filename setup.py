"""Install train_gpt.py as gpt_speedrun/engine.py, which is a link here: git on Windows writes the link's text in its place."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    def run(self):
        if self.editable_mode and not Path("gpt_speedrun/engine.py").is_symlink():  # a copy, since this folder is imported
            shutil.copy("train_gpt.py", "gpt_speedrun/engine.py")
        super().run()

    def build_module(self, module, module_file, package):
        return super().build_module(module, "train_gpt.py" if module == "engine" else module_file, package)


setup(cmdclass={"build_py": BuildPy})
