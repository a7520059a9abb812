"""train_gpt.py of this checkout as a module of this package. pip installs train_gpt.py itself in
place of this file.

No link: not every file system and not every Git has links.
"""

import os
import sys
from importlib.machinery import SourceFileLoader

package = os.path.dirname(os.path.abspath(__file__))
__file__ = os.path.join(os.path.dirname(package), "train_gpt.py")
SourceFileLoader(__name__, __file__).exec_module(sys.modules[__name__])
