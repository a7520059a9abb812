"""Have pip install train_gpt.py as gpt_speedrun/engine.py. All else is in pyproject.toml."""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    def build_module(self, module, module_file, package):
        return super().build_module(
            module, "train_gpt.py" if module == "engine" else module_file, package
        )


setup(cmdclass={"build_py": BuildPy})
