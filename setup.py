"""Have pip install train_gpt.py as the module gpt_speedrun. All else is in pyproject.toml."""
from setuptools import setup
from setuptools.command.build_py import build_py


class BuildModule(build_py):
    def find_modules(self):
        return [("", "gpt_speedrun", "train_gpt.py")]  # package, module, file


setup(cmdclass={"build_py": BuildModule})
