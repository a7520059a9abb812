"""train_gpt.py by the name that pip installs it under (setup.py). No link: not every file system and Git has links."""
import os
import sys
from importlib.machinery import SourceFileLoader

__file__ = os.path.join(os.path.dirname(__file__), "train_gpt.py")
SourceFileLoader(__name__, __file__).exec_module(sys.modules[__name__])
